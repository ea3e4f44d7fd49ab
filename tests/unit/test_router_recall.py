"""Bodies that were read before: found byte for byte, forgotten beyond the bound."""

from __future__ import annotations

import tracemalloc
from typing import Any, cast

import pytest

from stoker.router import core
from stoker.router.fleet.pools import Pool
from stoker.router.prompts.plan import TOKENS, Plan
from stoker.router.prompts.prompt import COMPLETIONS, Asked, Prompt, tokenized
from stoker.router.prompts.recall import Known, Recall
from tests.support.picking import World, packed

BASIS: Any = (None, 16, 0, 0)


def known(body: bytes, keys: int = 2) -> Known:
    plan = Plan(cast(Pool, None), core.Request(list(range(keys)), 10), "stoker", TOKENS)
    return Known(body, "tiny", stream=False, priority=0, plan=plan, basis=BASIS, at=100.0)


def find(recall: Recall, api: str, body: bytes, now: float = 100.0) -> Known | None:
    return recall.find(api, body, now)


def test_a_body_is_known_again_by_the_same_bytes_and_api_alone() -> None:
    recall, one = Recall(), known(b"body")
    recall.note("chat_completions", one)
    assert find(recall, "chat_completions", b"body") is one
    assert find(recall, "completions", b"body") is None
    assert find(recall, "chat_completions", b"bodY") is None


def test_the_longest_unused_goes_first_and_the_bound_holds() -> None:
    recall = Recall(limit=3 * known(b"x" * 100).size)
    for name in b"abc":
        recall.note("completions", known(bytes([name]) * 100))
    assert find(recall, "completions", b"a" * 100) is not None
    recall.note("completions", known(b"d" * 100))
    assert find(recall, "completions", b"b" * 100) is None
    assert {name for name in "abcd" if find(recall, "completions", name.encode() * 100)} == {"a", "c", "d"}
    assert len(recall) == 3


def test_many_short_bodies_take_no_more_memory_than_the_bound_says() -> None:
    recall = Recall(limit=16 * 1024 * 1024)
    tracemalloc.start()
    try:
        for number in range(60_000):
            recall.note("completions", known(b"%09d" % number, keys=0))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 16 * 1024 * 1024


def test_noting_a_body_again_takes_no_more_room() -> None:
    recall = Recall(limit=2 * known(b"x" * 100).size)
    recall.note("completions", known(b"a" * 100))
    for _ in range(5):
        recall.note("completions", known(b"b" * 100))
    assert len(recall) == 2


def test_what_would_take_too_much_room_is_not_remembered() -> None:
    recall = Recall()
    for each in (known(b"x" * (1024 * 1024 + 1)), known(b"x", keys=100_000)):
        recall.note("completions", each)
        assert find(recall, "completions", each.body) is None
    assert not len(recall)


def test_what_was_rendered_is_not_the_prompt_for_ever() -> None:
    recall = Recall()
    recall.note("completions", known(b"body"))
    assert find(recall, "completions", b"body", 390.0) is not None
    assert find(recall, "completions", b"body", 401.0) is None


async def test_what_changed_while_a_body_was_read_is_not_taken_for_what_it_was_read_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    router, pool, read = world.router, world.view.pools["tiny"], world.router.planner.plan

    async def slow(*how: Any) -> Plan:
        plan = await read(*how)
        pool.max_model_len += 1
        return plan

    monkeypatch.setattr(router.planner, "plan", slow)
    asked = Asked(COMPLETIONS, "tiny", Prompt(b"", tokenized=tokenized(packed(64))), True)
    await router.draft(asked, body=b"the body")
    assert router.recalled(COMPLETIONS, b"the body") is None
    monkeypatch.setattr(router.planner, "plan", read)
    plan = await router.draft(asked, body=b"the body")
    known = router.recalled(COMPLETIONS, b"the body")
    assert known is not None
    assert known.plan is plan
