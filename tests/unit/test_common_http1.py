"""The HTTP client for engines, before servers that say exactly what a test wants said."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import uvloop

from stoker.common.http1 import Broken, Client
from tests.support.waiting import eventually

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


ONE_READ = 256 << 10
"""Bytes that asyncio reads from a socket at once, at most."""
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Server:
    """Plays a script on each connection; remembers what came."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.connections = 0
        self.closed = asyncio.Event()
        """A connection ended from the other side."""
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await self._script(reader, writer)
        self.closed.set()
        writer.close()


@contextlib.asynccontextmanager
async def served(script: Script) -> AsyncIterator[Server]:
    server = Server(script)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listening.close()


@contextlib.asynccontextmanager
async def client(keepalive_s: float = 4.0, buffer_bytes: int = 1024) -> AsyncIterator[Client]:
    made = Client(2.0, keepalive_s, buffer_bytes)
    try:
        async with asyncio.timeout(10):
            yield made
    finally:
        await made.close()


async def head_of(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return head + await reader.readexactly(int(line.partition(b":")[2]))
    return head


def saying(*answers: bytes) -> Script:
    """Answers one request after the other, then waits for the end."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await head_of(reader)
            writer.write(answer)
        await reader.readexactly(1)

    return script


async def ask(asking: Client, url: str) -> tuple[int, bytes]:
    async with await asking.send("GET", url) as exchange:
        await exchange.head()
        return exchange.status, await exchange.read()


async def test_the_request_arrives_as_it_was_given() -> None:
    heard: list[bytes] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await head_of(reader))
        writer.write(OK)

    async with served(script) as server, client() as asking:
        url = f"{server.url}/v1/x?a=%2F%20"
        async with await asking.send("POST", url, [("X-Who", "me"), ("x-who", "you")], b"body") as exchange:
            await exchange.head()
            assert exchange.headers == [("Content-Length", "2")]
    address = server.url.removeprefix("http://").encode()
    assert heard == [
        b"POST /v1/x?a=%2F%20 HTTP/1.1\r\nHost: " + address + b"\r\nX-Who: me\r\nx-who: you\r\n"
        b"Content-Length: 4\r\n\r\nbody"
    ]


async def test_headers_pass_as_the_bytes_they_are() -> None:
    heard: list[bytes] = []
    value = "Jürgen \udcff"  # as aiohttp reads what is no UTF-8

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await head_of(reader))
        writer.write(b"HTTP/1.1 204 No Content\r\nX-Who: J\xc3\xbcrgen \xff\r\n\r\n")

    async with served(script) as server, client() as asking:
        exchange = await (await asking.send("GET", server.url, [("X-Who", value)])).head()
        assert (exchange.status, exchange.headers) == (204, [("X-Who", value)])
        assert await exchange.read() == b""
    assert b"X-Who: J\xc3\xbcrgen \xff\r\n" in heard[0]


@pytest.mark.parametrize(
    "answer",
    [
        OK,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\nX-Trailer: t\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\nX-Interim: 1\r\n\r\n" + OK,
    ],
)
async def test_a_connection_serves_one_request_after_the_other(answer: bytes) -> None:
    async with served(saying(answer, answer, answer)) as server, client() as asking:
        for _ in range(3):
            assert await ask(asking, server.url) == (200, b"ok")
        assert server.connections == 1


def test_it_runs_on_the_event_loop_of_the_services() -> None:
    # Its transports are none by their type.
    uvloop.run(test_a_connection_serves_one_request_after_the_other(OK))


async def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nall of it")

    async with served(script) as server, client() as asking:
        assert await ask(asking, server.url) == (200, b"all of it")
        assert await ask(asking, server.url) == (200, b"all of it")
        assert server.connections == 2


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n", "closed the connection"),
        (b"SSH-2.0-OpenSSH\r\n", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000, "bytes of headers"),
    ],
)
async def test_what_breaks_off_is_said_to_be_broken(said: bytes, why: str) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(said)
        await writer.drain()

    async with served(script) as server, client() as asking:
        with pytest.raises(Broken, match=why):
            await ask(asking, server.url)


async def test_nothing_listens() -> None:
    async with served(saying()) as server:
        url = server.url
    async with client() as asking:
        with pytest.raises(Broken) as refused:
            await ask(asking, url)
        assert refused.value.errno == 111


async def test_leaving_early_closes_the_connection() -> None:
    async with served(saying(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")) as server, client() as asking:
        async with await asking.send("GET", server.url) as exchange:
            await exchange.head()
            assert await exchange.readany() == b"half"
        await server.closed.wait()


async def test_a_connection_that_the_server_closed_is_not_used() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(OK)

    async with served(script) as server, client() as asking:
        for number in range(1, 4):
            assert await ask(asking, server.url) == (200, b"ok")
            await server.closed.wait()
            server.closed.clear()
            await eventually(lambda: not asking._all, "the connection's end is noticed")
            assert server.connections == number


async def test_idle_connections_are_closed_in_time() -> None:
    async with served(saying(OK, OK)) as server, client(keepalive_s=0.05) as asking:
        await ask(asking, server.url)
        await server.closed.wait()
        assert await ask(asking, server.url) == (200, b"ok")
        assert server.connections == 2


async def test_an_answer_that_nobody_asked_for_is_not_taken_for_the_next() -> None:
    evil = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"
    async with served(saying(OK + evil, OK)) as server, client() as asking:
        assert await ask(asking, server.url) == (200, b"ok")
        await server.closed.wait()
        await eventually(lambda: not asking._idle, "the connection is given up")


async def test_a_slow_reader_makes_the_server_wait() -> None:
    size = 64 << 20

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        for _ in range(size >> 20):
            writer.write(b"x" * (1 << 20))
            await writer.drain()
        await reader.readexactly(1)

    async with served(script) as server, client() as asking, await asking.send("GET", server.url) as exchange:
        held = exchange._connection
        await eventually(lambda: held._paused, "nothing more is read from the connection")
        assert held.transport is not None
        assert not held.transport.is_reading()
        # What one read of the socket brings is taken whole.
        assert 1024 < sum(map(len, exchange._pieces)) <= 1024 + ONE_READ
        got = 0
        while piece := await exchange.readany():
            assert len(piece) <= 1024 + ONE_READ
            got += len(piece)
        assert got == size


@pytest.mark.parametrize(
    ("url", "header"),
    [
        ("https://127.0.0.1:1/", "x"),
        ("http:///nowhere", "x"),
        ("http://127.0.0.1:1/a b", "x"),
        ("http://127.0.0.1:1/", "x\r\nX-Forged: 1"),
    ],
)
async def test_what_no_request_can_hold_is_refused(url: str, header: str) -> None:
    async with client() as asking:
        with pytest.raises(ValueError, match=r"http|host|line break"):
            await asking.send("GET", url, [("X", header)])


async def test_reading_an_answer_late_does_not_open_the_next_ones_flow() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for size in (2_000, 1_000_000):
            await head_of(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size)
            await writer.drain()

    async with served(script) as server, client(buffer_bytes=1024) as sender:
        first = await (await sender.send("GET", server.url + "/")).head()
        await eventually(lambda: first._ended, "the first answer is whole")
        second = await (await sender.send("GET", server.url + "/")).head()
        assert server.connections == 1
        await eventually(lambda: second._connection._paused, "the second waits for its reader")
        assert len(await first.read()) == 2_000
        assert second._connection._paused
        assert len(await second.read()) == 1_000_000
