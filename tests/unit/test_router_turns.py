"""Waiting for a turn: cancelled, timed out, refused and granted, with nothing left behind."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from stoker.common.errors import Exhausted, Unavailable
from stoker.router import core
from stoker.router.config import QueueConfig
from stoker.router.fleet.pools import Pool
from stoker.router.flights.turns import Turns

pytestmark = pytest.mark.looptime


@dataclass
class Sent:
    """A request that got its replica."""

    pool: Pool
    decision: core.Decision
    flight: int
    abandoned: list[int] = field(default_factory=list)

    def abandon(self) -> None:
        self.abandoned.append(self.flight)
        self.pool.fleet.release(self.flight, asyncio.get_running_loop().time())


@dataclass
class World:
    turns: Turns
    pool: Pool
    sent: list[Sent] = field(default_factory=list)

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def request(self, family: int, blocks: int = 100) -> core.Request:
        return core.Request([1_000 * family + n for n in range(blocks)], 16 * blocks)

    def wait(self, family: int, since: float | None = None, blocks: int = 100) -> asyncio.Task[Sent]:
        request = self.request(family, blocks)

        def depart(decision: core.Decision) -> Sent:
            flight = self.pool.fleet.dispatch(request, decision, self.now())
            self.sent.append(Sent(self.pool, decision, flight))
            return self.sent[-1]

        return asyncio.create_task(self.turns.wait(self.pool, request, depart, since))

    def occupy(self) -> int:
        request = self.request(99)
        decision = core.decide(request, self.pool.fleet, self.now(), random.Random(1))
        return self.pool.fleet.dispatch(request, decision, self.now())

    def end(self, flight: int) -> None:
        self.pool.fleet.release(flight, self.now())
        self.turns.pump(self.pool)


def world(limit: int = 10, longest_s: float = 30.0) -> World:
    fleet = core.Fleet()
    fleet.put(core.Replica("a", prefill_rate=1_000.0))
    turns = Turns(
        QueueConfig(limit=limit, longest_s=longest_s), random.Random(1), lambda: asyncio.get_running_loop().time()
    )
    return World(turns, Pool("tiny", fleet))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_who_waits_goes_when_there_is_room_and_the_line_closes() -> None:
    here = world()
    flight = here.occupy()
    first, second = here.wait(1), here.wait(2)
    await settle()
    assert len(here.turns) == 2
    assert here.turns.before(here.pool)
    here.end(flight)
    sent = await first
    await settle()
    assert not second.done(), "one at a time"
    here.end(sent.flight)
    here.end((await second).flight)
    assert not here.turns.before(here.pool)
    assert here.pool.fleet.load.in_flight == 0


async def test_room_that_comes_by_time_alone_is_found() -> None:
    here = world()
    here.pool.fleet.dispatch(
        core.Request([], 1_000, streamed=False), core.Decision("a", core.Reason.RING, 0, 1_000, False), here.now()
    )
    await asyncio.wait_for(here.wait(1), 2.0)
    assert 0.85 <= here.now() <= 1.1


async def test_who_waits_too_long_is_told_when_to_come_again() -> None:
    here = world(longest_s=5.0)
    here.occupy()
    with pytest.raises(Exhausted) as refused:
        await here.wait(1)
    assert refused.value.reason == "QUEUE_TIMEOUT"
    assert refused.value.retry_after_s is not None
    assert here.now() >= 5.0
    assert not here.turns.before(here.pool)


async def test_a_full_line_refuses_and_keeps_those_in_it() -> None:
    here = world(limit=1)
    flight = here.occupy()
    waiting = here.wait(1)
    await settle()
    with pytest.raises(Exhausted, match="wait for a replica"):
        await here.wait(2)
    here.end(flight)
    assert (await waiting).decision.replica == "a"


async def test_nobody_is_told_to_stay_away_longer_than_those_who_wait_may() -> None:
    here = world(limit=1, longest_s=5.0)
    here.occupy()
    waiting = here.wait(1, blocks=62_500)  # 1,000 s
    await settle()
    with pytest.raises(Exhausted) as refused:
        await here.wait(2)
    assert refused.value.retry_after_s == 5.0
    with pytest.raises(Exhausted) as late:
        await waiting
    assert late.value.retry_after_s == 5.0


async def test_who_is_cancelled_while_waiting_is_never_sent() -> None:
    here = world()
    flight = here.occupy()
    waiting = here.wait(1)
    await settle()
    waiting.cancel()
    here.end(flight)
    await settle()
    assert waiting.cancelled()
    assert here.sent == []
    assert not here.turns.before(here.pool)


async def test_who_is_cancelled_in_the_moment_of_its_turn_gives_it_back() -> None:
    here = world()
    flight = here.occupy()
    waiting = here.wait(1)
    await settle()
    here.end(flight)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert here.sent[0].abandoned == [here.sent[0].flight]
    assert here.pool.fleet.load.in_flight == 0


async def test_a_fleet_that_empties_ends_the_wait_with_the_reason() -> None:
    here = world()
    here.occupy()
    waiting = here.wait(1)
    await settle()
    here.pool.fleet.remove("a")
    with pytest.raises(Unavailable, match="0 announced"):
        await waiting
    assert not here.turns.before(here.pool)


async def test_an_error_of_one_that_departs_is_its_own() -> None:
    here = world()
    flight = here.occupy()

    def gone(decision: core.Decision) -> Sent:
        raise Unavailable("just left")

    lost = asyncio.create_task(here.turns.wait(here.pool, here.request(1, 1), gone, None))
    kept = here.wait(2)
    await settle()
    here.end(flight)
    with pytest.raises(Unavailable, match="just left"):
        await lost
    assert (await kept).decision.replica == "a"


async def test_looking_who_may_go_takes_a_bounded_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    here = world()
    here.occupy()
    waiting = here.wait(1)
    await settle()
    looked: list[float] = []
    spent = 0.0

    def slow_look(queue: core.AdmissionQueue, *_: object, **__: object) -> None:
        nonlocal spent
        looked.append(here.now())
        spent += 0.02

    monkeypatch.setattr(core.AdmissionQueue, "grant", slow_look)
    monkeypatch.setattr(here.turns, "_clock", lambda: here.now() + spent)
    for _ in range(1_000):
        here.turns.pump(here.pool)
        await asyncio.sleep(0.001)
    assert 5 <= len(looked) <= 25, "of 1 s, at most half"
    waiting.cancel()
