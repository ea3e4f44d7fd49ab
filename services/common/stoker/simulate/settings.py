"""What a simulation is told beside its trace and its policies."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from math import exp
from random import Random

from stoker.bench.replicas import Hardware
from stoker.bench.sites import Delays
from stoker.router.core import RoutingConfig
from stoker.scaler.core.signals import Startup
from stoker.simulate.hardware import DEFAULT

_Z95 = 1.6449  # of the normal distribution


@dataclass(frozen=True, slots=True)
class Starting:
    """How long a replica takes from its assignment until it serves: always alike, or log-normal around the median."""

    median_s: float = 90.0
    spread: float = 0.0
    """Standard deviation of the logarithm; 0.3 puts the 95th percentile at 1.6 times the median."""

    def drawn(self, rng: Random) -> float:
        """One start."""
        return self.median_s * exp(rng.gauss(0.0, self.spread)) if self.spread else self.median_s

    @property
    def known(self) -> Startup:
        """What a scaler has learnt of it from earlier starts."""
        return Startup(self.median_s, self.median_s * exp(_Z95 * self.spread))


@dataclass(frozen=True, slots=True)
class Objective:
    """A request is within it when its first token came in time, and the others on average."""

    ttft_s: float = 2.0
    itl_s: float | None = 0.2
    """MLPerf Inference's limits for Llama-2-70B served interactively: 2 s and 0.2 s."""


class Victims(StrEnum):
    """Which replicas that serve go when the count falls."""

    WARM = "warm"
    """The scaler's choice: those whose caches and work are worth least, successors warmed."""
    NEWEST = "newest"
    """Those that came last, as most autoscalers do it."""
    RANDOM = "random"


@dataclass(frozen=True, slots=True)
class Settings:
    """All that a simulation follows from, with the trace and the policy."""

    hardware: Hardware = DEFAULT
    objective: Objective = field(default_factory=Objective)
    starting: Starting = field(default_factory=Starting)
    least: int = 1
    most: int = 100
    initial: int = 1
    """Replicas that serve when the trace begins."""
    price_per_hour: float = 1.0
    """Of one replica."""
    round_s: float = 2.0
    """Between two rounds of the scaler."""
    tell_s: float = 0.5
    """Between what a replica that does anything tells of its load and its blocks."""
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    delays: Delays = field(default_factory=Delays)
    queue: int = 1_024
    """Requests that wait in the router at most, as by its default; more are refused."""
    longest_s: float = 120.0
    """How long they wait at most."""
    mtbf_s: float = 0.0
    """Mean time from a replica's start to its death (exponential, seeded); 0: none dies."""
    victims: Victims = Victims.WARM
    warm_s: float = 10.0
    """Prefill that each replica that stays may spend on prompts of those that go, as the scaler's by default."""
    retire_s: float = 30.0
    """How long these may take, as by the planner's default."""
    seed: int = 1

    def __post_init__(self) -> None:
        if self.most < self.least:
            raise ValueError(f"at least {self.least} and at most {self.most} replicas cannot both be")
