"""The count for the demand that is expected when a replica started now would be ready.

What is forecast is the load in busy replicas, prefill and decode together; the demand of now is scaled by how much
higher that is expected to be, or may be without anybody expecting it (`core.reserve`). Never less than the demand of
now: what falls is seen soon enough.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from stoker.scaler.core import forecasting
from stoker.scaler.core.model import Demand
from stoker.scaler.core.past import Past, Series
from stoker.scaler.core.policies import slo
from stoker.scaler.core.policy import Policy
from stoker.scaler.core.reserve import reserve
from stoker.scaler.core.signals import Capacity, History
from stoker.scaler.core.values import Need, Reason

T = TypeVar("T", float, Series)

_STARTUP_S = 60.0
"""Assumed as long as no start was measured."""


def need(policy: Policy, history: History, now: float) -> Need:
    """The count for the highest demand within the time of a start."""
    demand, missing = slo.measured(policy, history, now)
    if demand is None:
        return Need(None, Reason.UNKNOWN, missing)
    startup = history.startup
    ahead_s = next((s for s in (startup.p95_s, startup.p50_s) if s is not None), _STARTUP_S)
    load = Busy.of(history.capacity)
    current = load.busy(demand.arrivals_per_s, demand.uncached_tokens_per_s, demand.decode_tokens_per_s)
    forecast = forecasting.highest(
        history.minutes,
        load,
        history.now_wall,
        current,
        ahead_s,
        season_s=policy.forecast.season_s,
        quantile=policy.forecast.quantile,
    )
    # Half of what may be late may come unforeseen; what of that does not is left to chance in the queues.
    spare = reserve(
        history.minutes,
        load,
        ahead_s,
        settle_s=policy.pace.settle_s,
        season_s=policy.forecast.season_s,
        allowed=(1.0 - policy.slo.attainment) / 2.0,
        prior=policy.forecast.prior,
    )
    reserved = spare.of(current)
    ready_for = max(forecast.expected, reserved)
    expected = _expected(history, demand, load, current, ready_for)
    stricter = replace(policy.slo, attainment=policy.slo.attainment + spare.missed)
    answer = slo.answer(replace(policy, slo=stricter), history, now, expected, Reason.FORECAST)
    told = {f"loss_{name}": loss for name, loss in forecast.losses.items()}
    numbers = {"ahead_s": ahead_s, "load": current, "expected_load": forecast.expected, "missed": forecast.missed}
    numbers |= {"reserve": spare.growth, "reserve_load": reserved, "unforeseen": spare.missed}
    return replace(answer, numbers={**answer.numbers, **numbers, **told})


@dataclass(frozen=True, slots=True)
class Busy:
    """Replicas kept busy by a minute's demand; requests a second where nothing is measured yet.

    A load is only compared with itself, and its two parts drift with each measurement: two digits of each are kept,
    so that it is the same load for a while.
    """

    prefill_s: float = 0.0
    """Of one uncached token."""
    sequence_s: float = 0.0

    @classmethod
    def of(cls, capacity: Capacity) -> Busy:
        """As it was measured."""
        prefill = capacity.prefill_tokens_per_s
        return cls(_rounded(1.0 / prefill if prefill else 0.0), _rounded(capacity.sequence_s or 0.0))

    def __call__(self, past: Past) -> Series:
        """The load of each minute."""
        uncached = past.prefill_tokens_per_s * (1.0 - past.hit_rate)
        return self.busy(past.arrivals_per_s, uncached, past.decode_tokens_per_s)

    def busy(self, arrivals_per_s: T, uncached_per_s: T, decode_per_s: T) -> T:
        """The load of these rates: of requests, of prompt tokens to compute, of tokens to generate."""
        if not self.prefill_s and not self.sequence_s:
            return arrivals_per_s
        return uncached_per_s * self.prefill_s + decode_per_s * self.sequence_s


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")


def _expected(history: History, demand: Demand, load: Busy, current: float, expected: float) -> Demand:
    """The demand at the expected load: that of now, grown; that of the last busy minute where there is none now."""
    if expected <= current:
        return demand
    if current > 0.0:
        return demand.times(expected / current)
    lately = Past.of(history.minutes[-forecasting.TRIED :])
    loads = load(lately)
    busy = np.flatnonzero(loads > 0.0)
    if not len(busy):
        return demand
    minute, then = lately[int(busy[-1])], float(loads[busy[-1]])
    uncached = minute.prefill_tokens_per_s * (1.0 - minute.hit_rate)
    return Demand(minute.arrivals_per_s, uncached, minute.decode_tokens_per_s).times(expected / then)
