"""A port for short HTTP/1.1 requests that get a decision, for as little work each as Python allows.

Envoy's checks come there, and picks.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

import httptools
import msgspec

from stoker.common.errors import DeadlineExceeded, InvalidRequest, StokerError
from stoker.common.tls import Tls
from stoker.router.config import LimitsConfig
from stoker.router.http import errors as openai_errors
from stoker.router.http.errors import TooLarge
from stoker.router.http.intake import BODY_S, HELD_BODIES, bodies_full
from stoker.router.http.listening import Listener, listen

_MOST_HEAD_BYTES = 64 * 1024
SPARE_CONNECTIONS = 256
"""Beyond one a request in flight: those that get refused."""

_PHRASES = {200: "OK"}


class Ask(msgspec.Struct, frozen=True):
    """A request as it came to Envoy, or here. Header names are in lower case; of several alike the first counts."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes
    keep_alive: bool = True
    only: frozenset[str] | None = None
    """The engines, ip:port, of which one must be chosen; None for any."""


class Answer(msgspec.Struct, frozen=True):
    """What to say. Envoy lets a request pass at 200, with these headers; anything else is for its client."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""
    undo: Callable[[], None] | None = None
    """To call where the answer cannot be delivered."""
    undo_late: Callable[[], None] | None = None
    """To call where it may not have been, since the connection closed behind it: harmless where it was."""

    def encoded(self, *, close: bool = False) -> bytes:
        """The whole response. A value never breaks a line: none is taken from a request unchecked."""
        lines = [f"HTTP/1.1 {self.status} {_PHRASES.get(self.status, 'Refused')}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        lines.append(f"content-length: {len(self.body)}")
        if close:
            lines.append("connection: close")
        return "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + self.body


def refusal(error: StokerError, headers: Mapping[str, str] | None = None) -> Answer:
    """An error, in the form of the OpenAI API."""
    return Answer(
        openai_errors.status(error), {**(headers or {}), **openai_errors.headers(error)}, openai_errors.body(error)
    )


def refused(target: str, error: StokerError) -> Answer:
    """What is said of a request that cannot be read to its end; its target may be unknown, and is then empty."""
    return refusal(error)


Decide = Callable[[Ask], Answer | Awaitable[Answer]]
"""An answer, at once where nothing has to be waited for: most checks then cost no task."""
Refuse = Callable[[str, StokerError], Answer]
"""As `refused`."""


class Port:
    """Listens, and answers requests by `decide`."""

    def __init__(
        self,
        setting: str,
        address: str,
        decide: Decide,
        limits: LimitsConfig,
        clock: Callable[[], float],
        *,
        example: str,
        shared: bool = False,
        refuse: Refuse = refused,
        idle_s: float = float("inf"),
    ) -> None:
        """`setting`, `address`, `example`, `shared`: as for `listen`; `refuse`, `idle_s`: as for `Connections`."""
        most = limits.max_in_flight + SPARE_CONNECTIONS
        self.connections = Connections(decide, limits.max_body_bytes, most, clock, refuse, idle_s)
        self.sweep = self.connections.sweep
        self._listen = functools.partial(
            listen, setting, address, self.connections.protocol, example=example, shared=shared
        )
        self._server: Listener | None = None

    async def start(self, secure: Tls | None = None) -> None:
        """Listen. Raises StokerError when the address is taken or none."""
        self._server = await self._listen(secure=secure)

    @property
    def number(self) -> int:
        """Where it listens."""
        assert self._server is not None  # noqa: S101
        return self._server.port

    def close(self) -> None:
        """Stop at once."""
        if self._server is not None:
            self._server.close()
        self.connections.close()


class Connections:
    """All connections of one endpoint, and what they share: the bounds."""

    def __init__(
        self,
        decide: Decide,
        max_body_bytes: int,
        max_connections: int,
        clock: Callable[[], float],
        refuse: Refuse = refused,
        idle_s: float = float("inf"),
    ) -> None:
        """Who asks nothing for `idle_s` seconds is let go."""
        self.decide = decide
        self.refuse = refuse
        self.clock = clock
        self._idle_s = idle_s
        self.max_body_bytes = max_body_bytes
        self.max_held_bytes = HELD_BODIES * max_body_bytes
        self.max_connections = max_connections
        self.held_bytes = 0
        self.open: set[Connection] = set()

    def protocol(self) -> Connection:
        """For a connection that comes in."""
        return Connection(self)

    def sweep(self) -> None:
        """Let go of those that have been sending one request for too long, and of those that rest for too long."""
        now = self.clock()
        late, idle = now - BODY_S, now - self._idle_s
        for each in list(self.open):
            if each.began is not None and each.began < late:
                each.cut_short(DeadlineExceeded(f"the request did not arrive within {BODY_S:g} s"))
            elif each.began is None and each.rested < idle and not each.busy:
                each.abort()

    def close(self) -> None:
        """Close all."""
        for each in list(self.open):
            each.abort()


class Connection(asyncio.Protocol):
    """One connection. Requests are answered in the order they came, one at a time."""

    def __init__(self, shared: Connections) -> None:
        self.began: float | None = None
        """When the request that is now arriving began; None between requests."""
        self.rested: float
        """When the last request was whole, or the connection was made."""
        self._shared = shared
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._asks: deque[Ask | Answer] = deque()
        self._work: asyncio.Task[None] | None = None
        self._deaf = False  # reads no more: a refusal is the last answer
        self._held = 0
        self._undo: Callable[[], None] | None = None  # of the last answer
        self._reset()

    @property
    def busy(self) -> bool:
        """An answer is awaited."""
        return self._work is not None

    def _reset(self) -> None:
        self._url = b""
        self._headers: dict[str, str] = {}
        self._pieces: list[bytes] = []
        self._size = self._head_bytes = 0
        self._in_head = True
        self.began = None
        self.rested = self._shared.clock()

    # --- the transport -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A connection is there."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods alone
        if len(self._shared.open) >= self._shared.max_connections:
            self.abort()
            return
        self._shared.open.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        """Who gives up closes: what was decided for it ends here."""
        self._shared.open.discard(self)
        self._transport = None
        self._deaf = True
        self._hold(-self._held)
        self._asks.clear()
        if self._work is not None:
            self._work.cancel()
        elif self._undo is not None:
            self._undo()  # given up while the answer was on its way

    def eof_received(self) -> None:
        """The client sends no more; what it has asked is answered."""
        if self.began is not None and not self._deaf:
            self.cut_short(InvalidRequest("the connection ended before the request was whole"))

    def pause_writing(self) -> None:
        """Answers are small: who lets them pile up does not read."""
        self.abort()

    def abort(self) -> None:
        """Drop the connection."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Something arrived."""
        if self._deaf:
            return
        if self.began is None:
            self.began = self._shared.clock()
        if self._in_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._refuse(InvalidRequest("this is no HTTP/1.1 request that can be read here"))
            return
        if self._deaf:
            return
        if self._in_head and self._head_bytes > _MOST_HEAD_BYTES:
            self._refuse(InvalidRequest(f"the headers are larger than {_MOST_HEAD_BYTES} bytes"))
        elif len(self._asks) > 1 and self._transport is not None:
            # Not for one: a check that is given up shows only to who goes on reading.
            self._transport.pause_reading()

    # --- the parser ----------------------------------------------------------------------------------------

    def on_url(self, url: bytes) -> None:
        """A piece of the target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        self._headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))

    def on_headers_complete(self) -> None:
        """The body follows."""
        self._in_head = False
        length = self._headers.get("content-length", "0")
        # The parser has seen that it is a number, and the only one.
        if len(length) > 20 or int(length) > self._shared.max_body_bytes:
            self._refuse(TooLarge(self._shared.max_body_bytes))
        elif self._headers.get("expect", "").lower() == "100-continue":
            self._invite()

    def _invite(self) -> None:
        """The client waits for leave to send its body. Behind other requests it has it when its patience ends."""
        free = self._work is None and not self._deaf and self._parser.get_http_version() == "1.1"
        if free and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, piece: bytes) -> None:
        """A piece of the body."""
        if self._deaf:
            return
        self._size += len(piece)
        self._hold(len(piece))
        self._pieces.append(piece)
        if self._size > self._shared.max_body_bytes:
            self._refuse(TooLarge(self._shared.max_body_bytes))
        elif self._shared.held_bytes > self._shared.max_held_bytes:
            self._refuse(bodies_full(self._shared.max_held_bytes))

    def on_message_complete(self) -> None:
        """A whole request."""
        if self._deaf:
            return
        body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        method = self._parser.get_method().decode("latin-1")
        keep_alive = self._parser.should_keep_alive()
        self._enqueue(Ask(method, self._url.decode("latin-1"), self._headers, body, keep_alive))
        self._deaf = not keep_alive
        self._reset()

    # --- the answers ---------------------------------------------------------------------------------------

    def _hold(self, size: int) -> None:
        self._held += size
        self._shared.held_bytes += size

    def cut_short(self, error: StokerError) -> None:
        """Refuse the request that is arriving."""
        if self._deaf:
            self.abort()
        else:
            self._refuse(error)

    def _refuse(self, error: StokerError) -> None:
        """Answer in turn, then close: what follows cannot be told apart from the rest of this request."""
        self._deaf = True
        self._hold(-self._size)
        target = self._url.decode("latin-1")
        self._reset()
        self._enqueue(self._shared.refuse(target, error))

    def _enqueue(self, ask: Ask | Answer) -> None:
        if self._work is None and not self._asks:
            if isinstance(ask, Answer):
                self._write(ask, close=True)
                return
            answer = self._shared.decide(ask)
            if isinstance(answer, Answer):
                self._say(ask, answer)
                return
            self._work = asyncio.get_running_loop().create_task(self._answer_all(ask, answer))
            return
        self._asks.append(ask)
        if self._work is None:
            self._work = asyncio.get_running_loop().create_task(self._answer_all())

    async def _answer_all(self, ask: Ask | None = None, coming: Awaitable[Answer] | None = None) -> None:
        """Answer what was begun, and then what waits."""
        if ask is not None and coming is not None:
            open_still = self._say(ask, await coming)
            if not open_still:
                self._work = None
                return
        while self._asks:
            next_ask = self._asks.popleft()
            if isinstance(next_ask, Answer):
                self._write(next_ask, close=True)
                break
            answer = self._shared.decide(next_ask)
            if not isinstance(answer, Answer):
                answer = await answer
            if not self._say(next_ask, answer):
                break
        self._work = None
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _say(self, ask: Ask, answer: Answer) -> bool:
        """Write an answer; False where nothing more can be said."""
        if self._transport is None or self._transport.is_closing():
            if answer.undo is not None:
                answer.undo()
            return False
        self._hold(-len(ask.body))
        self._undo = answer.undo_late
        self._write(answer, close=not ask.keep_alive)
        return ask.keep_alive

    def _write(self, answer: Answer, *, close: bool) -> None:
        if self._transport is not None:
            self._transport.write(answer.encoded(close=close))
            if close:
                self._transport.close()
