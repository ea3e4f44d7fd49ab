"""Which replicas go first when there are too many: those whose going costs least."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import combinations

from stoker.scaler.core.signals import History
from stoker.scaler.core.values import Cost, Load, Replica, Standing
from stoker.scaler.core.warmth import Worth

_DIGITS = re.compile(r"\d+")
_TOKENS_PER_S = 10_000.0
"""Prefill where it was not measured: right in order of magnitude, and only weighs caches against work."""
_LIFE_S = 10.0
"""Time that a request runs, where that is not known."""
_TRIES = 5_000
"""Sets of blocks that are looked up at most to compare choices."""

Rank = tuple[int, int, float, tuple[tuple[int, str], ...]]


@dataclass(frozen=True, slots=True)
class Rates:
    """What turns tokens and requests into seconds of a replica's time."""

    prefill_tokens_per_s: float = _TOKENS_PER_S
    life_s: float = _LIFE_S
    """Mean time that a request is in the batch."""

    @staticmethod
    def of(history: History) -> Rates:
        """As measured; by Little's law a request runs for as long as those that run take to arrive."""
        known = (s for s in reversed(history.samples) if s.running is not None and s.arrivals_per_s)
        lives = (s.running / s.arrivals_per_s for s in known if s.running and s.arrivals_per_s)
        return Rates(history.capacity.prefill_tokens_per_s or _TOKENS_PER_S, next(lives, _LIFE_S))


@dataclass(frozen=True, slots=True)
class Choice:
    """Who goes, best first; what each of the ready ones costs beside those before it, unless the choice is an
    earlier one; and how many more should have gone and may not, for their failure domain's sake."""

    victims: tuple[str, ...] = ()
    costs: Mapping[str, Cost] = field(default_factory=dict)
    kept: int = 0


def choose(
    replicas: Sequence[Replica],
    surplus: int,
    loads: Mapping[str, Load],
    now: float,
    *,
    fresh_s: float,
    before: Sequence[str] = (),
    worth: Worth | None = None,
    rates: Rates | None = None,
    domain_least: int = 0,
) -> Choice:
    """The `surplus` replicas to remove, best first.

    Those go first that are replaced anyway, then those that serve nothing (failing, then pending, starting,
    unhealthy), then the others; among those that serve the ones that cost least together: the prefill of what only
    they hold and somebody will ask for, and the time until their work is done. Never the one with the backlog while
    another would do: what is queued there would be late, and the next one's backlog longer. Work that is unknown or
    older than `fresh_s` may be the longest; a cache of which nothing was told may be the most valuable. Equals go by
    name, the highest ordinal first.

    All this changes with every report, so a choice once made (`before`) stands while it still serves: the same
    number of victims, all of them still there, and as many of each kind.
    """
    if surplus <= 0:
        return Choice()
    kinds = _kinds([replica for replica in replicas if not replica.leaving])
    room = _Room.of(kinds[-1], domain_least)
    counts, left = list[int](), surplus
    for kind in kinds:
        counts.append(min(left, len(kind)) if kind is not kinds[-1] else min(left, room.most))
        left -= counts[-1]
    kept = min(left, len(kinds[-1]) - counts[-1])
    chosen_before = frozenset(before)
    if _stands(chosen_before, kinds, counts) and room.holds(r for r in kinds[-1] if r.id in chosen_before):
        return Choice(tuple(before), kept=kept)
    names, costs = list[str](), dict[str, Cost]()
    for kind, count in zip(kinds, counts, strict=True):
        if not count or kind[0].standing is not Standing.READY:
            names += [replica.id for replica in kind[:count]]
            continue
        held = (worth or Worth()).within([replica.id for replica in kind], count)
        within = room if kind is kinds[-1] else _Room.of(kind, 0)
        chosen = _Weighing(kind, loads, held, rates or Rates(), now, fresh_s).least(count, within)
        names += chosen
        costs |= chosen
    return Choice(tuple(names), costs, kept)


def _kinds(staying: Sequence[Replica]) -> tuple[list[Replica], ...]:
    """Replicas by who goes before whom: moving ones that do not serve and that do, others that do not and that do."""
    kinds: tuple[list[Replica], ...] = ([], [], [], [])
    for replica in sorted(staying, key=lambda each: (each.standing, by_ordinal(each.id))):
        kinds[2 * (not replica.moving) + (replica.standing is Standing.READY)].append(replica)
    return kinds


@dataclass(frozen=True, slots=True)
class _Room:
    """How many may go in each failure domain; any number of those whose domain is not known."""

    by_domain: Mapping[str, int]
    most: int

    @staticmethod
    def of(ready: Sequence[Replica], least: int) -> _Room:
        there = Counter(replica.domain for replica in ready)
        room = {name: max(0, count - least) if name else count for name, count in there.items()}
        return _Room(room, sum(room.values()))

    def holds(self, going: Iterable[Replica]) -> bool:
        """Whether all these may go together."""
        return all(count <= self.by_domain[domain] for domain, count in Counter(r.domain for r in going).items())


class _Weighing:
    """The ready replicas with what the going of each costs."""

    def __init__(
        self,
        ready: Sequence[Replica],
        loads: Mapping[str, Load],
        worth: Worth,
        rates: Rates,
        now: float,
        fresh_s: float,
    ) -> None:
        self._ready = sorted(ready, key=lambda replica: by_ordinal(replica.id))
        self._worth = worth
        self.rates = rates
        fresh = {r.id: load for r in ready if (load := loads.get(r.id)) is not None and now - load.seen_at <= fresh_s}
        self.drain_s = {r.id: _drain_s(fresh.get(r.id), rates) for r in ready}
        longest = max((s for r in ready if (s := self.drain_s[r.id]) is not None), default=0.0)
        self.backlog = {
            name for name, load in fresh.items() if load.waiting and 2 * (self.drain_s[name] or 0.0) >= longest
        }
        self._untold = max((worth.by_holders.get(worth.bits.get(r.id, 0), 0.0) for r in ready), default=0.0)

    def least(self, count: int, room: _Room) -> dict[str, Cost]:
        """The `count` replicas that cost least together, in the order in which they best go, each with its cost: of
        all choices if these are few, else one step after the other, mended by exchanges while that is quick."""
        ready = self._ready
        if not any(holders & (holders - 1) for holders in self._worth.by_holders):
            return _Greedy(self, ready, room).take(count)  # nothing is shared: there is no better
        sets = len(self._worth.by_holders) + count
        if count < len(ready) and math.comb(len(ready), count) * sets <= _TRIES:
            able = (list(going) for going in combinations(ready, count))
            ready = min((going for going in able if room.holds(going)), key=self._rank)
        costs = _Greedy(self, ready, room).take(count)
        if count < len(ready) and count * len(ready) * sets <= _TRIES:
            chosen = self._exchanged([replica for replica in ready if replica.id in costs], room)
            costs = _Greedy(self, chosen, room).take(count)
        return costs

    def _exchanged(self, going: list[Replica], room: _Room) -> list[Replica]:
        """The same or a better choice: each in turn makes way for who is best beside the others."""
        for replica in list(going):
            going.remove(replica)
            able = [each for each in self._ready if each not in going and room.holds([*going, each])]
            going.append(min(able, key=lambda each: self._rank([*going, each])))
        return going

    def _rank(self, going: Sequence[Replica]) -> Rank:
        """What a choice costs: the lower, the better."""
        names = [replica.id for replica in going]
        lost = self._worth.lost_with(names) + sum(self.untold(name) for name in names)
        drains = [self.drain_s[name] for name in names]
        cost_s = lost / self.rates.prefill_tokens_per_s + sum(s for s in drains if s is not None)
        backlog = sum(name in self.backlog for name in names)
        return (sum(s is None for s in drains), backlog, round(cost_s, 6), tuple(sorted(map(by_ordinal, names))))

    def untold(self, name: str) -> float:
        """Tokens that a replica may hold of which nothing was told: as many as any other holds alone."""
        return 0.0 if name in self._worth.bits else self._untold

    def shared(self) -> Iterator[tuple[list[str], float]]:
        """Who holds the same blocks, and what these are worth."""
        names = {bit: name for name, bit in self._worth.bits.items()}
        for holders, tokens in self._worth.by_holders.items():
            yield [names[bit] for bit in _bits(holders)], tokens


class _Greedy:
    """One victim after the other, each the cheapest beside those before it.

    What a replica costs only rises as others go: when all but one holder of some blocks are gone, these are the last
    one's alone. So a heap of old costs finds the next, whatever the size of the fleet.
    """

    def __init__(self, weighing: _Weighing, able: Sequence[Replica], room: _Room) -> None:
        self._weighing = weighing
        self._room = dict(room.by_domain)
        self._tokens = {replica.id: weighing.untold(replica.id) for replica in able}
        self._holders: list[tuple[set[str], float]] = []
        self._held: dict[str, list[int]] = {}
        for names, tokens in weighing.shared():
            if all(name in self._tokens for name in names):
                for name in names:
                    self._held.setdefault(name, []).append(len(self._holders))
                self._holders.append((set(names), tokens))
                if len(names) == 1:
                    self._tokens[names[0]] += tokens
        self._heap = [(self._rank(replica.id), replica.id, replica.domain) for replica in able]
        heapify(self._heap)

    def take(self, count: int) -> dict[str, Cost]:
        """The first `count`."""
        costs: dict[str, Cost] = {}
        while self._heap and len(costs) < count:
            rank, name, domain = heappop(self._heap)
            if not self._room[domain]:
                continue
            now = self._rank(name)
            if now > rank:
                heappush(self._heap, (now, name, domain))
                continue
            self._room[domain] -= 1
            costs[name] = self._cost(name)
            self._gone(name)
        return costs

    def _gone(self, name: str) -> None:
        for place in self._held.get(name, ()):
            left, tokens = self._holders[place]
            left.discard(name)
            if len(left) == 1:
                self._tokens[next(iter(left))] += tokens

    def _rank(self, name: str) -> tuple[bool, bool, float, tuple[int, str]]:
        cost = self._cost(name)
        return (cost.drain_s is None, cost.backlog, round(cost.lost_s + (cost.drain_s or 0.0), 6), by_ordinal(name))

    def _cost(self, name: str) -> Cost:
        weighing, tokens = self._weighing, self._tokens[name]
        lost_s = tokens / weighing.rates.prefill_tokens_per_s
        return Cost(tokens, lost_s, weighing.drain_s[name], name in weighing.backlog)


def _bits(number: int) -> Iterator[int]:
    while number:
        lowest = number & -number
        yield lowest
        number ^= lowest


def _drain_s(load: Load | None, rates: Rates) -> float | None:
    """Until what a replica has is done: its queue, then the longest of so many requests of exponential lives."""
    if load is None or load.running is None or load.waiting is None:
        return None
    queued_s = (load.queued_prefill_tokens or 0) / rates.prefill_tokens_per_s
    return queued_s + rates.life_s * math.log1p(load.running + load.waiting)


def by_ordinal(name: str) -> tuple[int, str]:
    """Sorts replicas so that the highest ordinal comes first."""
    digits = _DIGITS.findall(name.rpartition("-")[2])
    return (-int(digits[-1]) if digits else 0, name)


def _stands(before: frozenset[str], kinds: Sequence[Sequence[Replica]], counts: Sequence[int]) -> bool:
    """Whether an earlier choice is as good as any other with so many of each kind."""
    chosen = [sum(replica.id in before for replica in kind) for kind in kinds]
    return chosen == list(counts) and len(before) == sum(counts)
