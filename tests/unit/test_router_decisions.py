"""What is told of a decision, and what is remembered of it: enough for Explain, bounded, and nothing else."""

from __future__ import annotations

import gc
import random
import re
import tracemalloc
import weakref

import pytest
from msgspec.structs import replace

from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.router import core
from stoker.router.decisions.decided import DECISION_HEADER, REPLICA_HEADER, Decided, Recent, Remembered, told
from stoker.router.fleet.view import View
from stoker.router.prompts.plan import BYTES, TOKENS, Plan
from tests.support.router import replica

_RNG = random.Random(7)
KEYS = [_RNG.getrandbits(64) for _ in range(64)]


def view_of(*names: str) -> View:
    view = View(core.RoutingConfig(), core.HealthConfig())
    records = [replica(name, f"http://{name}", block_size=16) for name in names]
    view.records(registry_pb2.Records(replicas=records), now=0.0, snapshot=True)
    return view


def decided(
    view: View,
    tried: frozenset[str] = frozenset(),
    policy: str = core.STOKER,
    waited_s: float = 0.0,
) -> Decided:
    pool, _ = view.resolve("tiny")
    request = core.Request(KEYS, 16 * len(KEYS) + 5, 16, exclude=tried)
    plan = Plan(pool, request, policy, TOKENS, tokens=request.prompt_tokens)
    decision = core.decide(request, pool.fleet, 10.0, random.Random(1), policy=policy, explain=True)
    return Decided(plan, decision, pool.targets[decision.replica], 10.0, 10.0 - waited_s, tried)


def test_a_decision_is_told_in_one_structured_field() -> None:
    view = view_of("a", "b", "c")
    view.pools["tiny"].fleet.snapshot("b", core.Snapshot(1, 1, {core.Tier.GPU: KEYS[:40]}), 10.0)
    said = told(decided(view, waited_s=0.25))
    assert said[REPLICA_HEADER] == "b"
    parts = said[DECISION_HEADER].split(";")
    assert parts[:3] == ["exact", "hit=640", "prompt=1029"]
    assert re.fullmatch(r"cost_ms=\d+\.\d", parts[3])
    assert parts[4:] == ["candidates=3", "waited_ms=250", "attempt=1"]


def test_what_is_unknown_is_not_told_as_zero() -> None:
    known = decided(view_of("a"))
    unread = replace(known, plan=replace(known.plan, source=BYTES, why="no_tokenizer", tokens=None))
    assert "hit" not in told(unread)[DECISION_HEADER]
    assert "prompt" not in told(unread)[DECISION_HEADER]
    assert "cost" not in told(decided(view_of("a"), policy=core.ROUND_ROBIN))[DECISION_HEADER]


def test_a_retry_says_which_try_it_is_and_remembers_who_failed() -> None:
    again = decided(view_of("a", "b", "c"), tried=frozenset({"a", "b"}))
    assert told(again)[REPLICA_HEADER] == "c"
    assert told(again)[DECISION_HEADER].endswith(";attempt=3")
    assert Remembered.of(again).excluded == (("a", "already_tried"), ("b", "already_tried"))


def test_who_was_no_candidate_is_remembered_with_the_reason_of_that_moment() -> None:
    view = view_of("a", "b", "c", "d", "e", "f")
    pool = view.pools["tiny"]
    draining, starting, retiring = (replica(name, f"http://{name}", block_size=16) for name in "bcf")
    retiring.wanted = records_pb2.WANTED_RETIRE
    draining.state, starting.state = records_pb2.STATE_DRAINING, records_pb2.STATE_STARTING
    view.records(registry_pb2.Records(replicas=[draining, starting, retiring]), now=0.0)
    view.reached(pool.targets["d"], False)
    while not pool.fleet.health.ejected("e", 10.0):
        pool.fleet.observe("e", core.Outcome.FAULT, 10.0)
    recent = Recent()
    taken = decided(view)
    recent.note("one", taken)
    view.reached(pool.targets["d"], True)
    remembered = recent.of("one")
    assert remembered is not None
    if taken.decision.reason is core.Reason.PANIC:
        pytest.fail("the test means to eject one of two at most")
    assert dict(remembered.excluded) == {
        "b": "draining",
        "c": "not_ready",
        "d": "unhealthy",
        "e": "ejected",
        "f": "retiring",
    }
    assert {each.replica for each in remembered.decision.candidates} == {"a"}


def test_the_last_requests_are_remembered_each_once() -> None:
    view, recent = view_of("a", "b"), Recent(kept=3)
    for name in ("first", "second", "third", "first", "fourth"):
        recent.note(name, decided(view))
    assert len(recent) == 3
    assert recent.of("second") is None
    assert all(recent.of(name) is not None for name in ("third", "first", "fourth"))


def test_what_is_remembered_is_bounded_in_bytes() -> None:
    few, many = view_of("a"), view_of(*(f"r{number}" for number in range(200)))
    kept = []
    for view in (few, many):
        recent = Recent(kept_bytes=200_000)
        for number in range(200):
            recent.note(str(number), decided(view))
        assert recent.of("199") is not None
        kept.append(len(recent))
    assert kept[0] > 3 * kept[1] > 3
    recent = Recent(kept_bytes=1)
    for number in range(3):
        recent.note(str(number), decided(many))
        assert recent.of(str(number)) is not None, "the last one is kept whatever its size"
        assert len(recent) == 1


@pytest.mark.parametrize("replicas", [3, 200])
def test_a_decision_holds_no_more_than_is_counted_for_it(replicas: int) -> None:
    view = view_of(*(f"r{number}" for number in range(replicas)))
    decided(view)  # what all share is there
    tracemalloc.start()
    try:
        recent, before = Recent(), tracemalloc.get_traced_memory()[0]
        for number in range(100):
            recent.note(f"{number:032}", decided(view))
        gc.collect()
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held <= recent.bytes, f"{held / 100:.0f} bytes each, counted as {recent.bytes / 100:.0f}"


def test_nothing_of_the_fleet_and_no_keys_live_on_in_what_is_remembered() -> None:
    view, recent = view_of("a", "b"), Recent()

    class Keys(list[int]):
        pass

    pool, _ = view.resolve("tiny")
    keys = Keys(KEYS)
    request = core.Request(keys, 16 * len(KEYS), 16)
    decision = core.decide(request, pool.fleet, 10.0, random.Random(1), explain=True)
    plan = Plan(pool, request, core.STOKER, TOKENS, tokens=request.prompt_tokens)
    recent.note("one", Decided(plan, decision, pool.targets[decision.replica], 10.0, 10.0))
    left = weakref.ref(pool.fleet), weakref.ref(keys)
    del view, pool, plan, request, decision, keys
    gc.collect()
    assert [each() for each in left] == [None, None]
    remembered = recent.of("one")
    assert remembered is not None
    assert remembered.last_key == KEYS[-1], "the last block's key stands for the whole prompt"
    assert len(remembered.decision.candidates[0].replica) == 1
