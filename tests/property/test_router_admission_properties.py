"""What holds for every line of requests."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.common.errors import Exhausted
from stoker.router.core import AdmissionQueue, Fairness, Fleet, Replica, Request, RoutingConfig

SLACK = 3_000.0
requests = st.builds(
    Request,
    keys=st.just(()),
    prompt_tokens=st.integers(1, 2_000),
    tenant=st.sampled_from("abc"),
    priority=st.integers(-1, 1),
)
steps = st.lists(st.one_of(requests, st.sampled_from(["end", "leave"])), max_size=80)


def fleet() -> Fleet:
    made = Fleet(RoutingConfig())
    for name in ("x", "y"):
        made.put(Replica(name, prefill_rate=1_000.0))
    return made


@settings(max_examples=150, deadline=None)
@given(steps, st.integers(0, 2**32), st.integers(1, 30))
def test_each_request_ends_once_and_nothing_is_left(steps: list[Request | str], seed: int, limit: int) -> None:
    made, queue, rng = fleet(), AdmissionQueue(limit, Fairness(SLACK)), Random(seed)
    waiting: dict[int, Request] = {}
    flights: list[int] = []

    def pump(now: float) -> None:
        while (grant := queue.grant(made, now, rng)) is not None:
            request = waiting.pop(grant.ticket)
            if grant.decision is not None:
                assert not made.busy(grant.decision.replica, now)
                flights.append(made.dispatch(request, grant.decision, now))

    for number, step in enumerate(steps):
        now = 0.01 * number
        if isinstance(step, Request):
            try:
                waiting[queue.join(step, made, now)] = step
            except Exhausted:
                assert len(queue) == limit
        elif step == "end" and flights:
            made.release(flights.pop(rng.randrange(len(flights))), now)
        elif step == "leave" and waiting:
            gone = rng.choice(list(waiting))
            queue.leave(gone)
            del waiting[gone]
        pump(now)
        assert len(queue) == len(waiting) <= limit
    while flights:
        made.release(flights.pop(), 10.0)
        pump(10.0)
    assert not waiting
    assert len(queue) == 0
    assert queue.drain_s(made, 0.0) == 0.0
    assert made.load.in_flight == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 2_000), min_size=20, max_size=60), st.integers(0, 2**32))
def test_no_tenant_that_waits_falls_behind_by_more_than_the_slack_and_a_request(sizes: list[int], seed: int) -> None:
    made, fairness = fleet(), Fairness(SLACK)
    queue, rng = AdmissionQueue(1_000, fairness), Random(seed)
    left = {"a": 0, "b": 0}
    tenant_of = {}
    for size in sizes:
        tenant = rng.choice("ab")
        left[tenant] += 1
        request = Request((), size, tenant=tenant)
        tenant_of[queue.join(request, made, 0.0)] = tenant
    while (grant := queue.grant(made, 0.0, rng)) is not None:
        left[tenant_of[grant.ticket]] -= 1
        if all(left.values()):
            assert abs(fairness.served("a") - fairness.served("b")) <= SLACK + 2_000
