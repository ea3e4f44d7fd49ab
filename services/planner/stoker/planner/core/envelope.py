"""Capacity from the envelope down: how many racks, nodes and GPUs a facility powers, cools, holds and connects.

A facility is filled node by node until something runs out, and what ran out is the answer's other half.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from stoker.common.errors import InvalidRequest
from stoker.planner.core.facility.values import Facility
from stoker.planner.core.filling import Filling, Room
from stoker.planner.core.limits import UNITS, Kind, Limit, Scope
from stoker.planner.core.ordering import natural
from stoker.planner.core.units import Watts


@dataclass(frozen=True, slots=True)
class Capacity:
    """A facility as full as it goes.

    `racks` are those with nodes, `power` is what all racks draw at the most, their switches included.
    `nodes_per_rack`, `gpus_per_rack` and `u_used` are those of the fullest rack. `added` of the `nodes` do not stand
    there yet. `binding` is what keeps the next one out, None where nothing was to be added. `limits` are those of the
    rack that binds, or else of the fullest, the tightest of the feeds above it, and those of its site.
    `cost_per_hour` is of nodes with GPUs and all energy, None where a price is missing; `energy_per_hour` is that of
    the energy alone, None where no site has a price.
    """

    fill: str
    facility: Facility
    racks: int
    nodes: int
    added: int
    gpus: int
    nodes_per_rack: int
    gpus_per_rack: int
    u_used: int
    power: Watts
    binding: Limit | None
    limits: tuple[Limit, ...]
    cost_per_hour: float | None
    energy_per_hour: float | None

    def tokens_per_s(self, rates: Mapping[str, float]) -> float | None:
        """Tokens that all its GPUs generate; `rates` are tokens per second of one, by GPU type.

        None where a type has no rate: the sum would be of something else than the facility.
        """
        types = self.facility.node_types
        gpus = Counter[str]()
        for node in self.facility.nodes.values():
            gpus[types[node.type].gpu] += types[node.type].gpus
        used = {gpu: count for gpu, count in gpus.items() if count}
        if not used or not used.keys() <= rates.keys():
            return None
        return sum(count * rates[gpu] for gpu, count in used.items())

    def tokens_per_joule(self, rates: Mapping[str, float]) -> float | None:
        """Tokens for each joule that the racks draw at the most; None as for `tokens_per_s`."""
        tokens = self.tokens_per_s(rates)
        return tokens / self.power if tokens is not None and self.power else None


def capacity(facility: Facility, fill: str = "", look: Callable[[], None] = lambda: None) -> Capacity:
    """Fills the facility's envelopes and the racks that have a `fill`, or all racks where the facility says neither.

    `fill` names a node type to fill them with, or a rack type to set envelopes up as, in place of what the facility
    says; where nothing says, it is the commonest node type. Raises InvalidRequest where it names no type, or an
    envelope has no end.
    `look` is called before each node or rack of nodes; what it raises ends the filling.
    """
    if fill and fill not in facility.node_types and fill not in candidates(facility):
        names = ", ".join(candidates(facility))
        raise InvalidRequest.field("fill", f"{fill!r} is no type here; known: {names}")
    filling = Filling(facility, fill, look)
    filling.fill()
    fullest = max(filling.rooms, key=lambda room: room.nodes, default=None)
    filled, binding = filling.facility(), filling.binding()
    at = binding.at if binding and binding.scope is Scope.RACK else ""
    told = next((room for room in filling.rooms if room.rack.name == at), fullest)
    energy = _energy(filled, filling.rooms)
    return Capacity(
        fill=filling.what,
        facility=filled,
        racks=sum(room.nodes > 0 for room in filling.rooms),
        nodes=len(filled.nodes),
        added=len(filled.nodes) - len(facility.nodes),
        gpus=sum(room.gpus for room in filling.rooms),
        nodes_per_rack=fullest.nodes if fullest else 0,
        gpus_per_rack=fullest.gpus if fullest else 0,
        u_used=fullest.elevation.used if fullest else 0,
        power=filling.power(),
        binding=binding,
        limits=filling.limits(told) if told else (),
        cost_per_hour=_cost(filled, energy or 0.0),
        energy_per_hour=energy,
    )


def instead(facility: Facility) -> Facility:
    """The facility with its nodes with GPUs taken out, and their racks to be filled."""
    types = facility.node_types
    taken = {name: node for name, node in facility.nodes.items() if types[node.type].gpus}
    emptied = {node.rack: node.type for node in taken.values()}
    racks = {
        name: replace(rack, fill=rack.fill or emptied[name]) if name in emptied else rack
        for name, rack in facility.racks.items()
    }
    nodes = {name: node for name, node in facility.nodes.items() if name not in taken}
    links = tuple(link for link in facility.links if link.lower not in taken)
    return replace(facility, nodes=nodes, racks=racks, links=links)


def candidates(facility: Facility) -> tuple[str, ...]:
    """Types worth comparing: nodes with GPUs, and racks that come with nodes, whose nodes are no answer alone."""
    whole = {name for name, rack in facility.rack_types.items() if rack.nodes}
    inside = {node for name in whole for node in facility.rack_types[name].nodes}
    single = {name for name, node in facility.node_types.items() if node.gpus and name not in inside}
    return tuple(sorted(single | (whole if facility.envelopes else set()), key=natural))


def in_words(limit: Limit, what: str) -> str:
    """Why one more `what` does not go in: "with one more dgx-h100, rack r1 needs 20.4 kW of power and has 15 kW"."""
    place = f"{limit.scope.value} {limit.at}"
    after = f" after the loss of {limit.lost}" if limit.lost else ""
    need, has = amount(limit.kind, limit.used + limit.each), amount(limit.kind, limit.available)
    if limit.kind is Kind.SPACE and limit.left >= limit.each:
        return f"a further {what} needs {limit.each:g} U in one piece, and none is free in {place}"
    return f"with one more {what}, {place} needs {need} of {limit.kind.value} and has {has}{after}"


def amount(kind: Kind, value: float) -> str:
    """A figure with its unit, power in kW."""
    if UNITS[kind] == "W":
        return f"{value / 1e3:,.4g} kW" if abs(value) < 1e6 else f"{value / 1e3:,.0f} kW"
    return f"{value:,.0f} {UNITS[kind]}"


def _energy(facility: Facility, rooms: list[Room]) -> float | None:
    if not any(site.cost_per_kwh for site in facility.sites.values()):
        return None
    return sum(room.drawn / 1e3 * facility.sites[room.rack.site].cost_per_kwh for room in rooms)


def _cost(facility: Facility, energy: float) -> float | None:
    total = energy
    for node in facility.nodes.values():
        kind = facility.node_types[node.type]
        if kind.gpus and not kind.cost_per_hour:
            return None
        total += kind.cost_per_hour * facility.sites[facility.racks[node.rack].site].cost_factor
    return total or None
