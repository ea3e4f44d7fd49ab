"""The OpenAI port's HTTP/1.1, byte by byte, without a network."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stoker.common.errors import InvalidRequest
from stoker.router.http_messages import Answer, Request, Response, StreamResponse
from stoker.router.http_server import HttpServer

BODY = b"POST /v1/x?y=1 HTTP/1.1\r\nHost: h\r\nX-Two: first\r\nx-two: second\r\nContent-Length: 5\r\n\r\nhello"


class Wire:
    """A connection's other end."""

    def __init__(self) -> None:
        self.sent = b""
        self.closed = self.aborted = self.paused = False
        self.protocol: Any = None

    def write(self, data: bytes) -> None:
        self.sent += data

    def is_closing(self) -> bool:
        return self.closed or self.aborted

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


class Served:
    """A server, one connection, and what its handler saw."""

    def __init__(self, handle: Any = None, now: float = 0.0) -> None:
        self.now = now
        self.seen: list[tuple[str, str, bytes]] = []
        self._handle = handle or self._echo
        self.server = HttpServer(self._handle, keepalive_s=75.0, max_connections=2, clock=lambda: self.now)
        self.wire = self.connect()

    def connect(self) -> Wire:
        wire = Wire()
        wire.protocol = self.server()
        wire.protocol.connection_made(wire)
        return wire

    async def _echo(self, request: Request) -> Answer:
        body = b""
        while not request.content.at_eof():
            body += await request.content.readany()
        self.seen.append((request.method, request.target, body))
        return Response(200, body, {"x-two": request.headers.get("x-two", "")})

    async def feed(self, *pieces: bytes) -> bytes:
        for piece in pieces:
            self.wire.protocol.data_received(piece)
            await settle()
        return self.wire.sent


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


async def test_a_request_comes_whole_and_its_response_says_how_long_it_is() -> None:
    served = Served()
    sent = await served.feed(BODY)
    assert served.seen == [("POST", "/v1/x?y=1", b"hello")]
    head, _, body = sent.partition(b"\r\n\r\n")
    assert body == b"hello"
    assert head.startswith(b"HTTP/1.1 200 OK\r\nx-two: first\r\ncontent-length: 5\r\ndate: ")
    assert not served.wire.closed


async def test_it_may_come_byte_by_byte() -> None:
    served = Served()
    await served.feed(*(BODY[place : place + 1] for place in range(len(BODY))))
    assert served.seen == [("POST", "/v1/x?y=1", b"hello")]


async def test_requests_sent_ahead_are_answered_in_turn() -> None:
    served = Served()
    sent = await served.feed(BODY + BODY + BODY)
    assert sent.count(b"HTTP/1.1 200") == len(served.seen) == 3
    assert not served.wire.paused


async def test_more_requests_ahead_than_anybody_sends_end_the_connection() -> None:
    served = Served()
    await served.feed(b"GET / HTTP/1.1\r\n\r\n" * 200)
    assert served.wire.aborted


async def test_a_stream_is_chunked_and_its_head_leaves_with_the_first_piece() -> None:
    async def handle(request: Request) -> Answer:
        out = StreamResponse(request, 200, {"content-type": "text/event-stream"})
        assert not served.wire.sent
        await out.write(b"one")
        await out.write(b"")
        await out.write(b"two")
        await out.write_eof()
        return out

    served = Served(handle)
    head, _, body = (await served.feed(b"POST / HTTP/1.1\r\n\r\n")).partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    assert body == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"


async def test_http_1_0_gets_no_chunks_and_the_end_of_the_connection() -> None:
    async def handle(request: Request) -> Answer:
        out = StreamResponse(request, 200, {})
        await out.write(b"one")
        await out.write_eof()
        return out

    served = Served(handle)
    sent = await served.feed(b"POST / HTTP/1.0\r\n\r\n")
    assert sent.endswith(b"connection: close\r\ndate: " + sent.split(b"date: ")[1])
    assert b"chunked" not in sent
    assert sent.endswith(b"\r\n\r\none")
    assert served.wire.closed


async def test_a_reader_that_takes_nothing_holds_its_writer() -> None:
    passed: list[int] = []

    async def handle(request: Request) -> Answer:
        out = StreamResponse(request, 200, {})
        for number in range(3):
            await out.write(b"x")
            passed.append(number)
        await out.write_eof()
        return out

    served = Served(handle)
    served.wire.protocol.pause_writing()
    await served.feed(b"POST / HTTP/1.1\r\n\r\n")
    assert passed == []
    served.wire.protocol.resume_writing()
    await settle()
    assert passed == [0, 1, 2]


async def test_a_client_that_goes_takes_its_handler_with_it() -> None:
    ended: list[str] = []

    async def handle(request: Request) -> Answer:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        raise AssertionError

    served = Served(handle)
    await served.feed(BODY)
    served.wire.protocol.connection_lost(None)
    await settle()
    assert ended == ["cancelled"]
    assert not served.server.open


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1x\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST nowhere HTTP/1.1\r\n\r\n",
        b"CONNECT host:443 HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"y" * 70_000,
        b"GET / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    ],
)
async def test_what_cannot_be_read_is_refused_and_the_connection_ends(raw: bytes) -> None:
    served = Served()
    sent = await served.feed(raw)
    assert sent.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b'"type":"invalid_request_error"' in sent
    assert served.wire.closed
    assert not served.seen


async def test_a_malformed_body_fails_its_own_request_alone() -> None:
    failed: list[BaseException] = []

    async def handle(request: Request) -> Answer:
        try:
            await request.content.readany()
        except InvalidRequest as error:
            failed.append(error)
        return Response(400, b"no")

    served = Served(handle)
    sent = await served.feed(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"zz\r\n")
    assert failed
    assert sent.startswith(b"HTTP/1.1 400")
    assert b"connection: close" in sent
    assert served.wire.closed


async def test_what_nobody_reads_is_let_pass_and_the_connection_goes_on() -> None:
    async def handle(request: Request) -> Answer:
        return Response(429, b"later")

    served = Served(handle)
    await served.feed(BODY[:-2])
    assert served.wire.sent.endswith(b"later")
    await served.feed(BODY[-2:] + BODY)
    assert served.wire.sent.count(b"HTTP/1.1 429") == 2
    assert not served.wire.closed


async def test_a_refusal_that_closes_is_read_before_the_connection_ends() -> None:
    async def handle(request: Request) -> Answer:
        answer = Response(413, b"too large")
        answer.force_close()
        return answer

    served = Served(handle)
    await served.feed(BODY[:-2])
    assert served.wire.sent.endswith(b"too large")
    assert b"connection: close" in served.wire.sent
    assert not served.wire.closed  # or its sender would see a reset
    served.now = 6.0
    served.server.sweep()
    assert served.wire.aborted


async def test_a_body_waits_for_its_invitation() -> None:
    async def handle(request: Request) -> Answer:
        request.invite()
        return await served._echo(request)

    served = Served(handle)
    head, body = BODY.replace(b"Host: h", b"Expect: 100-continue").split(b"\r\n\r\n")
    assert await served.feed(head + b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert (await served.feed(body)).endswith(b"\r\n\r\nhello")


async def test_who_is_not_invited_may_not_send_its_body_so_the_connection_ends() -> None:
    async def handle(request: Request) -> Answer:
        return Response(429, b"later")

    served = Served(handle)
    sent = await served.feed(BODY.replace(b"Host: h", b"Expect: 100-continue").partition(b"hello")[0])
    assert b"connection: close" in sent
    assert served.wire.closed


async def test_another_protocol_is_offered_in_vain() -> None:
    served = Served()
    raw = BODY.replace(b"Host: h", b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: x")
    await served.feed(raw + BODY)
    assert [body for _, _, body in served.seen] == [b"hello", b"hello"]


async def test_a_large_body_waits_with_its_sender() -> None:
    go = asyncio.Event()

    async def handle(request: Request) -> Answer:
        await go.wait()
        return await served._echo(request)

    served = Served(handle)
    size = 600_000
    await served.feed(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % size + b"x" * 300_000)
    assert served.wire.paused
    go.set()
    await settle()
    assert not served.wire.paused
    await served.feed(b"x" * 300_000)
    assert len(served.seen[0][2]) == size


@pytest.mark.parametrize(
    ("sent", "seconds", "kept"),
    [(b"", 74, True), (b"", 76, False), (b"POST / HT", 59, True), (b"POST / HT", 61, False)],
)
async def test_idle_and_slow_connections_have_their_time(sent: bytes, seconds: float, kept: bool) -> None:
    served = Served()
    if sent:
        await served.feed(sent)
    served.now = seconds
    served.server.sweep()
    assert served.wire.closed is not kept


async def test_a_server_that_retires_ends_its_connections_with_their_responses() -> None:
    go = asyncio.Event()

    async def handle(request: Request) -> Answer:
        await go.wait()
        return Response(200, b"done")

    served = Served(handle)
    await served.feed(BODY)
    idle = served.connect()
    served.server.retire()
    assert idle.closed
    assert not served.wire.closed
    go.set()
    await settle()
    assert b"connection: close" in served.wire.sent
    assert served.wire.closed


async def test_connections_are_bounded() -> None:
    served = Served()
    served.connect()
    assert served.connect().aborted


async def test_a_handler_that_fails_costs_its_own_connection() -> None:
    async def handle(request: Request) -> Answer:
        raise RuntimeError("nobody foresaw this")

    served = Served(handle)
    await served.feed(BODY)
    assert served.wire.aborted


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"/v1/models/a%2Fb?x=1", "/v1/models/a/b"),
        (b"http://router:7380/v1/models?x=1", "/v1/models"),
        (b"/v1/models#part", "/v1/models"),
    ],
)
async def test_targets(target: bytes, path: str) -> None:
    paths: list[str] = []

    async def handle(request: Request) -> Answer:
        paths.append(request.path)
        return Response(200)

    await Served(handle).feed(b"GET " + target + b" HTTP/1.1\r\n\r\n")
    assert paths == [path]


async def test_no_header_breaks_a_line() -> None:
    async def handle(request: Request) -> Answer:
        return Response(200, b"", {"x": "a\r\nb: c"})

    served = Served(handle)
    assert await served.feed(BODY) == b""
    assert served.wire.aborted
