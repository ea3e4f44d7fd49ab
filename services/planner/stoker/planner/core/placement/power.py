"""What racks may draw: breakers at every level of the feed tree, also after a loss; supply of a site; cooling.

All limits have one form, so that a search can treat them alike: the sum over racks of weight x watts must not exceed
a capacity. Weights are whole numbers, also where a rack's load is shared by three feeds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm

from stoker.planner.core.facility.values import Facility, Feed, Rack
from stoker.planner.core.units import Watts


@dataclass(frozen=True, slots=True)
class Limit:
    """Each rack's watts times `weights[rack]` / `scale` add up to at most `capacity`. `kind` is power or cooling."""

    kind: str
    name: str
    capacity: Watts
    scale: int
    weights: Mapping[str, int]


def limits(facility: Facility) -> tuple[Limit, ...]:
    """Every limit on the racks' draw, but those that another of the same feed implies."""
    found = list(_feeds(facility))
    for site in facility.sites.values():
        racks = [rack.name for rack in facility.racks.values() if rack.site == site.name]
        if site.supply is not None and racks:
            capacity = Watts(max(0, site.supply - site.reserved))
            found.append(Limit("power", f"supply of site {site.name}", capacity, 1, dict.fromkeys(racks, 1)))
    found += (
        Limit("cooling", f"cooling of rack {rack.name}", rack.cooling, 1, {rack.name: 1})
        for rack in facility.racks.values()
        if rack.cooling is not None
    )
    return tuple(found)


def fatal_sources(facility: Facility, rack: Rack) -> frozenset[str]:
    """The sources with any one of which `rack` is lost."""
    sources = {facility.feeds[feed].source for feed in rack.feeds}
    return frozenset(sources) if not rack.survives_loss or len(sources) == 1 else frozenset()


def _feeds(facility: Facility) -> Iterator[Limit]:
    by_feed: defaultdict[str, list[Limit]] = defaultdict(list)
    scale = lcm(*(range(1, 1 + max((len(rack.feeds) for rack in facility.racks.values()), default=1))))
    for lost in ("", *sorted({feed.source for feed in facility.feeds.values()})):
        weights: defaultdict[str, dict[str, int]] = defaultdict(dict)
        touched: set[str] = set()
        for rack in facility.racks.values():
            live = [facility.feeds[feed] for feed in rack.feeds if facility.feeds[feed].source != lost]
            hit = len(live) < len(rack.feeds)
            if not live or (hit and not rack.survives_loss):
                continue
            for leaf in live:
                for feed in _upwards(facility, leaf):
                    above = weights[feed.name]
                    above[rack.name] = above.get(rack.name, 0) + scale // len(live)
                    if hit or not lost:
                        touched.add(feed.name)
        for name in sorted(touched):
            capacity = facility.feeds[name].capacity
            if capacity is not None:
                words = f"feed {name}" + (f" after the loss of source {lost}" if lost else "")
                by_feed[name].append(Limit("power", words, capacity, scale, weights[name]))
    for alike in by_feed.values():
        yield from (limit for limit in alike if not any(_implies(other, limit) for other in alike))


def _upwards(facility: Facility, leaf: Feed) -> Iterator[Feed]:
    feed: Feed | None = leaf
    seen: set[str] = set()
    while feed is not None and feed.name not in seen:
        seen.add(feed.name)
        yield feed
        feed = facility.feeds.get(feed.parent)


def _implies(other: Limit, limit: Limit) -> bool:
    """Whether `limit` can be left out beside `other`, of the same feed; of two alike the first stays."""
    if other is limit or any(other.weights.get(rack, 0) < weight for rack, weight in limit.weights.items()):
        return False
    return other.weights != limit.weights or other.name < limit.name
