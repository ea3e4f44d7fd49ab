"""What routers tell each other of their dispatches: on its way, and where it counts."""

from __future__ import annotations

from random import Random

import pytest

from stoker.api.registry.v1 import registry_pb2
from stoker.common.blocks import pack_keys
from stoker.registry.core import validation
from stoker.registry.core.dispatches import MAX_KEYS, DropOldest, aged_ms
from stoker.registry.core.outflow import Interest, Outflow
from stoker.router.core import (
    Delta,
    Dispatched,
    Fleet,
    LoadLedger,
    Reason,
    Replica,
    Request,
    RoutingConfig,
    Snapshot,
    Tier,
    decide,
)
from tests.support.registry import ALL_TOPICS

KEYS = list(range(1_000, 1_040))
REQUEST = Request(KEYS, 645, output_tokens=55)


def batch(*replicas: str, router_id: str = "other", keys: int = 1, age_ms: int = 0) -> registry_pb2.Dispatches:
    return registry_pb2.Dispatches(
        router_id=router_id,
        dispatches=[
            registry_pb2.Dispatch(replica_id=replica, keys=pack_keys(range(keys)), age_ms=age_ms)
            for replica in replicas
        ],
    )


def outflow(*deployments: str, watcher: str = "me") -> Outflow:
    request = registry_pb2.WatchRequest(topics=ALL_TOPICS, deployments=deployments, watcher=watcher)
    return Outflow(Interest.of(request))


def fleet() -> Fleet:
    made = Fleet(RoutingConfig(kv_weight=0.1))
    for name in ("a", "b", "c"):
        made.put(Replica(name))
    return made


# On the way


def test_the_oldest_give_way_and_are_counted() -> None:
    queue: DropOldest[registry_pb2.Dispatches] = DropOldest(limit_bytes=1_000)
    for number in range(10):
        queue.put(batch(f"chat-{number}"), float(number))
    kept = queue.take()
    assert [since for since, _ in kept] == [float(n) for n in range(10 - len(kept), 10)]
    assert kept
    assert queue.dropped == 10 - len(kept) > 0
    assert not queue.take()


def test_one_that_can_never_fit_is_dropped_too() -> None:
    queue: DropOldest[registry_pb2.Dispatches] = DropOldest(limit_bytes=1_000)
    queue.put(batch("chat-0", keys=1_000), 0.0)
    queue.put(batch("chat-1"), 0.0)
    assert [message.dispatches[0].replica_id for _, message in queue.take()] == ["chat-1"]


def test_waiting_makes_a_dispatch_older_for_this_watcher_alone() -> None:
    told, quick, slow = batch("chat-0", age_ms=25), outflow(), outflow()
    for flow in (quick, slow):
        assert flow.dispatched(told, now=10.0)
        assert flow
    (soon,) = quick.take_soft(now=10.0)
    (late,) = slow.take_soft(now=10.5)
    assert soon.dispatches.dispatches[0].age_ms == 25
    assert late.dispatches.dispatches[0].age_ms == 525
    assert not slow
    assert aged_ms(59_999, 0.0, 100.0) == 60_000


def test_a_watcher_hears_other_routers_of_its_deployments() -> None:
    flow = outflow("chat", watcher="me")
    assert not flow.dispatched(batch("chat-0", router_id="me"), 0.0)
    assert not flow.dispatched(batch("code-0"), 0.0)
    assert flow.dispatched(batch("code-0", "chat-0", "chat-x-0"), 0.0)
    (message,) = flow.take_soft()
    assert [d.replica_id for d in message.dispatches.dispatches] == ["chat-0"]


def test_who_does_not_ask_is_not_told() -> None:
    flow = Outflow(Interest.of(registry_pb2.WatchRequest(topics=[registry_pb2.TOPIC_LOAD])))
    assert not flow.dispatched(batch("chat-0"), 0.0)
    assert not flow


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"replica_id": "Chat!"}, "replica_id"),
        ({"keys": b"123"}, "keys"),
        ({"keys": bytes(8 * (MAX_KEYS + 1))}, "keys"),
        ({"touched": b"123"}, "touched"),
        ({"touched": bytes(8 * (MAX_KEYS + 1))}, "touched"),
        ({"age_ms": 60_001}, "age_ms"),
        ({"prefill_tokens": 2**63}, "prefill_tokens"),
        ({"kv_tokens": 2**63}, "kv_tokens"),
        ({}, None),
    ],
)
def test_a_bad_dispatch_is_named(fields: dict[str, object], wrong: str | None) -> None:
    dispatch = registry_pb2.Dispatch(**{"replica_id": "chat-0", "keys": bytes(8 * MAX_KEYS), **fields})  # type: ignore[arg-type]
    found = [violation.field for violation in validation.dispatch("dispatches[0]", dispatch)]
    assert found == ([f"dispatches[0].{wrong}"] if wrong else [])


# Load


def test_others_dispatches_count_until_a_report_has_them() -> None:
    ledger = LoadLedger()
    ledger.report("a", 100, seen_at=1.0)
    ledger.overhear("a", 700, at=1.2, now=1.25)
    ledger.overhear("a", 50, at=1.4, now=1.45)
    assert ledger.load("a") == 850
    ledger.report("a", 300, seen_at=1.3)
    assert ledger.load("a") == 350
    ledger.report("a", 10, seen_at=1.5)
    assert ledger.load("a") == 10


def test_what_a_report_had_already_is_not_counted_again() -> None:
    ledger = LoadLedger()
    ledger.report("a", 100, seen_at=1.0)
    ledger.overhear("a", 700, at=0.9, now=1.1)
    assert ledger.load("a") == 100


def test_without_reports_it_ages() -> None:
    ledger = LoadLedger()
    ledger.overhear("a", 700, at=1.0, now=1.0)
    ledger.overhear("a", 50, at=2.0, now=2.0)
    ledger.overhear("a", 9, at=1.0, now=5.0)
    assert ledger.load("a", now=2.9) == 750
    assert ledger.load("a", now=3.5) == 50
    assert ledger.load("a", now=4.5) == 0


def test_it_adds_to_own_requests_and_outlives_their_release() -> None:
    ledger = LoadLedger()
    flight = ledger.dispatch("a", 100, 10, 1.0)
    ledger.overhear("a", 700, at=1.0, now=1.0)
    assert ledger.load("a") == 810
    ledger.release(flight, 1.5)
    assert ledger.load("a") == 700


def test_what_is_overheard_is_bounded() -> None:
    ledger = LoadLedger()
    for number in range(10_000):
        ledger.overhear("a", 1, at=1.0 + number * 1e-5, now=1.2)
    assert 4_000 <= ledger.load("a") <= 5_000


# The view


def test_an_announcement_names_only_what_the_digest_does_not_show() -> None:
    made = fleet()
    made.snapshot("a", Snapshot(1, 1, {Tier.GPU: KEYS[:8], Tier.CPU: KEYS[8:10]}), 0.0)
    decision = decide(REQUEST, made, 0.0, Random(1))
    assert decision.replica == "a"
    told = Dispatched.of(REQUEST, decision)
    assert told == Dispatched("a", KEYS[10:], decision.prefill_tokens, 700)
    # A digest in doubt may show others something else.
    doubtful = decide(REQUEST, made, 30.0, Random(1))
    assert doubtful.replica == "a"
    assert Dispatched.of(REQUEST, doubtful).keys == KEYS


def test_the_second_router_follows_the_first() -> None:
    first, second = fleet(), fleet()
    for each in (first, second):
        each.snapshot("a", Snapshot(1, 1, {Tier.GPU: KEYS[:8]}), 0.0)
        each.load.report("a", 0.0, seen_at=0.0)
    decision = decide(REQUEST, first, 1.0, Random(1))
    second.overhear(Dispatched.of(REQUEST, decision), at=1.0, now=1.04)
    first.dispatch(REQUEST, decision, 1.0)
    longer = Request([*KEYS, 7], 661)
    follows = [decide(longer, each, 1.1, Random(2), explain=True) for each in (first, second)]
    assert follows[0] == follows[1]
    assert (follows[1].replica, follows[1].reason) == ("a", Reason.SPECULATIVE)


def test_a_new_epoch_and_evictions_end_what_was_overheard() -> None:
    made = fleet()
    made.snapshot("a", Snapshot(1, 1, {}), 0.0)
    made.overhear(Dispatched("a", KEYS, 645, 700), at=0.0, now=0.0)
    made.delta("a", Delta(1, 2, {}, {Tier.GPU: KEYS[20:]}), 0.1)
    assert made.speculation.extend(KEYS, {}) == {"a": 20}
    made.snapshot("a", Snapshot(2, 1, {}), 0.2)
    assert made.speculation.extend(KEYS, {}) == {}


def test_a_replica_that_is_not_here_is_not_counted() -> None:
    made = fleet()
    made.overhear(Dispatched("gone", KEYS, 645, 700), at=0.0, now=0.0)
    made.put(Replica("gone"))
    assert made.load.load("gone") == 0
    assert made.speculation.extend(KEYS, {}) == {}
