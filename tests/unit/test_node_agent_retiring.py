"""A retiring replica has its prompts computed elsewhere: in order, within a budget and a time, never in the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import pytest

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import records_pb2
from stoker.common.blocks import SAMPLE
from stoker.common.errors import Exhausted, NotFound, StokerError, Unavailable
from stoker.common.ticket_keys import KeyFile
from stoker.node_agent import state_files, wire
from stoker.node_agent.core.lifecycle import Member
from stoker.node_agent.core.prompts import Prompt, PromptOf
from stoker.node_agent.core.task import Prefix, Retirement, Task, by_priority
from stoker.node_agent.retiring import Retiring, Successor, Warming

pytestmark = pytest.mark.looptime

LENGTH = 100


@dataclass
class Heir:
    """Computes 100 tokens a second; refuses in turn what `errors` says."""

    cached: int = 0
    errors: list[StokerError | None] = field(default_factory=list)
    asked: list[tuple[int, float]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0

    async def compute(self, prompt: Prompt, timeout_s: float) -> common_pb2.Usage:
        self.asked.append((prompt.tokens[0], asyncio.get_running_loop().time()))
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep((len(prompt.tokens) - self.cached) / 100)
        finally:
            self.at_once -= 1
        return common_pb2.Usage(prompt_tokens=len(prompt.tokens), cached_prompt_tokens=self.cached)

    @property
    def leaves(self) -> list[int]:
        return [leaf for leaf, _ in self.asked]


def prompt_of(leaf: int) -> Prompt | None:
    return Prompt([leaf] * LENGTH) if leaf < 1_000 else None


async def prompts() -> PromptOf:
    return prompt_of


def retirement(*prefixes: tuple[int, str], tokens: int = LENGTH, timeout_s: float = 60.0) -> Retirement:
    heirs = dict.fromkeys(heir for _, heir in prefixes)
    return Retirement(
        tuple(Prefix(leaf, heir, tokens) for leaf, heir in prefixes),
        dict.fromkeys(heirs, "127.0.0.1:1"),
        timeout_s,
    )


async def warm(asked: Retirement, longest: int = 10_000, **heirs: Heir) -> Warming:
    warming = Warming(asked, prompt_of, longest, block_size=1, busy_pause_s=0.5)
    await warming.run(lambda name: heirs[name])
    return warming


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_each_successor_computes_its_prompts_in_order_one_at_a_time_and_all_at_once() -> None:
    began = now()
    a, b = Heir(), Heir()
    warming = await warm(retirement((1, "a"), (2, "b"), (3, "a"), (4, "b")), a=a, b=b)
    assert (a.leaves, b.leaves) == ([1, 3], [2, 4])
    assert (a.most_at_once, b.most_at_once) == (1, 1)
    assert now() - began == pytest.approx(2.0)
    assert warming.budget.spent == 4 * LENGTH


async def test_no_more_is_computed_than_the_plan_said() -> None:
    heir = Heir()
    warming = await warm(retirement(*((leaf, "a") for leaf in range(100)), tokens=LENGTH // 2), a=heir)
    assert 50 <= len(heir.leaves) <= 60, "prompts turned out longer: what they took is missing for the last ones"
    assert warming.budget.spent == LENGTH * len(heir.leaves)


async def test_a_few_prompts_may_be_longer_than_the_blocks_followed_of_them_say() -> None:
    heir = Heir()
    # Of a hundred blocks of one token each, six are followed on average: four are here.
    warming = await warm(retirement(*((leaf, "a") for leaf in range(5)), tokens=4 * SAMPLE), a=heir)
    assert heir.leaves == [0, 1, 2, 3, 4]
    assert warming.budget.spent == 5 * LENGTH


async def test_what_the_successor_holds_already_is_free() -> None:
    heir = Heir(cached=90)
    warming = await warm(retirement((1, "a"), (2, "a"), (3, "a"), tokens=10), a=heir)
    assert heir.leaves == [1, 2, 3]
    assert warming.budget.spent == 30


async def test_it_ends_when_its_time_is_over() -> None:
    began = now()
    heir = Heir()
    await warm(retirement((1, "a"), (2, "a"), (3, "a"), timeout_s=1.5), a=heir)
    assert now() - began == pytest.approx(1.5)
    assert heir.leaves == [1, 2]
    assert heir.at_once == 0, "the second was given up in the middle"


async def test_a_busy_successor_is_asked_again_later() -> None:
    heir = Heir(errors=[Exhausted("busy", retry_after_s=0.25), Exhausted("busy")])
    await warm(retirement((1, "a"), (2, "a")), a=heir)
    assert heir.leaves == [1, 1, 1, 2]
    first, second, third, _ = [at for _, at in heir.asked]
    assert [second - first, third - second] == pytest.approx([0.25, 0.5])


async def test_one_that_stays_busy_costs_the_time_and_no_more() -> None:
    began = now()
    heir = Heir(errors=[Exhausted("busy") for _ in range(100)])
    await warm(retirement((1, "a"), timeout_s=5.0), a=heir)
    assert now() - began == pytest.approx(5.0)


async def test_a_successor_that_is_gone_is_left_alone_and_the_others_go_on() -> None:
    gone, other = Heir(errors=[None, Unavailable("gone")]), Heir()
    await warm(retirement((1, "a"), (2, "a"), (3, "a"), (4, "b"), (5, "b")), a=gone, b=other)
    assert gone.leaves == [1, 2]
    assert other.leaves == [4, 5]


async def test_a_prompt_that_is_refused_or_not_known_costs_that_one() -> None:
    heir = Heir(errors=[None, NotFound("no such adapter")])
    warming = await warm(retirement((1, "a"), (1_001, "a"), (2, "a"), (3, "a")), a=heir)
    assert heir.leaves == [1, 2, 3]
    assert warming.budget.spent == 200


async def test_a_prompt_leaves_room_for_the_token_that_is_asked_for() -> None:
    heir = Heir()
    warming = await warm(retirement((1, "a")), longest=64, a=heir)
    assert warming.budget.spent == 64


async def test_nothing_to_do_is_done_at_once() -> None:
    await warm(Retirement())


class Follower:
    """A member's retiring, with a successor that is a fake."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, heir: Successor) -> None:
        monkeypatch.setattr("stoker.node_agent.retiring.RemoteSuccessor", lambda *_: heir)
        self.changes = 0
        self.retiring = Retiring(None, KeyFile(""), 0.5, self._changed)

    def _changed(self) -> None:
        self.changes += 1

    def follow(self, asked: Retirement | None) -> None:
        self.retiring.follow(asked, prompts, "m", 10_000, 1)


async def test_a_member_says_when_it_is_done_and_what_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    heir = Heir()
    member = Follower(monkeypatch, heir)
    asked = retirement((1, "a"), (2, "a"))
    for _ in range(3):
        member.follow(asked)
        await asyncio.sleep(0.5)
    assert heir.leaves == [1, 2], "told twice, begun once"
    assert (member.retiring.done, member.changes) == (False, 0)
    await asyncio.sleep(1.0)
    assert (member.retiring.done, member.changes) == (True, 1)
    assert member.retiring.warmed_tokens == 2 * LENGTH
    await member.retiring.stop()


async def test_told_to_run_on_it_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    heir = Heir()
    member = Follower(monkeypatch, heir)
    asked = retirement((1, "a"), (2, "a"))
    member.follow(asked)
    await asyncio.sleep(0.5)
    assert heir.at_once == 1
    member.follow(None)
    await asyncio.sleep(0)
    await asyncio.sleep(5.0)
    assert (heir.at_once, heir.leaves) == (0, [1])
    assert (member.retiring.done, member.changes) == (False, 0)
    member.follow(asked)
    await asyncio.sleep(5.0)
    assert heir.leaves == [1, 1, 2]
    assert member.retiring.done
    member.follow(None)
    assert not member.retiring.done


async def test_what_fails_within_does_not_keep_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        async def compute(self, prompt: Prompt, timeout_s: float) -> common_pb2.Usage:
            raise ZeroDivisionError

    member = Follower(monkeypatch, Broken())
    member.follow(retirement((1, "a")))
    await asyncio.sleep(1.0)
    assert member.retiring.done


def asked(wanted: records_pb2.Wanted.ValueType, **fields: object) -> records_pb2.Assignment:
    return records_pb2.Assignment(
        replica_id="chat-1",
        deployment="chat",
        members=[records_pb2.GangMember(rank=0, node_id="n1")],
        wanted=wanted,
        retirement=records_pb2.Retirement(**fields),  # type: ignore[arg-type]
    )


def task_of(assignment: records_pb2.Assignment) -> Task:
    (task,) = wire.tasks_of(assignment, "n1", {}, startup_timeout_s=1.0, drain_timeout_s=1.0)
    return task


HIGHEST = (1 << 64) - 1


async def test_what_an_assignment_says_of_it() -> None:
    prefixes = [records_pb2.Prefix(leaf=HIGHEST, successor=1, tokens=9), records_pb2.Prefix(leaf=2, successor=7)]
    heirs = [records_pb2.Successor(replica_id=f"chat-{n}", agent_endpoint=f"h{n}:1") for n in (0, 2)]
    told = asked(records_pb2.WANTED_RETIRE, prefixes=prefixes, successors=heirs, timeout_s=12.0)
    task = task_of(told)
    assert not task.drain
    assert task.retirement == Retirement(
        (Prefix(HIGHEST, "chat-2", 9),), {"chat-0": "h0:1", "chat-2": "h2:1"}, 12.0
    ), "a successor that is not there is passed over"
    record = state_files.record_of(Member(task, since=0.0))
    assert msgspec.json.decode(msgspec.json.encode(record), type=state_files.Record).task == task
    told.wanted = records_pb2.WANTED_RUN
    assert task_of(told).retirement is None
    told.wanted = records_pb2.WANTED_DRAIN
    assert (task_of(told).drain, task_of(told).retirement) == (True, None)


@pytest.mark.parametrize(("said", "taken"), [(float("nan"), 0.0), (-1.0, 0.0), (float("inf"), 3_600.0), (0.0, 0.0)])
async def test_no_time_that_makes_no_sense_is_taken(said: float, taken: float) -> None:
    retirement = task_of(asked(records_pb2.WANTED_RETIRE, timeout_s=said)).retirement
    assert retirement is not None
    assert retirement.timeout_s == taken


async def test_no_more_prefixes_are_taken_than_may_be_said() -> None:
    many = [records_pb2.Prefix(leaf=n) for n in range(5_000)]
    heirs = [records_pb2.Successor(replica_id="chat-0", agent_endpoint="h:1")]
    retirement = task_of(asked(records_pb2.WANTED_RETIRE, prefixes=many, successors=heirs)).retirement
    assert retirement is not None
    assert len(retirement.prefixes) == 1_024


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], False),
        (["--scheduling-policy", "priority"], True),
        (["--scheduling-policy=priority", "--x"], True),
        (["--scheduling-policy", "fcfs", "--note", "priority"], False),
    ],
)
async def test_whether_an_engine_heeds_priorities(args: Sequence[str], expected: bool) -> None:
    check: Callable[[tuple[str, ...]], bool] = by_priority
    assert check(tuple(args)) is expected
