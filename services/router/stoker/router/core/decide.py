"""The routing decision: a pure function of a request, the fleet as seen, the time and a seeded rng."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from random import Random
from typing import NamedTuple

import numpy as np

from stoker.common.errors import Unavailable
from stoker.router.core import few, homes, leaving
from stoker.router.core.explanation import ALIKE_DIGITS, RANKS, Columns
from stoker.router.core.fleet import Fleet
from stoker.router.core.match import Match, match
from stoker.router.core.panel import Panel
from stoker.router.core.ring import Ring
from stoker.router.core.seats import Bools, Floats
from stoker.router.core.values import Decision, Reason, Request, RoutingConfig

STOKER = "stoker"
ROUND_ROBIN = "round_robin"
POLICIES = (STOKER, ROUND_ROBIN)

_ALIKE_S = 10.0**-ALIKE_DIGITS


def decide(
    request: Request, fleet: Fleet, now: float, rng: Random, *, policy: str = STOKER, explain: bool = False
) -> Decision:
    """Choose a replica for a request.

    Raises Unavailable (reason NO_REPLICA) when no replica of the pool can take it.
    """
    panel, panic = candidates(request, fleet, now)
    if policy == ROUND_ROBIN:
        return _round_robin(request, fleet, panel)
    anywhere = 0 if request.keys else request.session or rng.getrandbits(64)
    decision = few.decide(request, fleet, panel, now, anywhere, panic=panic, explain=explain)
    return decision or _by_columns(request, fleet, panel, now, anywhere, panic=panic, explain=explain)


def _by_columns(
    request: Request, fleet: Fleet, panel: Panel, now: float, anywhere: int, *, panic: bool, explain: bool
) -> Decision:
    weighed = weigh(request, fleet, panel, now, anywhere)
    best, opened = _choose(weighed, fleet)
    reason = _reason(best, weighed, opened)
    found = weighed.match
    if reason in homes.MISSES and found.shown:
        best = _successor(best, request, weighed, fleet)
        reason = _reason(best, weighed, opened)
    cached = round(float(found.cached[best]))
    trusted = found.trust is None or found.trust[best] == 1.0
    return Decision(
        replica=panel.ids[best],
        reason=Reason.PANIC if panic else reason,
        cached_tokens=cached,
        prefill_tokens=request.prompt_tokens - cached,
        over_bound=not opened,
        candidates=_explained(weighed, fleet) if explain else (),
        shown_tokens=request.block_size * int(found.exact[best]) if trusted else 0,
        cost=float(weighed.cost[best]),
        considered=len(panel),
    )


def candidates(request: Request, fleet: Fleet, now: float) -> tuple[Panel, bool]:
    """Return the replicas that may serve a request, and whether that took panic mode.

    Raises Unavailable (reason NO_REPLICA) when there is none.
    """
    out = frozenset() if fleet.health.quiet else fleet.health.out(now)
    shut = leaving.closed(request, fleet) if fleet.retiring else frozenset()
    if shut:
        found, panic = _admitted(request, fleet, request.exclude | shut, out)
        if found.ids and not panic:
            return found, False
    found, panic = _admitted(request, fleet, request.exclude, out)
    if not found.ids:
        raise Unavailable(_no_replica(request, fleet), reason="NO_REPLICA", retry_after_s=1.0)
    return found, panic


def _admitted(request: Request, fleet: Fleet, exclude: frozenset[str], out: frozenset[str]) -> tuple[Panel, bool]:
    """Return those who are not `out`, or where these are too few all, and then True."""
    able = fleet.panel(request.adapter, request.role, exclude)
    if not out or not able.ids:
        return able, False
    admitted = fleet.panel(request.adapter, request.role, exclude | out)
    if not admitted.ids or len(admitted) < fleet.config.panic_share * len(able):
        return able, True
    return admitted, False


def _no_replica(request: Request, fleet: Fleet) -> str:
    total = len(fleet.replicas)
    ready = sum(replica.ready for replica in fleet.replicas.values())
    wanted = f" with adapter {request.adapter!r}" if request.adapter else ""
    return (
        f"no replica{wanted} can take this request: {total} announced, {ready} ready, "
        f"{len(request.exclude)} already tried; wait for one to become ready, or scale the deployment up"
    )


def copies(request: Request, fleet: Fleet, now: float) -> int:
    """Return how many of those who may serve a request hold about as much of it as any does; at least 1."""
    cached = match(request, fleet, candidates(request, fleet, now)[0], now).cached
    most = float(cached.max())
    return int((2.0 * cached >= most).sum()) if most else 1


class Weighed(NamedTuple):
    """All candidates of a request: columns by row of the panel, in the units of Candidate."""

    panel: Panel
    match: Match
    block_size: int
    cost: Floats
    load: Floats
    weight: Floats
    total: float
    """The load of all, in tokens."""
    warmth: Floats | None
    """How warm each is beside the warmest, None where all are alike."""
    ring_key: int
    home: int | None
    """The row of the home on the ring, None if that is no candidate."""


def weigh(request: Request, fleet: Fleet, panel: Panel, now: float, anywhere: int) -> Weighed:
    """Return every candidate of a panel with its cost, load, bound and matches.

    `anywhere` (u64) is by what the ring is asked for a prompt without keys.
    """
    config = fleet.config
    found = match(request, fleet, panel, now)
    warmth = fleet.ramp.warmth(panel.seats, now)
    unseen = homes.unseen(fleet, panel, found)
    key = homes.key(request, found, unseen, anywhere)
    home = homes.row(key, fleet, panel)
    load = fleet.load.loads(now)[panel.seats]
    prefill = float(request.prompt_tokens) - found.cached
    weight = prefill + config.kv_weight * (request.prompt_tokens + request.output_tokens)
    credit = np.zeros(len(panel))
    if unseen is not None and request.keys:
        guess = homes.depths(request, fleet, panel) * (unseen if warmth is None else unseen * warmth)
        credit = config.ring_credit * np.maximum(0.0, guess - found.cached)
    if home is not None:
        # The same guess by another depth: it does not count twice.
        unknown = max(0, request.prompt_tokens - request.block_size * found.deepest)
        credit[home] = max(credit[home], config.home_credit * unknown)
    cost = (load + config.miss_weight * (prefill - credit)) / fleet.rates.column[panel.seats]
    return Weighed(panel, found, request.block_size, cost, load, weight, float(load.sum()), warmth, key, home)


def _bound(weighed: Weighed, config: RoutingConfig, rows: int | slice = slice(None)) -> Floats:
    """Return the bound of one row or of all, in tokens."""
    panel, warmth = weighed.panel, weighed.warmth
    capacity = panel.capacity if warmth is None else panel.capacity * warmth
    slack = (1.0 + config.epsilon) / (panel.capacities if warmth is None else float(capacity.sum()))
    share = np.ceil(slack * (weighed.total + weighed.weight[rows]) * capacity[rows])
    floor = config.floor_tokens if warmth is None else config.floor_tokens * warmth[rows]
    bound: Floats = np.maximum(share, floor)
    return bound


def _ranks(weighed: Weighed, ring: Ring) -> dict[int, int]:
    """Rank the first few on the ring, by row."""
    places = enumerate(islice(ring.order(weighed.ring_key), RANKS))
    rows = weighed.panel.rows
    return {rows[name]: rank for rank, name in places if name in rows}


def _choose(weighed: Weighed, fleet: Fleet) -> tuple[int, bool]:
    """Return the row of the cheapest that is open, or of the one least over its bound; and whether any is open."""
    load, weight, cost = weighed.load, weighed.weight, weighed.cost

    def opened(row: int) -> bool:
        tokens = float(load[row] + weight[row])
        quiet = weighed.warmth is None and tokens <= fleet.config.floor_tokens
        return quiet or tokens <= float(_bound(weighed, fleet.config, row))

    best = int(cost.argmin())
    if not opened(best):
        over = load + weight - _bound(weighed, fleet.config)
        cost = np.where(over <= 0.0, cost, np.inf)
        best = int(cost.argmin())
        if over[best] > 0.0:
            return _first(weighed, fleet, over == over.min(), lambda row: True), False
    lowest = round(float(cost[best]), ALIKE_DIGITS)
    near = cost <= lowest + _ALIKE_S
    return _first(
        weighed, fleet, near, lambda row: round(float(cost[row]), ALIKE_DIGITS) == lowest and opened(row)
    ), True


def _successor(best: int, request: Request, weighed: Weighed, fleet: Fleet) -> int:
    """Return where a prefix that spills to `best` gets its next copy.

    Whether there is one more copy, costs decide: when every holder is so loaded that a miss costs less. Where, the
    prefix's own ring order does, among those that cost the same but for the home of the prompt's unknown rest:
    routers that share digests make one copy, not one each.
    """
    found, config = weighed.match, fleet.config
    unknown = max(0, request.prompt_tokens - request.block_size * found.deepest)
    held = max(found.exact.item(best), found.believed.item(best))
    if request.block_size * (found.shown - held) <= homes.HOT * unknown:
        return best
    margin = _ALIKE_S
    if best == weighed.home:
        margin += config.home_credit * config.miss_weight * unknown / fleet.rates.column[weighed.panel.seats[best]]
    lacking = np.maximum(found.exact, found.believed) < found.shown
    near = lacking & (weighed.cost <= weighed.cost[best] + margin)
    near &= weighed.load + weighed.weight <= _bound(weighed, config)
    rows = weighed.panel.rows
    order = islice(fleet.ring.order(request.keys[found.shown - 1]), RANKS)
    return next((rows[name] for name in order if name in rows and near[rows[name]]), best)


def _first(weighed: Weighed, fleet: Fleet, near: Bools, tied: Callable[[int], bool]) -> int:
    """Return the first on the ring of the `near` rows that are `tied`; where none has a rank, the first row."""
    rows = near.nonzero()[0]
    if len(rows) == 1:
        return int(rows[0])
    ranked = (row for row in _ranks(weighed, fleet.ring) if near[row])
    either: Iterator[int] = chain(ranked, rows.tolist())
    return next(row for row in either if tied(row))


def _reason(best: int, weighed: Weighed, opened: bool) -> Reason:
    if not opened:
        return Reason.LEAST_LOADED
    found = weighed.match
    cached = found.cached[best]
    if found.cached[found.cached.argmax()] > cached:
        return Reason.SPILL
    if cached:
        trust = 1.0 if found.trust is None else found.trust[best]
        shown = weighed.block_size * found.exact[best]
        return Reason.EXACT if 2 * trust * shown >= cached else Reason.SPECULATIVE
    return Reason.RING if best == weighed.home else Reason.SPILL


def _explained(weighed: Weighed, fleet: Fleet) -> Columns:
    found, size, panel, ring = weighed.match, weighed.block_size, weighed.panel, fleet.ring
    shown = fleet.index.known(panel.seats)

    def evidence() -> tuple[tuple[Floats, ...], dict[int, int]]:
        columns = (
            size * found.exact,
            size * np.maximum(found.exact, found.believed),
            found.cached,
            np.where(shown, 1.0 if found.trust is None else found.trust, 0.0),
        )
        return columns, _ranks(weighed, ring)

    weights = (weighed.cost, weighed.load, weighed.weight)
    config = fleet.config
    return Columns(panel.ids, weights, config.floor_tokens, partial(_bound, weighed, config), evidence)


def _round_robin(request: Request, fleet: Fleet, panel: Panel) -> Decision:
    """The baseline: each candidate in turn, whatever it holds."""
    ids = sorted(panel.ids)
    chosen = ids[fleet.turn % len(ids)]
    fleet.turn += 1
    return Decision(chosen, Reason.ROUND_ROBIN, 0, request.prompt_tokens, over_bound=False, considered=len(ids))
