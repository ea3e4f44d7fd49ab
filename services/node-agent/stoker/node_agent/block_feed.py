"""From an engine's KV events to the digest that the fleet hears, and to its copy on disk."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import asdict

import structlog

from stoker.api.registry.v1 import registry_pb2
from stoker.node_agent import telemetry, wire
from stoker.node_agent.core.digest import CacheDigest
from stoker.node_agent.engine.events import Batch
from stoker.node_agent.engine.protocol import KvEndpoint
from stoker.node_agent.engine.stream import Item, KvEventStream, Lost, Received, Restarted
from stoker.node_agent.state_files import DigestCopy

log = structlog.get_logger(__name__)

Publish = Callable[[registry_pb2.DigestUpdate], None]


class BlockFeed:
    """Follows one cache for one life of its engine, which has one cache or, data-parallel, one for each rank.

    Open it before the engine starts: it binds what the engine connects to.
    """

    def __init__(
        self,
        replica_id: str,
        digest: CacheDigest,
        endpoint: KvEndpoint | None,
        publish: Publish,
        *,
        interval_s: float,
        batch: int,
        resume_from: int = 0,
    ) -> None:
        """Without an `endpoint` the engine tells no events: the cache is known to hold nothing."""
        self.digest = digest
        self.next_seq = resume_from
        """The first event batch not yet in the digest."""
        self.gaps = 0
        """Times that batches were lost for good."""
        self._replica_id = replica_id
        self._publish = publish
        self._interval_s = interval_s
        self._batch = batch
        self._counted = asdict(digest.counts)
        self._full = asyncio.Event()
        self._endpoint = endpoint
        self._rank = endpoint.dp_rank if endpoint is not None else 0
        self._streams = contextlib.AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Bind the event addresses and begin. Raises Unavailable when one is taken."""
        if self._endpoint is None:
            return
        stream = KvEventStream(self._endpoint, start=self.next_seq)
        await self._streams.enter_async_context(stream)
        self._tasks = [asyncio.create_task(self._follow(stream)), asyncio.create_task(self._flush_for_ever())]

    async def close(self) -> None:
        """Stop following; what is in the digest stays."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await self._streams.aclose()

    def flush(self) -> None:
        """Tell all changes now."""
        for delta in self.digest.deltas():
            self._publish(wire.delta_of(self._replica_id, self._rank, delta))
        counts = asdict(self.digest.counts)
        for kind, count in counts.items():
            if count != self._counted[kind]:
                telemetry.DIGEST_EVENTS.labels(kind).inc(count - self._counted[kind])
        self._counted = counts

    def tell_all(self) -> None:
        """Tell the whole set, for who cannot trust what it has."""
        self.flush()
        for piece in self.digest.snapshot():
            self._publish(wire.piece_of(self._replica_id, self._rank, piece))

    def copy(self) -> DigestCopy:
        """What a later agent needs to go on from here."""
        return DigestCopy(self.digest.export(), self.next_seq)

    async def _follow(self, stream: KvEventStream) -> None:
        try:
            async for item in stream:
                self._take(item)
                if self.digest.pending >= self._batch:
                    self._full.set()
        except asyncio.CancelledError:
            raise
        except Exception:
            # A digest that is not followed lies: hold nothing, and let the health of the replica be its own.
            log.exception("blocks.stream_failed", replica=self._replica_id, rank=self._rank)
            self.digest.lost()

    def _take(self, item: Item) -> None:
        match item:
            case Received():
                self.next_seq = item.seq + 1
                if isinstance(item.batch, Batch):
                    self.digest.apply(item.batch.events)
            case Lost():
                # Before anything is held nothing can be wrong: an old engine's first events are gone, that is all.
                self.gaps += 1
                telemetry.DIGEST_GAPS.inc()
                log.warning("blocks.events_lost", replica=self._replica_id, first=item.first, last=item.last)
                self.digest.lost()
            case Restarted():
                self.digest.lost()

    async def _flush_for_ever(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._full.wait()
            self._full.clear()
            self.flush()
