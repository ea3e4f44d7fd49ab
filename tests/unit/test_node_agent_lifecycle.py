"""Single decisions that timelines do not show."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.node_agent.core.gang import State
from stoker.node_agent.core.lifecycle import MAX_ERROR_BYTES, Act, Exit, Member, Policy, Seen, compose_error, step
from stoker.node_agent.core.task import Prefix, Retirement, Task, parallelism
from stoker.node_agent.engine.protocol import Health

TASK = Task("r-0", "r", 1, "m", "m", "sim")


def seen(**fields: object) -> Seen:
    return Seen(**{"task": TASK, "alive": False, "wall_ms": 1_000_000, **fields})  # type: ignore[arg-type]


def test_epochs_rise_with_every_life_and_every_death() -> None:
    member = Member(TASK, since=0)
    member, acts = step(member, seen(), Policy(), 0, Random(1))
    assert acts == [Act.LAUNCH]
    assert member.epoch == 1_000_000
    dead, _ = step(member, seen(exit=Exit(1)), Policy(), 1, Random(1))
    assert dead.epoch == 1_000_001
    # The wall clock went back an hour.
    again, acts = step(dead, seen(wall_ms=10), Policy(), 100, Random(1))
    assert acts == [Act.LAUNCH]
    assert again.epoch == 1_000_002


def test_the_jitter_comes_from_the_generator() -> None:
    member, _ = step(Member(TASK, since=0), seen(), Policy(), 0, Random(1))
    pauses = {step(member, seen(exit=Exit(1)), Policy(), 1, Random(s))[0].retry_at for s in range(8)}
    assert len(pauses) == 8
    assert all(1.5 <= pause <= 2.0 for pause in pauses)


def test_a_member_whose_engine_cannot_be_launched_says_why() -> None:
    member, _ = step(Member(TASK, since=0), seen(), Policy(), 0, Random(1))
    member, _ = step(member, seen(exit=Exit(error="no such file: python")), Policy(), 0.1, Random(1))
    assert member.state is State.BACKOFF
    assert "no such file: python" in member.last_error


def test_an_end_that_went_by_unseen_is_an_end() -> None:
    follower = Member(replace(TASK, rank=1, size=2), since=0, state=State.READY, attempt=1, ready_at=0)
    member, _ = step(follower, seen(task=follower.task, alive=False), Policy(), 5, Random(1))
    assert member.state is State.BACKOFF
    assert "not there" in member.last_error


def test_startup_time_is_measured() -> None:
    member, _ = step(Member(TASK, since=0), seen(), Policy(), 10, Random(1))
    member, _ = step(member, seen(alive=True, health=Health.SERVING), Policy(), 42.5, Random(1))
    assert (member.state, member.startup_s) == (State.READY, 32.5)


@pytest.mark.parametrize(("before", "first"), [(None, None), (False, True), (True, False)])
def test_whether_it_was_a_models_first_start_is_told(before: bool | None, first: bool | None) -> None:
    member, _ = step(Member(TASK, since=0), seen(started_before=before), Policy(), 10, Random(1))
    member, _ = step(member, seen(alive=True, health=Health.SERVING, started_before=before), Policy(), 42, Random(1))
    assert member.first_start is first
    # By then the model is known: what was told of the start stays.
    member, _ = step(member, seen(alive=True, health=Health.SERVING, started_before=True), Policy(), 43, Random(1))
    assert (member.state, member.first_start) == (State.READY, first)


def test_a_member_that_retires_serves_on_until_it_is_told_to_drain() -> None:
    retires = replace(TASK, retirement=Retirement((Prefix(7, "r-1", 100),), {"r-1": "h:1"}, 30.0))
    member = Member(TASK, since=0, state=State.READY, ready_at=0, answered_at=0)
    for now in range(1, 200):
        member, acts = step(member, seen(task=retires, alive=True, health=Health.SERVING), Policy(), now, Random(1))
        assert (member.state, member.serving, acts) == (State.READY, True, [])
    assert member.task.retirement is not None
    back, _ = step(member, seen(alive=True, health=Health.SERVING), Policy(), 200, Random(1))
    assert back.task.retirement is None
    drains, _ = step(member, seen(task=replace(TASK, drain=True), alive=True), Policy(), 200, Random(1))
    assert (drains.state, drains.serving) == (State.DRAINING, False)


def test_drain_waits_while_the_load_is_unknown() -> None:
    ready = Member(TASK, since=0, state=State.READY, ready_at=0, answered_at=0)
    draining, _ = step(ready, seen(task=None, alive=True), Policy(), 10, Random(1))
    waits, acts = step(draining, seen(task=None, alive=True, in_flight=None), Policy(), 20, Random(1))
    assert (waits.state, acts) == (State.DRAINING, [])
    _, acts = step(draining, seen(task=None, alive=True, in_flight=0, in_flight_at=9.0), Policy(), 20, Random(1))
    assert acts == [], "a measurement from before the drain proves nothing"
    _, acts = step(draining, seen(task=None, alive=True, in_flight=0, in_flight_at=15.0), Policy(), 20, Random(1))
    assert acts == [Act.TERMINATE]


@settings(derandomize=True, deadline=None)
@given(st.text(max_size=6000), st.lists(st.text(max_size=3000), max_size=50))
def test_errors_fit(summary: str, lines: list[str]) -> None:
    composed = compose_error(summary, lines)
    assert len(composed.encode()) <= MAX_ERROR_BYTES


def test_errors_keep_the_last_lines() -> None:
    composed = compose_error("it died", [f"line {i} {'x' * 80}" for i in range(200)])
    assert composed.startswith("it died")
    assert "line 199" in composed
    assert "line 0 " not in composed


def test_parallelism() -> None:
    def of(*args: str, gpus: int = 0, size: int = 1) -> tuple[int, int]:
        return parallelism(Task("r-0", "r", 1, "m", "m", "vllm", 0, size, args, gpus_per_node=gpus))

    assert of() == (1, 1)
    assert of(gpus=8) == (8, 1)
    assert of(gpus=8, size=2) == (16, 1)
    assert of("--data-parallel-size", "2", gpus=8) == (4, 2)
    assert of("--pipeline-parallel-size=2", gpus=8, size=2) == (8, 1)
    assert of("-tp", "2", gpus=8) == (2, 1)
    assert of("--data-parallel-size") == (1, 1)
