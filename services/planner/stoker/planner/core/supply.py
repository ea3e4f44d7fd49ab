"""What feeds and sites carry, in every loss that must be survived, as racks fill up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from stoker.planner.core.facility.values import Feed, Rack, Site
from stoker.planner.core.limits import Kind, Limit, Scope
from stoker.planner.core.units import Watts

_PARTS = 2520
"""Loads are counted in such parts of a watt: a load shared by up to ten feeds stays a whole number."""


@dataclass(frozen=True, slots=True)
class _Share:
    """The part of a rack's load that a feed carries when all feeds of `lost` are gone ("": none is)."""

    lost: str
    feed: str
    parts: int


class Supply:
    """The ledger of power. Racks are made known by `connect`, and draw by `draw`."""

    def __init__(self, sites: Mapping[str, Site], feeds: Mapping[str, Feed], racks: Iterable[Rack]) -> None:
        self._sites, self._feeds = sites, dict(feeds)
        self._loads: Counter[tuple[str, str]] = Counter()
        self._at_site: Counter[str] = Counter()
        self._at_rack: Counter[str] = Counter()
        self._shares: dict[str, list[_Share]] = {}
        racks = list(racks)
        self._users = Counter(feed for rack in racks for feed in set(rack.feeds))
        for rack in racks:
            self._shares[rack.name] = self._shared(rack)

    def connect(self, rack: Rack, feeds: Iterable[Feed]) -> None:
        """Adds a rack with lowest feeds of its own."""
        for feed in feeds:
            self._feeds[feed.name] = feed
        self._users.update(set(rack.feeds))
        self._shares[rack.name] = self._shared(rack)

    def draw(self, rack: Rack, power: Watts) -> None:
        """Books a load of `power` in a rack."""
        self._at_rack[rack.name] += power
        self._at_site[rack.site] += power
        for share in self._shares[rack.name]:
            self._loads[share.lost, share.feed] += share.parts * power

    def drawn(self, rack: Rack) -> Watts:
        """What a rack draws."""
        return Watts(self._at_rack[rack.name])

    def limits(self, rack: Rack, each: Watts) -> list[Limit]:
        """What bounds the number of further loads of `each` watts in a rack: its feeds, those above, its site."""
        found: dict[str, Limit] = {}
        for share in self._shares[rack.name]:
            limit = self._of_feed(rack, share, each)
            if limit is not None:
                known = found.get(limit.at)
                if known is None or (limit.allows, limit.left) < (known.allows, known.left):
                    found[limit.at] = limit
        if self._dark(rack):
            found[rack.name] = Limit(Kind.POWER, Scope.RACK, rack.name, 0, self.drawn(rack), each, self._sole(rack))
        site = self._sites[rack.site]
        if site.supply is not None:
            available = site.supply - site.reserved
            found[site.name] = Limit(Kind.POWER, Scope.SITE, site.name, available, self._at_site[site.name], each)
        return list(found.values())

    def _of_feed(self, rack: Rack, share: _Share, each: Watts) -> Limit | None:
        feed = self._feeds[share.feed]
        if feed.capacity is None:
            return None
        load = self._loads[share.lost, share.feed]
        if share.feed in rack.feeds and self._users[share.feed] == 1:
            # Said as what the whole rack may draw: all that this feed carries comes from here.
            available = feed.capacity * _PARTS // share.parts
            return Limit(Kind.POWER, Scope.RACK, rack.name, available, self.drawn(rack), each, share.lost)
        parts = each * share.parts / _PARTS
        return Limit(Kind.POWER, Scope.FEED, share.feed, feed.capacity, load / _PARTS, parts, share.lost)

    def _sole(self, rack: Rack) -> str:
        return next(iter({self._feeds[feed].source for feed in rack.feeds}))

    def _dark(self, rack: Rack) -> bool:
        """Whether it shall survive a loss that leaves it without any feed."""
        return bool(rack.feeds) and rack.survives_loss and len({self._feeds[feed].source for feed in rack.feeds}) == 1

    def _shared(self, rack: Rack) -> list[_Share]:
        sources = sorted({self._feeds[feed].source for feed in rack.feeds})
        parts: Counter[tuple[str, str]] = Counter()
        for lost in ("", *sources) if rack.survives_loss else ("",):
            alive = [feed for feed in rack.feeds if not lost or self._feeds[feed].source != lost]
            for lowest in alive:
                name = lowest
                while name:
                    parts[lost, name] += -(-_PARTS // len(alive))
                    name = self._feeds[name].parent
        return [_Share(lost, feed, count) for (lost, feed), count in parts.items()]


def feeds_of(template: Iterable[Feed], rack: str) -> tuple[Feed, ...]:
    """A rack's own copies of the lowest feeds that stand for those of all such racks."""
    return tuple(replace(feed, name=f"{rack}/{feed.name}") for feed in template)
