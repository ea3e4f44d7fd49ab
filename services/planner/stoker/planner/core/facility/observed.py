"""What agents report of their hosts, as a facility: alone, or merged into what a file says."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from stoker.planner.core.facility.values import Facility, GpuType
from stoker.planner.core.units import Bytes

_NOT_IN_A_NAME = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True, slots=True)
class ObservedGpu:
    """`name` as the driver says it, "NVIDIA H100 80GB HBM3"; `numa` is -1 where unknown."""

    index: int
    name: str
    memory: Bytes
    numa: int = -1
    pci_bus_id: str = ""


@dataclass(frozen=True, slots=True)
class ObservedNode:
    """A host as its agent reports it. Of its labels `rack`, `row`, `suite`, `site`, `region`, `provider` and `feed`
    ("a" or "a,b") tell its place."""

    name: str
    gpus: tuple[ObservedGpu, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


def facility_of(
    nodes: Iterable[ObservedNode], gpu_types: Mapping[str, GpuType] | None = None, name: str = "observed"
) -> Facility:
    """A facility of what agents report, where there is no file. `gpu_types` are those known (the catalogue's): a GPU
    is recognised by its driver's name.

    Each node stands in the rack that its labels name, or else in one of its own; no rack has power, height or weight
    limits, so that nothing is refused for what nobody knows. GPUs of a node whose type has NVLink form one domain.
    """
    return merged(Facility(name=name, gpu_types=dict(gpu_types or {})), nodes)


def merged(facility: Facility, nodes: Iterable[ObservedNode]) -> Facility:
    """What a file says, with what agents report: the file wins on place, power and fabric, agents on GPUs that exist.

    A GPU of the file that its agent does not report is gone; one that only the agent reports is there, in the node's
    NVLink domain. Nodes that the file lacks are added as in `facility_of`, in the file's rack where their label names
    one. Nodes that no agent reports stay as the file has them: who is there now is not asked here.
    """
    raise NotImplementedError
