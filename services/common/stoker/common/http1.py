"""HTTP/1.1 to engines and routers: a request leaves at once, its response streams, its connection is kept.

Of what a general client offers, these need little, and the rest costs more time than the routing decision: there
are no redirects, cookies, proxies, compression or HEAD here. One request at a time on a connection, none is
repeated.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import cast
from urllib.parse import urlsplit

import httptools

# A host that vanished without a FIN is noticed within 13 s, as over gRPC: whether it owes an answer or an ack.
_SOCKET_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 13_000),
)
_MAX_HEAD_BYTES = 64 * 1024
_TEXT = ("utf-8", "surrogateescape")  # headers come and go as the bytes they are, as in aiohttp


class Broken(ConnectionError):
    """A connection that could not be opened, or broke before its response had ended."""


class Client:
    """Requests to any number of servers, over connections that it keeps for `keepalive_s` seconds."""

    def __init__(
        self,
        connect_s: float,
        keepalive_s: float = 4.0,
        buffer_bytes: int = 256 * 1024,
        secure: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """`buffer_bytes`: how much of a response waits for its reader before the server has to.

        `secure` gives what a connection to an https:// URL is made with; without it there are none.
        Servers close idle connections after 5 s or more: with a shorter `keepalive_s` no request meets that.
        """
        self._connect_s = connect_s
        self._keepalive_s = keepalive_s
        self._buffer_bytes = buffer_bytes
        self._secure = secure
        self._idle: dict[str, deque[_Connection]] = {}
        self._all: set[_Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None

    async def send(
        self, method: str, url: str, headers: Iterable[tuple[str, str]] = (), body: bytes = b""
    ) -> Exchange:
        """Write a request; waits for nothing but a connection, where none is free.

        `url` is sent as it is, and must be encoded. Raises Broken, and ValueError for what no request can hold.
        """
        origin, address, target = _split(url)
        if self._secure is None and not origin.startswith("http:"):
            raise ValueError(f"{url[:200]!r} is no http:// URL")
        lines = [f"{method} {target} HTTP/1.1", f"Host: {address}"]
        lines += [f"{name}: {value}" for name, value in headers]
        if body or method != "GET":
            lines.append(f"Content-Length: {len(body)}")
        if any("\n" in line or "\r" in line for line in lines) or " " in target:
            raise ValueError("a line break or a space where HTTP allows none")
        head = "\r\n".join((*lines, "", "")).encode(*_TEXT)
        connection = self._free(origin) or await self._connect(origin, address)
        return connection.begin(head + body if len(body) < _MAX_HEAD_BYTES else (head, body))

    async def close(self) -> None:
        """Drop all connections."""
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self._all):
            connection.drop()
        await asyncio.sleep(0)  # their sockets close in the next turn of the event loop

    def _free(self, origin: str) -> _Connection | None:
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()  # the one used last: the others may go
            if connection.usable and time.monotonic() - connection.idle_since < self._keepalive_s:
                return connection
            connection.drop()
        return None

    async def _connect(self, origin: str, address: str) -> _Connection:
        loop = asyncio.get_running_loop()
        host, port = _host_and_port(origin)
        context = self._secure() if self._secure is not None and origin.startswith("https:") else None
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self, origin, self._buffer_bytes), host, port, ssl=context
                )
        except TimeoutError:
            raise Broken(f"no connection to {address} within {self._connect_s:g} s") from None
        except OSError as error:
            raise Broken(error.errno, f"cannot connect to {address}: {error.strerror or error}") from error
        self._all.add(connection)
        return connection

    def keep(self, connection: _Connection) -> None:
        """Take back a connection whose response has ended."""
        self._idle.setdefault(connection.origin, deque()).append(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(self._keepalive_s, self._drop_old)

    def forget(self, connection: _Connection) -> None:
        """A connection is gone."""
        self._all.discard(connection)
        idle = self._idle.get(connection.origin)
        if idle is not None:
            if connection in idle:
                idle.remove(connection)
            if not idle:
                del self._idle[connection.origin]

    def _drop_old(self) -> None:
        self._sweep = None
        limit = time.monotonic() - self._keepalive_s
        for idle in list(self._idle.values()):
            for connection in list(idle):
                if connection.idle_since <= limit:
                    connection.drop()
        if self._idle:
            self._sweep = asyncio.get_running_loop().call_later(self._keepalive_s, self._drop_old)


class Exchange:
    """A request that was sent, and its response. Leaving its `async with` before the end drops the connection."""

    __slots__ = ("_connection", "_ended", "_failure", "_pieces", "_waiter", "headers", "status")

    def __init__(self, connection: _Connection) -> None:
        self.status = 0
        """0 until `head` has returned."""
        self.headers: list[tuple[str, str]] = []
        """Of the response, in order; names as they came."""
        self._connection = connection
        self._pieces: list[bytes] = []
        self._ended = False
        self._failure: Broken | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def head(self) -> Exchange:
        """Wait for status and headers. Raises Broken."""
        while not self.status:
            await self._more()
        return self

    async def readany(self) -> bytes:
        """What has arrived since the last call, at least a byte; empty at the end. Raises Broken."""
        while not self._pieces:
            if self._ended:
                return b""
            await self._more()
        pieces, self._pieces = self._pieces, []
        if not self._ended:  # else the connection may be another exchange's by now
            self._connection.taken()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def read(self, limit: int = 64 << 20) -> bytes:
        """All that follows, of which no more than `limit` bytes are kept. Raises Broken."""
        pieces, size = [], 0
        while size < limit and (piece := await self.readany()):
            pieces.append(piece)
            size += len(piece)
        return b"".join(pieces)[:limit]

    @property
    def content_type(self) -> str:
        """The media type without its parameters, in lower case; empty where none is given."""
        given = next((value for name, value in self.headers if name.lower() == "content-type"), "")
        return given.partition(";")[0].strip().lower()

    def close(self) -> None:
        """Drop the connection, unless the response has ended. Harmless when repeated."""
        if not self._ended:
            self._connection.drop()

    async def __aenter__(self) -> Exchange:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _more(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    # --- from the connection -------------------------------------------------------------------------------

    def arrived(self, piece: bytes) -> None:
        """More of the body."""
        self._pieces.append(piece)
        self.wake()

    def ended(self) -> None:
        """The response is whole."""
        self._ended = True
        self.wake()

    def failed(self, failure: Broken) -> None:
        """Nothing more will come."""
        self._failure = failure
        self.wake()

    def wake(self) -> None:
        """Something to see."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Connection(asyncio.Protocol):
    """One connection: idle, or busy with one exchange."""

    def __init__(self, client: Client, origin: str, buffer_bytes: int) -> None:
        self.origin = origin
        self.address = origin.partition("://")[2]
        self.idle_since = 0.0
        self.transport: asyncio.Transport | None = None
        self._client = client
        self._buffer_bytes = buffer_bytes
        self._exchange: Exchange | None = None
        self._buffered = self._head_bytes = 0
        self._paused = self._framed = False

    @property
    def usable(self) -> bool:
        """Open, and free."""
        return self.transport is not None and not self.transport.is_closing() and self._exchange is None

    def begin(self, request: bytes | tuple[bytes, ...]) -> Exchange:
        """Write a request."""
        if self.transport is None or self.transport.is_closing():
            raise Broken(f"{self.address} closed the connection")
        self._exchange = exchange = Exchange(self)
        self._parser = httptools.HttpResponseParser(self)
        self._buffered = self._head_bytes = 0
        self._framed = False
        if isinstance(request, bytes):
            self.transport.write(request)
        else:
            self.transport.writelines(request)
        return exchange

    def drop(self) -> None:
        """Close it now."""
        if self.transport is not None:
            self.transport.abort()

    def taken(self) -> None:
        """The reader took what was there."""
        self._buffered = 0
        if self._paused and self.transport is not None:
            self._paused = False
            self.transport.resume_reading()

    # --- asyncio's -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods alone
        held = transport.get_extra_info("socket")
        if held is not None:
            for level, option, value in _SOCKET_OPTIONS:
                held.setsockopt(level, option, value)

    def data_received(self, data: bytes) -> None:
        """Parse what came."""
        exchange = self._exchange
        if exchange is None:
            self.drop()  # nobody asked
            return
        if not exchange.status:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"{self.address} sent what is no HTTP: {error}")
        if not exchange.status and self._head_bytes > _MAX_HEAD_BYTES:
            self._fail(f"{self.address} sent more than {_MAX_HEAD_BYTES} bytes of headers")

    def connection_lost(self, error: Exception | None) -> None:
        """It is closed."""
        exchange = self._exchange
        if exchange is not None:
            if error is None and exchange.status and not self._framed:
                self._exchange = None
                exchange.ended()  # such a body ends with its connection
            else:
                self._fail(f"{self.address} closed the connection{f': {error}' if error is not None else ''}")
        self.transport = None
        self._client.forget(self)

    def _fail(self, why: str) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.failed(Broken(why))
        self.drop()

    # --- the parser's --------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A response; one that nobody asked for must not be taken for the next one's."""
        if self._exchange is None:
            self.drop()

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, or one trailer, which nobody needs."""
        exchange = self._exchange
        if exchange is None or exchange.status:
            return
        exchange.headers.append((name.decode(*_TEXT), value.decode(*_TEXT)))
        self._framed = self._framed or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        """The head is whole."""
        exchange, status = self._exchange, self._parser.get_status_code()
        if exchange is None:
            return
        if status < 200:  # an interim response: the real one follows
            exchange.headers.clear()
            return
        exchange.status = status
        exchange.wake()

    def on_body(self, piece: bytes) -> None:
        """A piece of the body."""
        exchange = self._exchange
        if exchange is None:
            return
        exchange.arrived(piece)
        self._buffered += len(piece)
        if self._buffered > self._buffer_bytes and not self._paused and self.transport is not None:
            self._paused = True
            self.transport.pause_reading()

    def on_message_complete(self) -> None:
        """The response is whole."""
        exchange = self._exchange
        if exchange is None or not exchange.status:
            return
        self._exchange = None
        exchange.ended()
        assert self.transport is not None  # noqa: S101
        self.taken()
        # A response that came before its request was sent leaves the rest of that on the connection.
        if self.transport.get_write_buffer_size():
            self.drop()  # closing would wait for a server that reads no more
        elif self._parser.should_keep_alive():
            self.idle_since = time.monotonic()
            self._client.keep(self)
        else:
            self.transport.close()


@functools.lru_cache(maxsize=4096)
def _host_and_port(origin: str) -> tuple[str, int]:
    parts = urlsplit(origin)
    if not parts.hostname:
        raise ValueError(f"no host in {origin!r}")
    return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


def _split(url: str) -> tuple[str, str, str]:
    """Origin, address and target of a URL."""
    scheme, _, rest = url.partition("://")
    if scheme not in ("http", "https"):
        raise ValueError(f"{url[:200]!r} is no http:// URL")
    address, slash, path = rest.partition("/")
    return f"{scheme}://{address}", address, slash + path or "/"
