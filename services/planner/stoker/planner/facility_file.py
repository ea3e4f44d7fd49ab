"""Facility files: YAML in, `Facility` out, every mistake told with its line. docs/facility.md explains the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import yaml

from stoker.common import yaml_file
from stoker.common.errors import StokerError
from stoker.common.yaml_file import Mistakes
from stoker.common.yaml_struct import Reader, merged
from stoker.planner import catalogue
from stoker.planner.core.facility.values import Facility
from stoker.planner.facility_build import build
from stoker.planner.facility_schema import FacilityFile

MOST_BYTES = 16 << 20
_MOST_FILES = 100
_LONGEST_NAME = 127
_NEEDS = "at least a name, and sites"


def read(path: Path) -> Facility:
    """The facility in a file, files that it includes read too.

    Raises StokerError (BAD_FILE) that names file and line of every mistake, one a line.
    """
    return _made(_with_included(path))


def parse(text: str, source: str, look: Callable[[], None] | None = None) -> Facility:
    """The facility in a text that includes no files; `source` names it in errors. Raises as `read` does, and what
    `look` does, which is called now and then."""
    node = _composed(text, source, look)
    for included in _included(node):
        mark = included.start_mark
        raise yaml_file.bad(
            f"{source}:{mark.line + 1}: include: files beside this text cannot be read here; send it as one "
            "(`stoker plan validate FILE --whole` writes that)"
        )
    return _made(node)


def whole(path: Path) -> str:
    """The text of a file with all that it includes, as one file that includes nothing: what a service can be sent.

    Raises as `read` does: a service could tell mistakes by the lines of this text alone.
    """
    node = _with_included(path)
    _made(node)
    if isinstance(node, yaml.MappingNode):
        node.value = [(key, value) for key, value in node.value if key.value != "include"]
    return str(yaml.serialize(node, Dumper=yaml.SafeDumper, allow_unicode=True, width=118))


def schema() -> dict[str, Any]:
    """The file's JSON schema, for editors and other programs."""
    return msgspec.json.schema(FacilityFile)


def written(part: FacilityFile) -> str:
    """A facility file, or a part of one, as YAML."""
    return str(
        yaml.safe_dump(
            msgspec.to_builtins(part), sort_keys=False, allow_unicode=True, default_flow_style=None, width=118
        )
    )


def _composed(text: str, source: str, look: Callable[[], None] | None = None) -> yaml.Node:
    return yaml_file.composed(text, source, _NEEDS, aliases=False, look=look)


def _with_included(path: Path) -> yaml.Node:
    """The nodes of a file and of all that it includes, what stands nearer holding before what is further."""
    seen: list[Path] = []
    whole: yaml.Node | None = None
    waiting: list[tuple[Path, yaml.Node | None]] = [(path, None)]
    while waiting:
        each, named_at = waiting.pop(0)
        if each.resolve() in seen:
            continue
        seen.append(each.resolve())
        if len(seen) > _MOST_FILES:
            raise yaml_file.bad(f"{path}: includes more than {_MOST_FILES} files")
        try:
            node = _composed(yaml_file.text(each, MOST_BYTES), str(each))
        except StokerError as error:
            if named_at is None:
                raise
            mark = named_at.start_mark
            raise yaml_file.bad(f"{mark.name}:{mark.line + 1}: include: {error.message}") from error
        waiting += [(each.parent / str(item.value), item) for item in _included(node)]
        whole = node if whole is None else merged(whole, node)
    assert whole is not None  # noqa: S101 - the first file was read
    return whole


def _included(node: yaml.Node) -> list[yaml.ScalarNode]:
    if not isinstance(node, yaml.MappingNode):
        return []
    lists = [
        value.value for key, value in node.value if key.value == "include" and isinstance(value, yaml.SequenceNode)
    ]
    return [item for items in lists for item in items if isinstance(item, yaml.ScalarNode)]


def _made(node: yaml.Node) -> Facility:
    mistakes = Mistakes()
    reader = Reader(mistakes)
    file = reader.read(node, FacilityFile)
    mistakes.refuse()
    assert file is not None  # noqa: S101 - nothing was wrong
    if not file.name:
        mistakes.add(node, "name: missing; it must be given")
    elif len(file.name) > _LONGEST_NAME:
        mistakes.add(node, f"name: has {len(file.name):,} characters; at most {_LONGEST_NAME}")
    elif not file.name.isprintable():
        mistakes.add(node, f"name: {file.name!r} has control characters; write it without")
    facility = build(file, catalogue.file(), lambda path, what: mistakes.add(reader.place(path), _told(path, what)))
    mistakes.refuse()
    return facility


def _told(path: str, what: str) -> str:
    return f"{path}: {what}" if path else what
