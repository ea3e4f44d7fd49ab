"""Deployment files: YAML in, DeploymentSpec out, every mistake told with its line. Policy files likewise."""

from __future__ import annotations

import difflib
import math
import re
from pathlib import Path
from typing import Any

import yaml
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from stoker.api.common.v1 import common_pb2, scaling_pb2
from stoker.common import yaml_file
from stoker.registry.core import placement, scaling
from stoker.registry.core.validation import Limits, Violations

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])")
_STEP = re.compile(r"(\w+)(?=[.\[]|$)|\[(\d+)\]")
_ENGINES = ("vllm", "sim")
_MAX_BYTES, _MOST = 1 << 20, 1_000
_NEEDS = "at least name, model, engine and replicas"
_INTEGERS = {
    FieldDescriptor.CPPTYPE_UINT32: 2**32 - 1,
    FieldDescriptor.CPPTYPE_INT32: 2**31 - 1,
    FieldDescriptor.CPPTYPE_UINT64: 2**63 - 1,
}
"""The kinds of whole numbers, each with its highest."""


class _Reader:
    """Turns YAML nodes into values and gathers what is wrong on the way."""

    def __init__(self) -> None:
        self.mistakes = yaml_file.Mistakes()

    def wrong(self, node: yaml.Node, what: str) -> None:
        self.mistakes.add(node, what)

    def message(self, node: yaml.Node, descriptor: Descriptor) -> dict[str, Any]:
        """A mapping, as the fields of a message."""
        if not isinstance(node, yaml.MappingNode):
            self.wrong(node, "expected a mapping of settings, `key: value` on each line")
            return {}
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            field = descriptor.fields_by_name.get(key)
            if field is None:
                self.wrong(key_node, f"{key}: no such setting; {_hint(key, descriptor)}")
            elif key in values:
                self.wrong(key_node, f"{key}: given twice")
            else:
                values[key] = self.field(value_node, field)
        return {key: value for key, value in values.items() if value is not None}

    def field(self, node: yaml.Node, field: FieldDescriptor) -> Any:
        """The value of one field, None if it is wrong."""
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            return self.text_map(node, field.name)
        if not field.is_repeated:
            return self.single(node, field)
        if not isinstance(node, yaml.SequenceNode):
            self.wrong(node, f"{field.name}: expected a list")
            return None
        items = [self.single(item, field) for item in node.value]
        return None if any(item is None for item in items) else items

    def single(self, node: yaml.Node, field: FieldDescriptor) -> Any:
        if field.message_type is not None:
            return self.message(node, field.message_type)
        if not isinstance(node, yaml.ScalarNode):
            self.wrong(node, f"{field.name}: expected a single value")
            return None
        if field.enum_type is not None:
            return self.enum(node, field)
        if field.cpp_type in _INTEGERS:
            return self.integer(node, field.name, _INTEGERS[field.cpp_type])
        if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
            return self.number(node, field.name)
        if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            return self.truth(node, field.name)
        return node.value

    def enum(self, node: yaml.ScalarNode, field: FieldDescriptor) -> int | None:
        assert field.enum_type is not None  # noqa: S101 - the caller looked
        prefix = f"{_WORD.sub('_', field.enum_type.name).upper()}_"
        names = {v.name.removeprefix(prefix).lower(): v.number for v in field.enum_type.values if v.number}
        if node.value.lower() not in names:
            self.wrong(node, f"{field.name}: {node.value!r} is none of {', '.join(names)}")
        return names.get(node.value.lower())

    def integer(self, node: yaml.ScalarNode, name: str, most: int) -> int | None:
        short = len(node.value) <= 20  # before Python is asked to read a number of a megabyte
        if not (short and node.value.isascii() and node.value.isdigit()) or int(node.value) > most:
            self.wrong(node, f"{name}: {node.value[:80]!r} is no whole number from 0 to {most}")
            return None
        return int(node.value)

    def truth(self, node: yaml.ScalarNode, name: str) -> bool | None:
        if node.value.lower() not in ("true", "false"):
            self.wrong(node, f"{name}: {node.value!r} is neither true nor false")
            return None
        return bool(node.value.lower() == "true")

    def number(self, node: yaml.ScalarNode, name: str) -> float | None:
        try:
            value = float(node.value)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            self.wrong(node, f"{name}: {node.value!r} is no number")
            return None
        return value

    def text_map(self, node: yaml.Node, name: str) -> dict[str, str] | None:
        if not isinstance(node, yaml.MappingNode) or not all(isinstance(v, yaml.ScalarNode) for _, v in node.value):
            self.wrong(node, f"{name}: expected a mapping of texts")
            return None
        return {str(key.value): str(value.value) for key, value in node.value}


def _hint(key: str, descriptor: Descriptor) -> str:
    """What may have been meant by a setting that is not there: one alike, or of that name in a section."""
    fields = descriptor.fields_by_name
    near = difflib.get_close_matches(key, list(fields), n=1)
    sections = ((name, field.message_type) for name, field in fields.items() if not field.is_repeated)
    near += [f"{name}.{key}" for name, inside in sections if inside and key in inside.fields_by_name]
    return f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(fields)}"


def read(path: Path) -> common_pb2.DeploymentSpec:
    """The deployment in a file. Raises StokerError naming the file and every line at fault."""
    return parse(yaml_file.text(path, _MAX_BYTES), str(path))


def read_all(path: Path) -> list[common_pb2.DeploymentSpec]:
    """The deployments in a file, parted by `---`. Raises StokerError as `read` does, for all of them at once."""
    return parse_all(yaml_file.text(path, _MAX_BYTES), str(path))


def read_policy(path: Path) -> scaling_pb2.ScalingPolicy:
    """The scaling policy in a file, as a deployment's `scaling` states it. Raises StokerError as `read` does."""
    return parse_policy(yaml_file.text(path, _MAX_BYTES), str(path))


def parse(text: str, source: str) -> common_pb2.DeploymentSpec:
    """The deployment in a text; `source` names it in errors."""
    node = yaml_file.composed(text, source, _NEEDS)
    reader = _Reader()
    spec = _deployment(reader, node)
    reader.mistakes.refuse()
    return spec


def parse_all(text: str, source: str) -> list[common_pb2.DeploymentSpec]:
    """The deployments in a text; `source` names it in errors."""
    reader = _Reader()
    specs: dict[str, common_pb2.DeploymentSpec] = {}
    nodes = yaml_file.documents(text, source, _NEEDS)
    if len(nodes) > _MOST:
        raise yaml_file.bad(f"{source} has {len(nodes)} deployments; a file has at most {_MOST}")
    for node in nodes:
        # A deployment of its own: what is wrong with one says nothing of the next.
        one = _Reader()
        spec = _deployment(one, node)
        if spec.name in specs and not one.mistakes:
            one.wrong(node, f"name: {spec.name!r} is there twice; names are unique")
        specs[spec.name] = spec
        reader.mistakes.join(one.mistakes)
    reader.mistakes.refuse()
    return list(specs.values())


def _deployment(reader: _Reader, node: yaml.Node) -> common_pb2.DeploymentSpec:
    """A deployment, as far as its node is one; the rest is told to `reader`."""
    values = reader.message(node, common_pb2.DeploymentSpec.DESCRIPTOR)
    if isinstance(node, yaml.MappingNode):
        _check(reader, node, values)
    if reader.mistakes:
        return common_pb2.DeploymentSpec()
    spec = common_pb2.DeploymentSpec(**values)
    if spec.HasField("scaling"):
        _check_policy(reader, node, spec.scaling, "scaling")
    if spec.HasField("placement"):
        _tell(reader, node, placement.policy("placement", spec.placement, spec))
    return spec


def parse_policy(text: str, source: str, *, lines: bool = True) -> scaling_pb2.ScalingPolicy:
    """The scaling policy in a text; `source` names it in errors, without `lines` where nobody wrote any."""
    node = yaml_file.composed(text, source, "at least a kind")
    reader = _Reader()
    values = reader.message(node, scaling_pb2.ScalingPolicy.DESCRIPTOR)
    reader.mistakes.refuse(lines=lines)
    policy = scaling_pb2.ScalingPolicy(**values)
    _check_policy(reader, node, policy, "")
    reader.mistakes.refuse(lines=lines)
    return policy


def _check_policy(reader: _Reader, root: yaml.Node, policy: scaling_pb2.ScalingPolicy, at: str) -> None:
    """Tell what the registry would refuse, each at its line; `at` is the policy's path in the file, if it has one."""
    _tell(reader, root, scaling.policy(at, policy, Limits()))


def _tell(reader: _Reader, root: yaml.Node, violations: Violations) -> None:
    for violation in violations:
        field = violation.field.removeprefix(".")
        reader.wrong(_node_at(root, field), f"{field}: {violation.description}")


def _node_at(root: yaml.Node, field: str) -> yaml.Node:
    """The node of a field, "scaling.schedules[1].begins", or the nearest around it that the file has."""
    node = root
    for name, number in _STEP.findall(field):
        if number and isinstance(node, yaml.SequenceNode) and int(number) < len(node.value):
            node = node.value[int(number)]
        elif name and isinstance(node, yaml.MappingNode):
            found = next((value for key, value in node.value if key.value == name), None)
            if found is None:
                break
            node = found
    return node


def _check(reader: _Reader, root: yaml.MappingNode, values: dict[str, Any]) -> None:
    at = {str(key.value): value for key, value in root.value}
    # A misspelt key is told once, not as missing too.
    needed = () if reader.mistakes else ("name", "model", "engine")
    for required in needed:
        if not values.get(required):
            reader.wrong(at.get(required, root), f"{required}: missing; it must be given")
    name = values.get("name", "")
    if name and not _NAME.fullmatch(name):
        reader.wrong(at["name"], f"name: {name!r} must be a-z, 0-9 and inner hyphens, at most 63 characters")
    engine = values.get("engine")
    if engine and engine not in _ENGINES:
        reader.wrong(at["engine"], f"engine: {engine!r} is none of {', '.join(_ENGINES)}")
    values.setdefault("replicas", 1)
