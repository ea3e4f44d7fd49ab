"""Who waits in a router, and who goes next."""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from stoker.common.errors import Exhausted, Unavailable
from stoker.router.core import (
    AdmissionQueue,
    Dispatched,
    Fairness,
    Fleet,
    Outcome,
    Replica,
    Request,
    RoutingConfig,
    Snapshot,
    Tier,
    decide,
)

RATE = 1_000.0
RNG = Random(1)


def fleet(*names: str, aging: float = 0.3) -> Fleet:
    made = Fleet(RoutingConfig(aging=aging))
    for name in names:
        made.put(Replica(name, prefill_rate=RATE))
        made.snapshot(name, Snapshot(1, 1, {Tier.GPU: []}), 0.0)
    return made


def prompt(family: int, blocks: int, *, streamed: bool = True) -> Request:
    return Request([1_000 * family + n for n in range(blocks)], 16 * blocks, streamed=streamed)


def send(made: Fleet, request: Request, now: float) -> int:
    return made.dispatch(request, decide(request, made, now, RNG), now)


def join(queue: AdmissionQueue, made: Fleet, request: Request, now: float, since: float | None = None) -> int:
    return queue.join(request, made, now, since=since)


def test_a_replica_takes_its_first_prefill_whatever_its_size_and_then_no_more_until_the_first_token() -> None:
    made = fleet("a")
    assert not made.busy("a", 0.0)
    flight = send(made, prompt(1, 500), 0.0)
    assert made.busy("a", 0.0)
    assert made.busy("a", 60.0), "seen ends are waited for"
    made.first_token(flight, 60.0)
    assert not made.busy("a", 60.0)


def test_a_request_is_load_beside_its_tokens_until_its_first_one() -> None:
    made, told = fleet("a"), fleet("a")
    flight = send(made, prompt(1, 2), 0.0)
    tokens = 32 + RoutingConfig().step_s * RATE
    kv = made.load.load("a") - tokens
    assert 0 < kv <= 2
    told.overhear(Dispatched("a", (), 32, 0), 0.0, 0.0)
    assert told.load.load("a") == pytest.approx(tokens)
    made.first_token(flight, 1.0)
    assert made.load.load("a") == pytest.approx(kv)


def test_short_prefills_are_sent_together() -> None:
    made = fleet("a")
    for number in range(7):
        assert not made.busy("a", 0.0), number
        send(made, prompt(number, 1), 0.0)  # 16 tokens: 16 ms
    assert made.busy("a", 0.0)


def test_where_no_first_token_is_seen_the_prefill_runs_off_at_the_measured_rate() -> None:
    made = fleet("a")
    for number in (1, 2):
        send(made, prompt(number, 100, streamed=False), 0.0)  # 1.6 s each
    assert made.busy("a", 3.0)
    assert not made.busy("a", 3.15)


def test_what_another_router_claims_to_have_sent_is_bounded_by_the_cache() -> None:
    made = fleet("a")
    made.put(Replica("a", block_size=16, kv_blocks=100, prefill_rate=RATE))
    made.overhear(Dispatched("a", (), 100_000_000, 100_000_000), 0.0, 0.0)
    assert made.busy("a", 1.0)
    assert not made.busy("a", 1.6)


def test_what_another_router_sent_is_waited_for_too() -> None:
    made = fleet("a")
    elsewhere = fleet("a")
    request = prompt(1, 100)
    made.overhear(Dispatched.of(request, decide(request, elsewhere, 0.0, RNG)), 0.0, 0.05)
    assert made.busy("a", 1.4)
    assert not made.busy("a", 1.6)


def test_a_router_whose_prefills_end_sooner_than_thought_does_not_keep_the_others_waiting() -> None:
    made, elsewhere = fleet("a"), fleet("a")
    request = prompt(1, 100)  # 1.6 s by the measured rate; in truth 1 s, when the other router sends its next
    told = Dispatched.of(request, decide(request, elsewhere, 0.0, RNG))
    free = 0
    for second in range(100):
        made.overhear(told, float(second), second + 0.05)
        assert made.load.backlog("a", RATE, second + 0.05) <= 1.6
        free += not made.busy("a", second + 0.9)
    assert free >= 30


def test_what_another_router_sends_together_is_waited_for_together() -> None:
    made = fleet("a")
    for _ in range(7):
        made.overhear(Dispatched("a", (), 16, 16), 0.0, 0.02)
    assert made.load.backlog("a", RATE, 0.0) == pytest.approx(0.112)


@pytest.mark.parametrize("streamed", [True, False])
def test_a_failed_flight_gives_its_place_back(streamed: bool) -> None:
    made = fleet("a")
    flight = send(made, prompt(1, 500, streamed=streamed), 0.0)
    made.release(flight, 1.0)
    made.release(flight, 1.0)
    assert not made.busy("a", 1.0)
    assert made.load.backlog("a", RATE, 1.0) == 0.0


def test_what_ends_before_its_time_leaves_those_behind_it_their_own() -> None:
    made = fleet("a")
    refused = send(made, prompt(9, 25_000, streamed=False), 0.0)  # 400 s
    behind = send(made, prompt(2, 100, streamed=False), 0.0)
    assert made.load.backlog("a", RATE, 0.5) == pytest.approx(401.1)
    made.release(refused, 0.5)
    assert made.load.backlog("a", RATE, 0.5) == pytest.approx(1.6)
    made.release(behind, 0.7)
    assert made.load.backlog("a", RATE, 0.7) == 0.0


def test_who_has_least_to_compute_goes_first() -> None:
    made, queue = fleet("a"), AdmissionQueue(10, Fairness(0.0))
    warm = prompt(1, 100)
    made.snapshot("a", Snapshot(1, 2, {Tier.GPU: list(warm.keys)}), 0.0)
    flight = send(made, prompt(9, 200), 0.0)
    cold = join(queue, made, prompt(2, 100), 0.0)
    hit = join(queue, made, warm, 1.0)
    assert queue.grant(made, 1.0, RNG) is None, "busy"
    made.first_token(flight, 2.0)
    granted = queue.grant(made, 2.0, RNG)
    assert granted is not None
    assert granted.ticket == hit
    assert granted.decision is not None
    assert granted.decision.cached_tokens >= 1_599
    second = queue.grant(made, 2.0, RNG)
    assert second is not None
    assert second.ticket == cold
    assert len(queue) == 0


def test_nobody_is_overtaken_for_ever() -> None:
    made, queue = fleet("a"), AdmissionQueue(100, Fairness(0.0))
    cold = join(queue, made, prompt(2, 100), 0.0)  # 1.6 s of prefill: may be overtaken for 1.6 / 0.3 s
    now = 0.0
    for number in range(100):
        join(queue, made, prompt(100 + number, 5), now)
        granted = queue.grant(made, now, RNG)
        assert granted is not None
        if granted.ticket == cold:
            break
        now += 0.5
    assert 4.5 <= now <= 6.0


def test_a_request_goes_elsewhere_once_that_is_better_than_to_wait() -> None:
    made, queue = fleet("a", "b"), AdmissionQueue(10, Fairness(0.0))
    warm = prompt(1, 100)
    made.snapshot("a", Snapshot(1, 2, {Tier.GPU: list(warm.keys)}), 0.0)
    send(made, prompt(1, 101), 0.0)  # keeps a busy, for 16 tokens
    elsewhere = made.load.dispatch("b", 200.0, 0.0, 0.0)
    ticket = join(queue, made, warm, 0.0)
    made.load.report("a", 20_000.0, 1.0)
    assert queue.grant(made, 1.0, RNG) is None, "b is better and busy, a is busy"
    made.first_token(elsewhere, 2.0)
    granted = queue.grant(made, 2.0, RNG)
    assert granted is not None
    assert (granted.ticket, granted.decision and granted.decision.replica) == (ticket, "b")


def test_a_full_queue_refuses_with_the_time_it_takes_to_drain() -> None:
    made, queue = fleet("a", "b"), AdmissionQueue(2, Fairness(0.0))
    for number in (1, 2):
        join(queue, made, prompt(number, 250), 0.0)
    with pytest.raises(Exhausted) as refused:
        join(queue, made, prompt(3, 1), 0.0)
    assert refused.value.reason == "QUEUE_FULL"
    assert refused.value.retry_after_s == 4.0, "8,000 tokens at 2 × 1,000/s"


def test_who_leaves_is_not_granted_and_frees_a_place() -> None:
    made, queue = fleet("a"), AdmissionQueue(1, Fairness(0.0))
    ticket = join(queue, made, prompt(1, 10), 0.0)
    queue.leave(ticket)
    queue.leave(ticket)
    assert queue.grant(made, 0.0, RNG) is None
    assert queue.drain_s(made, 0.0) == 0.0
    join(queue, made, prompt(1, 10), 0.0)


def test_a_request_that_no_replica_can_serve_ends_with_the_error() -> None:
    made, queue = fleet("a"), AdmissionQueue(10, Fairness(0.0))
    ticket = join(queue, made, Request([], 10, adapter="none"), 0.0)
    granted = queue.grant(made, 0.0, RNG)
    assert granted is not None
    assert granted.ticket == ticket
    assert isinstance(granted.error, Unavailable)
    assert len(queue) == 0


def test_who_comes_back_from_a_failed_replica_keeps_its_age() -> None:
    made, queue = fleet("a", aging=1.0), AdmissionQueue(10, Fairness(0.0))
    join(queue, made, prompt(1, 10), 9.9)
    returned = join(queue, made, prompt(2, 100), 10.0, since=0.0)
    granted = queue.grant(made, 10.0, RNG)
    assert granted is not None
    assert granted.ticket == returned


def test_who_waits_for_a_hot_prefix_goes_to_an_idle_replica_once_it_has_waited_as_long_as_a_miss_costs() -> None:
    made, queue = fleet("a", "b"), AdmissionQueue(10, Fairness(0.0))
    warm = prompt(1, 100)  # 1.6 s of prefill where nothing of it is cached
    made.snapshot("a", Snapshot(1, 2, {Tier.GPU: list(warm.keys)}), 0.0)
    made.load.dispatch("a", 200.0, 0.0, 0.0)
    ticket = join(queue, made, warm, 0.0)
    patience = made.config.miss_weight * 1.6
    assert queue.grant(made, patience - 0.1, RNG) is None
    granted = queue.grant(made, patience + 0.1, RNG)
    assert granted is not None
    assert (granted.ticket, granted.decision and granted.decision.replica) == (ticket, "b")


def test_who_can_go_nowhere_else_waits_on() -> None:
    made, queue = fleet("a", "b"), AdmissionQueue(10, Fairness(0.0))
    made.load.dispatch("a", 200.0, 0.0, 0.0)
    join(queue, made, replace(prompt(1, 100), exclude=frozenset({"b"})), 0.0)
    assert queue.grant(made, 1_000.0, RNG) is None


def test_nobody_spills_to_an_ejected_replica() -> None:
    made, queue = fleet("a", "b", "c"), AdmissionQueue(10, Fairness(0.0))
    for name in ("a", "c"):
        made.load.dispatch(name, 200.0, 0.0, 0.0)
    for _ in range(3):
        made.observe("b", Outcome.FAULT, 999.0)
    join(queue, made, prompt(1, 100), 0.0)
    assert queue.grant(made, 1_000.0, RNG) is None


def test_those_who_want_a_busy_replica_do_not_hold_up_those_behind_them_who_want_another() -> None:
    made, queue = fleet("a", "b"), AdmissionQueue(200, Fairness(0.0))
    made.load.dispatch("a", 200.0, 0.0, 0.0)
    for number in range(100):
        join(queue, made, replace(prompt(number, 5), exclude=frozenset({"b"})), 0.0)
    free = join(queue, made, replace(prompt(200, 5), exclude=frozenset({"a"})), 0.0)
    granted = [queue.grant(made, 0.0, RNG) for _ in range(4)]
    assert [grant.ticket for grant in granted if grant is not None] == [free]


def test_who_comes_back_is_among_the_oldest_and_not_refused_where_the_queue_is_full() -> None:
    made, queue = fleet("a"), AdmissionQueue(100, Fairness(0.0))
    for number in range(100):
        join(queue, made, prompt(number, 5), 9.0)
    returned = join(queue, made, prompt(200, 100), 10.0, since=0.0)
    granted = queue.grant(made, 10.0, RNG)
    assert granted is not None
    assert granted.ticket == returned
    with pytest.raises(Exhausted):
        join(queue, made, prompt(201, 5), 10.0)


def test_a_request_that_cannot_be_decided_ends_alone_and_not_with_who_made_room() -> None:
    made, queue = fleet("a"), AdmissionQueue(10, Fairness(0.0))
    broken = join(queue, made, Request(5, 10), 0.0)  # type: ignore[arg-type] # stands for any defect
    sound = join(queue, made, prompt(2, 5), 0.0)
    first, second = queue.grant(made, 0.0, RNG), queue.grant(made, 0.0, RNG)
    assert first is not None
    assert (first.ticket, type(first.error)) == (broken, TypeError)
    assert second is not None
    assert second.ticket == sound
