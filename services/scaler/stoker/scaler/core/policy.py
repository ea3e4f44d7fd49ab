"""What an operator asks of the scaler for one deployment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

SEASONS = 8
"""Seasons that a forecast looks back, at most."""


class Kind(StrEnum):
    """How the count is found."""

    FIXED = "fixed"
    """The specification's count."""
    CONCURRENCY = "concurrency"
    """Requests in flight over a target, in a stable and a panic window, as Knative's autoscaler does it."""
    SATURATION = "saturation"
    """Spare KV cache and queue in each replica."""
    SLO = "slo"
    """A model of TTFT and ITL from measured rates."""
    FORECAST = "forecast"
    """The `SLO` model on the demand expected when a replica started now would be ready."""


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Of `Kind.CONCURRENCY`. Defaults are Knative's, but for the target."""

    target: float = 8.0
    """Requests in flight (queued ones included) that a replica can have."""
    utilisation: float = 0.7
    """Share of `target` that it shall have on average."""
    stable_s: float = 60.0
    panic_s: float = 6.0
    panic_at: float = 2.0
    """Panic while the demand of the panic window is this many times what is ready; nothing shrinks meanwhile,
    nor for `stable_s` after."""
    weighted: bool = False
    """Averages give recent samples more weight, exponentially."""


@dataclass(frozen=True, slots=True)
class Saturation:
    """Of `Kind.SATURATION`."""

    spare_kv: float = 0.20
    """Share of KV blocks that shall be free on average."""
    spare_queue: float = 1.0
    """Requests waiting per replica, router's queue included, from which it counts as saturated."""
    window_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Slo:
    """Of `Kind.SLO` and `Kind.FORECAST`: `attainment` of the requests shall be within both times."""

    ttft_s: float = 1.0
    itl_s: float = 0.050
    attainment: float = 0.95
    window_s: float = 60.0
    """Arrivals are averaged over this long; what surely rises is believed in a sixth of it."""
    headroom: float = 0.0
    """Demand is taken to be this share higher than it is: what may come before a start is done."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of `Kind.FORECAST`, beside its `Slo`."""

    season_s: float = 86_400.0
    """Period of the load; looked back by whole periods where history reaches that far."""
    quantile: float = 0.9
    """Demand is taken at this quantile of what forecasts missed lately."""
    prior: float = 1.0
    """Jumps that are taken to have come in as many times twenty minutes before the first that are known: what is
    kept in reserve where little was seen. 0: nothing without evidence."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of the count. `least` 0 allows none at all once nothing was asked for `idle_s`."""

    least: int = 1
    most: int = 1_000
    idle_s: float = 600.0
    domain_least: int = 0
    """Ready replicas that each failure domain keeps of those it has, when others go."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a count may move. Steps are counted from the replicas that are ready, so that deciding again before
    they are there changes nothing; cooldowns from the last change of either direction."""

    up_replicas: int = 1_000
    """At most this many more than are ready …"""
    up_factor: float = 4.0
    """… and at most this many times as many (one more than are ready is always allowed)."""
    up_cooldown_s: float = 0.0
    down_replicas: int = 1_000
    """At most this many fewer than are ready …"""
    down_factor: float = 0.5
    """… and at least this share of them. The last one is not bound by either: it waits for `Bounds.idle_s`."""
    down_cooldown_s: float = 60.0
    settle_s: float = 300.0
    """The count falls only to the highest that was wanted in this time: what flaps does not shrink."""
    margin: float = 0.1
    """Nothing shrinks until the need is this share below the lower count: hysteresis."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Other bounds for some hours: `days` of the week (0 is Monday), seconds of the day in UTC; an end before its
    beginning lies on the next day."""

    days: frozenset[int]
    from_s: float
    until_s: float
    least: int
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Price:
    """What one replica costs."""

    per_hour: float = 1.0
    """Money, in any one currency."""
    power_w: float = 0.0


@dataclass(frozen=True, slots=True)
class Caps:
    """What all variants of one model may take together; None: without limit."""

    per_hour: float | None = None
    power_w: float | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    """How one deployment is scaled.

    Deployments of one `group` serve the same model from different hardware: their demand is one, the cheapest
    grows and the dearest shrinks. Empty: a group of its own. A prefill pool and a decode pool are two groups.
    """

    kind: Kind = Kind.FIXED
    group: str = ""
    concurrency: Concurrency = field(default_factory=Concurrency)
    saturation: Saturation = field(default_factory=Saturation)
    slo: Slo = field(default_factory=Slo)
    forecast: Forecast = field(default_factory=Forecast)
    bounds: Bounds = field(default_factory=Bounds)
    pace: Pace = field(default_factory=Pace)
    schedules: Sequence[Schedule] = ()
    price: Price = field(default_factory=Price)
    caps: Caps = field(default_factory=Caps)
    paused: bool = False
    """True: the count stands as it is."""
    fresh_s: float = 15.0
    """Age at which a signal no longer counts as known."""


def lookback_s(policy: Policy) -> float:
    """How far back samples and wanted counts are looked at, seconds."""
    concurrency = policy.concurrency.stable_s + policy.concurrency.panic_s
    windows = max(concurrency, policy.saturation.window_s, policy.slo.window_s, policy.pace.settle_s)
    return policy.fresh_s + max(windows, policy.bounds.idle_s if policy.bounds.least == 0 else 0.0)


def memory_s(policy: Policy) -> float:
    """How far back minutes are looked at, seconds."""
    return SEASONS * policy.forecast.season_s if policy.kind is Kind.FORECAST else 0.0
