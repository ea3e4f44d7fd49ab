"""Bodies on their way in: who is let in, and who gives way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import HttpVersion11

from stoker.common.errors import Code, DeadlineExceeded, Exhausted
from stoker.router.http.errors import TooLarge
from stoker.router.http.intake import Intake

pytestmark = pytest.mark.looptime

LIMIT = 1000


class Content:
    """What a client sends, as a request gives it."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._more = asyncio.Event()
        self._ended = False

    def feed(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._more.set()

    def end(self, last: bytes = b"") -> None:
        self._ended = True
        self.feed(last)

    def is_eof(self) -> bool:
        return self._ended

    def at_eof(self) -> bool:
        return self._ended and not self._pieces

    async def readany(self) -> bytes:
        await self._more.wait()
        self._more.clear()
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)


def request(content: Content) -> Any:
    return SimpleNamespace(content=content, content_length=None, version=HttpVersion11, headers={})


@contextlib.asynccontextmanager
async def sending(intake: Intake, first: bytes = b"") -> AsyncIterator[tuple[Content, asyncio.Task[bytes]]]:
    """A client that has sent `first` and goes on as the test says; its body is let go as soon as it is whole."""
    content = Content()

    async def take() -> bytes:
        async with intake.body(request(content)) as raw:
            return raw

    task = asyncio.create_task(take())
    if first:
        content.feed(first)
    await settle()
    try:
        yield content, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_body_comes_as_it_was_sent_and_is_counted_until_it_is_let_go() -> None:
    intake = Intake(LIMIT, 2)
    async with sending(intake, b"one ") as (content, task):
        assert intake.held_bytes == 4
        content.end(b"two")
        assert await task == b"one two"
    assert intake.held_bytes == 0


async def test_the_slowest_gives_way_to_newcomers_not_they_to_it() -> None:
    intake = Intake(LIMIT, 2)
    async with sending(intake, b"a") as (_, slow), sending(intake, b"b") as (_, slower_later):
        async with sending(intake) as (content, quick):
            content.end(b"quick")
            assert await quick == b"quick"
        with pytest.raises(Exhausted, match="slowly"):
            await slow
        assert not slower_later.done()
        assert intake.held_bytes == 1


async def test_bytes_are_bounded_in_total_and_the_oldest_gives_way() -> None:
    intake = Intake(LIMIT, 1000)
    async with contextlib.AsyncExitStack() as held:
        slow = [(await held.enter_async_context(sending(intake, b"x" * LIMIT)))[1] for _ in range(64)]
        assert intake.held_bytes == 64 * LIMIT
        async with sending(intake) as (content, quick):
            content.end(b"quick")
            assert await quick == b"quick"
        await settle()
        assert [task.done() for task in slow] == [True] + [False] * 63
    assert intake.held_bytes == 0


async def test_where_all_is_held_by_requests_in_flight_newcomers_are_told_to_wait() -> None:
    intake = Intake(LIMIT, 1000)
    async with contextlib.AsyncExitStack() as flying:
        for _ in range(64):
            content = Content()
            content.end(b"x" * LIMIT)
            await flying.enter_async_context(intake.body(request(content)))
        async with sending(intake, b"x") as (_, refused):
            with pytest.raises(Exhausted, match="max_body_bytes") as told:
                await refused
        assert told.value.retry_after_s
        assert intake.held_bytes == 64 * LIMIT
    assert intake.held_bytes == 0


async def test_what_never_ends_is_given_up_after_a_minute() -> None:
    intake = Intake(LIMIT, 2)
    began = asyncio.get_running_loop().time()
    async with sending(intake, b"x") as (_, task):
        with pytest.raises(DeadlineExceeded, match="60 s") as late:
            await task
    assert late.value.code is Code.DEADLINE_EXCEEDED
    assert asyncio.get_running_loop().time() - began == pytest.approx(60)
    assert intake.held_bytes == 0


async def test_too_large_is_refused_as_soon_as_it_is() -> None:
    intake = Intake(LIMIT, 2)
    async with sending(intake, b"x" * (LIMIT + 1)) as (_, task):
        with pytest.raises(TooLarge):
            await task
    assert intake.held_bytes == 0


async def test_a_body_that_is_late_in_the_moment_its_place_is_needed_harms_nobody() -> None:
    intake = Intake(LIMIT, 1)
    loop = asyncio.get_running_loop()
    now = loop.create_future()
    loop.call_at(60.0, now.set_result, None)

    async def prompt_one() -> bytes:
        content = Content()
        content.end(b"whole")
        await now
        async with intake.body(request(content)) as raw:
            return raw

    other = asyncio.create_task(prompt_one())
    async with sending(intake, b"x") as (_, late):
        assert await other == b"whole"
        with pytest.raises((Exhausted, DeadlineExceeded)):
            await late
    assert intake.held_bytes == 0
