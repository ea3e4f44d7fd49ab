"""Reads a Hugging Face `config.json`. The file is anybody's: it is bounded, checked, and never executed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker.common.errors import Code, StokerError
from stoker.planner.core.sizing.architecture import Model
from stoker.planner.core.sizing.reading import Unreadable, model_of

_MAX_BYTES = 1 << 20
_MAX_INDEX_BYTES = 16 << 20
_INDEX = "model.safetensors.index.json"
_ONE_FILE = "model.safetensors"


class BadModelConfig(StokerError):
    """A config.json that says no model, or one that cannot be sized."""

    code = Code.INVALID_ARGUMENT
    reason = "BAD_MODEL_CONFIG"


def read(path: Path, *, kv_dtype: str = "auto") -> Model:
    """The model in a config.json, or in a directory that has one.

    `kv_dtype` is vLLM's `--kv-cache-dtype`: "auto" is the model's own. Where the index of its safetensors lies
    beside it, its `total_size` is taken along. Raises BadModelConfig naming the file, the keys and what to do.
    """
    if path.is_dir():
        path = path / "config.json"
    config = _object(path, _MAX_BYTES)
    # A config called config.json says least by its own name.
    name = path.parent.resolve().name if path.name == "config.json" else path.stem
    return parse(config, name=name, source=str(path), kv_dtype=kv_dtype, stored=_stored(path.parent))


def parse(
    config: Mapping[str, Any], *, name: str, source: str, kv_dtype: str = "auto", stored: int | None = None
) -> Model:
    """The model in a config that was read already; `source` names it in errors."""
    try:
        return model_of(config, name=name, kv_dtype=kv_dtype, stored=stored)
    except Unreadable as error:
        raise BadModelConfig("\n".join(f"{source}: {mistake}" for mistake in error.mistakes)) from error


def _stored(folder: Path) -> int | None:
    index = folder / _INDEX
    if index.is_file():
        metadata = _object(index, _MAX_INDEX_BYTES).get("metadata")
        size = metadata.get("total_size") if isinstance(metadata, dict) else None
        whole = (
            int(size) if isinstance(size, int | float) and not isinstance(size, bool) and 0 < size < 1e15 else None
        )
        if whole is None:
            raise BadModelConfig(f"{index}: metadata.total_size is no number of bytes; mend or remove the file")
        return whole
    single = folder / _ONE_FILE
    return single.stat().st_size if single.is_file() else None


def _object(path: Path, most: int) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(most + 1)
    except OSError as error:
        raise BadModelConfig(f"cannot read {path}: {error.strerror}; name a model's config.json") from error
    if len(raw) > most:
        raise BadModelConfig(f"{path} has more than {most:,} bytes; a config.json has a few thousand")
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        said = str(error) or type(error).__name__
        raise BadModelConfig(f"{path}: no valid JSON: {said}; name a model's config.json") from error
    if not isinstance(value, dict):
        raise BadModelConfig(f"{path}: expected an object of settings; name a model's config.json")
    return value
