"""What a simulation shows, in figures."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stoker.bench.replicas import quantile
from stoker.simulate.fleet import Count
from stoker.simulate.ledger import Bin, Ledger
from stoker.simulate.scaling import Change, Scaling

THRASH_WINDOW_S = 600.0


@dataclass(frozen=True, slots=True)
class Figures:
    """One policy on one trace. None is unknown: nothing was answered, or nothing had more than one token."""

    policy: str
    requests: int
    refused: int
    attainment: float | None
    """Share of all requests that were answered within the objective; those that were refused are not."""
    replica_hours: float
    """From assignment to the end, starting and draining included, within the trace's time."""
    cost: float
    scale_ups: int
    scale_downs: int
    thrashing: int
    """Replicas moved one way and back within `THRASH_WINDOW_S`."""
    hit_rate: float | None
    """Prompt tokens found in a cache over all."""
    hit_rate_after: float | None
    """The same within ten minutes after replicas that served were told to go; None: none were."""
    warmed_tokens: int
    """Computed on replicas that stayed before anybody asked for them."""
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    ttft_p99_ms: float | None
    itl_p50_ms: float | None
    """Of the requests' means."""
    itl_p95_ms: float | None
    replicas_mean: float
    replicas_most: int
    deaths: int
    """Replicas that died and started anew."""
    over_bound: int
    """Requests that the router sent where its bound did not allow them, as none was open."""


@dataclass(frozen=True, slots=True)
class Run:
    """One policy on one trace: the figures, and what is drawn."""

    figures: Figures
    seconds: float
    """How long the trace is."""
    counts: Sequence[Count]
    bins: Sequence[Bin]
    changes: Sequence[Change]


def figures(policy: str, ledger: Ledger, scaling: Scaling, seconds: float) -> Figures:
    """All figures of a simulation of a trace of `seconds` that has ended."""
    fleet, changes, settings = ledger.fleet, scaling.changes, scaling.settings
    measured, counts = fleet.measured, fleet.counts
    hours = replica_seconds(counts, seconds) / 3_600.0
    moves = [(change.at, change.after - change.before) for change in changes if change.at <= seconds]
    return Figures(
        policy=policy,
        requests=ledger.arrived,
        refused=ledger.refused_count,
        attainment=round(ledger.within / ledger.arrived, 5) if ledger.arrived else None,
        replica_hours=round(hours, 3),
        cost=round(hours * settings.price_per_hour, 2),
        scale_ups=sum(by > 0 for _, by in moves),
        scale_downs=sum(by < 0 for _, by in moves),
        thrashing=thrashing(moves),
        hit_rate=_share(measured.cached_tokens, measured.prompt_tokens),
        hit_rate_after=_share(scaling.cached_tokens_after, scaling.prompt_tokens_after),
        warmed_tokens=measured.warmed_blocks * settings.hardware.block_size,
        ttft_p50_ms=_ms(ledger.ttfts, 0.50),
        ttft_p95_ms=_ms(ledger.ttfts, 0.95),
        ttft_p99_ms=_ms(ledger.ttfts, 0.99),
        itl_p50_ms=_ms(ledger.itls, 0.50),
        itl_p95_ms=_ms(ledger.itls, 0.95),
        replicas_mean=round(3_600.0 * hours / seconds, 2) if seconds else 0.0,
        replicas_most=max(count.total for count in counts if count.at <= seconds),
        deaths=fleet.deaths,
        over_bound=ledger.over_bound,
    )


def replica_seconds(counts: Sequence[Count], seconds: float) -> float:
    """The integral over all that cost from 0 to `seconds`."""
    ends = [*(count.at for count in counts[1:]), float("inf")]
    spans = ((count.total, min(end, seconds) - count.at) for count, end in zip(counts, ends, strict=True))
    return sum(total * span for total, span in spans if span > 0.0)


def thrashing(moves: Iterable[tuple[float, int]], window_s: float = THRASH_WINDOW_S) -> int:
    """How many replicas were moved one way and back within a window; `moves` are (when, by how many), in order.

    Movement along a trend costs nothing, movement against it counts in full, as in CockroachDB's allocator
    simulator (pkg/kv/kvserver/asim/history, trend-discounting total variation); there over a whole series, here
    pair by pair: each replica moved is matched with the last one moved the other way, if that is recent enough.
    """
    total = 0
    past: deque[tuple[float, int]] = deque()  # not yet moved back, all the same way
    for at, by in moves:
        while past and past[0][0] < at - window_s:
            past.popleft()
        while by and past and (past[-1][1] > 0) != (by > 0):
            when, before = past.pop()
            back = min(abs(by), abs(before))
            total += back
            by += back if by < 0 else -back
            if abs(before) > back:
                past.append((when, before - back if before > 0 else before + back))
        if by:
            past.append((at, by))
    return total


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def _ms(values: Sequence[float], share: float) -> float | None:
    return round(1e3 * quantile(values, share), 1) if len(values) else None
