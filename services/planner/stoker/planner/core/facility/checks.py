"""What cannot be true of a facility: racks fuller than they are high, feeds in a circle, more cables than ports."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from stoker.planner.core.facility.values import Facility, Node, Rack
from stoker.planner.core.ordering import natural

DEEPEST_FEED = 20
"""More feeds one above the other are rather a loop."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with the thing of that name, and what to do."""

    name: str
    what: str


def faults(facility: Facility) -> list[Fault]:
    """All faults, by name in natural order. What nobody said (no limit, no place) breaks nothing."""
    found = [
        *_references(facility),
        *_feeds(facility),
        *_racks(facility),
        *_fabric(facility),
    ]
    return sorted(found, key=lambda fault: (natural(fault.name), fault.what))


def _references(facility: Facility) -> Iterator[Fault]:
    for rack in facility.racks.values():
        if rack.site not in facility.sites:
            yield Fault(rack.name, f"site {rack.site!r} does not exist")
        for feed in rack.feeds:
            if feed not in facility.feeds:
                yield Fault(rack.name, f"feed {feed!r} does not exist; name one under `feeds`")
    for node in facility.nodes.values():
        if node.rack not in facility.racks:
            yield Fault(node.name, f"rack {node.rack!r} does not exist")
        if node.type not in facility.node_types:
            yield Fault(node.name, f"node type {node.type!r} does not exist")


def _feeds(facility: Facility) -> Iterator[Fault]:
    for feed in facility.feeds.values():
        if feed.parent and feed.parent not in facility.feeds:
            yield Fault(feed.name, f"parent {feed.parent!r} does not exist; name one under `feeds`")
        at, depth = feed, 0
        while at.parent in facility.feeds and depth < DEEPEST_FEED:
            if at.parent == feed.name:
                yield Fault(feed.name, f"is fed by itself, through {at.name}; a feed tree has a top")
                break
            at, depth = facility.feeds[at.parent], depth + 1
        if depth == DEEPEST_FEED:
            yield Fault(feed.name, f"has no top within {DEEPEST_FEED} feeds above it")


def _racks(facility: Facility) -> Iterator[Fault]:
    within: defaultdict[str, list[Node]] = defaultdict(list)
    for node in facility.nodes.values():
        if node.rack in facility.racks and node.type in facility.node_types:
            within[node.rack].append(node)
    for name, nodes in within.items():
        rack = facility.racks[name]
        yield from _room(facility, rack, nodes)
        yield from _positions(facility, rack, nodes)


def _room(facility: Facility, rack: Rack, nodes: list[Node]) -> Iterator[Fault]:
    types = [facility.node_types[node.type] for node in nodes]
    used = sum(kind.height_u for kind in types)
    if used + rack.reserved_u > rack.height_u:
        reserved = f" beside {rack.reserved_u} U reserved" if rack.reserved_u else ""
        yield Fault(rack.name, f"its {len(nodes)} nodes are {used} U high{reserved}; it has {rack.height_u} U")
    weight = sum(kind.weight_kg for kind in types)
    if rack.weight_kg is not None and weight > rack.weight_kg:
        yield Fault(rack.name, f"its {len(nodes)} nodes weigh {weight:g} kg; it bears {rack.weight_kg:g} kg")


def _positions(facility: Facility, rack: Rack, nodes: list[Node]) -> Iterator[Fault]:
    taken: dict[int, str] = {}
    for node in sorted(nodes, key=lambda node: natural(node.name)):
        if node.bottom_u <= 0:
            continue
        top = node.bottom_u + facility.node_types[node.type].height_u - 1
        if top > rack.height_u:
            yield Fault(node.name, f"reaches up to unit {top} of {rack.name}, which has {rack.height_u} U")
        other = next((taken[u] for u in range(node.bottom_u, top + 1) if u in taken), None)
        if other is not None:
            yield Fault(node.name, f"stands in the same units of {rack.name} as {other}; mend bottom_u of one")
        taken.update((u, node.name) for u in range(node.bottom_u, top + 1))


def _fabric(facility: Facility) -> Iterator[Fault]:
    ports: Counter[str] = Counter()
    for link in facility.links:
        for end in (link.lower, link.upper):
            if end not in facility.nodes and end not in facility.switches:
                yield Fault(end, f"no such node or switch; a link from {link.lower} to {link.upper} names it")
        if link.upper in facility.nodes:
            yield Fault(link.upper, f"is the upper end of the link from {link.lower}; only switches are")
        if link.lower == link.upper:
            yield Fault(link.lower, "is linked to itself")
        ports[link.lower] += link.count
        ports[link.upper] += link.count
    for name, used in ports.items():
        if name in facility.switches and used > facility.switches[name].radix:
            yield Fault(name, f"{used} cables end at it; it has {facility.switches[name].radix} ports")
        if name in facility.nodes and facility.nodes[name].type in facility.node_types:
            has = facility.node_types[facility.nodes[name].type].fabric_ports
            if used > has:
                yield Fault(name, f"{used} cables begin at it; its type has fabric_ports: {has}")
