"""An engine's response on its way to the client, byte for byte."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from stoker.common.errors import StokerError
from stoker.common.http1 import Broken, Exchange
from stoker.common.otel import NOT_TRACED, Span
from stoker.router import metrics
from stoker.router.config import LimitsConfig
from stoker.router.decisions.decided import Decided, told
from stoker.router.flights.flight import Flight
from stoker.router.http import errors as openai_errors
from stoker.router.http.engines import EngineFailed, Engines, failed, response_headers
from stoker.router.prompts.prompt import RESPONSES

_CACHED = re.compile(rb'"prompt_tokens"\s*:\s*(\d+).*?"cached_tokens"\s*:\s*(\d+)', re.DOTALL)
_GENERATED = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d+)')
_EVENT_END = b"\n\n"
# What an engine says of a response before it computes anything.
_ANNOUNCEMENT = re.compile(rb"event: response\.(?:queued|created|in_progress)\n")
_HEAD_BYTES = 4096


@dataclass(slots=True)
class Call:
    """One request of a client. `arrived` and `deadline` are in seconds of the event loop's clock."""

    request: web.BaseRequest
    request_id: str
    api: str
    arrived: float
    deadline: float
    stream: bool = False
    outcome: str = "failed"
    noted: Callable[[bytes], bytes] | None = None
    """Sees the events of the answer as they pass, and returns them as they go out; None where nobody needs to."""
    decided: Decided | None = None
    """The last decision taken for it."""
    span: Span = NOT_TRACED

    @property
    def told(self) -> dict[str, str]:
        """Headers of every answer to it: its name, and the decision once there is one."""
        return {"x-request-id": self.request_id, **(told(self.decided) if self.decided is not None else {})}


class Relay:
    """One try of one call: what came, and what already went out."""

    def __init__(self, call: Call, flight: Flight, limits: LimitsConfig, broken: Relay | None = None) -> None:
        """`broken`: the try that broke off after its first token, whose stream this one goes on with."""
        self.decided = flight.decided
        self.head = b""
        self.engine_late = False
        """The time that ran out was the engine's, not the whole request's and not the reader's."""
        self.reader_late = False
        """The time that ran out was the reader's: what was sent to it is not taken."""
        self._call = call
        self._flight = flight
        self._request = call.request
        self._limits = limits
        self._events = broken is not None
        self._token_seen = False
        self._out: web.StreamResponse | None = None if broken is None else broken._out
        self._tail = b""
        self._timeout: asyncio.Timeout | None = None

    @property
    def started(self) -> bool:
        """Something went out to the client: no other replica may serve it now."""
        return self._out is not None

    @property
    def out(self) -> web.StreamResponse:
        """What went out."""
        assert self._out is not None  # noqa: S101
        return self._out

    @contextlib.asynccontextmanager
    async def open(
        self,
        engines: Engines,
        path: str,
        raw: bytes,
        headers: dict[str, str],
        tried: frozenset[str] = frozenset(),
        may_retry: Callable[[], bool] = lambda: False,
    ) -> AsyncIterator[Exchange]:
        """The engine's response. Leaving early drops its connection, and with it the work in the engine.

        Raises EngineFailed, and TimeoutError when the deadline or the engine's own time has passed. A request whose
        replica is found dead before its first token moves to one not `tried`, if `may_retry` allows.
        """
        try:
            async with asyncio.timeout_at(self._call.deadline) as self._timeout:
                self._allow(self._limits.first_byte_s)
                self._flight.movable(self._timeout, tried, may_retry)
                upstream = await engines.call("POST", self.decided.target.url + path, raw, headers)
                try:
                    yield upstream
                finally:
                    upstream.close()
        except TimeoutError:
            if self._flight.moved and not self.started:
                raise EngineFailed(
                    f"replica {self.decided.target.id} was found dead before it answered", moved=True
                ) from None
            self.engine_late = not self.reader_late and asyncio.get_running_loop().time() < self._call.deadline
            raise

    def _allow(self, seconds: float) -> None:
        assert self._timeout is not None  # noqa: S101
        until = min(self._call.deadline, asyncio.get_running_loop().time() + seconds)
        # To move a timer costs as much as to pass a piece on: one that is right within a hundredth stays.
        if not 0 <= until - (self._timeout.when() or 0.0) <= seconds / 100:
            self._timeout.reschedule(until)

    async def run(self, upstream: Exchange) -> web.StreamResponse:
        """Pass the response on to its end. Raises EngineFailed where the engine breaks off."""
        # What can be made before the first output is made while the engine works on that.
        headers = {**response_headers(upstream.headers), **self._call.told}
        out = web.StreamResponse(status=upstream.status, headers=headers)
        chunk = await _next(upstream)
        metrics.of(metrics.TTFT, self._call.api).observe(asyncio.get_running_loop().time() - self._call.arrived)
        if self._call.stream:
            self._flight.stay()
            self._look_for_token(chunk)
        self._stop_if_moved()
        self.head = chunk[:_HEAD_BYTES]
        if not self._call.stream or upstream.status >= 400:
            return await self._whole(upstream, chunk, headers)
        self._events = upstream.content_type == "text/event-stream"
        await self._send(out.prepare(self._request))
        self._out = out
        held = b""
        while chunk:
            self._allow(self._limits.idle_s)
            held = await self._pass(out, held + chunk if held else chunk)
            chunk = await _next(upstream)
            if not self._token_seen:
                self._look_for_token(chunk)
        if held:
            await self._send(out.write(held))
        await self._send(out.write_eof())
        return out

    def _look_for_token(self, chunk: bytes) -> None:
        if self._call.api != RESPONSES or chunk.count(b"event: ") > len(_ANNOUNCEMENT.findall(chunk)):
            self._token_seen = True
            self._flight.first_token()

    def _stop_if_moved(self) -> None:
        """The replica spoke just after it was given up: nothing may go out any more."""
        if self._flight.moved:
            raise TimeoutError

    async def _send(self, sending: Awaitable[object]) -> None:
        """Let the client take something; the clock that runs meanwhile is its own."""
        self.reader_late = True
        await sending
        self.reader_late = False

    async def _pass(self, out: web.StreamResponse, chunk: bytes) -> bytes:
        """Write whole events only, so that a break never leaves half of one; returns what is held back."""
        chunk, held = self._cut(chunk)
        if chunk:
            self._tail = chunk
            noted = self._call.noted
            await self._send(out.write(chunk if noted is None or not self._events else noted(chunk)))
        return held

    def _cut(self, chunk: bytes) -> tuple[bytes, bytes]:
        """The whole events, and what is left of one that has begun."""
        if not self._events or chunk.endswith(_EVENT_END) or len(chunk) >= self._limits.max_body_bytes:
            return chunk, b""
        cut = chunk.rfind(_EVENT_END) + len(_EVENT_END)
        return (chunk[:cut], chunk[cut:]) if cut >= len(_EVENT_END) else (b"", chunk)

    async def events(self, upstream: Exchange) -> AsyncIterator[bytes]:
        """Whole events as they arrive, for whoever passes them on himself. Raises as `run` does."""
        held = b""
        while chunk := await _next(upstream):
            if not self._token_seen:
                self._look_for_token(chunk)
            self._allow(self._limits.idle_s)
            chunk, held = self._cut(held + chunk)
            if chunk:
                yield chunk

    async def say(self, events: bytes, *, last: bool = False) -> None:
        """Write to the client's stream, and end it with what is the last."""
        await self._send(self.out.write(events))
        if last:
            await self._send(self.out.write_eof())

    async def _whole(self, upstream: Exchange, chunk: bytes, headers: dict[str, str]) -> web.StreamResponse:
        """A response that is no stream is short: it is collected, so that a break can still be retried."""
        chunks = [chunk]
        while chunk:
            self._allow(self._limits.idle_s)
            chunk = await _next(upstream)
            chunks.append(chunk)
        body = b"".join(chunks)
        self._tail = body
        self._stop_if_moved()
        out = web.Response(status=upstream.status, body=body, headers=headers)
        await self._send(out.prepare(self._request))
        self._out = out
        self._allow(self._limits.idle_s)
        await self._send(out.write_eof())
        return out

    async def interrupted(self, error: StokerError) -> web.StreamResponse:
        """Say in the stream that it broke off, then end it; where that cannot be said, cut the connection."""
        out = self.out
        said = False
        if self._events and not self.reader_late:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.idle_s):
                    await out.write(openai_errors.event(error))
                    await out.write_eof()
                    said = True
        # A response that ended properly leaves its connection usable: closing it would fail the client's next
        # request, which may be on its way already.
        if not said:
            out.force_close()
            if self._request.transport is not None:
                self._request.transport.abort()
        return out

    def count_usage(self) -> None:
        """Compare what was predicted to be cached with what the engine says was."""
        found = _CACHED.search(self._tail)
        if found is not None:
            generated = _GENERATED.search(self._tail)
            self._flight.used(int(found[1]), int(found[2]), int(generated[1]) if generated is not None else None)


async def _next(upstream: Exchange) -> bytes:
    """What has arrived since the last call; empty at the end."""
    try:
        return await upstream.readany()
    except Broken as error:
        raise failed(error) from error
