"""What is known of a deployment's demand and of how its replicas fare, over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """One deployment at `at` (monotonic seconds). None is unknown, which is not zero.

    Rates are over the time since the sample before. Sums and means are over the replicas that are ready.
    """

    at: float
    ready: float = 0
    """Replicas that serve. Where variants share a demand, the core counts them in replicas of one variant."""
    starting: float = 0
    """Assigned or loading, not failing."""
    running: float | None = None
    """Requests in the engines' batches."""
    waiting: float | None = None
    """Requests in the engines' queues."""
    queued: float | None = None
    """Requests held by routers."""
    queue_s: float | None = None
    """Longest that one of these has been held, seconds."""
    arrivals_per_s: float | None = None
    """Requests that came to the routers."""
    prefill_tokens_per_s: float | None = None
    """Prompt tokens that came with them, cached or not."""
    prompt_scv: float | None = None
    """Squared coefficient of variation of these requests' prompt tokens: variance over squared mean."""
    decode_tokens_per_s: float | None = None
    """Tokens generated."""
    kv_usage: float | None = None
    """Mean share of KV blocks that running requests hold, 0 to 1."""
    hit_rate: float | None = None
    """Prompt tokens found in a cache over those looked up, 0 to 1."""
    ttft_s: float | None = None
    """Mean time to the first token, as routers saw it, their queue included."""
    itl_s: float | None = None
    """Mean time between tokens."""
    within_slo: float | None = None
    """Share of the requests answered since that were within the policy's times, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one replica can do, measured; None where not yet. A decode step of n sequences takes
    `step_s + n * sequence_s` seconds."""

    prefill_tokens_per_s: float | None = None
    """Uncached prompt tokens, while it does nothing else."""
    step_s: float | None = None
    sequence_s: float | None = None
    kv_tokens: float | None = None
    """Tokens of KV cache in all."""
    max_seqs: int | None = None
    """Requests in one batch at most."""


@dataclass(frozen=True, slots=True)
class Startup:
    """Seconds from the decision to a ready replica, as measured on earlier starts."""

    p50_s: float | None = None
    p95_s: float | None = None


@dataclass(frozen=True, slots=True)
class Minute:
    """One minute of demand, kept for long: mean rates at the minute that began at `at` (wall-clock seconds)."""

    at: float
    arrivals_per_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    hit_rate: float


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a policy asked for at `at` (monotonic seconds), before limits: replicas of this deployment alone for the
    whole demand of its group. `correction` is what it had learnt by then of its own model's error."""

    at: float
    replicas: float
    correction: float = 1.0


@dataclass(frozen=True, slots=True)
class History:
    """What is known of one deployment: its last minutes in samples, its last days in minutes, oldest first.

    `samples` and `wanted` reach back `policy.lookback_s()`, `minutes` `policy.memory_s()`; older ones do no harm.
    `now_wall` is the wall-clock second of the round, so that minutes can be placed beside `now`; 0 is unknown.
    """

    samples: Sequence[Sample] = ()
    minutes: Sequence[Minute] = ()
    wanted: Sequence[Wanted] = ()
    capacity: Capacity = Capacity()
    startup: Startup = Startup()
    changed_at: float | None = None
    """When the count last changed (monotonic seconds); None: not known to have."""
    now_wall: float = 0.0
