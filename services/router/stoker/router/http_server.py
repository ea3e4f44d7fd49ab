"""HTTP/1.1 as the OpenAI port speaks it: `Request`s in, `Response`s and `StreamResponse`s out.

Of what a general server offers the port needs little, and the rest takes longer than the routing decision. One
request at a time on a connection is answered, in a task that ends with its client's connection.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import cast
from urllib.parse import quote, urlsplit

import httptools
import structlog

from stoker.common.errors import InvalidRequest, StokerError
from stoker.router import openai_errors
from stoker.router.http_messages import TEXT, Answer, Request, Response, encoded

log = structlog.get_logger(__name__)

_MOST_HEAD_BYTES = 64 * 1024
_MOST_PIPELINED = 64
_HEAD_S = 60.0
_LINGER_S = 5.0
"""How long a body that nobody wants is read, so that its sender gets to see the refusal."""
_OFFER = frozenset({"connection", "upgrade", "http2-settings"})


Handle = Callable[[Request], Awaitable[Answer]]


class HttpServer:
    """All connections of one port. A handler returns a `Response` to be sent, or what it has sent itself."""

    def __init__(
        self, handle: Handle, *, keepalive_s: float, max_connections: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`keepalive_s`: how long a connection may be idle, seconds."""
        self.handle = handle
        self.clock = clock
        self.max_connections = max_connections
        self.open: set[_Connection] = set()
        self.retiring = False
        """Connections end with the response under way."""
        self._keepalive_s = keepalive_s

    def __call__(self) -> asyncio.BaseProtocol:
        """For a connection that comes in."""
        return _Connection(self)

    def sweep(self) -> None:
        """Close those that are idle, or too slow with their heads or what nobody wants."""
        now = self.clock()
        for each in list(self.open):
            each.look(now, self._keepalive_s)

    def retire(self) -> None:
        """Close what is idle now, and each other with its response."""
        self.retiring = True
        for each in list(self.open):
            each.look(self.clock(), 0.0)

    async def close(self) -> None:
        """Close all."""
        for each in list(self.open):
            each.abort()
        tasks = [each.work for each in self.open if each.work is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # their sockets close in the next turn of the event loop


class _Connection(asyncio.Protocol):
    """One connection. Requests are answered in the order they came."""

    def __init__(self, server: HttpServer) -> None:
        self.work: asyncio.Task[None] | None = None
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._requests: deque[Request] = deque()
        self._arriving: Request | None = None
        self._answering: Request | None = None
        self._writable: asyncio.Future[None] | None = None
        self._paused = self._deaf = self._sent = self._lingers = False
        self._since = server.clock()  # of the head, the idleness or the lingering
        self._reset()

    def _reset(self) -> None:
        self._url = b""
        self._headers: dict[str, str] = {}
        self._head_bytes = 0

    # --- the transport -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A connection is there."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods alone
        if len(self._server.open) >= self._server.max_connections:
            self._transport.abort()
            return
        self._server.open.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        """A client that goes takes its work in the engine with it."""
        self._server.open.discard(self)
        self._transport = None
        self._deaf = True
        self._requests.clear()
        if self.work is not None:
            self.work.cancel()

    def pause_writing(self) -> None:
        """The client takes no more for now."""
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        """It does again."""
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    def data_received(self, data: bytes) -> None:
        """Something arrived."""
        if self._deaf:
            return
        if self._arriving is None:
            if not self._head_bytes:
                self._since = self._server.clock()
            self._head_bytes += len(data)
        self._feed(data)
        if self._arriving is None and self._head_bytes > _MOST_HEAD_BYTES:
            self._refuse(InvalidRequest(f"the headers are larger than {_MOST_HEAD_BYTES} bytes"))

    def _feed(self, data: bytes) -> None:
        while data and not self._deaf:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if self._deaf:
                    return
                # Another protocol is offered, and the parser leaves its body alone; we stay with this one.
                method, headers = self._parser.get_method(), self._headers
                kept = [f"{name}: {value}\r\n" for name, value in headers.items() if name not in _OFFER]
                head = b"%b %b HTTP/1.1\r\n%b\r\n" % (method, self._url, "".join(kept).encode(*TEXT))
                self._reset()
                self._parser = httptools.HttpRequestParser(self)
                self._parser.feed_data(head)
                data = data[upgrade.args[0] :]
            except httptools.HttpParserError as error:
                self._refuse(InvalidRequest(f"this is no HTTP/1.1 request that can be read here: {error}"))
                return
            else:
                return

    def listen(self) -> None:
        """There is room for more."""
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()

    def _pause(self) -> None:
        if not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    # --- the parser ----------------------------------------------------------------------------------------

    def on_url(self, url: bytes) -> None:
        """A piece of the target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer, which nobody needs."""
        if self._arriving is None:
            self._headers.setdefault(name.decode(*TEXT).lower(), value.decode(*TEXT))

    def on_headers_complete(self) -> None:
        """The body follows."""
        if self._deaf or self._parser.should_upgrade():
            if self._parser.get_method() == b"CONNECT":
                self._refuse(InvalidRequest("this is no proxy"))
            return
        if len(self._headers.get("content-length", "")) > 20:
            self._refuse(InvalidRequest("content-length is no size of anything"))
            return
        target = _target(self._url)
        if target is None:
            self._refuse(InvalidRequest("the request's target is no path"))
            return
        self._arriving = request = Request(
            self._parser.get_method().decode("latin-1"),
            target,
            self._headers,
            self,
            version=self._parser.get_http_version(),
            keep_alive=self._parser.should_keep_alive(),
        )
        self._enqueue(request)

    def on_body(self, piece: bytes) -> None:
        """A piece of the body."""
        if self._arriving is not None and not self._arriving.content.feed(piece):
            self._pause()

    def on_message_complete(self) -> None:
        """A whole request."""
        if self._parser.should_upgrade():
            return
        request, self._arriving = self._arriving, None
        self._reset()
        if request is None:
            return
        request.content.end()
        self._deaf = self._deaf or not request.keep_alive
        if self._lingers and self._transport is not None:
            self._transport.close()

    # --- answering -----------------------------------------------------------------------------------------

    def _enqueue(self, request: Request) -> None:
        self._requests.append(request)
        if self.work is None:
            self.work = asyncio.get_running_loop().create_task(self._answer_all())
        elif len(self._requests) > _MOST_PIPELINED:
            self.abort()
        elif len(self._requests) > 1:
            self._pause()  # not for one: that a client goes shows only to who goes on reading

    def _refuse(self, error: StokerError) -> None:
        """Answer what cannot be read, then close: what follows cannot be told apart from the rest of it."""
        self._deaf = True
        arriving, self._arriving = self._arriving, None
        last = arriving or (self._requests[-1] if self._requests else self._answering)
        if last is not None and self.work is not None:  # it is the last one that gets an answer
            last.keep_alive = False
            if arriving is not None:
                arriving.content.fail(error)
        elif self._transport is not None:
            body = openai_errors.body(error)
            fields = {**openai_errors.headers(error), "content-length": str(len(body))}
            self._transport.write(encoded(openai_errors.status(error), fields, "connection: close") + body)
            self._transport.close()

    async def _answer_all(self) -> None:
        try:
            while self._requests and self._transport is not None:
                self._answering = request = self._requests.popleft()
                self._sent = False
                answer = await self._server.handle(request)
                if isinstance(answer, Response) and not self._sent:
                    await answer.send(request)
                if not request.content.ended:
                    request.content.unwanted()
                self.listen()
                if not request.keep_alive and self._deaf and self._transport is not None:
                    self._transport.close()
        except ConnectionResetError:
            self.abort()
        except Exception as error:  # one bad request must not cost the process
            log.error("http.connection_failed", exc_info=error)
            self.abort()
        finally:
            self._answering = self.work = None
            self._since = self._server.clock()

    def answers(self, close: bool) -> bool:
        """A response begins; returns whether the connection ends with it."""
        request = self._answering
        assert request is not None  # noqa: S101
        close = close or not request.keep_alive or self._server.retiring
        return close or (request.expects_invitation and not request.content.ended)

    def answered(self, *, close: bool) -> None:
        """A response is out."""
        self._sent = True
        if not close or self._transport is None:
            return
        self._requests.clear()
        if self._answering is None or self._answering.content.ended or self._answering.expects_invitation:
            self._deaf = True
            self._transport.close()
        else:  # closed at once, the client would see a reset instead of the answer
            self._lingers = True
            self._answering.content.unwanted()

    @property
    def blocked(self) -> bool:
        """The client takes no more for now."""
        return self._writable is not None

    def write(self, data: bytes) -> None:
        """Send. Raises ConnectionResetError."""
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the client went away")
        self._transport.write(data)

    async def drained(self) -> None:
        """Wait while the client takes no more."""
        if self._writable is not None:
            await asyncio.shield(self._writable)

    def abort(self) -> None:
        """Drop the connection."""
        if self._transport is not None:
            self._transport.abort()

    def look(self, now: float, keepalive_s: float) -> None:
        """Close it, if it had its time."""
        if self.work is not None or self._transport is None:
            return
        if self._arriving is not None:  # it is answered already
            patience = _LINGER_S
        elif self._head_bytes:
            patience = _HEAD_S
        else:
            patience = keepalive_s
        if now - self._since >= patience:
            self._transport.abort() if self._arriving is not None else self._transport.close()


def _target(url: bytes) -> str | None:
    """Path and query of a request's target, None where it has none."""
    text = url.decode("latin-1")
    if not text.startswith("/"):
        parts = urlsplit(text)
        if parts.scheme not in ("http", "https"):
            return None
        text = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    text = text.partition("#")[0]
    return text if text.isascii() else quote(text.encode("latin-1"), safe="".join(map(chr, range(33, 127))))
