"""Continuous batching: budget, order, preemption, ends. Time and tokens are the test's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.sim_engine.core.blocks import BlockPool
from stoker.sim_engine.core.profile import Profile
from stoker.sim_engine.core.scheduler import Output, Request, Scheduler, Step


def scheduler(blocks: int = 100, *, running: int = 8, budget: int = 64, by_priority: bool = False) -> Scheduler:
    return Scheduler(BlockPool(blocks, 4), max_running=running, budget=budget, by_priority=by_priority)


def request(name: str, length: int, max_tokens: int = 4, *, priority: int = 0, base: int = 0) -> Request:
    prompt = tuple(range(base, base + length))
    return Request(name, prompt, max_tokens, arrived_s=0.0, priority=priority)


def step(engine: Scheduler, now: float = 0.0) -> tuple[Step, list[Output]]:
    planned = engine.schedule(now)
    assert planned is not None
    return planned, engine.complete(planned, lambda asked: 1000 + asked.generated)


def shares(planned: Step) -> dict[str, int]:
    return {share.request.id: share.tokens for share in planned.planned}


def test_a_long_prompt_is_computed_in_chunks_and_speaks_at_its_end() -> None:
    engine = scheduler(budget=10)
    engine.add(request("a", 25))
    assert [shares(planned)["a"] for planned, outputs in (step(engine) for _ in range(2)) if not outputs] == [10, 10]
    planned, outputs = step(engine)
    assert shares(planned) == {"a": 5}
    assert [(output.token, output.finish_reason) for output in outputs] == [(1000, None)]


def test_decoding_goes_first_and_prefill_fills_the_budget() -> None:
    engine = scheduler(budget=10)
    engine.add(request("a", 4))
    step(engine)
    engine.add(request("b", 30, base=500))
    planned, _ = step(engine)
    assert shares(planned) == {"a": 1, "b": 9}
    assert (planned.prefill_tokens, planned.decoding) == (9, 1)


def test_it_ends_at_max_tokens_and_frees_everything() -> None:
    engine = scheduler()
    engine.add(request("a", 6, max_tokens=2))
    step(engine)
    _, outputs = step(engine)
    assert outputs[-1].finish_reason == "length"
    assert engine.pool.usage == 0
    assert engine.schedule(0.0) is None


def test_a_script_is_said_and_then_it_stops() -> None:
    engine = scheduler()
    asked = Request("a", (1, 2), 10, arrived_s=0.0, script=(7, 8))
    engine.add(asked)
    assert step(engine)[1][0].finish_reason is None
    assert step(engine)[1][0].finish_reason == "stop"


def test_cached_tokens_are_counted_once_and_not_computed() -> None:
    engine = scheduler()
    engine.add(request("a", 13, max_tokens=1))
    step(engine)
    again = request("b", 13, max_tokens=1)
    engine.add(again)
    planned, _ = step(engine, now=3.0)
    assert shares(planned) == {"b": 1}
    assert (again.cached_tokens, again.scheduled_s) == (12, 3.0)
    assert (engine.totals.prefix_queries, engine.totals.prefix_hits) == (26, 12)


def test_the_batch_is_bounded_and_the_queue_is_first_come_first_served() -> None:
    engine = scheduler(running=2)
    for name in "abc":
        engine.add(request(name, 4, base=100 * ord(name)))
    planned, _ = step(engine)
    assert list(shares(planned)) == ["a", "b"]
    assert (len(engine.running), engine.waiting) == (2, 1)


def test_a_prompt_that_does_not_fit_now_waits_and_holds_back_those_behind() -> None:
    engine = scheduler(blocks=6)
    engine.add(request("a", 12, max_tokens=1))
    engine.add(request("b", 16, max_tokens=1, base=500))
    engine.add(request("c", 2, max_tokens=1, base=900))
    assert list(shares(step(engine)[0])) == ["a"]
    assert list(shares(step(engine)[0])) == ["b", "c"]


def test_when_blocks_run_out_the_last_comer_starts_over() -> None:
    engine = scheduler(blocks=5)
    first, last = request("a", 7, max_tokens=6), request("b", 7, max_tokens=6, base=500)
    engine.add(first)
    engine.add(last)
    outputs: list[Output] = []
    for _ in range(40):
        planned = engine.schedule(0.0)
        if planned is None:
            break
        outputs += engine.complete(planned, lambda asked: 1000 + asked.generated)
    assert last.preemptions == 1
    assert engine.totals.preemptions == 1
    assert [output.token for output in outputs if output.request is last] == [1000 + i for i in range(6)]
    ends = [output.request.id for output in outputs if output.finish_reason]
    assert ends == ["a", "b"]


def test_priority_takes_the_urgent_first_and_drops_the_least_urgent() -> None:
    engine = scheduler(running=1, by_priority=True)
    for name, priority in (("late", 5), ("soon", -1), ("mid", 0)):
        engine.add(request(name, 4, max_tokens=1, priority=priority, base=100 * (priority + 2)))
    assert [next(iter(shares(step(engine)[0]))) for _ in range(3)] == ["soon", "mid", "late"]


def test_an_aborted_request_gets_nothing_more() -> None:
    engine = scheduler()
    asked = request("a", 6)
    engine.add(asked)
    planned = engine.schedule(0.0)
    assert planned is not None
    engine.abort(asked)
    assert engine.complete(planned, lambda _: 1) == []
    assert engine.pool.usage == 0


def test_what_can_never_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        scheduler(blocks=4).add(request("a", 12))


@given(
    work=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6), st.integers(0, 3)), min_size=1, max_size=12),
    blocks=st.integers(12, 30),
    budget=st.integers(1, 40),
    by_priority=st.booleans(),
)
def test_every_request_says_all_it_should_and_the_budget_holds(
    work: list[tuple[int, int, int]], blocks: int, budget: int, by_priority: bool
) -> None:
    engine = scheduler(blocks, running=4, budget=budget, by_priority=by_priority)
    for at, (length, max_tokens, family) in enumerate(work):
        engine.add(request(str(at), length, max_tokens, priority=family, base=100 * family))
    said: dict[str, list[int]] = {str(at): [] for at in range(len(work))}
    for _ in range(5000):
        planned = engine.schedule(0.0)
        if planned is None:
            break
        assert planned.planned
        assert sum(share.tokens for share in planned.planned) <= budget
        assert len(planned.planned) <= 4
        for output in engine.complete(planned, lambda asked: 5000 + asked.generated):
            said[output.request.id].append(output.token)
    assert {name: len(tokens) for name, tokens in said.items()} == {
        str(at): max_tokens for at, (_, max_tokens, _) in enumerate(work)
    }
    assert engine.pool.usage == 0


def test_a_step_costs_what_its_profile_says() -> None:
    profile = Profile(step_s=1, prefill_token_s=0.1, decode_sequence_s=0.5, context_token_s=0.001, speed=2)
    assert profile.step_seconds(prefill_tokens=10, decoding=2, attended=1000) == pytest.approx(2.0)
