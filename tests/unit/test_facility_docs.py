"""docs/facility.md names every key of the file, as the schema describes it, and its example is a facility."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from stoker.planner import facility_file, importers
from stoker.planner.core.facility.drift import Kind
from stoker.planner.facility_schema import FacilityFile

PAGE = (Path(__file__).resolve().parents[2] / "docs/facility.md").read_text()


def structs() -> dict[str, inspect.StructType]:
    """Every mapping that may stand in the file, by name, in the order in which they are met."""
    found: dict[str, inspect.StructType] = {}

    def meet(kind: Any) -> None:
        if isinstance(kind, inspect.StructType) and kind.cls.__name__ not in found:
            for base in bases(kind.cls):
                found.setdefault(base.__name__, inspect.type_info(base))  # type: ignore[arg-type]
            found[kind.cls.__name__] = kind
            for field in kind.fields:
                meet(field.type)
        for attribute in ("type", "types", "value_type", "item_type"):
            inner = getattr(kind, attribute, None)
            for each in inner if isinstance(inner, tuple) else (inner,) if inner is not None else ():
                meet(each)

    meet(inspect.type_info(FacilityFile))
    return found


def bases(cls: type) -> list[type]:
    """The mappings whose keys it has too."""
    return [base for base in cls.__mro__[1:] if issubclass(base, msgspec.Struct) and base.__struct_fields__]


def described(kind: Any) -> str:
    """What the schema says of a key."""
    if isinstance(kind, inspect.Metadata):
        told = (kind.extra_json_schema or {}).get("description", "")
        return told or described(kind.type)
    return next((d for d in map(described, getattr(kind, "types", ())) if d), "")


def title(cls: type) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", cls.__name__.removesuffix("Entry")).capitalize()


def table(struct: inspect.StructType) -> str:
    """The rows that the page must have of one mapping."""
    inherited = {name for base in bases(struct.cls) for name in base.__struct_fields__}  # type: ignore[attr-defined]
    rows = [
        f"| `{field.encode_name}` | {described(field.type)}{'' if not field.required else '; must be given'} |"
        for field in struct.fields
        if field.name not in inherited
    ]
    return "\n".join(rows)


@pytest.mark.parametrize("struct", structs().values(), ids=lambda struct: struct.cls.__name__)
def test_every_key_is_in_the_page_as_the_schema_describes_it(struct: inspect.StructType) -> None:
    wanted = table(struct)
    assert wanted in PAGE, f"docs/facility.md must hold, under {title(struct.cls)}:\n{wanted}"


def test_examples_in_the_page_are_facilities() -> None:
    examples = re.findall(r"^```yaml\n(name: .*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert examples
    for example in examples:
        facility_file.parse(example, "docs/facility.md")


def test_every_format_and_every_kind_of_drift_is_in_the_page() -> None:
    assert all(f"`{form}`" in PAGE for form in importers.FORMATS)
    assert all(f"`{kind.value}`" in PAGE for kind in Kind)


def test_the_schema_is_whole() -> None:
    schema = facility_file.schema()
    assert set(schema["$defs"]) <= set(structs())
    assert schema["$defs"]["RackEntry"]["properties"]["nodes"]["description"].startswith("hosts by name")
    assert not schema["$defs"]["RackEntry"]["additionalProperties"]
    msgspec.json.encode(schema)
