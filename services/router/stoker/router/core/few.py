"""The decision among a handful of replicas, one by one: there, columns cost more in calls than they save in loops.

It is `decide`'s for the plain case: fresh digests or none, nobody warming up, one block size, room somewhere, and no
hot prefix to be copied. What is not plain is left to the columns.
"""

from __future__ import annotations

from itertools import islice
from math import ceil
from typing import NamedTuple

from stoker.router.core import homes
from stoker.router.core.explanation import ALIKE_DIGITS, RANKS, Rows
from stoker.router.core.fleet import Fleet
from stoker.router.core.panel import Panel
from stoker.router.core.ring import Ring
from stoker.router.core.values import Candidate, Decision, Reason, Request
from stoker.router.core.walk import Runs

FEW = 7
"""Replicas of a fleet up to which this is the faster way, and sums are the same to their last digits."""


class _Found(NamedTuple):
    """What `Match` is in columns, where all digests are trusted."""

    exact: list[int]
    believed: list[int]
    cached: list[float]
    shown: int
    deepest: int


def decide(
    request: Request, fleet: Fleet, panel: Panel, now: float, *, panic: bool, explain: bool
) -> Decision | None:
    """Choose among the replicas of a panel; None for what is not plain."""
    plain = request.keys and panel.alike == request.block_size and len(fleet.replicas) <= FEW
    if not plain or fleet.ramp.warms(now) or fleet.index.trusts(now) is not None:
        return None
    found = _match(request, fleet, panel)
    known = fleet.index.known_rows(panel.seats)
    unknown = max(0, request.prompt_tokens - request.block_size * found.deepest)
    key = homes.key_of(request.keys, found.shown, blind=2 * known.count(False) > len(known))
    home = homes.row(key, fleet, panel)
    credit = _credit(request, fleet, panel, found, known)
    if home is not None:
        credit[home] = max(credit[home], fleet.config.home_credit * unknown)
    candidates = _weigh(request, fleet, panel, now, found, known, credit)
    opened = [row for row, each in enumerate(candidates) if each.load + each.weight <= each.bound]
    if not opened:
        return None
    lowest = round(min([candidates[row].cost for row in opened]), ALIKE_DIGITS)
    tied = [row for row in opened if round(candidates[row].cost, ALIKE_DIGITS) == lowest]
    best = home if home in tied else tied[0] if len(tied) == 1 else _first(tied, key, fleet.ring, panel)
    chosen = candidates[best]
    reason = _reason(chosen, max(found.cached), at_home=best == home)
    spread = request.block_size * (found.shown - found.believed[best]) > homes.HOT * unknown
    if spread and reason in homes.MISSES:
        return None
    cached = round(chosen.cached)
    return Decision(
        replica=chosen.replica,
        reason=Reason.PANIC if panic else reason,
        cached_tokens=cached,
        prefill_tokens=request.prompt_tokens - cached,
        over_bound=False,
        candidates=Rows(panel.ids, candidates, fleet.ring, key) if explain else (),
        shown_tokens=chosen.exact,
        cost=chosen.cost,
        considered=len(candidates),
    )


def _match(request: Request, fleet: Fleet, panel: Panel) -> _Found:
    """Look a prompt up in the fleet's digests and among recent dispatches."""
    size, config = request.block_size, fleet.config
    exact, worth, shown = [0] * len(panel), [0.0] * len(panel), 0
    runs: Runs = []
    for tier, runs in fleet.index.runs(request.keys).items():
        before, exact = exact, _depths(runs, panel)
        worth = _more(worth, config.tier_credit[tier] * size, before, exact)
        shown = runs[-1][0] if runs else 0
    believed, deepest = exact, shown
    guessed = fleet.speculation.runs(request.keys, runs)
    if guessed:
        believed = [max(pair) for pair in zip(exact, _depths(guessed, panel), strict=True)]
        worth = _more(worth, config.speculative_credit * size, exact, believed)
        deepest = max(shown, guessed[-1][0])
    # The last token is always computed: the engine needs its logits.
    most = max(0.0, request.prompt_tokens - 1.0)
    return _Found(exact, believed, [each if each < most else most for each in worth], shown, deepest)


def _depths(runs: Runs, panel: Panel) -> list[int]:
    """Return each row's depth in blocks, 0 where it holds nothing."""
    depths = [0] * len(panel)
    for depth, alive in runs:
        for row, bit in enumerate(panel.bits):
            if alive & bit:
                depths[row] = depth
    return depths


def _more(worth: list[float], credit: float, before: list[int], after: list[int]) -> list[float]:
    return [each + credit * (more - less) for each, less, more in zip(worth, before, after, strict=True)]


def _credit(request: Request, fleet: Fleet, panel: Panel, found: _Found, known: list[bool]) -> list[float]:
    """Return the tokens that those without a digest are credited with by the ring."""
    credit = [0.0] * len(panel)
    if not all(known):
        for row, tokens in homes.tokens(request, fleet, panel).items():
            if not known[row]:
                credit[row] = fleet.config.ring_credit * max(0.0, tokens - found.cached[row])
    return credit


def _weigh(
    request: Request,
    fleet: Fleet,
    panel: Panel,
    now: float,
    found: _Found,
    known: list[bool],
    credit: list[float],
) -> list[Candidate]:
    """Return every candidate, its place on the ring left open."""
    config, size, prompt = fleet.config, request.block_size, request.prompt_tokens
    loads = fleet.load.loads(now)[panel.seats].tolist()
    rates = fleet.rates.column[panel.seats].tolist()
    kv = config.kv_weight * (prompt + request.output_tokens)
    slack, total = (1.0 + config.epsilon) / panel.capacities, sum(loads)
    candidates = []
    for row, name in enumerate(panel.ids):
        cached, load = found.cached[row], loads[row]
        prefill = prompt - cached
        weight = prefill + kv
        cost = (load + config.miss_weight * (prefill - credit[row])) / rates[row]
        bound = max(ceil(slack * (total + weight) * panel.parts[row]), config.floor_tokens)
        exact, believed = size * found.exact[row], size * found.believed[row]
        trust = 1.0 if known[row] else 0.0
        candidates.append(Candidate(name, cost, load, weight, bound, exact, believed, cached, trust, RANKS))
    return candidates


def _first(tied: list[int], key: int, ring: Ring, panel: Panel) -> int:
    """Return which of some rows comes first on the ring; where none has a rank, the first row."""
    order = map(panel.rows.get, islice(ring.order(key), RANKS))
    return next((row for row in order if row is not None and row in tied), tied[0])


def _reason(chosen: Candidate, most: float, *, at_home: bool) -> Reason:
    if most > chosen.cached:
        return Reason.SPILL
    if chosen.cached:
        return Reason.EXACT if 2 * chosen.exact >= chosen.cached else Reason.SPECULATIVE
    return Reason.RING if at_home else Reason.SPILL
