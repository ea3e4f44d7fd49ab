"""The decision among a handful of replicas, one by one: there, columns cost more in calls than they save in loops.

It is `decide`'s for the plain case: fresh digests or none, nobody warming up, one block size, room somewhere, and no
hot prefix to be copied. What is not plain is left to the columns.
"""

from __future__ import annotations

from itertools import islice
from math import ceil
from operator import add
from typing import NamedTuple

from stoker.router.core import homes
from stoker.router.core.explanation import ALIKE_DIGITS, RANKS, Explanation, preference
from stoker.router.core.fleet import Fleet
from stoker.router.core.panel import Panel
from stoker.router.core.ring import Ring
from stoker.router.core.values import Candidate, Decision, Reason, Request
from stoker.router.core.walk import Runs

FEW = 7
"""Replicas of a fleet up to which this is the faster way, and sums are the same to their last digits."""


class Found(NamedTuple):
    """What `Match` is in columns, where all digests are trusted."""

    exact: list[int]
    believed: list[int]
    cached: list[float]
    shown: int
    deepest: int


class Weighed(NamedTuple):
    """What `decide.Weighed` is in columns."""

    cost: list[float]
    load: list[float]
    weight: list[float]
    slack: float
    """The part of the load of all that one of capacity 1 may hold."""
    total: float
    parts: tuple[float, ...]
    floor: float

    def bound(self, row: int) -> float:
        """Return the bound of a row, in tokens."""
        return max(ceil(self.slack * (self.total + self.weight[row]) * self.parts[row]), self.floor)

    def opened(self) -> list[int]:
        """Return the rows that the bound admits this request to."""
        tokens = list(map(add, self.load, self.weight))
        return [row for row, each in enumerate(tokens) if each <= self.floor or each <= self.bound(row)]


class Rows(Explanation):
    """The candidates row by row, told only to those who ask."""

    __slots__ = ("_found", "_known", "_ring", "_ring_key", "_size", "_weighed")

    def __init__(
        self,
        ids: tuple[str, ...],
        weighed: Weighed,
        found: Found,
        known: list[bool],
        size: int,
        ring: Ring,
        ring_key: int,
    ) -> None:
        """`known`: those with a digest; `size`: of a block, in tokens; `ring_key`: what the ring was asked by."""
        super().__init__(ids)
        self._weighed = weighed
        self._found = found
        self._known = known
        self._size = size
        self._ring = ring
        self._ring_key = ring_key

    def _told(self) -> list[Candidate]:
        ranks = {name: rank for rank, name in enumerate(islice(self._ring.order(self._ring_key), RANKS))}
        weighed, found = self._weighed, self._found
        views = [
            Candidate(
                replica=name,
                cost=weighed.cost[row],
                load=weighed.load[row],
                weight=weighed.weight[row],
                bound=weighed.bound(row),
                exact=self._size * found.exact[row],
                speculative=self._size * found.believed[row],
                cached=found.cached[row],
                trust=1.0 if self._known[row] else 0.0,
                ring_rank=ranks.get(name, RANKS),
            )
            for row, name in enumerate(self.ids)
        ]
        return sorted(views, key=preference)

    def cheapest(self, count: int) -> list[str]:
        """Return the first few ids of those that were open, by cost alone."""
        opened = sorted(self._weighed.opened(), key=self._weighed.cost.__getitem__)
        return [self.ids[row] for row in opened[:count]]


def decide(
    request: Request, fleet: Fleet, panel: Panel, now: float, anywhere: int, *, panic: bool, explain: bool
) -> Decision | None:
    """Choose among the replicas of a panel; None for what is not plain. `anywhere`: as for `decide.weigh`."""
    keys = request.keys
    plain = (not keys or panel.alike == request.block_size) and len(fleet.replicas) <= FEW
    if not plain or fleet.ramp.warms(now) or fleet.index.trusts(now) is not None:
        return None
    found = _match(request, fleet, panel) if keys else _nothing(panel)
    known = fleet.index.known_rows(panel.seats)
    unknown = max(0, request.prompt_tokens - request.block_size * found.deepest)
    key = homes.key_of(keys, found.shown, blind=2 * known.count(False) > len(known)) if keys else anywhere
    home = homes.row(key, fleet, panel)
    credit = _credit(request, fleet, panel, found, known)
    if home is not None:
        credit[home] = max(credit[home], fleet.config.home_credit * unknown)
    weighed = _weigh(request, fleet, panel, now, found.cached, credit)
    opened = weighed.opened()
    if not opened:
        return None
    costs = [round(weighed.cost[row], ALIKE_DIGITS) for row in opened]
    lowest = min(costs)
    tied = [row for row, cost in zip(opened, costs, strict=True) if cost == lowest]
    best = home if home in tied else tied[0] if len(tied) == 1 else _first(tied, key, fleet.ring, panel)
    size = request.block_size
    reason = _reason(found, best, size, at_home=best == home)
    spread = size * (found.shown - found.believed[best]) > homes.HOT * unknown
    if spread and reason in homes.MISSES:
        return None
    cached = round(found.cached[best])
    return Decision(
        replica=panel.ids[best],
        reason=Reason.PANIC if panic else reason,
        cached_tokens=cached,
        prefill_tokens=request.prompt_tokens - cached,
        over_bound=False,
        candidates=Rows(panel.ids, weighed, found, known, size, fleet.ring, key) if explain else (),
        shown_tokens=size * found.exact[best],
        cost=weighed.cost[best],
        considered=len(panel.ids),
    )


def _match(request: Request, fleet: Fleet, panel: Panel) -> Found:
    """Look a prompt up in the fleet's digests and among recent dispatches."""
    size, config = request.block_size, fleet.config
    exact, worth, shown = [0] * len(panel.ids), [0.0] * len(panel.ids), 0
    runs: Runs = []
    for tier, runs in fleet.index.runs(request.keys).items():
        before, exact = exact, _depths(runs, panel)
        worth = _more(worth, config.tier_credit[tier] * size, before, exact)
        shown = runs[-1][0] if runs else 0
    believed, deepest = exact, shown
    guessed = fleet.speculation.runs(request.keys, runs)
    if guessed:
        believed = list(map(max, exact, _depths(guessed, panel)))
        worth = _more(worth, config.speculative_credit * size, exact, believed)
        deepest = max(shown, guessed[-1][0])
    # The last token is always computed: the engine needs its logits.
    most = max(0.0, request.prompt_tokens - 1.0)
    return Found(exact, believed, [each if each < most else most for each in worth], shown, deepest)


def _nothing(panel: Panel) -> Found:
    """Return what is found of a prompt without keys."""
    return Found([0] * len(panel.ids), [0] * len(panel.ids), [0.0] * len(panel.ids), 0, 0)


def _depths(runs: Runs, panel: Panel) -> list[int]:
    """Return each row's depth in blocks, 0 where it holds nothing."""
    depths = [0] * len(panel.ids)
    for depth, alive in runs:
        for row, bit in enumerate(panel.bits):
            if alive & bit:
                depths[row] = depth
    return depths


def _more(worth: list[float], credit: float, before: list[int], after: list[int]) -> list[float]:
    return [each + credit * (more - less) for each, less, more in zip(worth, before, after, strict=True)]


def _credit(request: Request, fleet: Fleet, panel: Panel, found: Found, known: list[bool]) -> list[float]:
    """Return the tokens that those without a digest are credited with by the ring."""
    credit = [0.0] * len(panel.ids)
    if request.keys and not all(known):
        for row, tokens in homes.tokens(request, fleet, panel).items():
            if not known[row]:
                credit[row] = fleet.config.ring_credit * max(0.0, tokens - found.cached[row])
    return credit


def _weigh(
    request: Request, fleet: Fleet, panel: Panel, now: float, cached: list[float], credit: list[float]
) -> Weighed:
    config, prompt = fleet.config, request.prompt_tokens
    loads = fleet.load.loads(now)[panel.seats].tolist()
    rates = fleet.rates.column[panel.seats].tolist()
    kv, miss = config.kv_weight * (prompt + request.output_tokens), config.miss_weight
    prefills = [prompt - each for each in cached]
    costs = [
        (load + miss * (prefill - each)) / rate
        for load, prefill, each, rate in zip(loads, prefills, credit, rates, strict=True)
    ]
    slack = (1.0 + config.epsilon) / panel.capacities
    weights = [each + kv for each in prefills]
    return Weighed(costs, loads, weights, slack, sum(loads), panel.parts, config.floor_tokens)


def _first(tied: list[int], key: int, ring: Ring, panel: Panel) -> int:
    """Return which of some rows comes first on the ring; where none has a rank, the first row."""
    order = map(panel.rows.get, islice(ring.order(key), RANKS))
    return next((row for row in order if row is not None and row in tied), tied[0])


def _reason(found: Found, best: int, size: int, *, at_home: bool) -> Reason:
    cached = found.cached[best]
    if max(found.cached) > cached:
        return Reason.SPILL
    if cached:
        return Reason.EXACT if 2 * size * found.exact[best] >= cached else Reason.SPECULATIVE
    return Reason.RING if at_home else Reason.SPILL
