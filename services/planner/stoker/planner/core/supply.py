"""What feeds and sites carry, in every loss that must be survived, as racks fill up."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from stoker.planner.core.facility.values import Feed, Rack, Site
from stoker.planner.core.limits import Kind, Limit, Scope
from stoker.planner.core.units import Watts

_PARTS = 2520
"""Loads are counted in such parts of a watt: a load shared by up to ten feeds stays a whole number."""


@dataclass(frozen=True, slots=True)
class _Shares:
    """The parts of a rack's load that feeds carry: while all live, and after the loss of one of its sources."""

    normal: Mapping[str, int]
    after: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class Load:
    """What a feed carries while all live, and at the most after the loss of a source (`lost`, "" where no loss adds
    any), in watts."""

    normal: float
    worst: float
    lost: str = ""


class Supply:
    """The ledger of power. Racks are made known by `connect`, and draw by `draw`.

    A rack that does not survive the loss of a source draws nothing after it; so does one that has no other.
    """

    def __init__(self, sites: Mapping[str, Site], feeds: Mapping[str, Feed], racks: Iterable[Rack]) -> None:
        self._sites, self._feeds = sites, dict(feeds)
        self._loads: Counter[str] = Counter()
        self._changes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """By feed and lost source: what the loss adds to its load, in parts of a watt."""
        self._at_site: Counter[str] = Counter()
        self._at_rack: Counter[str] = Counter()
        self._shares: dict[str, _Shares] = {}
        self._users: Counter[str] = Counter()
        for rack in racks:
            self.connect(rack)

    def connect(self, rack: Rack, feeds: Iterable[Feed] = ()) -> None:
        """Adds a rack, with lowest feeds of its own where these are new."""
        for feed in feeds:
            self._feeds[feed.name] = feed
        self._users.update(set(rack.feeds))
        lowest = [self._feeds[name] for name in rack.feeds]
        sources = {feed.source for feed in lowest}
        after = {
            lost: self._parts([feed for feed in lowest if feed.source != lost] if rack.survives_loss else [])
            for lost in sorted(sources)
        }
        self._shares[rack.name] = _Shares(self._parts(lowest), after)

    def draw(self, rack: Rack, power: Watts) -> None:
        """Books a load of `power` in a rack."""
        self._at_rack[rack.name] += power
        self._at_site[rack.site] += power
        shares = self._shares[rack.name]
        for feed, parts in shares.normal.items():
            self._loads[feed] += parts * power
        for lost, after in shares.after.items():
            for feed, parts in shares.normal.items():
                self._changes[feed][lost] += (after.get(feed, 0) - parts) * power

    def loads(self) -> dict[str, Load]:
        """What each feed of the racks and above carries."""
        found = {}
        for feed in self._loads:
            normal = self._loads[feed]
            losses = [(change, lost) for lost, change in sorted(self._changes[feed].items()) if change > 0]
            most, lost = max(losses, key=lambda loss: loss[0], default=(0, ""))
            found[feed] = Load(normal / _PARTS, (normal + most) / _PARTS, lost)
        return found

    def limits(self, rack: Rack, each: Watts) -> list[Limit]:
        """What bounds the number of further loads of `each` watts in a rack: its feeds, those above, its site."""
        found: dict[str, Limit] = {}
        for limit in self._of_feeds(rack, each):
            known = found.get(limit.at)
            if known is None or (limit.allows, limit.left) < (known.allows, known.left):
                found[limit.at] = limit
        site = self._sites[rack.site]
        if site.supply is not None:
            available = site.supply - site.reserved
            found[site.name] = Limit(Kind.POWER, Scope.SITE, site.name, available, self._at_site[site.name], each)
        return list(found.values())

    def _of_feeds(self, rack: Rack, each: Watts) -> Iterator[Limit]:
        shares = self._shares[rack.name]
        for feed, normal in shares.normal.items():
            for lost in ("", *sorted(self._changes[feed].keys() | shares.after.keys())):
                parts = shares.after[lost].get(feed, 0) if lost in shares.after else normal
                load = self._loads[feed] + self._changes[feed][lost]
                capacity = self._feeds[feed].capacity
                if not parts or capacity is None:
                    continue
                if feed in rack.feeds and self._users[feed] == 1:
                    # Said as what the whole rack may draw: all that this feed carries comes from here.
                    whole, drawn = capacity * _PARTS // parts, self._at_rack[rack.name]
                    yield Limit(Kind.POWER, Scope.RACK, rack.name, whole, drawn, each, lost)
                else:
                    share = each * parts / _PARTS
                    yield Limit(Kind.POWER, Scope.FEED, feed, capacity, load / _PARTS, share, lost)

    def _parts(self, lowest: Collection[Feed]) -> dict[str, int]:
        """The parts that these feeds, which share a load equally, and all feeds above them carry."""
        parts: Counter[str] = Counter()
        for feed in lowest:
            name = feed.name
            while name:
                parts[name] += -(-_PARTS // len(lowest))
                name = self._feeds[name].parent
        return dict(parts)


def feeds_of(template: Iterable[Feed], rack: str) -> tuple[Feed, ...]:
    """A rack's own copies of the lowest feeds that stand for those of all such racks."""
    return tuple(replace(feed, name=f"{rack}/{feed.name}") for feed in template)
