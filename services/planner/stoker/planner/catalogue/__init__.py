"""GPU, node and rack types as their makers publish them, with source and date of each figure."""

from __future__ import annotations

from functools import cache
from importlib import resources

from stoker.common import yaml_file
from stoker.common.yaml_struct import Reader, merged
from stoker.planner.core.facility.values import Facility
from stoker.planner.facility_schema import FacilityFile

_PARTS = ("gpus.yaml", "nodes.yaml", "sources.yaml")


@cache
def file() -> FacilityFile:
    """The catalogue as a part of a facility file."""
    mistakes = yaml_file.Mistakes()
    nodes = [
        yaml_file.composed(resources.files(__name__).joinpath(part).read_text(encoding="utf-8"), part, "types")
        for part in _PARTS
    ]
    whole = nodes[0]
    for node in nodes[1:]:
        whole = merged(whole, node)
    read = Reader(mistakes).read(whole, FacilityFile)
    mistakes.refuse()
    assert read is not None  # noqa: S101 - nothing was wrong
    return read


@cache
def load() -> Facility:
    """A facility with nothing but the catalogue's types: `gpu_types`, `node_types` and `rack_types`."""
    from stoker.planner.facility_build import build  # it reads this catalogue

    return build(FacilityFile(name="catalogue"), file(), _never)


def _never(path: str, what: str) -> None:
    raise yaml_file.bad(f"catalogue: {path}: {what}")
