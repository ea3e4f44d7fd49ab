"""Configuration: frozen dataclass trees read from YAML, with flags on top.

Fields are `Annotated[type, msgspec.Meta(description=…, ge=…)]`, so that one place holds the default, the
bounds, the unit and the text that `--help` and `--print-config` show.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from stoker.common.errors import StokerError

C = TypeVar("C")


class ConfigError(StokerError):
    """A configuration that cannot be used; the message names the field and what it must be."""

    reason = "BAD_CONFIG"


def load(cls: type[C], path: Path | None = None, overrides: Sequence[str] = ()) -> C:
    """A `cls` from the YAML at `path` (defaults where None) with `key.sub=value` overrides on top."""
    tree: dict[str, Any] = {}
    if path is not None:
        tree = _read(path)
    for override in overrides:
        key, sep, text = override.partition("=")
        if not sep:
            raise ConfigError(f"--set {override}: write it as key=value, for example --set listen.grpc=0.0.0.0:50051")
        _put(tree, key.strip(), yaml.safe_load(text))
    _refuse_unknown(cls, tree, "")
    try:
        return msgspec.convert(tree, cls)
    except msgspec.ValidationError as error:
        where = f"{path}: " if path is not None else ""
        raise ConfigError(f"{where}{error}") from error


def describe(config: object) -> str:
    """The tree as YAML, each field under a comment with its description."""
    return "".join(_describe(config, 0))


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of settings at the top")
    return tree


def _put(tree: dict[str, Any], key: str, value: object) -> None:
    *parents, leaf = key.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--set {key}: {parent} is a value, not a group of settings")
    tree[leaf] = value


def _refuse_unknown(cls: Any, tree: dict[str, Any], prefix: str) -> None:
    hints = typing.get_type_hints(cls)
    for key, value in tree.items():
        if key not in hints:
            known = ", ".join(sorted(hints))
            raise ConfigError(f"{prefix}{key}: no such setting; known here: {known}")
        if dataclasses.is_dataclass(hints[key]) and isinstance(value, dict):
            _refuse_unknown(hints[key], value, f"{prefix}{key}.")


def _describe(config: Any, depth: int) -> Iterator[str]:
    indent = "  " * depth
    hints = typing.get_type_hints(type(config), include_extras=True)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for meta in getattr(hints[field.name], "__metadata__", ()):
            if isinstance(meta, msgspec.Meta) and meta.description:
                yield f"{indent}# {meta.description}\n"
        if dataclasses.is_dataclass(value):
            yield f"{indent}{field.name}:\n"
            yield from _describe(value, depth + 1)
        else:
            text = yaml.safe_dump(msgspec.to_builtins(value), default_flow_style=True).split("\n...")[0].strip()
            yield f"{indent}{field.name}: {text}\n"
