"""What becomes of every request, and what a scaler is told of it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from stoker.bench.desk import Asked
from stoker.bench.replicas import Clock, Job
from stoker.common.errors import StokerError
from stoker.router.core import Decision
from stoker.simulate.fleet import SimulatedFleet
from stoker.simulate.settings import Objective

BIN_S = 30.0
"""Width of what is drawn."""


@dataclass(slots=True)
class Interval:
    """What happened since the scaler was last told."""

    arrived: int = 0
    prompt_tokens: float = 0.0
    prompt_squares: float = 0.0
    ttfts: int = 0
    ttft_s: float = 0.0
    answered: int = 0
    within: int = 0
    tokens: int = 0
    decoding_s: float = 0.0


@dataclass(slots=True)
class Bin:
    """The requests that arrived in one stretch of time."""

    arrived: int = 0
    prompt_tokens: int = 0
    within: int = 0


@dataclass(slots=True)
class Integral:
    """A count over time, and its integral."""

    value: int = 0
    _sum: float = 0.0
    _at: float = 0.0

    def change(self, by: int, now: float) -> None:
        """The count changes now."""
        self._sum += self.value * (now - self._at)
        self._at = now
        self.value += by

    def until(self, now: float) -> float:
        """The integral until now."""
        return self._sum + self.value * (now - self._at)


@dataclass
class Ledger:
    """Listens to the desk; every request that arrives ends in exactly one of `answered` and `refused`."""

    clock: Clock
    fleet: SimulatedFleet
    objective: Objective
    arrived: int = 0
    answered: int = 0
    refused_count: int = 0
    within: int = 0
    over_bound: int = 0
    ttfts: array[float] = field(default_factory=lambda: array("d"))
    itls: array[float] = field(default_factory=lambda: array("d"))
    """Of each request with more than one token, the mean."""
    interval: Interval = field(default_factory=Interval)
    bins: list[Bin] = field(default_factory=list)
    held: Integral = field(default_factory=Integral)
    """Requests in the router."""
    sent_on: Integral = field(default_factory=Integral)
    """Requests in the engines."""
    context_tokens: float = 0.0
    """Of all answered: their context in the middle of decoding."""

    @property
    def open(self) -> int:
        """Requests that have arrived and have not ended."""
        return self.arrived - self.answered - self.refused_count

    def arrives(self, job: Job) -> None:
        """A request comes to the router."""
        self.arrived += 1
        self.held.change(1, self.clock.now)
        interval = self.interval
        interval.arrived += 1
        interval.prompt_tokens += job.prompt_tokens
        interval.prompt_squares += job.prompt_tokens * job.prompt_tokens
        bin_ = self._bin(self.clock.now)
        bin_.arrived += 1
        bin_.prompt_tokens += job.prompt_tokens

    def sent(self, asked: Asked, decision: Decision) -> None:
        """It goes to a replica."""
        self.over_bound += decision.over_bound
        self.held.change(-1, self.clock.now)
        self.sent_on.change(1, self.clock.now)
        self.fleet.sent(asked.replica, asked.job)

    def lost(self, asked: Asked) -> None:
        """Its replica died: it is in the router again."""
        self.sent_on.change(-1, self.clock.now)
        self.held.change(1, self.clock.now)

    def first_token(self, asked: Asked) -> None:
        """Its first token came."""
        ttft_s = self.clock.now - asked.at
        self.ttfts.append(ttft_s)
        self.interval.ttfts += 1
        self.interval.ttft_s += ttft_s
        self.fleet.touched(asked.replica)

    def ended(self, asked: Asked) -> None:
        """It was answered."""
        now, job, objective = self.clock.now, asked.job, self.objective
        self.answered += 1
        self.sent_on.change(-1, now)
        self.fleet.ended(asked.replica)
        self.context_tokens += job.prompt_tokens + job.output_tokens / 2
        first = asked.first_token_at if asked.first_token_at is not None else now
        within = first - asked.at <= objective.ttft_s
        interval = self.interval
        interval.answered += 1
        if job.output_tokens > 1:
            itl_s = (now - first) / (job.output_tokens - 1)
            self.itls.append(itl_s)
            within = within and (objective.itl_s is None or itl_s <= objective.itl_s)
            interval.tokens += job.output_tokens - 1
            interval.decoding_s += now - first
        interval.within += within
        self.within += within
        self._bin(asked.at).within += within

    def refused(self, asked: Asked, error: StokerError | None) -> None:
        """It was turned away."""
        self.refused_count += 1
        self.interval.answered += 1
        self.held.change(-1, self.clock.now)

    def take(self) -> Interval:
        """What happened since this was last asked."""
        taken, self.interval = self.interval, Interval()
        return taken

    def _bin(self, at: float) -> Bin:
        number = int(at / BIN_S)
        while len(self.bins) <= number:
            self.bins.append(Bin())
        return self.bins[number]
