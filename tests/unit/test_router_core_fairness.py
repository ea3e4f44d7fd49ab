"""Tenants: whose turn it is, what each may ask for, and whom a full queue sends away."""

from __future__ import annotations

from random import Random

import pytest

from stoker.common.errors import Exhausted
from stoker.router.core import (
    AdmissionQueue,
    Fairness,
    Fleet,
    Replica,
    Request,
    RoutingConfig,
    TenantLimits,
    TenantMeter,
)

RNG = Random(1)


def fleet() -> Fleet:
    made = Fleet(RoutingConfig())
    made.put(Replica("a", prefill_rate=1_000.0))
    return made


def ask(tenant: str, tokens: int = 1_000, priority: int = 0, weight: float = 1.0) -> Request:
    return Request([], tokens, tenant=tenant, priority=priority, weight=weight)


def join(queue: AdmissionQueue, made: Fleet, request: Request, now: float = 0.0) -> int:
    return queue.join(request, made, now)


def order(queue: AdmissionQueue, made: Fleet, now: float = 0.0) -> list[int]:
    """The tickets in the order in which one replica that is free each time takes them."""
    taken = []
    while (grant := queue.grant(made, now, RNG)) is not None:
        taken.append(grant.ticket)
    return taken


def test_who_sends_more_does_not_get_more() -> None:
    made, queue = fleet(), AdmissionQueue(100, Fairness(slack=0.0))
    many = [join(queue, made, ask("many")) for _ in range(20)]
    few = [join(queue, made, ask("few")) for _ in range(5)]
    taken = order(queue, made)
    assert sorted(taken[:10]) == sorted(many[:5] + few), "turn and turn about while both wait"
    assert taken[10:] == many[5:]


def test_a_heavier_tenant_gets_its_share() -> None:
    made, queue = fleet(), AdmissionQueue(100, Fairness(slack=0.0))
    for _ in range(30):
        join(queue, made, ask("heavy", weight=2.0))
    light = [join(queue, made, ask("light")) for _ in range(30)]
    assert 9 <= sum(ticket in light for ticket in order(queue, made)[:30]) <= 11


def test_time_away_earns_no_credit_and_time_alone_costs_none() -> None:
    made, fairness = fleet(), Fairness(slack=0.0)
    queue = AdmissionQueue(100, fairness)
    for _ in range(50):
        join(queue, made, ask("early"))
    order(queue, made)
    assert fairness.served("early") == 50_000
    late = [join(queue, made, ask("late")) for _ in range(10)]
    early = [join(queue, made, ask("early")) for _ in range(10)]
    taken = order(queue, made)
    assert 4 <= sum(ticket in early for ticket in taken[:10]) <= 6
    assert sorted(taken) == sorted(late + early)


def test_within_the_slack_the_shorter_prefill_goes_first() -> None:
    made, queue = fleet(), AdmissionQueue(100, Fairness(slack=5_000.0))
    first = join(queue, made, ask("a", 900))
    second = join(queue, made, ask("b", 800))
    third = join(queue, made, ask("b", 700))
    assert order(queue, made) == [third, second, first]


def test_higher_priority_goes_first_whoever_asks() -> None:
    made, queue = fleet(), AdmissionQueue(100, Fairness(slack=0.0))
    low = join(queue, made, ask("a", 10, priority=5))
    normal = join(queue, made, ask("a", 1_000))
    high = join(queue, made, ask("b", 2_000, priority=-1))
    assert order(queue, made) == [high, normal, low]


def test_room_that_the_first_do_not_want_goes_to_the_next() -> None:
    made, queue = fleet(), AdmissionQueue(100, Fairness(slack=0.0))
    made.put(Replica("b", prefill_rate=1_000.0, adapters=frozenset({"sql"})))
    flight = made.load.dispatch("b", 5_000.0, 0.0, 0.0)
    adapter = join(queue, made, Request([], 100, adapter="sql", tenant="a", priority=-1))
    plain = join(queue, made, ask("b"))
    assert order(queue, made) == [plain], "b is busy, and the adapter is nowhere else"
    made.first_token(flight, 0.0)
    assert order(queue, made) == [adapter]


def test_a_full_queue_sends_away_the_last_of_the_greediest() -> None:
    made, queue = fleet(), AdmissionQueue(4, Fairness(slack=0.0))
    greedy = [join(queue, made, ask("greedy")) for _ in range(4)]
    modest = join(queue, made, ask("modest"))
    refused = queue.grant(made, 0.0, RNG)
    assert refused is not None
    assert (refused.ticket, isinstance(refused.error, Exhausted)) == (greedy[-1], True)
    with pytest.raises(Exhausted):
        join(queue, made, ask("greedy"))
    assert sorted(order(queue, made)) == sorted([*greedy[:3], modest])


def test_a_tenant_without_limits_is_not_counted() -> None:
    meter = TenantMeter()
    for _ in range(1_000):
        meter.take("a", TenantLimits(), 1e9, 0.0)


def test_requests_beyond_the_rate_are_told_when_to_come_again() -> None:
    meter, limits = TenantMeter(), TenantLimits(requests_per_s=2.0, burst_s=5.0)
    for _ in range(10):
        meter.take("a", limits, 1.0, 0.0)
    with pytest.raises(Exhausted) as refused:
        meter.take("a", limits, 1.0, 0.0)
    assert refused.value.reason == "TENANT_LIMIT"
    assert refused.value.retry_after_s == pytest.approx(0.5)
    meter.take("b", limits, 1.0, 0.0)
    meter.take("a", limits, 1.0, 0.5)


def test_tokens_beyond_the_rate_too_and_a_refusal_costs_nothing() -> None:
    meter, limits = TenantMeter(), TenantLimits(requests_per_s=100.0, tokens_per_s=100.0, burst_s=10.0)
    meter.take("a", limits, 900.0, 0.0)
    for _ in range(3):
        with pytest.raises(Exhausted, match="tokens/s") as refused:
            meter.take("a", limits, 400.0, 0.0)
        assert refused.value.retry_after_s == pytest.approx(3.0)
    meter.take("a", limits, 400.0, 3.0)


def test_a_request_larger_than_the_bucket_waits_for_a_full_one() -> None:
    meter, limits = TenantMeter(), TenantLimits(tokens_per_s=100.0, burst_s=10.0)
    meter.take("a", limits, 5_000.0, 0.0)
    with pytest.raises(Exhausted) as refused:
        meter.take("a", limits, 5_000.0, 0.0)
    assert refused.value.retry_after_s == pytest.approx(50.0)
