"""The delay that a refusal names is true: who waits as told is let in, and no sooner would do."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stoker.common.errors import Exhausted
from stoker.router.core import (
    AdmissionQueue,
    Fairness,
    Fleet,
    Grant,
    Replica,
    Request,
    RoutingConfig,
    TenantLimits,
    TenantMeter,
)

RATE = 1_000.0
STEP = 0.01


@given(
    requests=st.sampled_from([0.0, 0.5, 3.0, 7.3]),
    tokens=st.sampled_from([0.0, 100.0, 333.3]),
    burst=st.sampled_from([0.7, 10.0, 60.0]),
    asked=st.lists(st.tuples(st.floats(0, 5), st.floats(1, 5_000)), max_size=30),
    last=st.floats(1, 5_000),
)
@example(requests=0.5, tokens=100.0, burst=0.7, asked=[(0.0, 5_000.0)], last=10.0)  # over both limits
def test_a_tenant_that_waits_as_told_is_admitted_at_once(
    requests: float, tokens: float, burst: float, asked: list[tuple[float, float]], last: float
) -> None:
    meter, limits = TenantMeter(), TenantLimits(requests_per_s=requests, tokens_per_s=tokens, burst_s=burst)
    now = 1_000_000.0  # a clock that has run for days: small steps are lost in its last digits
    for pause, amount in asked:
        now += pause
        try:
            meter.take("a", limits, amount, now)
        except Exhausted:
            continue
    try:
        meter.take("a", limits, last, now)
    except Exhausted as refused:
        delay = refused.retry_after_s
        assert delay is not None
        assert delay > 0
        if delay > 0.01:
            with pytest.raises(Exhausted):
                meter.take("a", limits, last, now + 0.9 * delay)
        meter.take("a", limits, last, now + delay)


class World:
    """Replicas that prefill one request after the other at their rate, behind a queue in the router."""

    def __init__(self, replicas: int, limit: int) -> None:
        self.fleet = Fleet(RoutingConfig())
        self.queue = AdmissionQueue(limit, Fairness(0.0))
        self.now = 0.0
        self.rng = Random(1)
        self.requests: dict[int, Request] = {}
        self.work: dict[str, deque[tuple[int, float]]] = {}
        for number in range(replicas):
            self.fleet.put(Replica(f"r{number}", prefill_rate=RATE))
            self.work[f"r{number}"] = deque()

    def ask(self, request: Request) -> None:
        """Raises Exhausted where the queue is full."""
        self.requests[self.queue.join(request, self.fleet, self.now)] = request
        self._grant()

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + STEP)
            for line in self.work.values():
                while line and line[0][1] <= self.now:
                    flight, _ = line.popleft()
                    self.fleet.first_token(flight, self.now)
                    self.fleet.release(flight, self.now)
            self._grant()

    def _grant(self) -> None:
        grant: Grant | None
        while (grant := self.queue.grant(self.fleet, self.now, self.rng)) is not None:
            assert grant.decision is not None
            request, line = self.requests.pop(grant.ticket), self.work[grant.decision.replica]
            begins = max(self.now, line[-1][1] if line else 0.0)
            flight = self.fleet.dispatch(request, grant.decision, self.now)
            line.append((flight, begins + request.prompt_tokens / RATE))


@given(
    replicas=st.integers(1, 4),
    limit=st.integers(1, 8),
    sizes=st.lists(st.integers(500, 20_000), min_size=20, max_size=30),
)
def test_who_is_refused_by_a_full_queue_finds_room_when_told(replicas: int, limit: int, sizes: list[int]) -> None:
    world = World(replicas, limit)
    for number, size in enumerate(sizes):
        request = Request((number,), size, 16)
        try:
            world.ask(request)
        except Exhausted as refused:
            world.run((refused.retry_after_s or 0.0) + 2 * STEP)
            world.ask(request)
            return
    raise AssertionError("more came than the queue and the replicas take")
