"""What agents report of their hosts, as a facility: alone, or merged into what a file says."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from stoker.planner.core.facility.values import Facility, Feed, Gpu, GpuType, Node, NodeType, Rack, Site
from stoker.planner.core.ordering import natural
from stoker.planner.core.units import NO_POWER, NO_RATE, Bytes

UNPLACED = "unplaced"
"""The site of nodes whose labels name none, and that no file knows."""

_NOT_IN_A_NAME = re.compile(r"[^a-z0-9]+")

Groups = tuple[tuple[int, ...], ...]


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
    ("a" or "a,b") tell its place.

    `scale_up_groups` are the indices of GPUs that reach each other by NVLink, `pcie_groups` those at one PCIe root;
    None where nobody looked.
    """

    name: str
    gpus: tuple[ObservedGpu, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    scale_up_groups: Groups | None = None
    pcie_groups: Groups | None = None


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
    return _Merging(facility).run(sorted(nodes, key=lambda node: natural(node.name)))


def recognised(gpu: ObservedGpu, gpu_types: Mapping[str, GpuType]) -> GpuType | None:
    """The type whose driver's name this GPU has, None for one that is not known."""
    wanted = gpu.name.casefold()
    return next((t for t in gpu_types.values() if wanted in map(str.casefold, t.driver_names)), None)


class _Merging:
    """The facility as it grows."""

    def __init__(self, facility: Facility) -> None:
        self._facility = facility
        self._gpu_types = dict(facility.gpu_types)
        self._node_types = dict(facility.node_types)
        self._sites = dict(facility.sites)
        self._feeds = dict(facility.feeds)
        self._racks = dict(facility.racks)
        self._nodes = dict(facility.nodes)

    def run(self, nodes: Iterable[ObservedNode]) -> Facility:
        for seen in nodes:
            known = self._facility.nodes.get(seen.name)
            self._nodes[seen.name] = self._added(seen) if known is None else self._confirmed(known, seen)
        return replace(
            self._facility,
            gpu_types=self._gpu_types,
            node_types=self._node_types,
            sites=self._sites,
            feeds=self._feeds,
            racks=self._racks,
            nodes=self._nodes,
        )

    def _confirmed(self, known: Node, seen: ObservedNode) -> Node:
        """A node of the file, with the GPUs that it has."""
        said = {gpu.index: gpu for gpu in known.gpus}
        domains = {gpu.scale_up for gpu in known.gpus}
        domain = domains.pop() if len(domains) == 1 else ""
        gpus = []
        for gpu in seen.gpus:
            place = said.get(gpu.index, Gpu(gpu.index, domain))
            gpus.append(place if gpu.numa < 0 else replace(place, numa=gpu.numa))
        labels = {**known.labels, **seen.labels}
        return replace(known, type=self._corrected(known.type, seen), gpus=tuple(gpus), labels=labels)

    def _corrected(self, type_name: str, seen: ObservedNode) -> str:
        """The node's type, with the GPUs that are recognised in it in place of those that the file says."""
        kind = self._node_types.get(type_name)
        found = recognised(seen.gpus[0], self._gpu_types) if seen.gpus else None
        if kind is None or found is None or found.name == kind.gpu:
            return type_name
        name = f"{type_name}:{found.name}"
        self._node_types[name] = replace(kind, name=name, gpu=found.name)
        return name

    def _added(self, seen: ObservedNode) -> Node:
        """A node that the file does not know."""
        kind = self._type_of(seen)
        linked = bool(kind.gpu and self._gpu_types[kind.gpu].scale_up_bandwidth)
        group_of = {gpu: number for number, group in enumerate(seen.scale_up_groups or ()) for gpu in group}
        root_of = {gpu: number for number, group in enumerate(seen.pcie_groups or ()) for gpu in group}

        def domain(index: int) -> str:
            if seen.scale_up_groups is None:
                return seen.name if linked else ""
            return f"{seen.name}/{group_of[index]}" if index in group_of else ""

        gpus = tuple(Gpu(g.index, domain(g.index), root_of.get(g.index, -1), g.numa) for g in seen.gpus)
        return Node(seen.name, rack=self._rack_of(seen), type=kind.name, gpus=gpus, labels=dict(seen.labels))

    def _type_of(self, seen: ObservedNode) -> NodeType:
        gpu = self._gpu_type_of(seen.gpus[0]) if seen.gpus else None
        name = f"observed-{len(seen.gpus)}x-{gpu.name}" if gpu else "observed-cpu"
        return self._node_types.setdefault(
            name,
            NodeType(
                name,
                height_u=0,
                weight_kg=0.0,
                max_power=NO_POWER,
                idle_power=NO_POWER,
                gpu=gpu.name if gpu else "",
                gpus=len(seen.gpus),
            ),
        )

    def _gpu_type_of(self, gpu: ObservedGpu) -> GpuType:
        known = recognised(gpu, self._gpu_types)
        if known is not None:
            return known
        name = _NOT_IN_A_NAME.sub("-", gpu.name.lower()).strip("-")[:60] or "gpu"
        unknown = GpuType(name, gpu.memory, NO_RATE, {}, NO_POWER, driver_names=(gpu.name,))
        return self._gpu_types.setdefault(name, unknown)

    def _rack_of(self, seen: ObservedNode) -> str:
        labels = seen.labels
        name = labels.get("rack") or f"rack:{seen.name}"
        if name in self._racks and name in self._facility.racks:
            return name
        if name in self._nodes or name in self._sites or name in self._facility.switches:
            name = f"rack:{name}"
        feeds = tuple(feed for feed in map(str.strip, labels.get("feed", "").split(",")) if feed)
        for feed in feeds:
            self._feeds.setdefault(feed, Feed(feed, source=feed, capacity=None))
        rack = self._racks.get(name) or Rack(
            name, site=self._site_of(labels), suite=labels.get("suite", ""), row=labels.get("row", "")
        )
        self._racks[name] = replace(rack, feeds=tuple(dict.fromkeys((*rack.feeds, *feeds))))
        return name

    def _site_of(self, labels: Mapping[str, str]) -> str:
        name = labels.get("site") or labels.get("region") or UNPLACED
        self._sites.setdefault(name, Site(name, labels.get("region", ""), labels.get("provider", "")))
        return name
