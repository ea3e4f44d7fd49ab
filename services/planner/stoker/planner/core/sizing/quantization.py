"""How the weights and the cache of a model are stored: `torch_dtype`, `quantization_config`, and the cache's type.

Bits include scales and zero points. Sources: OCP Microscaling Formats v1.0 (MXFP4: a scale of 8 bits for 32 numbers);
vLLM's documentation of quantization (which methods there are, and that weights of 4 bits are multiplied in bf16);
DeepSeek-V3, arXiv:2412.19437 §3.3 (fp8 with a scale for each 128 × 128 block); NVIDIA's NVFP4 (a scale of 8 bits for
16 numbers).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from stoker.planner.core.sizing.architecture import BF16, Format

FP8 = Format("fp8", 8.0, "fp8")
_PLAIN = {
    "bfloat16": BF16,
    "float16": Format("fp16", 16.0),
    "half": Format("fp16", 16.0),
    "float32": BF16,  # vLLM's dtype "auto" serves these in half precision
    "float": BF16,
    "auto": BF16,
}
_KV = {
    "fp8": Format("fp8", 8.0, "fp8"),
    "fp8_e4m3": Format("fp8", 8.0, "fp8"),
    "fp8_e5m2": Format("fp8", 8.0, "fp8"),
    "bfloat16": BF16,
    "bf16": BF16,
    "float16": Format("fp16", 16.0),
    "fp16": Format("fp16", 16.0),
}
_MODULES = ("self_attn", "mlp", "mlp.experts", "mlp.shared_experts")
_EXAMPLES = {
    "self_attn": "model.layers.1.self_attn.q_proj",
    "mlp": "model.layers.1.mlp.gate_proj",
    "mlp.experts": "model.layers.1.mlp.experts.0.gate_proj",
    "mlp.shared_experts": "model.layers.1.mlp.shared_experts.gate_proj",
    "lm_head": "lm_head",
}
_MOST_PATTERNS, _LONGEST_PATTERN = 10_000, 300
_METHODS = "fp8, mxfp4, awq, gptq, compressed-tensors, modelopt, bitsandbytes"

Wrong = Callable[[str, str], None]
"""Takes the key and what is wrong with it."""


@dataclass(frozen=True)
class Formats:
    """Of a model's parts. `plain` is that of everything that is not quantized."""

    plain: Format
    quantized: Mapping[str, Format]
    kv_fp8: bool = False

    def of(self, module: str) -> Format:
        """Of a kind of module: self_attn, mlp, mlp.experts, mlp.shared_experts or lm_head."""
        return self.quantized.get(module, self.plain)


def formats_of(config: Mapping[str, Any], outer: Mapping[str, Any], wrong: Wrong) -> Formats:
    """How a model's parts are stored."""
    dtype = next(
        (str(c[key]) for c in (config, outer) for key in ("torch_dtype", "dtype") if isinstance(c.get(key), str)),
        "bfloat16",
    )
    plain = _PLAIN.get(dtype.removeprefix("torch."))
    if plain is None:
        wrong("torch_dtype", f"{dtype[:40]!r} is none of {', '.join(_PLAIN)}; mend it")
        plain = BF16
    places = [
        (key, where.get(key)) for key in ("quantization_config", "compression_config") for where in (config, outer)
    ]
    key, said = next((place for place in places if place[1] is not None), ("", None))
    if said is None:
        return Formats(plain, {})
    if not isinstance(said, Mapping):
        wrong(key, "expected an object of settings; mend or remove it")
        return Formats(plain, {})
    method = str(said.get("quant_method") or said.get("quant_algo") or "")[:40].lower().replace("_", "-")
    found = _format(method, said, lambda name, what: wrong(f"{key}.{name}", what))
    if found is None:
        return Formats(plain, {})
    ignored = _ignored(said)
    modules = ("mlp.experts",) if method == "mxfp4" else _MODULES
    quantized = {module: found for module in modules if not any(_matches(each, module) for each in ignored)}
    if _whole_model(said):
        quantized["lm_head"] = found
    return Formats(plain, quantized, _cache_is_fp8(said))


def _format(method: str, said: Mapping[str, Any], wrong: Wrong) -> Format | None:
    if method in ("fp8", "fbgemm-fp8"):
        block = said.get("weight_block_size")
        size = block[0] if isinstance(block, list) and block else 1
        whole = isinstance(size, int) and not isinstance(size, bool) and 1 <= size <= 4_096
        return replace(FP8, block=size) if whole else FP8
    if method == "mxfp4":
        return Format("mxfp4", 4.0 + 8.0 / 32)
    if method in ("awq", "gptq", "awq-marlin", "gptq-marlin", "auto-round"):
        return _grouped(
            said,
            "bits" if "bits" in said else "w_bit",
            "group_size" if "group_size" in said else "q_group_size",
            wrong,
        )
    if method == "compressed-tensors":
        return _compressed(said, wrong)
    if method.startswith("modelopt") or method in ("nvfp4", "fp8-pb-wo"):
        nested = said.get("quantization")
        inside = nested.get("quant_algo") if isinstance(nested, Mapping) else None
        algorithm = str(said.get("quant_algo") or inside or method).upper()
        return Format("nvfp4", 4.0 + 8.0 / 16, "fp4") if "FP4" in algorithm else FP8
    if method == "bitsandbytes":
        # Blocks of 64 with a scale of 32 bits, these quantized once more: 4.127 bits (QLoRA, arXiv:2305.14314 §3).
        return Format("nf4", 4.127) if said.get("load_in_4bit") else Format("int8", 8.0, "int8")
    wrong(
        "quant_method",
        f"{method!r} is not known here; known: {_METHODS}. Take the unquantized config, or one of these",
    )
    return None


def _grouped(said: Mapping[str, Any], bits_key: str, group_key: str, wrong: Wrong) -> Format | None:
    bits, group = said.get(bits_key), said.get(group_key, 128)
    if bits not in (2, 3, 4, 8) or isinstance(bits, bool):
        wrong(bits_key, f"{str(bits)[:40]!r} is none of 2, 3, 4 and 8; mend it")
        return None
    if not isinstance(group, int) or isinstance(group, bool) or not (group == -1 or 8 <= group <= 65_536):
        wrong(group_key, f"{str(group)[:40]!r} is neither -1 nor a whole number from 8 to 65536; mend it")
        return None
    # A scale of 16 bits and a zero point for each group.
    more = (16.0 + bits) / group if group > 0 else 0.0
    return Format(f"int{bits}", bits + more)


def _compressed(said: Mapping[str, Any], wrong: Wrong) -> Format | None:
    groups = said.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) and groups else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    if not isinstance(weights, Mapping):
        wrong("config_groups", "no group says how weights are stored; take the file as its publisher has it")
        return None
    bits, kind, group = weights.get("num_bits"), weights.get("type"), weights.get("group_size")
    if bits not in (4, 8) or kind not in ("int", "float"):
        wrong(
            "config_groups",
            f"{str(bits)[:20]!r} bits of type {str(kind)[:20]!r} are not known here; 4 and 8, int and float are",
        )
        return None
    activations = first.get("input_activations") if isinstance(first, Mapping) else None
    if kind == "float" and bits == 8:
        return FP8 if activations else Format("fp8", 8.0)
    if kind == "float":
        return Format("fp4", 4.5, "fp4" if activations else "bf16")
    if bits == 8:
        return Format("int8", 8.0, "int8" if activations else "bf16")
    size = group if isinstance(group, int) and not isinstance(group, bool) and 8 <= group <= 65_536 else 0
    return Format("int4", 4.0 + (16.0 / size if size else 0.0))


def _ignored(said: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for key in ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules"):
        value = said.get(key)
        if isinstance(value, list):
            found += [
                each for each in value[:_MOST_PATTERNS] if isinstance(each, str) and len(each) <= _LONGEST_PATTERN
            ]
    return found


def _matches(pattern: str, module: str) -> bool:
    """Whether a pattern leaves out all modules of a kind: "re:" of compressed-tensors, a glob, or part of a name.

    A name of a single layer leaves out that one alone: with most layers quantized it counts for nothing.
    """
    example = _EXAMPLES[module]
    if pattern.startswith("re:"):
        # Patterns of others are not run as they are: what matters is the fixed text in them.
        parts = [part for part in re.split(r"[.*+?\[\]()|^$\\]+|\\d", pattern[3:]) if part]
    else:
        parts = [part for part in re.split(r"[.*]+", pattern) if part]
    words = [part for part in parts if part not in ("model", "layers", "language_model")]
    if not words or any(word.isdigit() for word in words):
        return False
    names = example.split(".")
    return all(any(word == name for name in names) for word in words)


def _whole_model(said: Mapping[str, Any]) -> bool:
    return said.get("lm_head") is True


def _cache_is_fp8(said: Mapping[str, Any]) -> bool:
    scheme = said.get("kv_cache_scheme")
    if isinstance(scheme, Mapping) and scheme.get("num_bits") == 8:
        return True
    return str(said.get("kv_cache_quant_algo") or "").upper() == "FP8"


def kv_format_of(
    asked: str, config: Mapping[str, Any], outer: Mapping[str, Any], formats: Formats, wrong: Wrong
) -> Format:
    """How the cache is stored: as asked, or "auto": fp8 where the weights come with scales for it, else plain."""
    if asked == "auto":
        return FP8 if formats.kv_fp8 else formats.plain
    if asked not in _KV:
        wrong("kv-dtype", f"{asked[:40]!r} is none of auto, {', '.join(_KV)}; choose one")
        return formats.plain
    return _KV[asked]
