"""What clients of the OpenAI port rely on of HTTP/1.1, byte by byte over real connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from stoker.router.http.server import HttpPort
from tests.support.router import replica, running_router, tell

POST = b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello"
Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Line:
    """One connection of a client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    @contextlib.asynccontextmanager
    async def to(cls, port: int) -> AsyncIterator[Line]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            async with asyncio.timeout(60):
                yield cls(reader, writer)
        finally:
            writer.close()

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def head(self) -> bytes:
        return (await self._reader.readuntil(b"\r\n\r\n")).lower()

    async def answer(self) -> tuple[int, bytes, bytes]:
        """Status, head in lower case, and body, of a response that tells its length."""
        head = await self.head()
        size = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
        return int(head.split()[1]), head, await self._reader.readexactly(size)

    async def rest(self) -> bytes:
        """All until the other side closes; a reset closes too."""
        with contextlib.suppress(ConnectionResetError):
            return await self._reader.read()
        return b""


class Served:
    """A port, and what its handler saw."""

    def __init__(self, handle: Handle | None, max_connections: int, keepalive_s: float) -> None:
        self.seen: list[bytes] = []
        self.port = HttpPort(handle or self._echo, max_connections=max_connections, keepalive_s=keepalive_s)
        self.number = 0

    async def _echo(self, request: web.BaseRequest) -> web.Response:
        body = await request.read()
        self.seen.append(body)
        return web.Response(body=body)

    def line(self) -> contextlib.AbstractAsyncContextManager[Line]:
        return Line.to(self.number)


@contextlib.asynccontextmanager
async def served(handle: Handle | None = None, most: int = 64, keepalive_s: float = 75.0) -> AsyncIterator[Served]:
    running = Served(handle, most, keepalive_s)
    listening = await asyncio.get_running_loop().create_server(running.port, "127.0.0.1", 0)
    running.number = listening.sockets[0].getsockname()[1]
    try:
        yield running
    finally:
        listening.close()
        await running.port.close()


async def test_requests_sent_ahead_are_answered_in_turn() -> None:
    async with served() as running, running.line() as line:
        line.send(b"".join(POST.replace(b"hello", b"%05d" % number) for number in range(20)))
        for number in range(20):
            assert (await line.answer())[::2] == (200, b"%05d" % number)


async def test_another_protocol_is_offered_in_vain() -> None:
    offered = b"Host: h\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: x"
    offer = POST.replace(b"Host: h", offered)
    async with served() as running, running.line() as line:
        for request in (offer, POST):
            line.send(request)
            assert (await line.answer())[::2] == (200, b"hello")


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1x\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"y" * 70_000 + b"\r\n\r\n",
        b"GET /" + b"y" * 70_000 + b" HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\n" + b"X: y\r\n" * 10_000 + b"\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    ],
    ids=["nonsense", "length", "two lengths", "header", "target", "headers", "huge length"],
)
async def test_what_cannot_be_read_is_refused_and_the_connection_ends(raw: bytes) -> None:
    async with served() as running, running.line() as line:
        line.send(raw)
        assert (await line.head()).startswith(b"http/1.0 400 bad request\r\n")
        await line.rest()
        assert not running.seen


async def test_http_1_0_gets_no_chunks_and_the_end_of_the_connection() -> None:
    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        out = web.StreamResponse()
        await out.prepare(request)
        await out.write(b"one")
        await out.write(b"two")
        return out

    async with served(handle) as running, running.line() as line:
        line.send(b"POST / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert b"chunked" not in await line.head()
        assert await line.rest() == b"onetwo"


async def test_a_client_that_goes_takes_its_handler_with_it() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.set()
            raise
        raise AssertionError

    async with served(handle) as running:
        async with running.line() as line:
            line.send(POST)
            await began.wait()
        async with asyncio.timeout(60):
            await ended.wait()


@pytest.mark.parametrize("sent", [b"", b"POST / HT"], ids=["idle", "slow with its head"])
async def test_idle_and_slow_connections_have_their_time(sent: bytes) -> None:
    async with served(keepalive_s=0.2) as running, running.line() as fresh, running.line() as used:
        used.send(POST)
        await used.answer()
        for line in (fresh, used):
            line.send(sent)
            assert await line.rest() == b""


async def test_what_nobody_reads_is_let_pass_and_the_connection_goes_on() -> None:
    async def handle(request: web.BaseRequest) -> web.Response:
        return web.Response(status=429, body=b"later")

    async with served(handle) as running, running.line() as line:
        line.send(POST[:-2])
        assert (await line.answer())[::2] == (429, b"later")
        line.send(POST[-2:] + POST)
        assert (await line.answer())[::2] == (429, b"later")


async def test_a_refusal_that_closes_is_read_before_the_connection_ends() -> None:
    async def handle(request: web.BaseRequest) -> web.Response:
        answer = web.Response(status=413, body=b"too large")
        answer.force_close()
        return answer

    async with served(handle) as running, running.line() as line:
        size = 4_000_000
        line.send(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % size + b"x" * (size // 2))
        status, head, body = await line.answer()
        assert (status, body) == (413, b"too large")
        assert b"connection: close" in head
        line.send(b"x" * (size // 2))  # closed at once, it would be reset before it had read the answer
        assert await line.rest() == b""


async def test_connections_are_bounded() -> None:
    async with served(most=2) as running, running.line() as one, running.line() as two:
        for line in (one, two):
            line.send(POST)
            assert (await line.answer())[0] == 200
        async with running.line() as third:
            assert await third.rest() == b""
        one.send(POST)
        assert (await one.answer())[0] == 200


async def test_a_port_that_retires_ends_its_connections_with_their_responses() -> None:
    began, go = asyncio.Event(), asyncio.Event()

    async def handle(request: web.BaseRequest) -> web.Response:
        began.set()
        await go.wait()
        return web.Response(body=b"done")

    async with served(handle) as running, running.line() as busy, running.line() as idle:
        busy.send(POST)
        await began.wait()
        running.port.retire()
        assert await idle.rest() == b""
        async with running.line() as late:
            late.send(POST)
            go.set()
            for line in (busy, late):
                status, head, body = await line.answer()
                assert (status, body) == (200, b"done")
                assert b"connection: close" in head
                assert await line.rest() == b""


# --- the whole router ----------------------------------------------------------------------------------------


async def test_a_draining_router_ends_idle_connections_and_finishes_the_others() -> None:
    began, go = asyncio.Event(), asyncio.Event()

    async def engine(request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "GET":
            return web.Response()
        out = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await out.prepare(request)
        await out.write(b"data: {}\n\n")
        began.set()
        await go.wait()
        await out.write(b"data: [DONE]\n\n")
        return out

    listening = await asyncio.get_running_loop().create_server(web.Server(engine), "127.0.0.1", 0)
    async with running_router("parity=false") as app:
        tell(app, replica("a", f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"))
        body = b'{"model":"tiny","prompt":"coal","stream":true}'
        async with Line.to(app.http_port) as busy, Line.to(app.http_port) as idle:
            idle.send(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n")
            assert (await idle.answer())[0] == 200
            busy.send(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            await began.wait()
            stopping = asyncio.create_task(app.stop())
            assert await idle.rest() == b""
            assert not stopping.done()
            go.set()
            assert (await busy.rest()).endswith(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            await stopping
    listening.close()


async def test_a_malformed_body_is_its_senders_fault() -> None:
    async with running_router() as app, Line.to(app.http_port) as line:
        line.send(
            POST.replace(b"/v1/x", b"/v1/completions").replace(b"Host: h", b"Host: h\r\nContent-Encoding: gzip")
        )
        status, _, body = await line.answer()
        assert status == 400
        assert b'"type":"invalid_request_error"' in body


async def test_who_is_not_invited_may_not_send_its_body_so_the_connection_ends() -> None:
    async with running_router() as app, Line.to(app.http_port) as line:
        app.router.draining = True
        line.send(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n")
        status, head, _ = await line.answer()
        assert status == 503
        assert b"connection: close" in head


async def test_a_target_may_name_the_router_as_for_a_proxy() -> None:
    async with running_router() as app, Line.to(app.http_port) as line:
        line.send(b"GET http://router:7380/v1/models?x=1 HTTP/1.1\r\nHost: router:7380\r\n\r\n")
        status, _, body = await line.answer()
        assert (status, body) == (200, b'{"object":"list","data":[]}')
