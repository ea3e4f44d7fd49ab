"""What may be true of a facility, but is rather not meant: said when a file is checked, and no fault."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from stoker.planner.core.facility.ranges import compressed
from stoker.planner.core.facility.values import Facility
from stoker.planner.core.placement import power

_NAMED = 5


def doubts(facility: Facility) -> list[str]:
    """Sentences on what is doubtful, the gravest kind first; things alike are put together."""
    return [*_power(facility), *_redundancy(facility), *_cables(facility), *_switches(facility)]


def _power(facility: Facility) -> Iterator[str]:
    """Limits that hosts could exceed, all at their most at once."""
    draw: Counter[str] = Counter({rack.name: rack.base_power for rack in facility.racks.values()})
    for node in facility.nodes.values():
        draw[node.rack] += facility.node_types[node.type].max_power
    for limit in power.limits(facility):
        # Rounded up: a watt too much is too much.
        most = -(-sum(draw[rack] * weight for rack, weight in limit.weights.items()) // limit.scale)
        if most > limit.capacity:
            what = "carries off" if limit.kind == "cooling" else "bears"
            yield (
                f"{limit.name} {what} {limit.capacity / 1e3:,.1f} kW; with all hosts at their most it would be "
                f"{most / 1e3:,.1f} kW: a plan leaves some GPUs there without work"
            )


def _redundancy(facility: Facility) -> Iterator[str]:
    """Racks with several feeds that one loss takes all."""
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for rack in facility.racks.values():
        sources = {facility.feeds[feed].source for feed in rack.feeds}
        if rack.survives_loss and len(rack.feeds) > 1 and len(sources) == 1:
            alike[sources.pop()].append(rack.name)
    for source, racks in alike.items():
        yield f"all feeds of {_named(racks)} hang on {source}, and are lost with it"


def _cables(facility: Facility) -> Iterator[str]:
    """Hosts with ports on the fabric and no cable, where others have some."""
    cabled = {link.lower for link in facility.links}
    if not cabled:
        return
    without = [
        node.name
        for node in facility.nodes.values()
        if node.name not in cabled and facility.node_types[node.type].fabric_ports
    ]
    if without:
        yield f"{_named(without)} have ports on the fabric, but no cable"


def _switches(facility: Facility) -> Iterator[str]:
    ends = {end for link in facility.links for end in (link.lower, link.upper)}
    without = [name for name in facility.switches if name not in ends]
    if without:
        yield f"no cable ends at {_named(without)}"


def _named(names: list[str]) -> str:
    """Names in ranges, a few of them."""
    texts = compressed(names)
    more = f" and others, {len(names)} in all" if len(texts) > _NAMED else ""
    return ", ".join(texts[:_NAMED]) + more
