"""Where a facility file and the hosts disagree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from stoker.planner.core.facility.observed import ObservedNode
from stoker.planner.core.facility.values import Facility


class Kind(StrEnum):
    """What differs."""

    MISSING_NODE = "missing_node"
    EXTRA_NODE = "extra_node"
    GPU_COUNT = "gpu_count"
    GPU_TYPE = "gpu_type"
    GPU_MEMORY = "gpu_memory"
    NUMA = "numa"
    PLACE = "place"


@dataclass(frozen=True, slots=True)
class Difference:
    """One disagreement on a node: `said` in the file, `seen` by its agent, both in words."""

    node: str
    kind: Kind
    said: str
    seen: str


def drift(facility: Facility, nodes: Iterable[ObservedNode]) -> tuple[Difference, ...]:
    """All disagreements, by node in natural order. None is an empty tuple."""
    raise NotImplementedError
