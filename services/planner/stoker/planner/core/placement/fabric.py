"""Which nodes reach each other over which tier of switches, and how much their uplinks carry.

A switch domain of tier k is a set of nodes that reach each other over switches of tiers 0 to k. With rails, the
leaves of all rails to which the same nodes are cabled are one domain.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stoker.planner.core.facility.values import Facility, Link
from stoker.planner.core.units import BytesPerSecond


@dataclass(frozen=True, slots=True)
class SwitchDomain:
    """`down` is what the cables into its highest switches carry from below, `up` those out of the domain, one way."""

    name: str
    tier: int
    up: BytesPerSecond
    down: BytesPerSecond

    @property
    def oversubscribed(self) -> bool:
        """Whether not all that is below can send out at once."""
        return self.up < self.down


@dataclass(frozen=True, slots=True)
class Fabric:
    """`of` has the index in `domains` of each node's domain in every tier, the lowest first. `whole` names what each
    node can reach at all. `rates` is what all cables of a node carry one way; nodes without cables are not in it."""

    domains: tuple[SwitchDomain, ...]
    of: Mapping[str, tuple[int, ...]]
    whole: Mapping[str, str]
    rates: Mapping[str, BytesPerSecond]


def survey(facility: Facility) -> Fabric:
    """Read the fabric from cables and switches; where there are none, all nodes of a site reach each other."""
    links = _plugged(facility)
    rates: defaultdict[str, int] = defaultdict(int)
    for link in links:
        if link.lower in facility.nodes:
            rates[link.lower] += link.rate * link.count
    domains: list[SwitchDomain] = []
    of: dict[str, tuple[int, ...]] = dict.fromkeys(facility.nodes, ())
    whole = {name: f"site {facility.racks[node.rack].site}" for name, node in facility.nodes.items()}
    if links:
        for tier in sorted({switch.tier for switch in facility.switches.values()}):
            roots = _joined(facility, links, tier)
            found = _domains(facility, links, tier, roots)
            numbers = {root: len(domains) + number for number, root in enumerate(found)}
            domains += found.values()
            for name in facility.nodes:
                of[name] += (numbers[roots[name]],)
            whole = {name: roots[name] for name in facility.nodes}
    return Fabric(tuple(domains), of, whole, {name: BytesPerSecond(rate) for name, rate in rates.items()})


def _plugged(facility: Facility) -> list[Link]:
    """Cables for which their switches have ports; those beyond a switch's radix hang loose."""
    used: defaultdict[str, int] = defaultdict(int)
    plugged: list[Link] = []
    for link in facility.links:
        switches = [facility.switches[end] for end in (link.lower, link.upper) if end in facility.switches]
        if all(used[switch.name] + link.count <= switch.radix for switch in switches):
            plugged.append(link)
            for switch in switches:
                used[switch.name] += link.count
    return plugged


def _tier(facility: Facility, end: str) -> int:
    return facility.switches[end].tier if end in facility.switches else -1


def _joined(facility: Facility, links: Iterable[Link], tier: int) -> dict[str, str]:
    """For each node and switch the name that stands for all it reaches over switches up to `tier`."""
    parent = {name: name for name in (*facility.nodes, *facility.switches)}

    def root(name: str) -> str:
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    for link in links:
        if max(_tier(facility, link.lower), _tier(facility, link.upper)) <= tier:
            one, other = sorted((root(link.lower), root(link.upper)))
            parent[other] = one
    return {name: root(name) for name in parent}


def _domains(
    facility: Facility, links: Iterable[Link], tier: int, roots: Mapping[str, str]
) -> dict[str, SwitchDomain]:
    """The domains of one tier, by what stands for them."""
    up: defaultdict[str, int] = defaultdict(int)
    down: defaultdict[str, int] = defaultdict(int)
    for link in links:
        low, high = sorted((link.lower, link.upper), key=lambda end: _tier(facility, end))
        if roots[high] != roots[low]:
            up[roots[low]] += link.rate * link.count
        elif _tier(facility, low) < tier == _tier(facility, high):
            down[roots[low]] += link.rate * link.count
    switches: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(facility.switches):
        if facility.switches[name].tier == tier:
            switches[roots[name]].append(name)
    found = {}
    for root in dict.fromkeys(roots[node] for node in facility.nodes):
        own = switches[root] or [root]
        name = own[0] if len(own) == 1 else f"{own[0]} … {own[-1]}"
        found[root] = SwitchDomain(name, tier, BytesPerSecond(up[root]), BytesPerSecond(down[root]))
    return found
