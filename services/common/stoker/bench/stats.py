"""From requests to figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median


@dataclass(frozen=True)
class Sample:
    """One request as its client saw it. Times are seconds."""

    api: str
    began_s: float
    """Since the run began."""
    ttft_s: float | None = None
    """To the first content; None if none came."""
    total_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    """Prompt tokens that the engine found in its cache; None where it does not say."""
    completion_tokens: int = 0
    replica: str = ""
    error: str = ""
    """Kind of error; empty if there was none."""
    tenant: str = ""


@dataclass(frozen=True)
class CacheCounters:
    """Prefix-cache counters of all engines together, in tokens."""

    queries: float
    hits: float

    def since(self, before: CacheCounters) -> float | None:
        """Hit rate since `before`; None if nothing was asked."""
        asked = self.queries - before.queries
        return (self.hits - before.hits) / asked if asked > 0 else None


@dataclass(frozen=True)
class TenantFigures:
    """What one tenant got in one run."""

    requests: int
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    ttft_longest_ms: float | None


@dataclass(frozen=True)
class RunFigures:
    """One run of one workload under one policy."""

    policy: str
    hit_rate: float | None
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    e2e_p50_ms: float | None
    requests_per_s: float
    requests: int
    errors: int
    errors_by_kind: dict[str, int] = field(default_factory=dict)
    requests_by_replica: dict[str, int] = field(default_factory=dict)
    by_tenant: dict[str, TenantFigures] = field(default_factory=dict)
    """Empty where requests name no tenant."""


def figures(policy: str, samples: Sequence[Sample], wall_s: float, hit_rate: float | None) -> RunFigures:
    """Draw the requests of one run together."""
    good = [s for s in samples if not s.error]
    ttft = [s.ttft_s * 1000 for s in good if s.ttft_s is not None]
    kinds = Counter(s.error for s in samples if s.error)
    return RunFigures(
        policy=policy,
        hit_rate=hit_rate,
        ttft_p50_ms=quantile(ttft, 0.5),
        ttft_p99_ms=quantile(ttft, 0.99),
        e2e_p50_ms=quantile([s.total_s * 1000 for s in good], 0.5),
        requests_per_s=len(good) / wall_s if wall_s > 0 else 0.0,
        requests=len(samples),
        errors=sum(kinds.values()),
        errors_by_kind=dict(sorted(kinds.items())),
        requests_by_replica=dict(sorted(Counter(s.replica for s in good if s.replica).items())),
        by_tenant=_by_tenant(good),
    )


def _by_tenant(good: Sequence[Sample]) -> dict[str, TenantFigures]:
    times: dict[str, list[float]] = {}
    for sample in good:
        if sample.tenant and sample.ttft_s is not None:
            times.setdefault(sample.tenant, []).append(sample.ttft_s * 1000)
    return {
        tenant: TenantFigures(len(ttft), quantile(ttft, 0.5), quantile(ttft, 0.99), max(ttft))
        for tenant, ttft in sorted(times.items())
    }


def over_rounds(rounds: Sequence[RunFigures]) -> RunFigures:
    """The median of each figure over rounds of one policy; requests and errors add up."""
    if not rounds:
        raise ValueError("no rounds to draw together")
    return RunFigures(
        policy=rounds[0].policy,
        hit_rate=_median(r.hit_rate for r in rounds),
        ttft_p50_ms=_median(r.ttft_p50_ms for r in rounds),
        ttft_p99_ms=_median(r.ttft_p99_ms for r in rounds),
        e2e_p50_ms=_median(r.e2e_p50_ms for r in rounds),
        requests_per_s=median(r.requests_per_s for r in rounds),
        requests=sum(r.requests for r in rounds),
        errors=sum(r.errors for r in rounds),
        errors_by_kind=_sums(r.errors_by_kind for r in rounds),
        requests_by_replica=_sums(r.requests_by_replica for r in rounds),
        by_tenant=_tenants_over(rounds),
    )


def _tenants_over(rounds: Sequence[RunFigures]) -> dict[str, TenantFigures]:
    tenants = sorted({tenant for run in rounds for tenant in run.by_tenant})
    each = {tenant: [run.by_tenant[tenant] for run in rounds if tenant in run.by_tenant] for tenant in tenants}
    return {
        tenant: TenantFigures(
            requests=sum(f.requests for f in found),
            ttft_p50_ms=_median(f.ttft_p50_ms for f in found),
            ttft_p99_ms=_median(f.ttft_p99_ms for f in found),
            ttft_longest_ms=_median(f.ttft_longest_ms for f in found),
        )
        for tenant, found in each.items()
    }


def quantile(values: Sequence[float], q: float) -> float | None:
    """The smallest value that at least a share `q` of all do not exceed; None of nothing."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)]


def order(policies: Sequence[str], round_number: int) -> list[str]:
    """Policies in the order of one round: every other round is reversed, so that drift hits all alike."""
    return list(policies) if round_number % 2 == 0 else list(reversed(policies))


def _median(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return median(known) if known else None


def _sums(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(sorted(total.items()))
