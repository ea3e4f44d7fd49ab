"""Requests to the OpenAI port and the responses to them, as `http_server` reads and writes them."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import Protocol
from urllib.parse import unquote

from stoker.common.errors import StokerError

_BUFFER_BYTES = 256 * 1024
"""Of a body that its handler has not taken yet; more waits with the client."""
TEXT = ("utf-8", "surrogateescape")
"""Codec of headers: they come and go as the bytes they are."""


class Connection(Protocol):
    """Where a request came from."""

    @property
    def blocked(self) -> bool:
        """The client takes no more for now."""
        ...

    def write(self, data: bytes) -> None:
        """Send. Raises ConnectionResetError."""
        ...

    async def drained(self) -> None:
        """Wait while the client takes no more."""
        ...

    def answers(self, close: bool) -> bool:
        """A response begins; returns whether the connection ends with it."""
        ...

    def answered(self, *, close: bool) -> None:
        """A response is out."""
        ...

    def listen(self) -> None:
        """There is room for more of a body."""
        ...

    def abort(self) -> None:
        """Drop the connection."""
        ...


class Body:
    """A request's body on its way in."""

    __slots__ = ("_connection", "_ended", "_failure", "_pieces", "_size", "_unwanted", "_waiter")

    def __init__(self, connection: Connection | None = None) -> None:
        self._connection = connection
        self._pieces: list[bytes] = []
        self._size = 0
        self._ended = self._unwanted = False
        self._failure: StokerError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        """All of it has arrived."""
        return self._ended

    def at_eof(self) -> bool:
        """All of it has been read."""
        return self._ended and not self._pieces

    async def readany(self) -> bytes:
        """What has arrived since the last call; empty at the end. Raises InvalidRequest where it is malformed."""
        while not self._pieces and not self._ended:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._failure is not None:
            raise self._failure
        pieces, self._pieces, self._size = self._pieces, [], 0
        if self._connection is not None:
            self._connection.listen()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def feed(self, piece: bytes) -> bool:
        """More of it; False where so much waits that no more should come."""
        if not self._unwanted:
            self._pieces.append(piece)
            self._size += len(piece)
            self._wake()
        return self._size <= _BUFFER_BYTES

    def end(self) -> None:
        """That was all."""
        self._ended = True
        self._wake()

    def fail(self, failure: StokerError) -> None:
        """The rest cannot be read."""
        self._failure = failure
        self.end()

    def unwanted(self) -> None:
        """Nobody reads the rest."""
        self._unwanted = True
        self._pieces.clear()
        self._size = 0

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Request:
    """One request. Header names are in lower case; of several alike the first counts."""

    __slots__ = ("_connection", "_path", "content", "headers", "keep_alive", "method", "target", "version")

    def __init__(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        connection: Connection | None = None,
        *,
        version: str = "1.1",
        keep_alive: bool = True,
    ) -> None:
        self.method = method
        self.target = target
        """Path and query, as they came."""
        self.headers = headers
        self.content = Body(connection)
        self.version = version
        self.keep_alive = keep_alive
        self._path: str | None = None
        self._connection = connection

    @property
    def path(self) -> str:
        """The path alone, decoded."""
        if self._path is None:
            path = self.target.partition("?")[0]
            self._path = unquote(path) if "%" in path else path
        return self._path

    @property
    def content_length(self) -> int | None:
        """Bytes of the body, where the client tells."""
        given = self.headers.get("content-length")
        return int(given) if given is not None else None  # the parser has seen that it is a number

    @property
    def connection(self) -> Connection:
        """Where it came from. Raises ConnectionResetError where that is gone."""
        if self._connection is None:
            raise ConnectionResetError("the client went away")
        return self._connection

    @property
    def expects_invitation(self) -> bool:
        """The client waits for leave to send its body."""
        return self.version != "1.0" and self.headers.get("expect", "").lower() == "100-continue"

    def invite(self) -> None:
        """Give it."""
        if self.expects_invitation:
            self.connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")


class Response:
    """A whole response."""

    def __init__(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        self.status = status
        self.body = body
        self.headers = headers or {}
        self._close = False

    def force_close(self) -> None:
        """Let the connection end with this response."""
        self._close = True

    async def send(self, request: Request) -> None:
        """Write it. Raises ConnectionResetError."""
        connection = request.connection
        close = connection.answers(self._close)
        head = _head(request, self.status, self.headers, close, f"content-length: {len(self.body)}")
        connection.write(head if request.method == "HEAD" else head + self.body)
        await connection.drained()
        connection.answered(close=close)


class StreamResponse:
    """A response that is written piece by piece. Its head leaves with the first one."""

    def __init__(self, request: Request, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        self._connection = request.connection
        chunked = request.version != "1.0"
        self._chunked = chunked
        self._close = self._connection.answers(not chunked)
        self._head = _head(request, status, headers, self._close, "transfer-encoding: chunked" if chunked else "")

    async def write(self, data: bytes) -> None:
        """Send a piece, and wait while the client takes none. Raises ConnectionResetError."""
        if not data:
            return
        head, self._head = self._head, b""
        if self._chunked:
            self._connection.write(b"%b%x\r\n%b\r\n" % (head, len(data), data))
        else:
            self._connection.write(head + data)
        if self._connection.blocked:
            await self._connection.drained()

    async def write_eof(self) -> None:
        """That was all."""
        end = self._head + (b"0\r\n\r\n" if self._chunked else b"")
        if end:
            self._connection.write(end)
        await self._connection.drained()
        self._connection.answered(close=self._close)

    def cut(self) -> None:
        """End it so that the client sees it is not whole."""
        self._connection.abort()


Answer = Response | StreamResponse


def _head(request: Request, status: int, headers: Mapping[str, str], close: bool, framing: str) -> bytes:
    own = [framing] if framing else []
    if close:
        own.append("connection: close")
    elif request.version == "1.0":
        own.append("connection: keep-alive")
    return encoded(status, headers, *own)


def encoded(status: int, headers: Mapping[str, str], *own: str) -> bytes:
    """The head of a response; `own` are lines. Raises ValueError for a header that breaks a line."""
    lines = [_status_line(status), *[f"{name}: {value}" for name, value in headers.items()], *own]
    if "date" not in headers and "Date" not in headers:
        lines.append(_date(int(time.time())))
    text = "\r\n".join((*lines, "", ""))
    if text.count("\n") != len(lines) + 1:
        raise ValueError("a line break in a header")
    return text.encode(*TEXT)


@functools.lru_cache(maxsize=128)
def _status_line(status: int) -> str:
    known = status in HTTPStatus.__members__.values()
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase if known else 'Unknown'}"


@functools.lru_cache(maxsize=2)
def _date(second: int) -> str:
    return f"date: {formatdate(second, usegmt=True)}"
