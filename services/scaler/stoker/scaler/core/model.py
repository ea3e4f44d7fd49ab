"""How many replicas carry a demand within the times of an SLO.

Prefill: the pool is a queue with as many servers as there are replicas; a request is served for its uncached tokens
over the measured prefill rate. Its TTFT is wait, prefill and one decode step. Decode: each second of a replica that
prefill leaves goes to steps of `step_s + n * sequence_s` for n sequences; by Little's law n is what the tokens asked
for make of it. Both grow together: what prefill takes, lengthens the steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from statistics import NormalDist

from stoker.control.core.queueing import ending_rate, erlang_c, spread
from stoker.scaler.core.policy import Slo
from stoker.scaler.core.signals import Capacity

MOST = 100_000
"""More replicas than this are never asked for."""
_SLACK = 1.25
"""Where one sequence alone takes longer a token than asked, steps may be this much longer than its own."""
_LIFETIME = 0.7
"""Variance of the sequences that run beside one, averaged over its life, over their variance at one moment: 0.67
for lives of equal length, 0.74 for exponential ones (M/G/∞)."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked of a deployment."""

    arrivals_per_s: float
    uncached_tokens_per_s: float
    """Prompt tokens to compute."""
    decode_tokens_per_s: float
    service_scv: float = 1.0
    """Squared coefficient of variation of a request's uncached tokens."""
    arrival_scv: float = 1.0
    """The same of the time between arrivals."""
    kv_tokens: float = 0.0
    """KV that one running sequence holds, tokens."""

    @property
    def none(self) -> bool:
        """Nothing is asked."""
        return not (self.arrivals_per_s or self.uncached_tokens_per_s or self.decode_tokens_per_s)

    def times(self, factor: float) -> Demand:
        """So much more of the same."""
        return replace(
            self,
            arrivals_per_s=factor * self.arrivals_per_s,
            uncached_tokens_per_s=factor * self.uncached_tokens_per_s,
            decode_tokens_per_s=factor * self.decode_tokens_per_s,
        )


@dataclass(frozen=True, slots=True)
class Estimate:
    """Replicas that the demand needs: for each side alone, as fractions, and the larger."""

    prefill: float
    decode: float
    late: float
    """Share of the requests that miss the TTFT with as many, rounded up."""

    @property
    def replicas(self) -> float:
        """What both need."""
        return max(self.prefill, self.decode)


@dataclass(frozen=True)
class Model:
    """A pool of replicas with this capacity under this demand."""

    capacity: Capacity
    slo: Slo
    demand: Demand

    def unmeasured(self) -> list[str]:
        """What the model needs and nobody has measured yet. Nothing else may be asked until it is known."""
        missing = []
        if self.demand.uncached_tokens_per_s and not self.capacity.prefill_tokens_per_s:
            missing.append("prefill_tokens_per_s")
        if self.demand.decode_tokens_per_s:
            missing += [name for name in ("step_s", "sequence_s") if getattr(self.capacity, name) is None]
        return missing

    def estimate(self) -> Estimate:
        """The smallest pool whose attainment holds."""
        if self.demand.none:
            return Estimate(0.0, 0.0, 0.0)
        floor = self._prefill + self._decode
        decode = _least_real(self._decodes_in_time, floor) if self._decode else 0.0
        late = cache(self.late)  # asked for the same counts again
        count = _least_whole(lambda count: late(count) <= self.allowed, max(1, math.ceil(floor)))
        prefill = count - 1 + _part(late(count - 1), late(count), self.allowed)
        return Estimate(prefill, decode, late(max(count, math.ceil(decode))))

    @cached_property
    def allowed(self) -> float:
        """Share of the requests that may miss the TTFT. Those that would miss it on an empty replica are not what
        more replicas could mend: near and beyond that point only the wait is kept short."""
        may = 1.0 - self.slo.attainment
        hopeless = sum(own >= self._left(1.0) for own in self._services) / len(self._services)
        return max(may, hopeless + may / 4.0)

    def late(self, count: int) -> float:
        """Share of the requests that miss the TTFT with so many replicas."""
        if count < 1 or self._spare(count) <= 0.0:
            return 1.0
        delayed = erlang_c(count, self._prefill)
        demand, left = self.demand, self._left(max(1.0, self._sequences(count) / count))
        rate = ending_rate(count, demand.arrivals_per_s, self._service_s, demand.arrival_scv, demand.service_scv)
        missed = (1.0 if own >= left else delayed * math.exp((own - left) * rate) for own in self._services)
        return sum(missed) / len(self._services)

    def _decodes_in_time(self, count: float) -> bool:
        """Whether steps are short enough, and the running sequences fit, at the quantile of the SLO."""
        if self._spare(count) <= 0.0:
            return False
        step_s, sequence_s = self.capacity.step_s or 0.0, self.capacity.sequence_s or 0.0
        mean, z = self._sequences(count), self._deviations
        beside = (mean + z * math.sqrt(_LIFETIME * mean)) / count
        most = (mean + z * math.sqrt(mean)) / count
        itl_s = (step_s + beside * sequence_s) / (1.0 - self._prefill / count)
        fits = most <= (self.capacity.max_seqs or math.inf)
        if self.capacity.kv_tokens:
            fits = fits and most * self.demand.kv_tokens <= self.capacity.kv_tokens
        return fits and itl_s <= max(self.slo.itl_s, _SLACK * (step_s + sequence_s))

    @cached_property
    def _deviations(self) -> float:
        """Standard deviations above the mean at the quantile of the SLO."""
        return NormalDist().inv_cdf(self.slo.attainment)

    @cached_property
    def _prefill(self) -> float:
        """Replicas that prefill alone keeps busy."""
        return self.demand.uncached_tokens_per_s / (self.capacity.prefill_tokens_per_s or math.inf)

    @cached_property
    def _decode(self) -> float:
        """Replicas that sequences alone keep busy, steps not counted."""
        return self.demand.decode_tokens_per_s * (self.capacity.sequence_s or 0.0)

    def _spare(self, count: float) -> float:
        """Replicas' time left for the fixed part of steps."""
        return count - self._prefill - self._decode

    def _sequences(self, count: float) -> float:
        """Sequences that run at once in so many replicas, on average."""
        steps = self.demand.decode_tokens_per_s * (self.capacity.step_s or 0.0)
        return count * steps / self._spare(count)

    def _left(self, sequences: float) -> float:
        """Seconds of the TTFT that are left for wait and prefill, a step being of so many sequences."""
        return self.slo.ttft_s - (self.capacity.step_s or 0.0) - sequences * (self.capacity.sequence_s or 0.0)

    @cached_property
    def _service_s(self) -> float:
        """Mean prefill time of a request."""
        return self._prefill / self.demand.arrivals_per_s if self.demand.arrivals_per_s else 0.0

    @cached_property
    def _services(self) -> list[float]:
        return spread(self._service_s, self.demand.service_scv)


def _least_real(enough: Callable[[float], bool], floor: float) -> float:
    """The smallest number above `floor` that is enough, to a thousandth."""
    low, high = floor, max(1.0, 2 * floor)
    while not enough(high):
        low, high = high, 2 * high
        if high > MOST:
            return float(MOST)
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _least_whole(enough: Callable[[int], bool], first: int) -> int:
    """The smallest whole number from `first` on that is enough."""
    low, step = first - 1, 1
    while not enough(low + step):
        low, step = low + step, 2 * step
        if low + step > MOST:
            return MOST
    high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _part(fewer: float, enough: float, allowed: float) -> float:
    """Which part of the last replica is needed: between what is late without it and with it."""
    if enough <= 0.0 or fewer <= enough:
        return 1.0
    return min(1.0, max(0.0, math.log(fewer / allowed) / math.log(fewer / enough)))
