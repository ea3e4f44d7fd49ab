"""Request bodies on their way in, bounded in size, time, number and total.

A body takes no place among the requests in flight before it has arrived, so slow senders keep nobody out. Where
there are too many of them, the one that has been sending longest gives way: honest bodies arrive in milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aiohttp import HttpVersion11, web

from stoker.common.errors import DeadlineExceeded, Exhausted, InvalidRequest, StokerError
from stoker.router.http.errors import TooLarge

BODY_S = 60.0
"""The longest that a body may take to arrive."""
HELD_BODIES = 64
"""The bytes of this many of the largest bodies are held at once, those of requests in flight included."""


class _Arriving:
    """A body on its way: its bytes so far, and the clock that gives it up."""

    __slots__ = ("clock", "gave_way", "size")

    def __init__(self, clock: asyncio.Timeout) -> None:
        self.size = 0
        self.clock = clock
        self.gave_way = False


class Intake:
    """Takes bodies in."""

    def __init__(self, max_body_bytes: int, max_bodies: int) -> None:
        """`max_bodies` may be on their way at once."""
        self._max_body_bytes = max_body_bytes
        self._max_bodies = max_bodies
        self._max_held_bytes = HELD_BODIES * max_body_bytes
        self._arriving: dict[_Arriving, None] = {}  # oldest first
        self.held_bytes = 0

    @contextlib.asynccontextmanager
    async def body(self, request: web.BaseRequest) -> AsyncIterator[bytes]:
        """A request's whole body; its bytes count until the block is left.

        Raises TooLarge, DeadlineExceeded (it was slow), InvalidRequest (it is malformed), and Exhausted where nobody
        else could give way.
        """
        if (request.content_length or 0) > self._max_body_bytes:
            raise TooLarge(self._max_body_bytes)
        body = _Arriving(asyncio.timeout(BODY_S))
        try:
            try:
                raw = await self._take(request, body)
            except web.RequestPayloadError as error:
                raise InvalidRequest(f"the body cannot be read: {error}") from error
            yield raw
        finally:
            self.held_bytes -= body.size

    async def _take(self, request: web.BaseRequest, body: _Arriving) -> bytes:
        if request.content.is_eof():  # most bodies come with their heads
            raw = await request.content.readany()
            self._count(body, len(raw))
            return raw
        pieces = []
        if len(self._arriving) >= self._max_bodies:
            self._gives_way(next(iter(self._arriving)))
        self._arriving[body] = None
        try:
            async with body.clock:
                await _invite(request)
                while not request.content.at_eof():
                    piece = await request.content.readany()
                    self._count(body, len(piece))
                    pieces.append(piece)
        except TimeoutError:
            raise self._slow(body) from None
        finally:
            self._arriving.pop(body, None)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _count(self, body: _Arriving, size: int) -> None:
        body.size += size
        self.held_bytes += size
        if body.size > self._max_body_bytes:
            raise TooLarge(self._max_body_bytes)
        while self.held_bytes > self._max_held_bytes:
            oldest = next(iter(self._arriving), body)
            if oldest is body or body.gave_way:
                raise bodies_full(self._max_held_bytes)
            self._gives_way(oldest)

    def _gives_way(self, body: _Arriving) -> None:
        del self._arriving[body]
        body.gave_way = True
        if not body.clock.expired():
            body.clock.reschedule(asyncio.get_running_loop().time())
        self.held_bytes -= body.size
        body.size = 0

    def _slow(self, body: _Arriving) -> StokerError:
        if body.gave_way:
            return Exhausted(
                "the body arrived slowly, and its place was needed for others; send it faster, or try again later",
                reason="TOO_MANY_REQUESTS",
                retry_after_s=1.0,
            )
        return DeadlineExceeded(f"the body did not arrive within {BODY_S:g} s")


def bodies_full(limit: int) -> Exhausted:
    """What a body ends with for which there is no room; `limit` in bytes, of all that are held."""
    return Exhausted(
        f"this router holds {limit} bytes of bodies, as many as it takes "
        f"({HELD_BODIES} × limits.max_body_bytes); try again later",
        reason="TOO_MANY_REQUESTS",
        retry_after_s=1.0,
    )


def uninvited(request: web.BaseRequest) -> bool:
    """The client waits for leave to send its body."""
    waits = request.version >= HttpVersion11 and request.headers.get("expect", "").lower() == "100-continue"
    return waits and not request.content.is_eof()


async def _invite(request: web.BaseRequest) -> None:
    if uninvited(request):
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # nothing of the response itself went out
