"""Which replicas go first when there are too many: those whose going costs least."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from stoker.scaler.core.signals import History
from stoker.scaler.core.values import Cost, Load, Replica, Standing
from stoker.scaler.core.warmth import Worth

_DIGITS = re.compile(r"\d+")
_TOKENS_PER_S = 10_000.0
"""Prefill where it was not measured: right in order of magnitude, and only weighs caches against work."""
_LIFE_S = 10.0
"""Time that a request runs, where that is not known."""
_TRIES = 50_000
"""Sets of blocks that are looked up at most to find the best choice for certain."""
_ROUNDS = 8

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

    Those that serve nothing go first (failing, then pending, starting, unhealthy), then of the ready ones those
    that cost least together: the prefill of what only they hold and somebody will ask for, and the time until
    their work is done. Never the one with the backlog while another would do: what is queued there would be late,
    and the next one's backlog longer. Work that is unknown or older than `fresh_s` may be the longest; a cache of
    which nothing was told may be the most valuable. Equals go by name, the highest ordinal first.

    All this changes with every report, so a choice once made (`before`) stands while it still serves: the same
    number of victims, all of them still there, and none of them ready while others are not.
    """
    staying = [replica for replica in replicas if not replica.leaving]
    idle = sorted((r for r in staying if r.standing is not Standing.READY), key=lambda r: (r.standing, _last(r.id)))
    ready = [replica for replica in staying if replica.standing is Standing.READY]
    surplus = min(max(0, surplus), len(staying))
    if surplus <= len(idle):
        names = [replica.id for replica in idle[:surplus]]
        return Choice(tuple(before if _stands(before, staying, len(names), 0) else names))
    room = _Room.of(ready, domain_least)
    most = min(surplus - len(idle), room.most)
    kept = surplus - len(idle) - most
    names = [replica.id for replica in idle]
    if _stands(before, staying, len(idle) + most, most) and room.holds(r for r in ready if r.id in before):
        return Choice(tuple(before), kept=kept)
    held = (worth or Worth()).within([replica.id for replica in ready], most)
    weighing = _Weighing(ready, loads, held, rates or Rates(), now, fresh_s)
    chosen = weighing.least(most, room)
    costs = weighing.costs(chosen)
    return Choice((*names, *costs), costs, kept)


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
        self._ready = sorted(ready, key=lambda replica: _last(replica.id))
        self._worth = worth
        self._rates = rates
        fresh = {r.id: load for r in ready if (load := loads.get(r.id)) is not None and now - load.seen_at <= fresh_s}
        self._drain_s = {r.id: _drain_s(fresh.get(r.id), rates) for r in ready}
        longest = max((s for r in ready if (s := self._drain_s[r.id]) is not None), default=0.0)
        self._backlog = {
            name for name, load in fresh.items() if load.waiting and 2 * (self._drain_s[name] or 0.0) >= longest
        }
        told = [worth.lost_with([r.id]) for r in ready if r.id in worth.bits]
        self._untold = max(told, default=0.0)

    def least(self, count: int, room: _Room) -> list[Replica]:
        """The `count` replicas that cost least together: of all choices if these are few, else one that no
        exchange of one replica makes better."""
        if count >= len(self._ready):
            return self._ready
        if math.comb(len(self._ready), count) * (len(self._worth.by_holders) + count) <= _TRIES:
            able = (list(going) for going in combinations(self._ready, count))
            return min((going for going in able if room.holds(going)), key=self._rank)
        going: list[Replica] = []
        for _ in range(count):
            going.append(self._best(going, room))
        for _ in range(_ROUNDS):
            before = self._rank(going)
            for replica in list(going):
                going.remove(replica)
                going.append(self._best(going, room))
            if self._rank(going) >= before:
                break
        return going

    def _best(self, going: Sequence[Replica], room: _Room) -> Replica:
        """Who goes best beside those."""
        able = [r for r in self._ready if r not in going and room.holds([*going, r])]
        return min(able, key=lambda replica: self._rank([*going, replica]))

    def _rank(self, going: Sequence[Replica]) -> Rank:
        drains = [self._drain_s[replica.id] for replica in going]
        cost_s = self._lost_tokens(going) / self._rates.prefill_tokens_per_s + sum(s for s in drains if s is not None)
        return (
            sum(s is None for s in drains),
            sum(replica.id in self._backlog for replica in going),
            round(cost_s, 6),
            tuple(sorted(_last(replica.id) for replica in going)),
        )

    def _lost_tokens(self, going: Sequence[Replica]) -> float:
        untold = sum(replica.id not in self._worth.bits for replica in going)
        return self._worth.lost_with(replica.id for replica in going) + untold * self._untold

    def costs(self, chosen: Sequence[Replica]) -> dict[str, Cost]:
        """What each costs beside those before it, in the order in which they best go."""
        left, going = list(chosen), list[Replica]()
        costs: dict[str, Cost] = {}
        while left:
            first = min(left, key=lambda replica: self._rank([*going, replica]))
            tokens = self._lost_tokens([*going, first]) - self._lost_tokens(going)
            lost_s = tokens / self._rates.prefill_tokens_per_s
            costs[first.id] = Cost(tokens, lost_s, self._drain_s[first.id], first.id in self._backlog)
            going.append(first)
            left.remove(first)
        return costs


def _drain_s(load: Load | None, rates: Rates) -> float | None:
    """Until what a replica has is done: its queue, then the longest of so many requests of exponential lives."""
    if load is None or load.running is None or load.waiting is None:
        return None
    queued_s = (load.queued_prefill_tokens or 0) / rates.prefill_tokens_per_s
    return queued_s + rates.life_s * math.log1p(load.running + load.waiting)


def _last(name: str) -> tuple[int, str]:
    digits = _DIGITS.findall(name.rpartition("-")[2])
    return (-int(digits[-1]) if digits else 0, name)


def _stands(before: Sequence[str], staying: Sequence[Replica], count: int, ready: int) -> bool:
    """Whether an earlier choice is as good as any other of `count` replicas, `ready` of them ready."""
    there = {replica.id: replica for replica in staying}
    if len(before) != count or any(name not in there for name in before):
        return False
    return sum(there[name].standing is Standing.READY for name in before) <= ready
