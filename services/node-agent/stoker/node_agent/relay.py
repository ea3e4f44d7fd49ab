"""Runs generations on the engines of this host and relays what they say.

Whatever ends a call (the end, an error, a cancel, a deadline, a reader who stands still), its HTTP connection is
closed at once, which is how the engine learns to abort, and its place is given back exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import msgspec
import structlog

from stoker.api.inference.v1 import inference_pb2
from stoker.common.errors import DeadlineExceeded, Exhausted, StokerError, Unavailable
from stoker.common.http1 import Broken, Client, Exchange
from stoker.node_agent import telemetry
from stoker.node_agent.config import RelayConfig
from stoker.openai.stream import EventStream, SlowReader, refusal

log = structlog.get_logger(__name__)

_MAX_ERROR_BODY = 1 << 20
_WATCH_S = 0.5
# An engine that has said it is done ends its response at once; one that does not loses its connection.
_END_S = 0.1


class InFlight:
    """Requests in the relay by replica. Every place taken is given back."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_replica: Counter[str] = Counter()

    def __call__(self, replica_id: str) -> int:
        """Requests of a replica now."""
        return self._by_replica[replica_id]

    @property
    def total(self) -> int:
        """Requests of all replicas now."""
        return self._by_replica.total()

    @contextlib.contextmanager
    def place(self, replica_id: str) -> Iterator[None]:
        """Hold a place while the block runs. Raises Exhausted when all are taken."""
        if self.total >= self._limit:
            raise Exhausted(
                f"this node relays {self._limit} streams already; try another replica",
                reason="RELAY_FULL",
                retry_after_s=1.0,
            )
        self._by_replica[replica_id] += 1
        telemetry.RELAY_STREAMS.inc()
        try:
            yield
        finally:
            self._by_replica[replica_id] -= 1
            if not self._by_replica[replica_id]:
                del self._by_replica[replica_id]
            telemetry.RELAY_STREAMS.dec()


class _Call:
    """One generation: what the engine says of it, and since when its reader stands still."""

    __slots__ = ("blocked_since", "exchange", "slow")

    def __init__(self) -> None:
        self.exchange: Exchange | None = None
        self.blocked_since: float | None = None
        self.slow = False

    def close(self) -> None:
        """Close the connection now, unless the response has ended; the engine aborts."""
        if self.exchange is not None:
            self.exchange.close()


class Relay:
    """Streams from engines to callers."""

    def __init__(self, in_flight: InFlight, config: RelayConfig) -> None:
        self._engines = Client(config.connect_timeout_s, buffer_bytes=config.buffer_bytes)
        self._in_flight = in_flight
        self._config = config
        self._calls: set[_Call] = set()
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to watch for readers who stand still."""
        self._watch = asyncio.create_task(self._watch_readers())

    async def close(self) -> None:
        """Close all connections."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._engines.close()

    async def stream(
        self,
        replica_id: str,
        url: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        started: inference_pb2.Started,
        deadline_s: float | None,
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Started, Deltas, Finished. `deadline_s` is seconds from now; None takes the setting's.

        Raises InvalidRequest for what the engine refuses, Unavailable (ENGINE_DIED) when it goes away,
        DeadlineExceeded, SlowReader, or Exhausted when the relay is full.
        """
        call = _Call()
        reason = "CANCELLED"
        with self._in_flight.place(replica_id):
            self._calls.add(call)
            try:
                async for response in self._relay(call, url, body, headers, started, deadline_s):
                    yield response
                reason = "OK"
            except StokerError as error:
                reason = error.reason
                raise
            finally:
                self._calls.discard(call)
                call.close()
                telemetry.RELAY_ENDED.labels(reason).inc()

    async def _relay(
        self,
        call: _Call,
        url: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        started: inference_pb2.Started,
        deadline_s: float | None,
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        now = asyncio.get_running_loop().time
        ends = now() + (self._config.default_deadline_s if deadline_s is None else deadline_s)
        events = EventStream()
        try:
            async with asyncio.timeout_at(ends):
                call.exchange = await self._engines.send(
                    "POST", url, (("Content-Type", "application/json"), *headers.items()), msgspec.json.encode(body)
                )
            # Goes out while the engine works.
            call.blocked_since = now()
            yield inference_pb2.GenerateResponse(started=started)
            call.blocked_since = None
            async for message in self._messages(call, call.exchange, events, ends):
                yield message
        except TimeoutError as error:
            raise DeadlineExceeded(f"the deadline passed while {url} generated") from error
        except Broken as error:
            if call.slow:
                raise self._slow() from error
            when = "after its first output" if events.emitted else "before any output"
            raise Unavailable(
                f"the engine went away {when}: {error}",
                reason="ENGINE_DIED",
                metadata={"emitted": str(events.emitted).lower()},
            ) from error

    async def _messages(
        self, call: _Call, exchange: Exchange, events: EventStream, ends: float
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        now = asyncio.get_running_loop().time
        async with asyncio.timeout_at(ends):
            await exchange.head()
            if exchange.status != 200:
                raise refusal(exchange.status, await exchange.read(_MAX_ERROR_BODY))
        while not events.done:
            async with asyncio.timeout_at(ends):
                data = await exchange.readany()
            if not data:
                raise Broken("the stream ended before its end")
            for delta in events.feed(data):
                call.blocked_since = now()
                yield inference_pb2.GenerateResponse(delta=delta)
                call.blocked_since = None
                telemetry.RELAY_DELTAS.inc()
            if call.slow:
                raise self._slow()
        yield inference_pb2.GenerateResponse(finished=inference_pb2.Finished(usage=events.usage))
        await _to_the_end(exchange)

    def _slow(self) -> SlowReader:
        return SlowReader(
            f"the reader stood still for {self._config.reader_timeout_s:g} s; the generation was aborted"
        )

    async def _watch_readers(self) -> None:
        """Cut off who does not read. One look for all: a timer a token would cost more than the token."""
        while True:
            await asyncio.sleep(_WATCH_S)
            limit = asyncio.get_running_loop().time() - self._config.reader_timeout_s
            for call in list(self._calls):
                if call.blocked_since is not None and call.blocked_since < limit and not call.slow:
                    call.slow = True
                    call.close()


async def _to_the_end(exchange: Exchange) -> None:
    """Read the end of the body: only then can the connection serve the next call."""
    with contextlib.suppress(TimeoutError, Broken):
        async with asyncio.timeout(_END_S):
            while await exchange.readany():
                pass
