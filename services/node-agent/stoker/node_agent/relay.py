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
from stoker.common.errors import Exhausted, StokerError
from stoker.common.http1 import Client
from stoker.node_agent import telemetry
from stoker.node_agent.config import RelayConfig
from stoker.openai.generation import Generation

log = structlog.get_logger(__name__)

_WATCH_S = 0.5


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


class Relay:
    """Streams from engines to callers."""

    def __init__(self, in_flight: InFlight, config: RelayConfig) -> None:
        self._engines = Client(config.connect_timeout_s, buffer_bytes=config.buffer_bytes)
        self._in_flight = in_flight
        self._config = config
        self._calls: set[Generation] = set()
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
        loop = asyncio.get_running_loop()
        said = Generation(url, loop.time() + (self._config.default_deadline_s if deadline_s is None else deadline_s))
        reason = "CANCELLED"
        with self._in_flight.place(replica_id):
            self._calls.add(said)
            try:
                encoded = msgspec.json.encode(body)
                sent = (("Content-Type", "application/json"), *headers.items())
                await said.begin(self._engines.send("POST", url, sent, encoded))
                async for response in _responses(said, started):
                    yield response
                await said.end()
                reason = "OK"
            except StokerError as error:
                reason = error.reason
                raise
            finally:
                self._calls.discard(said)
                said.close()
                telemetry.RELAY_ENDED.labels(reason).inc()

    async def _watch_readers(self) -> None:
        """Cut off who does not read. One look for all: a timer a token would cost more than the token."""
        while True:
            await asyncio.sleep(_WATCH_S)
            for said in list(self._calls):
                said.let_go_of_slow(self._config.reader_timeout_s)


async def _responses(
    said: Generation, started: inference_pb2.Started
) -> AsyncIterator[inference_pb2.GenerateResponse]:
    """All messages in turn, and of each how long its reader takes for it."""
    now = asyncio.get_running_loop().time
    said.given_at = now()
    yield inference_pb2.GenerateResponse(started=started)  # goes out while the engine works
    said.given_at = None
    while deltas := await said.deltas():
        for delta in deltas:
            said.given_at = now()
            yield inference_pb2.GenerateResponse(delta=delta)
            said.given_at = None
            telemetry.RELAY_DELTAS.inc()
    yield inference_pb2.GenerateResponse(finished=inference_pb2.Finished(usage=said.usage))
