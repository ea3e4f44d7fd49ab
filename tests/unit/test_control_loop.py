"""The loop of a deciding service, in simulated time: when it runs rounds, when it holds, when it steps back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.common.errors import Conflict, InvalidRequest, StokerError, Unavailable
from stoker.control.config import LoopConfig
from stoker.control.loop import ControlLoop, candidate_name, fitting, pieces
from stoker.registry.client import (
    FleetEvent,
    FleetView,
    FleetWatch,
    Leadership,
    LoadChanged,
    RecordsChanged,
    SourceChanged,
)

pytestmark = pytest.mark.looptime

CHANGE = RecordsChanged(registry_pb2.Records(), registry_pb2.Removals(), snapshot=False)


URGENT = LoadChanged(())


def clock() -> float:
    return asyncio.get_running_loop().time()


class Watch:
    """A fleet watch without registries."""

    def __init__(self) -> None:
        self.view = FleetView(revision=10)
        self.synced = asyncio.Event()
        self.synced.set()
        self.stale = False
        self.age: Callable[[float], float] = lambda now: 0.1
        self.queue: asyncio.Queue[FleetEvent] = asyncio.Queue()

    def age_s(self, now: float) -> dict[str, float]:
        return {"r1": self.age(now), "r2": float("inf")}

    async def events(self) -> AsyncIterator[FleetEvent]:
        while True:
            yield await self.queue.get()


class Election:
    """A leadership that the test gives and takes."""

    def __init__(self) -> None:
        self.fence: common_pb2.Fence | None = None
        self.lost = asyncio.Event()
        self.won = asyncio.Event()
        self.log: list[str] = []

    def win(self, revision: int) -> None:
        self.fence = common_pb2.Fence(role="r", revision=revision)
        self.lost.clear()
        self.won.set()

    def lose(self) -> None:
        self.fence = None
        self.won.clear()
        self.lost.set()

    async def wait_leading(self) -> common_pb2.Fence:
        await self.won.wait()
        assert self.fence is not None
        return self.fence

    async def resign(self) -> None:
        self.log.append("resign")
        self.lose()

    async def start(self) -> None:
        self.log.append("start")


@dataclass
class Rounds:
    """Notes when it is called; answers what the test wants."""

    answer: Callable[[], int | None] = lambda: None
    takes_s: float = 0.0
    at: list[float] = field(default_factory=list)
    fences: list[int] = field(default_factory=list)
    begun: int = 0
    ended: int = 0
    heard: list[FleetEvent] = field(default_factory=list)

    def hear(self, event: FleetEvent, now: float) -> bool:
        self.heard.append(event)
        return event is URGENT

    def begin(self) -> None:
        self.begun += 1

    def end(self) -> None:
        self.ended += 1

    async def run(self, view: FleetView, fence: common_pb2.Fence, now: float) -> int | None:
        self.at.append(round(now, 3))
        self.fences.append(fence.revision)
        await asyncio.sleep(self.takes_s)
        return self.answer()


@dataclass
class Stage:
    loop: ControlLoop
    watch: Watch
    election: Election
    rounds: Rounds


@asynccontextmanager
async def staged(**config: Any) -> AsyncIterator[Stage]:
    watch, election, rounds = Watch(), Election(), Rounds()
    loop = ControlLoop(
        "r",
        LoopConfig(**config),
        cast(FleetWatch, watch),
        cast(Leadership, election),
        rounds,
        random.Random(1),
    )
    task = asyncio.create_task(loop.run())
    try:
        yield Stage(loop, watch, election, rounds)
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_only_a_leader_runs_rounds_each_tick_and_soon_after_a_change() -> None:
    async with staged(tick_s=1.0, debounce_s=0.05) as stage:
        await asyncio.sleep(3)
        assert stage.rounds.at == []
        start = clock()
        stage.election.win(5)
        await asyncio.sleep(2.5)
        assert stage.rounds.at == pytest.approx([start, start + 1, start + 2], abs=0.01)
        for _ in range(20):
            stage.watch.queue.put_nowait(CHANGE)
        await asyncio.sleep(0.4)
        assert stage.rounds.at[3:] == pytest.approx([start + 2.55], abs=0.01)
        assert stage.rounds.begun == 1


async def test_a_round_follows_soon_on_what_the_round_itself_finds_urgent() -> None:
    async with staged(tick_s=60.0, debounce_s=0.05) as stage:
        start = clock()
        stage.election.win(5)
        await asyncio.sleep(0.5)
        stage.watch.queue.put_nowait(SourceChanged("r1", True, None))
        await asyncio.sleep(0.5)
        stage.watch.queue.put_nowait(URGENT)
        await asyncio.sleep(5)
        assert stage.rounds.at == pytest.approx([start, start + 1.05], abs=0.01)


async def test_changes_that_come_during_a_round_start_another() -> None:
    async with staged(tick_s=60.0, debounce_s=0.05) as stage:
        stage.rounds.takes_s = 1.0
        start = clock()
        stage.election.win(5)
        await asyncio.sleep(0.5)
        stage.watch.queue.put_nowait(CHANGE)
        await asyncio.sleep(5)
        assert stage.rounds.at == pytest.approx([start, start + 1.05], abs=0.01)


async def test_it_holds_while_the_view_is_in_doubt_and_says_why() -> None:
    async with staged(tick_s=1.0) as stage:
        stage.watch.stale = True
        stage.election.win(5)
        await asyncio.sleep(9.5)
        assert stage.rounds.at == []
        assert "vouches" in stage.loop.holding
        stage.watch.stale = False
        await asyncio.sleep(1)
        assert len(stage.rounds.at) == 1
        assert stage.loop.holding == ""


async def test_a_new_leader_waits_until_its_view_has_reached_its_fence() -> None:
    async with staged(tick_s=1.0) as stage:
        stage.election.win(11)
        await asyncio.sleep(3)
        assert stage.rounds.at == []
        freshness = registry_pb2.Freshness(revision=11)
        stage.watch.queue.put_nowait(SourceChanged("r1", True, freshness))
        await asyncio.sleep(1.1)
        assert len(stage.rounds.at) >= 1
        # A registry that went away no longer says how far the view is.
        stage.watch.queue.put_nowait(SourceChanged("r1", False, freshness))
        await asyncio.sleep(2)
        assert "last write" in stage.loop.holding


async def test_it_waits_for_its_own_write_to_show() -> None:
    async with staged(tick_s=1.0) as stage:
        stage.rounds.answer = lambda: 42
        stage.election.win(5)
        await asyncio.sleep(4.5)
        assert len(stage.rounds.at) == 1
        stage.watch.view.revision = 42
        stage.watch.queue.put_nowait(CHANGE)
        await asyncio.sleep(0.1)
        assert len(stage.rounds.at) == 2


@pytest.mark.parametrize("error", [Conflict("another leads", reason="FENCED"), Unavailable("no answer in time")])
async def test_a_fenced_or_unanswered_write_ends_its_leading_at_once(error: StokerError) -> None:
    async with staged(tick_s=1.0) as stage:

        def refuse() -> int:
            raise error

        stage.rounds.answer = refuse
        stage.election.win(5)
        await asyncio.sleep(10)
        assert len(stage.rounds.at) == 1
        assert stage.election.log == ["resign", "start"]
        assert not stage.loop.leading
        stage.rounds.answer = lambda: None
        stage.election.win(8)
        await asyncio.sleep(0.1)
        assert stage.rounds.fences == [5, 8]
        assert (stage.rounds.begun, stage.rounds.ended) == (2, 1)


async def test_lost_leadership_stops_rounds_at_once() -> None:
    async with staged(tick_s=1.0) as stage:
        stage.election.win(5)
        await asyncio.sleep(1.5)
        before = len(stage.rounds.at)
        stage.election.lose()
        stage.watch.queue.put_nowait(CHANGE)
        await asyncio.sleep(5)
        assert len(stage.rounds.at) == before


@pytest.mark.parametrize("error", [InvalidRequest, ValueError])
async def test_a_failed_round_is_repeated_with_growing_pauses_on_a_view_that_is_newer(error: type[Exception]) -> None:
    async with staged(tick_s=0.125) as stage:

        def fail() -> int:
            raise error("refused, or a defect")

        stage.rounds.answer = fail
        stage.election.win(5)
        await asyncio.sleep(60)
        gaps = [after - before for before, after in zip(stage.rounds.at, stage.rounds.at[1:], strict=False)]
        assert gaps[0] < 1 < gaps[-1] < 6
        # No registry has proven the view since: it may hide a write that landed.
        failed_at = clock()
        stage.watch.age = lambda now: now - failed_at + 1
        await asyncio.sleep(5.5)
        count = len(stage.rounds.at)
        await asyncio.sleep(3)
        assert len(stage.rounds.at) == count
        assert "failed write" in stage.loop.holding


async def test_every_event_is_heard_by_a_standby_too() -> None:
    async with staged() as stage:
        stage.watch.queue.put_nowait(CHANGE)
        await asyncio.sleep(0.1)
        assert stage.rounds.heard == [CHANGE]


def test_candidates_are_told_apart() -> None:
    assert candidate_name(LoopConfig()) != candidate_name(LoopConfig())
    assert candidate_name(LoopConfig(candidate="me")) == "me"


def test_writes_are_cut_into_pieces_the_registry_takes() -> None:
    assert [len(piece) for piece in pieces(range(250))] == [100, 100, 50]
    assert list(pieces([])) == []
    small, large, huge = (records_pb2.Desired(deployment=size * "x") for size in (9, 300_000, 2_000_000))
    assert [len(piece) for piece in fitting([small] * 250)] == [100, 100, 50]
    assert [len(piece) for piece in fitting([large] * 7)] == [3, 3, 1], "a write has a size, too"
    assert [len(piece) for piece in fitting([small, huge, small])] == [1, 1, 1], "the registry says what is too large"
    assert list(fitting([])) == []
