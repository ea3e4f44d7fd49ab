"""What every placement asks of a facility again and again, read once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import lcm

from stoker.planner.core.facility.values import Facility, NodeType
from stoker.planner.core.ordering import natural
from stoker.planner.core.placement import fabric, power
from stoker.planner.core.placement.gpus import Layout, layout
from stoker.planner.core.placement.values import Domain, Need

Key = tuple[str, str]
"""One failure domain: the value of its `Domain`, and its name."""

_ENDLESS = 1 << 60


@dataclass(frozen=True, slots=True)
class Ground:
    """A facility as placing sees it. `limits_of` has the numbers of the limits on each rack, with its weights.

    Power is counted in quanta, `quanta` of them a watt, so that one GPU's part of its node is a whole number: a rack
    that is exactly full fits. `resting` is what a rack draws with all GPUs idle, `slack` what each limit then leaves
    in its own scale. `keys` are the failure domains in which each node lies.
    """

    facility: Facility
    fabric: fabric.Fabric
    limits: tuple[power.Limit, ...]
    order: Mapping[str, int]
    layouts: Mapping[str, Layout]
    limits_of: Mapping[str, tuple[tuple[int, int], ...]]
    quanta: int
    resting: Mapping[str, int]
    slack: tuple[int, ...]
    keys: Mapping[str, tuple[Key, ...]]
    scale_up: Mapping[str, str] = field(default_factory=dict)
    """The NVLink domain of each node that shares one with other nodes."""

    @property
    def tiers(self) -> int:
        """How many tiers of switch domains there are."""
        return len(next(iter(self.fabric.of.values()), ()))

    def type_of(self, node: str) -> NodeType:
        """The type of a node, by name."""
        return self.facility.node_types[self.facility.nodes[node].type]

    def region(self, node: str) -> str:
        """The region of a node, "" where nobody said."""
        return self.facility.sites[self.facility.racks[self.facility.nodes[node].rack].site].region

    def latency_s(self, one: str, other: str) -> float | None:
        """Between two regions, one way; None where nobody said."""
        if one == other:
            return 0.0
        found = [d.latency_s for d in self.facility.distances if {d.one, d.other} == {one, other}]
        return min(found, default=None)

    def gpu_draw(self, need: Need | None, node: str) -> int:
        """What one busy GPU adds to a node's draw, in quanta."""
        if need is not None and need.busy_power is not None:
            return need.busy_power * self.quanta
        kind = self.type_of(node)
        return (kind.max_power - kind.idle_power) * self.quanta // kind.gpus if kind.gpus else 0

    def gpu_cost(self, node: str) -> float:
        """Currency per hour for one GPU of a node."""
        kind = self.type_of(node)
        site = self.facility.sites[self.facility.racks[self.facility.nodes[node].rack].site]
        return kind.cost_per_hour * site.cost_factor / kind.gpus if kind.gpus else 0.0

    def power_of(self, node: str) -> int:
        """What all GPUs of a node may draw together, in quanta; more than can be where nobody said."""
        kind = self.type_of(node)
        return (kind.max_power - kind.idle_power) * self.quanta if kind.max_power else _ENDLESS


def ground(facility: Facility) -> Ground:
    """Read `facility`. It takes some 50 µs a node: who plans one facility again may keep it."""
    limits, cables = power.limits(facility), fabric.survey(facility)
    limits_of: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for number, limit in enumerate(limits):
        for rack, weight in limit.weights.items():
            limits_of[rack].append((number, weight))
    quanta = lcm(*(kind.gpus or 1 for kind in facility.node_types.values()))
    resting = {rack.name: rack.base_power * quanta for rack in facility.racks.values()}
    scale_ups: defaultdict[str, set[str]] = defaultdict(set)
    for node in facility.nodes.values():
        resting[node.rack] += facility.node_types[node.type].idle_power * quanta
        for gpu in node.gpus:
            if gpu.scale_up:
                scale_ups[gpu.scale_up].add(node.name)
    return Ground(
        facility=facility,
        fabric=cables,
        limits=limits,
        order={name: number for number, name in enumerate(sorted(facility.nodes, key=natural))},
        layouts={node.name: layout(node.gpus) for node in facility.nodes.values()},
        limits_of={name: tuple(limits_of[name]) for name in facility.racks},
        quanta=quanta,
        resting=resting,
        slack=tuple(_slack(limit, quanta, resting) for limit in limits),
        keys={name: _keys(facility, cables, name) for name in facility.nodes},
        scale_up={node: name for name, nodes in scale_ups.items() if len(nodes) > 1 for node in nodes},
    )


def _slack(limit: power.Limit, quanta: int, resting: Mapping[str, int]) -> int:
    return limit.capacity * limit.scale * quanta - sum(w * resting[rack] for rack, w in limit.weights.items())


def _keys(facility: Facility, cables: fabric.Fabric, name: str) -> tuple[Key, ...]:
    rack = facility.racks[facility.nodes[name].rack]
    site = facility.sites[rack.site]
    # A row of one suite is another than the row of the same name next door.
    suite = f"{rack.site}/{rack.suite}" if rack.suite else ""
    tiers = cables.of[name]
    found = [
        (Domain.NODE, name),
        (Domain.RACK, rack.name),
        (Domain.ROW, f"{suite or rack.site}/{rack.row}" if rack.row else ""),
        (Domain.SUITE, suite),
        (Domain.SITE, rack.site),
        (Domain.REGION, site.region),
        (Domain.PROVIDER, site.provider),
        (Domain.SWITCH, cables.domains[tiers[0]].name if tiers else ""),
        *((Domain.SOURCE, source) for source in sorted(power.fatal_sources(facility, rack))),
    ]
    return tuple((kind.value, key) for kind, key in found if key)
