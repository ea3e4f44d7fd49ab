"""A `msgspec.Struct` from the nodes of a YAML file, every mistake told with its line and the way there.

msgspec itself stops at the first mistake and knows no lines.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import yaml
from msgspec import inspect

from stoker.common.yaml_file import Mistakes

T = TypeVar("T")

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_NULLS = ("", "~", "null", "Null", "NULL")
_BAD = object()
_COLLECTIONS = (inspect.DictType, inspect.ListType)


class Reader:
    """Reads one file, without aliases: these could make few bytes many values. `places` has
    the node of each key and item by its path, "sites.fra.rows.r1"."""

    def __init__(self, mistakes: Mistakes) -> None:
        self.places: dict[str, yaml.Node] = {}
        self._mistakes = mistakes

    def read(self, node: yaml.Node, cls: type[T]) -> T | None:
        """A `cls`, None where what is wrong was told."""
        self.places[""] = node
        value = self._value(node, _known(cls), "")
        return None if value is _BAD else cast("T", value)

    def place(self, path: str) -> yaml.Node:
        """The node at a path, or the nearest around it."""
        while path not in self.places:
            path = path.rpartition(".")[0]
        return self.places[path]

    def _wrong(self, node: yaml.Node, path: str, what: str) -> object:
        self._mistakes.add(node, f"{path}: {what}" if path else what)
        return _BAD

    def _value(self, node: yaml.Node, kind: Any, path: str) -> Any:
        """What stands at `node`; `_BAD` where that was told to be wrong."""
        if isinstance(kind, inspect.Metadata):
            return self._value(node, kind.type, path)
        if isinstance(kind, inspect.UnionType):
            return self._union(node, kind, path)
        if isinstance(kind, inspect.StructType):
            return self._struct(node, kind, path)
        if isinstance(kind, inspect.DictType):
            return self._dict(node, kind, path)
        if isinstance(kind, inspect.ListType):
            return self._list(node, kind, path)
        return self._scalar(node, kind, path)

    def _union(self, node: yaml.Node, kind: inspect.UnionType, path: str) -> Any:
        """The member of the union that is written as `node` is: a mapping, a list or a single value."""
        members = [m.type if isinstance(m, inspect.Metadata) else m for m in kind.types]
        if _is_null(node):
            return (
                None if any(isinstance(m, inspect.NoneType) for m in members) else self._value(node, members[0], path)
            )
        members = [m for m in members if not isinstance(m, inspect.NoneType)]
        wanted: tuple[type, ...] = (inspect.StructType, inspect.DictType)
        if isinstance(node, yaml.SequenceNode):
            wanted = (inspect.ListType,)
        fitting = [m for m in members if isinstance(m, wanted)]
        if isinstance(node, yaml.ScalarNode):
            fitting = [m for m in members if not isinstance(m, (inspect.StructType, *_COLLECTIONS))]
        return self._value(node, (fitting or members)[0], path)

    def _struct(self, node: yaml.Node, kind: inspect.StructType, path: str) -> Any:
        if _is_null(node):
            node = yaml.MappingNode("", [], node.start_mark, node.end_mark)
        if not isinstance(node, yaml.MappingNode):
            return self._wrong(node, path, "expected a mapping of settings, `key: value` on each line")
        fields = {field.encode_name: field for field in kind.fields}
        values: dict[str, Any] = {}
        for key_node, value_node, key in self._items(node, path):
            if key not in fields:
                self._wrong(key_node, _join(path, key), f"no such setting; {_hint(key, fields)}")
                values["?"] = _BAD
            else:
                values[fields[key].name] = self._value(value_node, fields[key].type, _join(path, key))
        for field in kind.fields:
            # A misspelt key is told once, not as missing too.
            if field.required and field.name not in values and "?" not in values:
                self._wrong(node, _join(path, field.encode_name), "missing; it must be given")
                values[field.name] = _BAD
        if any(value is _BAD for value in values.values()):
            return _BAD
        return kind.cls(**values)

    def _dict(self, node: yaml.Node, kind: inspect.DictType, path: str) -> Any:
        if _is_null(node):
            return {}
        if not isinstance(node, yaml.MappingNode):
            return self._wrong(node, path, "expected a mapping, `name: …` on each line")
        read = {
            key: self._value(value_node, kind.value_type, _join(path, key))
            for _, value_node, key in self._items(node, path)
        }
        return _BAD if any(value is _BAD for value in read.values()) else read

    def _items(self, node: yaml.MappingNode, path: str) -> list[tuple[yaml.Node, yaml.Node, str]]:
        items: dict[str, tuple[yaml.Node, yaml.Node, str]] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._wrong(key_node, path, "a key must be a single text; put it in quotes")
            elif key_node.value in items:
                self._wrong(key_node, _join(path, key_node.value), "given twice")
            else:
                items[key_node.value] = (key_node, value_node, key_node.value)
                self.places.setdefault(_join(path, key_node.value), key_node)
        return list(items.values())

    def _list(self, node: yaml.Node, kind: inspect.ListType, path: str) -> Any:
        if _is_null(node):
            return []
        if not isinstance(node, yaml.SequenceNode):
            return self._wrong(node, path, "expected a list")
        read = []
        for number, item in enumerate(node.value):
            self.places.setdefault(_join(path, str(number)), item)
            read.append(self._value(item, kind.item_type, _join(path, str(number))))
        return _BAD if any(value is _BAD for value in read) else read

    def _scalar(self, node: yaml.Node, kind: Any, path: str) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            return self._wrong(node, path, "expected a single value")
        text = str(node.value)
        if isinstance(kind, inspect.BoolType):
            if text.lower() not in ("true", "false"):
                return self._wrong(node, path, f"{text[:60]!r} is neither true nor false")
            return text.lower() == "true"
        if isinstance(kind, inspect.LiteralType):
            if text not in map(str, kind.values):
                return self._wrong(node, path, f"{text[:60]!r} is none of {', '.join(map(str, kind.values))}")
            return text
        if isinstance(kind, inspect.IntType):
            if not _INTEGER.fullmatch(text):
                return self._wrong(node, path, f"{text[:60]!r} is no whole number")
            return self._bounded(node, int(text), kind, path)
        if isinstance(kind, inspect.FloatType):
            try:
                number = float(text)
            except ValueError:
                number = math.nan
            if not math.isfinite(number):
                return self._wrong(node, path, f"{text[:60]!r} is no number")
            return self._bounded(node, number, kind, path)
        if not text and _is_null(node):
            return self._wrong(node, path, "expected a text")
        return text

    def _bounded(self, node: yaml.Node, value: Any, kind: inspect.IntType | inspect.FloatType, path: str) -> Any:
        if kind.ge is not None and value < kind.ge:
            return self._wrong(node, path, f"{value:g} must be at least {kind.ge:g}")
        if kind.gt is not None and value <= kind.gt:
            return self._wrong(node, path, f"{value:g} must be more than {kind.gt:g}")
        if kind.le is not None and value > kind.le:
            return self._wrong(node, path, f"{value:g} must be at most {kind.le:g}")
        return value


_TYPES: dict[type, inspect.Type] = {}


def _known(cls: type) -> inspect.Type:
    """What msgspec knows of a class; finding out takes milliseconds."""
    if cls not in _TYPES:
        _TYPES[cls] = inspect.type_info(cls)
    return _TYPES[cls]


def merged(first: yaml.Node, second: yaml.Node) -> yaml.Node:
    """Both files' settings: mappings key by key, lists one behind the other; of two single values the first."""
    if isinstance(first, yaml.MappingNode) and isinstance(second, yaml.MappingNode):
        theirs = {_key(key): (key, value) for key, value in second.value}
        mine = {_key(key) for key, _ in first.value}
        items = [
            (key, merged(value, theirs[_key(key)][1]) if _key(key) in theirs else value) for key, value in first.value
        ]
        items += [pair for name, pair in theirs.items() if name not in mine]
        return yaml.MappingNode(first.tag, items, first.start_mark, first.end_mark)
    if isinstance(first, yaml.SequenceNode) and isinstance(second, yaml.SequenceNode):
        return yaml.SequenceNode(first.tag, [*first.value, *second.value], first.start_mark, first.end_mark)
    return first


def _key(node: yaml.Node) -> str:
    return str(node.value) if isinstance(node, yaml.ScalarNode) else f"\0{id(node)}"


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value in _NULLS


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _hint(key: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(key[:60], list(known), n=1)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
