"""From the keys of a `config.json` to a model. Keys are those of Hugging Face transformers' configuration classes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from stoker.planner.core.sizing.architecture import Attention, FeedForward, Latent, Layers, Model, Tensors
from stoker.planner.core.sizing.quantization import Formats, formats_of, kv_format_of

_MOST_LAYERS = 1_000
_LARGEST = 10**8
"""No shape of a model that can be served has more in one dimension."""

_UNSUPPORTED_KEYS = {
    "ssm_cfg": "state-space layers (Mamba)",
    "mamba_d_state": "state-space layers (Mamba)",
    "mamba_num_heads": "state-space layers (Mamba 2)",
    "state_size": "state-space layers (Mamba)",
    "ssm_state_size": "state-space layers (Mamba)",
    "hybrid_override_pattern": "a hybrid of attention and state-space layers (Nemotron-H)",
    "attn_layer_period": "a hybrid of attention and state-space layers (Jamba)",
    "linear_num_key_heads": "a hybrid of full and linear attention (Qwen3-Next)",
    "linear_attn_config": "a hybrid of full and linear attention (Kimi Linear)",
    "lru_width": "recurrent layers (Griffin)",
    "rwkv_version": "recurrent layers (RWKV)",
    "cross_attention_layers": "cross-attention layers (Mllama)",
    "index_topk": "sparse attention with an indexer and a cache of its own (DeepSeek-V3.2)",
    "num_kv_shared_layers": "layers that share their cache with others (Gemma 3n)",
}
_UNSUPPORTED_LAYERS = {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "state_space"}
_WHY_NOT = "what such layers keep of a sequence is not a KV cache that grows with it, and is not modelled"

_GEMMA3 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262_208,
    "sliding_window_pattern": 6,
    "sliding_window": 4_096,
    "max_position_embeddings": 131_072,
}
_GEMMA2 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window_pattern": 2,
    "sliding_window": 4_096,
    "vocab_size": 256_000,
    "max_position_embeddings": 8_192,
}
_LEFT_OUT: dict[str, dict[str, Any]] = {
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma2": _GEMMA2,
    "gemma": {"vocab_size": 256_000, "head_dim": 256, "max_position_embeddings": 8_192},
    "cohere2": {"sliding_window_pattern": 4, "sliding_window": 4_096},
    "gpt_oss": {"sliding_window": 128, "attention_bias": True},
    "qwen2": {"attention_bias": True},
    "qwen2_moe": {"attention_bias": True, "decoder_sparse_step": 1},
    "qwen2_vl": {"attention_bias": True},
    "qwen2_vl_text": {"attention_bias": True},
    "qwen2_5_vl": {"attention_bias": True},
    "qwen2_5_vl_text": {"attention_bias": True},
}
"""What transformers' configuration class of the model type fills in where the file does not say."""
_TIED = {"gemma", "gemma2", "gemma3", "gemma3_text", "cohere", "cohere2", "gpt2", "falcon"}
_NORMS = {"gemma2": 4, "gemma3": 4, "gemma3_text": 4, "glm4": 4, "cohere": 1, "cohere2": 1}
_NORMED_HEADS = {
    "gemma3",
    "gemma3_text",
    "qwen3",
    "qwen3_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_vl_text",
    "minimax_m2",
}
_QUERIES_BIASED = {name for name in _LEFT_OUT if name.startswith("qwen")} | {"glm4", "glm4_moe"}
"""A bias on queries, keys and values only."""
_TWO_MATRICES = {"gpt2", "gpt_bigcode", "falcon", "phi", "opt", "bloom", "starcoder2", "gpt_neox", "nemotron"}
_KNOWN = {
    *(*_LEFT_OUT, *_NORMED_HEADS, *_TIED, *_TWO_MATRICES),
    *("llama", "mistral", "mistral3", "mixtral", "ministral", "deepseek", "deepseek_v2", "deepseek_v3", "kimi_k2"),
    *("phi3", "phimoe", "olmo", "olmo2", "olmoe", "granite", "granitemoe", "glm", "glm4", "glm4_moe", "internlm2"),
    *("internlm3", "llama4", "llama4_text", "gpt_oss", "exaone", "smollm3", "seed_oss", "ernie4_5", "ernie4_5_moe"),
}
_NESTED = ("text_config", "llm_config", "language_config")


class Unreadable(Exception):
    """What is wrong with a config; several mistakes at once."""

    def __init__(self, mistakes: Sequence[str]) -> None:
        super().__init__("; ".join(mistakes))
        self.mistakes = tuple(mistakes)


@dataclass
class _Keys:
    """The keys of one config: each is checked where it is asked for, and what is wrong is gathered."""

    config: Mapping[str, Any]
    prefix: str
    left_out: Mapping[str, Any]
    mistakes: list[str] = field(default_factory=list)

    def wrong(self, key: str, what: str) -> None:
        """Remember a mistake."""
        self.mistakes.append(f"{self.prefix}{key}: {what}")

    def get(self, *names: str) -> tuple[str, Any]:
        """The first of these keys that says anything, and what it says."""
        for name in names:
            if self.config.get(name) is not None:
                return name, self.config[name]
        return names[0], self.left_out.get(names[0])

    def count(self, *names: str, default: int | None = None, least: int = 1, most: int = _LARGEST) -> int:
        """A whole number; `least` where it is wrong, so that reading goes on."""
        name, value = self.get(*names)
        if value is None and default is not None:
            return default
        if value is None:
            near = difflib.get_close_matches(names[0], [str(key) for key in self.config], n=1, cutoff=0.8)
            hint = f"; is {near[0]!r} meant for it?" if near else ""
            also = f" (or {', '.join(names[1:])})" if names[1:] else ""
            self.wrong(name, f"missing{also}; take the config.json as the model's publisher has it{hint}")
            return least
        # 1024.0 is what some tools write.
        whole = (
            isinstance(value, int | float) and not isinstance(value, bool) and value == value and abs(value) <= most
        )
        if not whole or int(value) != value or value < least:
            self.wrong(name, f"{str(value)[:40]!r} is no whole number from {least} to {most}; mend it")
            return least
        return int(value)

    def truth(self, name: str, default: bool) -> bool:
        """True or false."""
        _, value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.wrong(name, f"{str(value)[:40]!r} is neither true nor false; mend it")
        return bool(value)

    def text(self, name: str) -> str:
        """A text, empty where it is none."""
        value = self.config.get(name)
        return value if isinstance(value, str) else ""


def model_of(config: Mapping[str, Any], *, name: str, kv_dtype: str = "auto", stored: int | None = None) -> Model:
    """The model that a config describes. Raises Unreadable."""
    outer, prefix = config, ""
    for key in _NESTED:
        nested = config.get(key)
        if isinstance(nested, dict):
            config, prefix = nested, f"{key}."
            break
    kind = str(config.get("model_type") or outer.get("model_type") or "")[:60]
    keys = _Keys(config, prefix, _LEFT_OUT.get(kind, {}))
    _refuse_unsupported(keys, config, outer, kind)
    formats = formats_of(config, outer, keys.wrong)
    kv_format = kv_format_of(kv_dtype, config, outer, formats, keys.wrong)
    width = keys.count("hidden_size", "n_embd", "d_model")
    vocabulary = keys.count("vocab_size", "padded_vocab_size")
    layers = _layers(keys, kind, width, formats)
    gpt2 = kind in ("gpt2", "opt", "gpt_bigcode")
    context = keys.count("max_position_embeddings", "n_positions", "seq_length", default=131_072)
    tied = keys.truth("tie_word_embeddings", bool(outer.get("tie_word_embeddings", kind in _TIED)))
    beside, notes = _beside(outer, formats)
    if kind not in _KNOWN:
        notes.append(f"model_type {kind or '(none)'!r} is not known here: sized by its keys as a plain decoder")
    if keys.mistakes:
        raise Unreadable(keys.mistakes)
    model = Model(
        name=name,
        kind=kind,
        width=width,
        vocabulary=vocabulary,
        layers=layers,
        context=context,
        tied=tied,
        kv_format=kv_format,
        embedding_format=formats.plain,
        head_format=formats.of("lm_head"),
        beside=beside,
        position_embeddings=context if gpt2 else 0,
        stored=stored,
    )
    return replace(model, notes=(*notes, *_disagreement(model)))


def _disagreement(model: Model) -> list[str]:
    if model.stored is None or model.weight_scale != 1.0 or model.stored == model.weight_bytes:
        return []
    return [
        f"the files hold {model.stored / 1e9:,.1f} GB, the config's shapes {model.weight_bytes / 1e9:,.1f} GB; the "
        "shapes are believed: files may hold what is not loaded, as layers for speculation, or another precision"
    ]


def _refuse_unsupported(keys: _Keys, config: Mapping[str, Any], outer: Mapping[str, Any], kind: str) -> None:
    for key, what in _UNSUPPORTED_KEYS.items():
        if config.get(key):
            raise Unreadable([f"{keys.prefix}{key}: {what}: unsupported, {_WHY_NOT}; size it by measurement"])
    types = config.get("layer_types") or config.get("layers_block_type")
    strange = sorted({str(each)[:40] for each in types} & _UNSUPPORTED_LAYERS) if isinstance(types, list) else []
    if strange:
        raise Unreadable([f"{keys.prefix}layer_types: {', '.join(strange)}: unsupported, {_WHY_NOT}"])
    if config.get("is_encoder_decoder") or outer.get("is_encoder_decoder"):
        raise Unreadable(["is_encoder_decoder: encoder-decoder models are unsupported; name a decoder-only model"])
    if kind in ("bert", "roberta", "xlm-roberta", "modernbert", "mamba", "mamba2", "t5", "whisper", "rwkv"):
        raise Unreadable([f"model_type: {kind!r} is unsupported; name a decoder-only transformer"])


def _layers(keys: _Keys, kind: str, width: int, formats: Formats) -> tuple[Layers, ...]:
    depth = keys.count("num_hidden_layers", "n_layer", "num_layers", most=_MOST_LAYERS)
    attention = _attention(keys, kind, width, formats)
    windows = _windows(keys, kind, depth)
    feeds = _feed_forwards(keys, kind, width, depth, formats)
    norms = _NORMS.get(kind, 2)
    kinds = list(zip(windows, feeds, strict=True))
    runs = []
    for (window, feed), same in groupby(kinds):
        seen = replace(attention, window=window)
        runs.append(Layers(len(list(same)), seen, feed, norms))
    return tuple(runs)


def _attention(keys: _Keys, kind: str, width: int, formats: Formats) -> Attention:
    heads = keys.count("num_attention_heads", "n_head", most=65_536)
    if keys.config.get("kv_lora_rank") is not None:
        latent = Latent(
            rank=keys.count("kv_lora_rank"),
            nope=keys.count("qk_nope_head_dim", least=0),
            rope=keys.count("qk_rope_head_dim", least=0),
            query_rank=keys.count("q_lora_rank", default=0, least=0),
        )
        head, value_head = latent.nope + latent.rope, keys.count("v_head_dim")
        return Attention(heads, heads, head, value_head, latent=latent, format=formats.of("self_attn"))
    multi_query = 1 if keys.config.get("multi_query") is True else heads
    kv_heads = keys.count("num_key_value_heads", "num_kv_heads", default=multi_query, most=65_536)
    head = keys.count("head_dim", default=max(1, width // heads))
    if heads % kv_heads:
        keys.wrong("num_key_value_heads", f"{kv_heads} does not divide the {heads} of num_attention_heads; mend one")
    bias = keys.truth("attention_bias", keys.truth("qkv_bias", kind in ("gpt2", "opt", "phi")))
    output_bias = bias and kind not in _QUERIES_BIASED
    norms = 2.0 * head if kind in _NORMED_HEADS or keys.config.get("use_qk_norm") is True else 0.0
    if kind == "gpt_oss":
        norms += heads  # an attention sink for each head
    return Attention(
        heads,
        kv_heads,
        head,
        head,
        query_bias=bias,
        output_bias=output_bias,
        norms=norms,
        format=formats.of("self_attn"),
    )


def _windows(keys: _Keys, kind: str, depth: int) -> list[int]:
    """How far each layer looks back, 0 without limit."""
    types = keys.config.get("layer_types")
    chunk = keys.count("attention_chunk_size", default=0, least=0)
    if isinstance(types, list):
        if len(types) != depth:
            keys.wrong("layer_types", f"names {len(types)} layers, num_hidden_layers is {depth}; mend one of them")
            return [0] * depth
        if not any(each in ("sliding_attention", "chunked_attention") for each in types):
            return [0] * depth
        window = chunk or keys.count("sliding_window")
        return [window if each in ("sliding_attention", "chunked_attention") else 0 for each in types]
    if kind in ("llama4", "llama4_text"):
        # Every fourth layer looks at everything (no_rope_layer_interval).
        every = keys.count("no_rope_layer_interval", default=4)
        return [0 if (place + 1) % every == 0 else chunk or 8_192 for place in range(depth)]
    window = keys.count("sliding_window", default=0, least=0)
    used = keys.truth("use_sliding_window", not kind.startswith("qwen"))
    if not window or not used:
        return [0] * depth
    if kind.startswith("qwen"):
        # Layers below max_window_layers look at everything.
        full = keys.count("max_window_layers", default=depth, least=0)
        return [0 if place < full else window for place in range(depth)]
    every = keys.count(
        "sliding_window_pattern", "_sliding_window_pattern", default=2 if kind == "gpt_oss" else 0, least=0
    )
    if every:
        return [0 if (place + 1) % every == 0 else window for place in range(depth)]
    return [window] * depth


def _feed_forwards(keys: _Keys, kind: str, width: int, depth: int, formats: Formats) -> list[FeedForward]:
    matrices = 2 if kind in _TWO_MATRICES else 3
    bias = keys.truth("mlp_bias", kind in ("gpt2", "opt", "phi", "starcoder2"))
    experts = keys.count(
        "num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts", default=0, least=0
    )
    if experts < 2:
        inner = keys.count("intermediate_size", "n_inner", "ffn_dim", default=4 * width if kind == "gpt2" else None)
        return [FeedForward(inner, matrices, bias=bias, format=formats.of("mlp"))] * depth
    active = keys.count("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
    if active > experts:
        keys.wrong("num_experts_per_tok", f"{active} is more than the {experts} experts there are; mend one of them")
    inner = keys.count("moe_intermediate_size", "intermediate_size")
    shared = keys.count("shared_expert_intermediate_size", default=0, least=0)
    shared = shared or keys.count("n_shared_experts", "moe_num_shared_experts", default=0, least=0) * inner
    if kind in ("llama4", "llama4_text"):
        shared = inner
    sparse = FeedForward(
        inner,
        matrices,
        experts,
        min(active, experts),
        shared,
        bias=kind == "gpt_oss",
        shared_gate=kind == "qwen2_moe",
        format=formats.of("mlp.experts"),
        shared_format=formats.of("mlp.shared_experts"),
    )
    is_sparse = _sparse_layers(keys, kind, depth)
    if all(is_sparse):
        return [sparse] * depth
    dense = FeedForward(
        keys.count("intermediate_size_mlp", "intermediate_size"), matrices, bias=bias, format=formats.of("mlp")
    )
    return [sparse if here else dense for here in is_sparse]


def _sparse_layers(keys: _Keys, kind: str, depth: int) -> list[bool]:
    """Which layers have experts."""
    first = keys.count("first_k_dense_replace", "moe_layer_start_index", default=0, least=0, most=_MOST_LAYERS)
    step = keys.count(
        "decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step", "moe_layer_interval", default=1
    )
    only = keys.config.get("mlp_only_layers")
    dense = set(only) if isinstance(only, list) and all(isinstance(each, int) for each in only) else set()
    # DeepSeek counts from layer 0, the others put experts at the end of each period.
    offset = 0 if kind.startswith(("deepseek", "kimi")) else 1
    return [place >= first and (place + offset) % step == 0 and place not in dense for place in range(depth)]


def _beside(outer: Mapping[str, Any], formats: Formats) -> tuple[Tensors, list[str]]:
    """The image encoder, counted by its layers: four square matrices of attention, and a network of two."""
    vision = outer.get("vision_config")
    if not isinstance(vision, dict):
        return Tensors(format=formats.plain), []
    sizes = [
        next((vision[name] for name in names if isinstance(vision.get(name), int) and 0 < vision[name] < 10**6), 0)
        for names in (("hidden_size", "embed_dim"), ("num_hidden_layers", "depth"), ("intermediate_size",))
    ]
    width, depth, inner = sizes
    if not width or not depth:
        return Tensors(format=formats.plain), ["an image encoder whose size the config does not say is left out"]
    gated = 3 if str(vision.get("model_type", "")).startswith(("pixtral", "qwen2_5")) else 2
    parameters = depth * (4.0 * width * width + gated * width * (inner or 4 * width))
    note = f"an image encoder of about {parameters / 1e9:.2f} billion parameters is held whole on each GPU's rank"
    return Tensors(0.0, parameters, formats.plain), [note]
