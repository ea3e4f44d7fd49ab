"""Where a facility file and the hosts disagree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from stoker.planner.core.facility.observed import ObservedNode, recognised
from stoker.planner.core.facility.ranges import compressed
from stoker.planner.core.facility.values import Facility, Gpu, Node
from stoker.planner.core.ordering import natural

_MEMORY_SHARE = 0.08
"""Makers' GB and what a driver reports differ by up to 7 % (10⁹ bytes or 2³⁰); more is another model."""


class Kind(StrEnum):
    """What differs."""

    MISSING_NODE = "missing_node"
    EXTRA_NODE = "extra_node"
    GPU_COUNT = "gpu_count"
    GPU_TYPE = "gpu_type"
    GPU_MEMORY = "gpu_memory"
    NUMA = "numa"
    SCALE_UP = "scale_up"
    PCIE = "pcie"
    PLACE = "place"


@dataclass(frozen=True, slots=True)
class Difference:
    """One disagreement on a node: `said` in the file, `seen` by its agent, both in words."""

    node: str
    kind: Kind
    said: str
    seen: str


def drift(facility: Facility, nodes: Iterable[ObservedNode]) -> tuple[Difference, ...]:
    """All disagreements, by node in natural order. None is an empty tuple. What one side does not know is none."""
    seen = {node.name: node for node in nodes}
    found: list[Difference] = []
    for name in sorted({*facility.nodes, *seen}, key=natural):
        if name not in seen:
            found.append(Difference(name, Kind.MISSING_NODE, _whole(facility.nodes[name]), "no agent reports it"))
        elif name not in facility.nodes:
            found.append(Difference(name, Kind.EXTRA_NODE, "not in the file", _reported(seen[name])))
        else:
            found += _differences(facility, facility.nodes[name], seen[name])
    return tuple(found)


def _differences(facility: Facility, said: Node, seen: ObservedNode) -> Iterator[Difference]:
    def differs(kind: Kind, in_file: object, reported: object) -> Difference:
        return Difference(said.name, kind, str(in_file), str(reported))

    if len(said.gpus) != len(seen.gpus):
        yield differs(Kind.GPU_COUNT, f"{len(said.gpus)} GPUs", f"{len(seen.gpus)} GPUs")
    yield from _types(facility, said, seen, differs)
    numa = {gpu.index: gpu.numa for gpu in seen.gpus if gpu.numa >= 0}
    wrong = [gpu for gpu in said.gpus if gpu.numa >= 0 and numa.get(gpu.index, gpu.numa) != gpu.numa]
    if wrong:
        yield differs(
            Kind.NUMA,
            ", ".join(f"GPU {gpu.index} at {gpu.numa}" for gpu in wrong),
            ", ".join(f"GPU {gpu.index} at {numa[gpu.index]}" for gpu in wrong),
        )
    for kind, key, groups in (
        (Kind.SCALE_UP, lambda gpu: gpu.scale_up, seen.scale_up_groups),
        (Kind.PCIE, lambda gpu: gpu.pcie_root if gpu.pcie_root >= 0 else "", seen.pcie_groups),
    ):
        in_file = _groups(said, key)
        if groups is not None and in_file and in_file != sorted(groups):
            yield differs(kind, _words(in_file), _words(groups))
    yield from _place(facility, said, seen, differs)


def _types(
    facility: Facility, said: Node, seen: ObservedNode, differs: Callable[[Kind, object, object], Difference]
) -> Iterator[Difference]:
    kind = facility.node_types.get(said.type)
    wanted = facility.gpu_types.get(kind.gpu) if kind else None
    if wanted is None:
        return
    for gpu in seen.gpus:
        found = recognised(gpu, facility.gpu_types)
        unknown_name = found is None and wanted.driver_names
        if unknown_name or (found is not None and found.name != wanted.name):
            yield differs(Kind.GPU_TYPE, wanted.name, f"{gpu.name} (GPU {gpu.index})")
            return
        if abs(gpu.memory - wanted.memory) > _MEMORY_SHARE * wanted.memory:
            yield differs(
                Kind.GPU_MEMORY, f"{wanted.memory / 1e9:.0f} GB", f"{gpu.memory / 1e9:.0f} GB (GPU {gpu.index})"
            )
            return


def _place(
    facility: Facility, said: Node, seen: ObservedNode, differs: Callable[[Kind, object, object], Difference]
) -> Iterator[Difference]:
    rack = facility.racks.get(said.rack)
    if rack is None:
        return
    site = facility.sites.get(rack.site)
    places = {"rack": rack.name, "row": rack.row, "suite": rack.suite, "site": rack.site}
    places["region"] = site.region if site else ""
    moved = {key: place for key, place in places.items() if place and seen.labels.get(key, place) != place}
    if moved:
        told = ", ".join(f"{key} {place}" for key, place in moved.items())
        yield differs(Kind.PLACE, told, ", ".join(f"{key} {seen.labels[key]}" for key in moved))


def _groups(node: Node, key: Callable[[Gpu], object]) -> list[tuple[int, ...]]:
    """GPUs with the same key, none for those that have none."""
    groups: dict[object, list[int]] = {}
    for gpu in node.gpus:
        if key(gpu) != "":
            groups.setdefault(key(gpu), []).append(gpu.index)
    return sorted(tuple(group) for group in groups.values())


def _words(groups: Iterable[tuple[int, ...]]) -> str:
    return " ".join("+".join(compressed(map(str, group))) for group in groups) or "none"


def _whole(node: Node) -> str:
    return f"{node.type} with {len(node.gpus)} GPUs in {node.rack}"


def _reported(node: ObservedNode) -> str:
    rack = node.labels.get("rack")
    what = f"{len(node.gpus)} × {node.gpus[0].name}" if node.gpus else "no GPUs"
    return f"{what}{f' in {rack}' if rack else ''}"
