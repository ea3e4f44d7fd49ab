"""How many replicas keep an SLO, by queueing.

Prefill: the pool is a queue with a server for each place where a prompt can be worked on (`Layout.queues`); a request
is served for its prefill and one decode step of the others for each chunk of it. Decode: what prefill leaves of a
rank's time goes to steps; by Little's law the number of sequences that run is arrivals times their length times the
time of a token, which itself depends on that number: the smallest fixed point. The shares of the requests that come
too late in either are added: no request needs to miss both.

Waiting: `stoker.control.core.queueing`. How a request's mean time between tokens varies: `Serving._itl`, whose form
was checked against the simulator (docs/sizing.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

from stoker.control.core.queueing import ending_rate, erlang_c, spread
from stoker.planner.core.sizing import factors
from stoker.planner.core.sizing.memory import Engine, Memory
from stoker.planner.core.sizing.rates import Rates
from stoker.planner.core.sizing.workload import Role, Slo, Workload

MOST = 100_000
"""More replicas than this are never asked for."""
_LIFETIME = 0.7
"""Variance of the sequences that run beside one, averaged over its life, over their variance at one moment: 0.67
for lives of equal length, 0.74 for exponential ones (M/G/∞)."""
_FULL = 0.9
"""So full may a KV cache be: beyond, what routers cannot even out makes some replica preempt or let wait."""
_UNEVEN = 0.25
"""Share by which the fullest decode replica holds more than the mean, as simulations show it (docs/sizing.md)."""
_LEAST_LEFT = 0.02
_NORMAL = NormalDist()
_RARE = 3.0
"""Standard deviations above the mean of the sequences that run, for which there is room: in simulations, room for
two of them let one request in ten wait."""


@dataclass(frozen=True, slots=True)
class State:
    """A pool with so many replicas. Times are at the SLO's percentile; infinite where the queue grows without end."""

    replicas: int
    ttft_s: float
    itl_s: float
    late_ttft: float
    late_itl: float
    prefill_share: float
    """Of a rank's time."""
    sequences: float
    """That run on one rank at once, on average."""
    fits: bool
    """Whether as many as run at the SLO's percentile have room in the KV cache and in the batch."""

    @property
    def late(self) -> float:
        """Share of the requests that miss a time."""
        return min(1.0, self.late_ttft + self.late_itl)


@dataclass(frozen=True)
class Serving:
    """Replicas of one role in one layout, under one workload. `transfer_s` is the time that KV needs to get from
    prefill to decode; `may_miss` the share of requests that may be late because of this pool."""

    rates: Rates
    memory: Memory
    engine: Engine
    workload: Workload
    slo: Slo
    role: Role
    may_miss: float
    transfer_s: float = 0.0

    def refusal(self) -> str | None:
        """Why no number of replicas can keep the SLO; None where some can."""
        if self.role is not Role.DECODE and self.first_token_s >= self.slo.ttft_s:
            return f"prefill alone takes {1e3 * self.first_token_s:,.0f} ms at the percentile asked for"
        if self.slo.itl_s is not None and self._tokens and self.token_s > self.slo.itl_s:
            return f"one sequence alone takes {1e3 * self.token_s:,.1f} ms a token"
        if self.role is not Role.PREFILL and self.room < 1.0:
            return f"not one sequence of {self.workload.length:,} tokens has room in its KV cache"
        return None

    @cached_property
    def first_token_s(self) -> float:
        """TTFT on an empty replica, at the percentile asked for."""
        alone = sorted(own + self.transfer_s + factors.REQUEST_S for own in self.prefills)
        return alone[max(0, min(len(alone) - 1, math.ceil((1.0 - self.may_miss) * len(alone)) - 1))]

    @cached_property
    def token_s(self) -> float:
        """Time of a token where nothing else runs."""
        return self._step(1.0)

    def least(self) -> State | None:
        """The fewest replicas that keep the SLO; None where `MOST` do not."""
        first = max(1, math.ceil(self._floor))
        low, step = first - 1, 1
        while not self.enough(low + step):
            low, step = low + step, 2 * step
            if low + step > MOST:
                return None
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.enough(middle) else (middle, high)
        return self.state(high)

    def enough(self, replicas: int) -> bool:
        """Whether so many keep the SLO."""
        state = self.state(replicas)
        return state.fits and state.late <= self.may_miss

    def state(self, replicas: int) -> State:
        """What so many are like."""
        queues = replicas * self.rates.layout.queues
        share = self._offered / queues
        sequences = self._sequences(queues, share)
        if replicas < 1 or share >= 1.0 or sequences is None:
            return State(replicas, math.inf, math.inf, 1.0, 1.0, share, math.inf, fits=False)
        step_s = self._step(sequences) if self._tokens else 0.0
        itl_s, deviation, common_s = self._itl(queues, share, sequences, step_s)
        late_itl = 0.0
        if self.slo.itl_s is not None and self._tokens:
            late_itl = _above(self.slo.itl_s, itl_s, deviation)
        percentile = _NORMAL.inv_cdf(min(1.0 - 1e-9, 1.0 - self.may_miss))
        # As many more run as tokens take longer for all. What has no room waits long: that shall be rare.
        common = sequences * common_s / itl_s if itl_s else 0.0
        most = (1.0 + self._uneven(queues)) * sequences + max(_RARE, percentile) * math.sqrt(sequences + common**2)
        late_after = self._late_after(queues, step_s)
        return State(
            replicas,
            _quantile(late_after, self.may_miss) if self.role is not Role.DECODE else 0.0,
            itl_s + percentile * deviation,
            late_after(self.slo.ttft_s) if self.role is not Role.DECODE else 0.0,
            late_itl,
            share,
            sequences,
            most <= self.room,
        )

    def binding(self, state: State) -> tuple[str, str]:
        """What one replica fewer would break, and what of the hardware that comes from."""
        workload = self.workload
        decode = self.rates.step_part(max(1.0, state.sequences), workload.context).binding
        uncached = workload.prompt_tokens * (1.0 - workload.hit_rate)
        prefill = self.rates.prefill_part(uncached, 0.0, self.engine.batched_tokens).binding
        if state.replicas <= 1:
            return "one_replica", decode if self.role is Role.DECODE else prefill
        fewer = self.state(state.replicas - 1)
        if math.isinf(fewer.ttft_s) and math.isinf(fewer.itl_s):
            mostly_prefill = self.role is Role.PREFILL or fewer.prefill_share > 0.5
            return "throughput", prefill if mostly_prefill else decode
        if not fewer.fits:
            return ("kv_cache", "memory") if self._kv_room <= self._batch_room else ("max_seqs", "setting")
        if fewer.late_itl > fewer.late_ttft:
            return "itl", decode
        return "ttft", prefill

    @cached_property
    def prefills(self) -> list[float]:
        """Equally likely times of a prefill."""
        workload = self.workload
        prompts = spread(workload.prompt_tokens, workload.prompt_scv)
        return [
            self.rates.prefill_s(p * (1.0 - workload.hit_rate), p * workload.hit_rate, self.engine.batched_tokens)
            for p in prompts
        ]

    @cached_property
    def _chunks(self) -> float:
        uncached = self.workload.prompt_tokens * (1.0 - self.workload.hit_rate)
        return max(1.0, uncached / self.engine.batched_tokens)

    @property
    def _offered(self) -> float:
        """Places that prefill alone keeps busy."""
        if self.role is Role.DECODE:
            return 0.0
        return self.workload.requests_per_s * sum(self.prefills) / len(self.prefills)

    @property
    def _floor(self) -> float:
        return self._offered / self.rates.layout.queues

    @property
    def _tokens(self) -> float:
        """Tokens that each request gets by decode steps: the first comes with its prefill."""
        return 0.0 if self.role is Role.PREFILL else max(0.0, self.workload.output_tokens - 1.0)

    @cached_property
    def _kv_room(self) -> float:
        """Sequences that the KV cache of one queue holds, each for its whole answer."""
        kept = next(iter(self.memory.sequences.values()))
        return _FULL * kept / self.rates.layout.queues

    @property
    def _batch_room(self) -> float:
        return self.engine.max_seqs / self.rates.layout.pp

    @property
    def room(self) -> float:
        """Sequences that one queue holds at once."""
        return min(self._kv_room, self._batch_room)

    @cached_property
    def _grid(self) -> list[tuple[float, float]]:
        """Step times at numbers of sequences, between which they are nearly straight."""
        counts = [0.25 * 2 ** (place / 2) for place in range(2 * 14)]
        return [(count, self.rates.step_s(count, self.workload.context)) for count in counts]

    def _step(self, sequences: float) -> float:
        """Seconds of one step, interpolated."""
        grid = self._grid
        place = min(max(1, math.ceil(2 * math.log2(max(1e-9, sequences) / 0.25))), len(grid) - 1)
        (n0, s0), (n1, s1) = grid[place - 1], grid[place]
        return s0 + (sequences - n0) * (s1 - s0) / (n1 - n0)

    def _sequences(self, queues: int, share: float) -> float | None:
        """That run on one rank; None where their number grows without end."""
        if not self._tokens:
            return 0.0
        if share >= 1.0 or queues < 1:
            return None
        rate = self.workload.requests_per_s * self._tokens / queues / (1.0 - share)
        # More than the batch holds is no state that lasts.
        most = min(self.room, self._grid[-1][0])
        if rate * self._step(most) > most:
            return None
        low, high = 0.0, most
        for _ in range(60):
            middle = (low + high) / 2.0
            low, high = (middle, high) if rate * self._step(middle) > middle else (low, middle)
        return high

    def _itl(self, queues: int, share: float, sequences: float, step_s: float) -> tuple[float, float, float]:
        """Over requests of their mean time between tokens: mean, standard deviation, and the part of the latter that
        all queues have in common.

        What a request meets varies by the sequences beside it and by the prefills that interrupt it. Routers even
        out what differs between queues; what all have in common is amplified, as whatever lengthens a token also
        lets more sequences and more prefills come together: by one over the share of the time that is left.
        """
        if not self._tokens:
            return 0.0, 0.0, 0.0
        itl_s = step_s / (1.0 - share)
        rate = self.workload.requests_per_s / queues
        slope = (self._step(1.01 * sequences + 0.01) - step_s) / (0.01 * sequences + 0.01)
        beside = _LIFETIME * sequences * slope**2
        uneven = (self._uneven(queues) * sequences * slope) ** 2
        interrupted = 0.0
        if self.role is Role.BOTH:
            squares = sum(own * own for own in self.prefills) / len(self.prefills)
            interrupted = rate * squares * itl_s / self._tokens
        left = max(_LEAST_LEFT, 1.0 - share - rate * self._tokens * slope)
        common = (beside + interrupted) / left**2 / queues
        own = ((beside + uneven) / (1.0 - share) ** 2 + interrupted) * (1.0 - 1.0 / queues)
        return itl_s, math.sqrt(common + own), math.sqrt(common)

    def _uneven(self, queues: int) -> float:
        """By how much a replica may hold more than its share. Routers spread prefill work more evenly than sequences,
        which stay where they are."""
        return _UNEVEN if self.role is Role.DECODE and queues > 1 else 0.0

    def _late_after(self, queues: int, step_s: float) -> Callable[[float], float]:
        """The share of the requests whose first token comes after a time."""
        workload = self.workload
        owns = [own + self._chunks * step_s for own in self.prefills]
        mean = sum(owns) / len(owns)
        scv = sum(own * own for own in owns) / len(owns) / (mean * mean) - 1.0 if mean else 0.0
        delayed = erlang_c(queues, workload.requests_per_s * mean)
        ending = ending_rate(queues, workload.requests_per_s, mean, workload.arrival_scv, max(0.0, scv))
        # Whoever comes waits for the step that is under way.
        fixed_s = factors.REQUEST_S + self.transfer_s + step_s / 2.0

        def late(ttft_s: float) -> float:
            left = ttft_s - fixed_s
            return sum(1.0 if own >= left else delayed * math.exp((own - left) * ending) for own in owns) / len(owns)

        return late


def _above(limit: float, mean: float, deviation: float) -> float:
    if deviation <= 0.0:
        return float(mean > limit)
    return 1.0 - _NORMAL.cdf((limit - mean) / deviation)


def _quantile(late: Callable[[float], float], share: float) -> float:
    """The time after which no more than this share is late, to a thousandth."""
    high = 1e-3
    while late(high) > share:
        high *= 2.0
        if high > 1e6:
            return math.inf
    low = high / 2.0
    while high - low > 1e-3 * high:
        middle = (low + high) / 2.0
        low, high = (middle, high) if late(middle) > share else (low, middle)
    return high
