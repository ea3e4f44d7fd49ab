"""The port on which Envoy asks: parsing, bounds, order, and what happens to checks that are given up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest
import uvloop

from stoker.router.http.port import Answer, Ask, Connections
from tests.support.lines import Line, listening
from tests.support.waiting import eventually

POST = b"POST /v1/completions?a=b HTTP/1.1\r\nHost: x\r\nX-Two: first\r\nx-two: second\r\nContent-Length: 2\r\n\r\nhi"
CHUNKED = (
    b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n7;ext=1\r\n, world\r\n0\r\n\r\n"
)


@dataclass
class Desk:
    """Answers with what was asked, when it is let."""

    asks: list[Ask] = field(default_factory=list)
    undone: list[str] = field(default_factory=list)
    cancelled: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    async def decide(self, ask: Ask) -> Answer:
        self.asks.append(ask)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

        def undo() -> None:
            self.undone.append(ask.target)

        return Answer(200, {"x-told": ask.target}, ask.body, undo=undo, undo_late=undo)


@dataclass
class Port:
    desk: Desk
    shared: Connections
    number: int
    now: list[float]

    async def line(self, sends: bytes = b"") -> Line:
        return await Line.to(self.number, sends)


@contextlib.asynccontextmanager
async def port(max_body_bytes: int = 1024, max_connections: int = 8) -> AsyncIterator[Port]:
    desk, now = Desk(), [0.0]
    clock: Callable[[], float] = lambda: now[0]  # noqa: E731
    shared = Connections(desk.decide, max_body_bytes, max_connections, clock)
    async with listening(shared) as number:
        yield Port(desk, shared, number, now)


async def test_a_request_is_read_as_it_is_and_the_connection_stays() -> None:
    async with port() as there:
        line = await there.line(POST)
        assert (await line.answer())[2] == b"hi"
        line.writer.write(CHUNKED)
        assert (await line.answer())[2] == b"hello, world"
        first = there.desk.asks[0]
        assert (first.method, first.target) == ("POST", "/v1/completions?a=b")
        assert first.headers["x-two"] == "first"


def test_it_is_the_same_on_the_loop_that_services_run_on() -> None:
    async def ask() -> bytes:
        async with port() as there:
            return (await (await there.line(POST)).answer())[2]

    assert uvloop.run(ask()) == b"hi"


async def test_a_request_in_single_bytes_is_the_same() -> None:
    async with port() as there:
        line = await there.line()
        for byte in CHUNKED:
            line.writer.write(bytes([byte]))
            await line.writer.drain()
            await asyncio.sleep(0)
        assert (await line.answer())[2] == b"hello, world"


async def test_pipelined_requests_are_answered_in_turn_one_at_a_time() -> None:
    async with port() as there:
        there.desk.gate.clear()
        line = await there.line(POST + CHUNKED + POST)
        await eventually(lambda: len(there.desk.asks) == 1, "the first is asked")
        await asyncio.sleep(0)
        assert len(there.desk.asks) == 1, "the others wait for its answer"
        there.desk.gate.set()
        assert [(await line.answer())[2] for _ in range(3)] == [b"hi", b"hello, world", b"hi"]


async def test_who_wants_to_close_is_closed_after_the_answer() -> None:
    async with port() as there:
        line = await there.line(POST.replace(b"Host: x", b"Host: x\r\nConnection: close"))
        assert (await line.answer())[1]["connection"] == "close"
        assert await line.ended()


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]
)
async def test_garbage_is_refused_and_costs_its_own_connection(garbage: bytes) -> None:
    async with port() as there:
        line = await there.line(garbage)
        assert (await line.answer())[0] == 400
        assert await line.ended()
        assert (await (await there.line(POST)).answer())[0] == 200


async def test_garbage_after_a_request_leaves_its_answer() -> None:
    async with port() as there:
        line = await there.line(POST + b"\0\0\0\r\n\r\n")
        assert [(await line.answer())[0] for _ in range(2)] == [200, 400]
        assert await line.ended()


@pytest.mark.parametrize(
    "head", [b"Content-Length: 1025", b"Content-Length: 99999999999999999", b"Transfer-Encoding: chunked"]
)
async def test_a_body_beyond_the_bound_is_refused_before_it_is_all_here(head: bytes) -> None:
    async with port(1024) as there:
        line = await there.line(b"POST / HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n")
        if b"chunked" in head:
            line.writer.write(b"800\r\n" + b"x" * 0x800 + b"\r\n")
        status, _, body = await line.answer()
        assert (status, b"body_too_large" in body) == (413, True)
        assert not there.desk.asks


async def test_endless_headers_are_refused() -> None:
    async with port() as there:
        line = await there.line(b"POST / HTTP/1.1\r\nX: ")
        with contextlib.suppress(ConnectionResetError):
            for _ in range(40):
                line.writer.write(b"x" * 4096)
                await line.writer.drain()
        assert (await line.answer())[0] == 400


async def test_all_bodies_together_are_bounded() -> None:
    async with port(1024, max_connections=200) as there:
        there.desk.gate.clear()
        big = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1024\r\n\r\n" + b"x" * 1024
        lines = [await there.line(big) for _ in range(64)]
        await eventually(lambda: len(there.desk.asks) == 64, "as many as are held")
        status, headers, _ = await (await there.line(big)).answer()
        assert (status, headers["retry-after"]) == (429, "1")
        there.desk.gate.set()
        for line in lines:
            assert (await line.answer())[0] == 200
        assert there.shared.held_bytes == 0


async def test_a_check_that_is_given_up_is_cancelled() -> None:
    async with port() as there:
        there.desk.gate.clear()
        line = await there.line(POST)
        await eventually(lambda: len(there.desk.asks) == 1, "it is asked")
        line.writer.close()
        await eventually(lambda: there.desk.cancelled == 1, "the decision ends")


async def test_an_answer_that_nobody_takes_any_more_is_undone() -> None:
    async with port() as there:
        there.desk.gate.clear()
        line = await there.line(POST)
        await eventually(lambda: len(there.desk.asks) == 1, "it is asked")
        next(iter(there.shared.open)).abort()  # closing, but not yet told
        there.desk.gate.set()
        await eventually(lambda: bool(there.desk.undone) or there.desk.cancelled == 1, "its flight ends")
        assert await line.ended()


async def test_an_answer_that_was_on_its_way_when_envoy_gave_up_is_undone() -> None:
    async with port() as there:
        line = await there.line(POST)
        await line.answer()
        assert not there.desk.undone
        line.writer.close()
        await eventually(lambda: len(there.desk.undone) == 1, "undone when the connection ends")


async def test_a_slow_sender_is_let_go() -> None:
    async with port() as there:
        line = await there.line(POST[:-1])
        await eventually(lambda: any(each.began is not None for each in there.shared.open), "it began")
        there.now[0] = 59.0
        there.shared.sweep()
        assert there.shared.open
        there.now[0] = 61.0
        there.shared.sweep()
        assert (await line.answer()).status == 504
        assert await line.ended()


async def test_connections_are_bounded() -> None:
    async with port(max_connections=2) as there:
        lines = [await there.line(POST) for _ in range(2)]
        for line in lines:
            await line.answer()
        assert await (await there.line()).ended()
