"""A tiny Llama with random weights and its own tokenizer, built on the spot: no network, no torch.

`python -m stoker.local.model DIR` writes one. It answers nonsense, but it costs what a model costs: real
prefill, real KV blocks, a real tokenizer and chat template. The default has about 26 million parameters.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from stoker.common.errors import InvalidRequest
from stoker.local.chat_template import CHAT_TEMPLATE

BEGIN, END, TURN, TURN_END = "<|begin|>", "<|end|>", "<|turn|>", "<|turn_end|>"
TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"

_FORMAT = 1
"""Raised when the same spec would build different files."""
_MARKER = "stoker_model.json"
_MODULES = (
    "argparse.py", "ast.py", "asyncio/base_events.py", "asyncio/tasks.py", "bdb.py", "calendar.py",
    "codecs.py", "collections/__init__.py", "configparser.py", "csv.py", "dataclasses.py", "datetime.py",
    "difflib.py", "doctest.py", "email/message.py", "enum.py", "fractions.py", "ftplib.py", "functools.py",
    "heapq.py", "http/client.py", "http/server.py", "inspect.py", "json/decoder.py", "locale.py",
    "logging/__init__.py", "mailbox.py", "optparse.py", "pathlib.py", "pdb.py", "pickle.py", "pickletools.py",
    "platform.py", "pydoc.py", "random.py", "shutil.py", "smtplib.py", "socket.py", "ssl.py",
    "statistics.py", "string.py", "subprocess.py", "tarfile.py", "tempfile.py", "textwrap.py",
    "threading.py", "traceback.py", "turtle.py", "typing.py", "unittest/case.py", "unittest/mock.py",
    "urllib/request.py", "uuid.py", "zipfile.py",
)  # fmt: skip


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a tiny model. Two equal specs build equal directories on one Python installation."""

    seed: int = 0
    hidden: int = 512
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    intermediate: int = 1408
    vocab: int = 4096
    """Tokens, at most; special ones included."""
    max_positions: int = 8192
    """Longest context, in tokens."""

    def key(self) -> str:
        """Names the files this spec builds here: the tokenizer is trained on this Python's own library."""
        made_of = {
            "spec": asdict(self),
            "format": _FORMAT,
            "template": CHAT_TEMPLATE,
            "python": platform.python_version(),
            "tokenizers": tokenizers.__version__,
            "numpy": np.__version__,
        }
        return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:16]


def cached(spec: ModelSpec = ModelSpec(), cache_dir: Path | None = None) -> Path:
    """The directory of this model in the user's cache, built on first use."""
    root = cache_dir or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stoker" / "models"
    return build(root / f"tiny-{spec.key()}", spec)


def build(directory: Path, spec: ModelSpec = ModelSpec()) -> Path:
    """Write the model to `directory`, unless it is there already; appears whole or not at all.

    Raises `InvalidRequest` if the directory holds anything else: nothing of the user's is overwritten.
    """
    if _holds(directory, spec):
        return directory
    if directory.exists() and any(directory.iterdir()) and not (directory / _MARKER).exists():
        raise InvalidRequest.field("directory", f"{directory} is not empty and not a tiny model; name another")
    directory.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        _write(work, spec)
        try:
            _swap(work, directory)
        except OSError:
            # Somebody else may have finished the same build first.
            if not _holds(directory, spec):
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return directory


def _holds(directory: Path, spec: ModelSpec) -> bool:
    try:
        return bool(json.loads((directory / _MARKER).read_text())["key"] == spec.key())
    except (OSError, ValueError, KeyError):
        return False


def _swap(work: Path, directory: Path) -> None:
    if directory.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{directory.name}-old-", dir=directory.parent))
        directory.rename(old / "model")
        shutil.rmtree(old, ignore_errors=True)
    work.chmod(0o755)
    work.rename(directory)


def _write(directory: Path, spec: ModelSpec) -> None:
    tokenizer = _train_tokenizer(spec)
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in (BEGIN, END, TURN_END)}
    _write_json(directory / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": spec.max_positions,
        "chat_template": CHAT_TEMPLATE,
    })  # fmt: skip
    _write_json(directory / "generation_config.json", {
        "bos_token_id": ids[BEGIN],
        "eos_token_id": [ids[END], ids[TURN_END]],
        "pad_token_id": ids[END],
    })  # fmt: skip
    _write_json(directory / "config.json", {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": ids[BEGIN],
        "eos_token_id": [ids[END], ids[TURN_END]],
        "head_dim": spec.hidden // spec.heads,
        "hidden_act": "silu",
        "hidden_size": spec.hidden,
        "initializer_range": 0.02,
        "intermediate_size": spec.intermediate,
        "max_position_embeddings": spec.max_positions,
        "mlp_bias": False,
        "num_attention_heads": spec.heads,
        "num_hidden_layers": spec.layers,
        "num_key_value_heads": spec.kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": spec.vocab,
    })  # fmt: skip
    _write_weights(directory / "model.safetensors", spec)
    _write_json(directory / _MARKER, {"key": spec.key(), "spec": asdict(spec)})


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _train_tokenizer(spec: ModelSpec) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [BEGIN, END, TURN, TURN_END]
    trainer = trainers.BpeTrainer(
        vocab_size=spec.vocab - 2,  # room for the two tool marks
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    # Not special: a tool call's marks must survive detokenization, tool parsers look for them.
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in (TOOL_CALL, TOOL_CALL_END)])
    # Text completions begin with BEGIN; chat prompts get it from the template instead.
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(
            single=f"{BEGIN} $A",
            pair=f"{BEGIN} $A {BEGIN} $B",
            special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))],
        ),
    ])  # fmt: skip
    return tokenizer


def _corpus() -> Iterator[str]:
    library = Path(sysconfig.get_path("stdlib"))
    for name in _MODULES:
        try:
            yield (library / name).read_text(encoding="utf-8")
        except OSError:
            continue


def _write_weights(path: Path, spec: ModelSpec) -> None:
    """The safetensors format: header length (u64, little-endian), JSON header, then the tensors' bytes."""
    rng = np.random.default_rng(spec.seed)
    shapes = _shapes(spec)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for shape in shapes.values():
            if len(shape) == 1:
                values = np.ones(shape, dtype=np.float32)
            else:
                values = rng.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
            # NumPy has no bfloat16: it is the upper half of a float32.
            file.write((values.view(np.uint32) >> 16).astype("<u2").tobytes())


def _shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    queries, keys = spec.hidden, spec.kv_heads * spec.hidden // spec.heads
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab, spec.hidden),
        "model.norm.weight": (spec.hidden,),
    }
    for layer in range(spec.layers):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}input_layernorm.weight": (spec.hidden,),
            f"{at}post_attention_layernorm.weight": (spec.hidden,),
            f"{at}self_attn.q_proj.weight": (queries, spec.hidden),
            f"{at}self_attn.k_proj.weight": (keys, spec.hidden),
            f"{at}self_attn.v_proj.weight": (keys, spec.hidden),
            f"{at}self_attn.o_proj.weight": (spec.hidden, queries),
            f"{at}mlp.gate_proj.weight": (spec.intermediate, spec.hidden),
            f"{at}mlp.up_proj.weight": (spec.intermediate, spec.hidden),
            f"{at}mlp.down_proj.weight": (spec.hidden, spec.intermediate),
        }
    return shapes


def main(argv: list[str] | None = None) -> int:
    """Build a tiny model and print where it is."""
    parser = argparse.ArgumentParser(prog="python -m stoker.local.model", description=__doc__)
    parser.add_argument("directory", type=Path)
    defaults = ModelSpec()
    for name, value in asdict(defaults).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    options = vars(parser.parse_args(argv))
    directory = options.pop("directory")
    try:
        sys.stdout.write(f"{build(directory, ModelSpec(**options))}\n")
    except InvalidRequest as error:
        sys.stderr.write(f"{error.message}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
