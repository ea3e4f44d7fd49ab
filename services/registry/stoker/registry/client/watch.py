"""The fleet as all registries together tell it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field

import grpc
import structlog

from stoker.api.registry.v1 import registry_pb2, registry_pb2_grpc
from stoker.common import rpc
from stoker.common.backoff import Backoff
from stoker.common.errors import InvalidRequest
from stoker.common.tls import Tls
from stoker.registry.client.events import (
    DemandSeen,
    DigestChanged,
    DispatchesSeen,
    FleetEvent,
    LoadChanged,
    RecordsChanged,
    SourceChanged,
)
from stoker.registry.core import records
from stoker.registry.core.demand import DemandMerge
from stoker.registry.core.merge import Change, DigestMerge, FleetView, LoadMerge, Verdict
from stoker.registry.core.records import Kind, Name, Record

log = structlog.get_logger(__name__)


@dataclass
class _Source:
    """One registry's stream."""

    endpoint: str
    connected: bool = False
    heard_at: float = float("-inf")
    again: bool = False
    """Whether all is to be told anew."""
    freshness: registry_pb2.Freshness | None = None
    pieces: dict[Name, Record] = field(default_factory=dict)
    upserts: dict[Name, Record] = field(default_factory=dict)
    removals: dict[Name, None] = field(default_factory=dict)

    def reset(self) -> None:
        """Half of a step is no step."""
        self.connected = False
        self.pieces, self.upserts, self.removals = {}, {}, {}

    def owns(self, node_id: str) -> bool:
        return self.connected and self.freshness is not None and node_id in self.freshness.nodes


class _Gap(Exception):
    """A digest step is missing: the stream must start anew."""


class FleetWatch:
    """One stream to every registry of `endpoints`, merged; it reconnects for ever, with jitter.

    `topics` are `registry_pb2.TOPIC_*`, at least one; `deployments` limits records, load and digests to these.
    A registry that is silent for `silence_s` (it owes a sign of life each second) counts as lost. `view` keeps
    its last state whatever happens. Use it as an async context manager; iterate `events()` from one task only:
    events are in a bounded queue, and an owner that does not take them slows the streams down.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        topics: Iterable[registry_pb2.Topic.ValueType],
        deployments: Iterable[str] = (),
        *,
        watcher: str = "",
        silence_s: float = 3.0,
        tls: Tls | None = None,
        rng: random.Random | None = None,
    ) -> None:
        if not endpoints:
            raise InvalidRequest.field("endpoints", "give at least one registry as host:port")
        self._request = registry_pb2.WatchRequest(
            topics=topics,
            deployments=deployments,
            watcher=watcher,
        )
        self._silence_s = silence_s
        self._tls = tls
        self._rng = rng or random.Random()  # noqa: S311 - jitter
        self._backoff = Backoff(first_s=0.1, max_s=3.0)
        self._sources = {endpoint: _Source(endpoint) for endpoint in endpoints}
        self._events: asyncio.Queue[FleetEvent] = asyncio.Queue(maxsize=1024)
        self._tasks: list[asyncio.Task[None]] = []
        self._loads = LoadMerge()
        self._digests = DigestMerge()
        self._demand = DemandMerge()
        self.view = FleetView()
        """All records of the topics asked for, as of the events already queued."""
        self.synced = asyncio.Event()
        """Set once the first whole snapshot is in `view`."""

    @property
    def stale(self) -> bool:
        """True unless some connected registry vouches that its view is current."""
        return not any(
            source.connected and source.freshness is not None and not source.freshness.stale
            for source in self._sources.values()
        )

    def age_s(self, now: float) -> dict[str, float]:
        """By endpoint: seconds since this registry's view was proven current; infinite before its first word.

        `now` is the event loop's clock.
        """
        ages = {}
        for endpoint, source in self._sources.items():
            staleness_s = source.freshness.etcd_staleness_ms / 1000 if source.freshness is not None else 0.0
            ages[endpoint] = now - source.heard_at + staleness_s
        return ages

    async def events(self) -> AsyncIterator[FleetEvent]:
        """Merged events, for ever."""
        while True:
            yield await self._events.get()

    def resync(self, replica_id: str) -> None:
        """What was told of a replica's blocks turned out wrong: have it told anew, within some seconds.

        Everything else stays as it is: records, and the digests of others, go on from where they are.
        """
        self._digests.forget(replica_id)
        for source in self._sources.values():
            source.again = True

    async def start(self) -> None:
        """Open the streams."""
        self._tasks = [
            asyncio.create_task(self._follow(source), name=f"watch registry {source.endpoint}")
            for source in self._sources.values()
        ]

    async def close(self) -> None:
        """End the streams."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def __aenter__(self) -> FleetWatch:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _follow(self, source: _Source) -> None:
        attempt = 0
        while True:
            started = asyncio.get_running_loop().time()
            try:
                async with rpc.channel(source.endpoint, self._tls) as channel:
                    await self._stream(source, channel)
                because = "the stream ended"
            except grpc.aio.AioRpcError as error:
                because = rpc.error_from(error).message
            except TimeoutError:
                because = f"silent for {self._silence_s:g} s"
            except _Gap as error:
                because = str(error)
            except Exception as error:  # a stream that is not opened again would leave its part of the view to age
                log.exception("watch.failed", endpoint=source.endpoint)
                because = repr(error)
            was_connected = source.connected
            source.reset()
            self._digests.disconnected(source.endpoint)
            if was_connected:
                log.warning("watch.lost", endpoint=source.endpoint, because=because)
                await self._events.put(SourceChanged(source.endpoint, False, source.freshness))
            attempt = 0 if was_connected and asyncio.get_running_loop().time() - started > 5 else attempt + 1
            await asyncio.sleep(self._backoff.delay_s(attempt, self._rng))

    async def _stream(self, source: _Source, channel: grpc.aio.Channel) -> None:
        stub: registry_pb2_grpc.RegistryServiceAsyncStub = registry_pb2_grpc.RegistryServiceStub(channel)
        source.again = False
        call = stub.Watch(self._request)
        loop = asyncio.get_running_loop()
        try:
            while True:
                async with asyncio.timeout(self._silence_s):
                    message = await call.read()
                if not isinstance(message, registry_pb2.WatchResponse):
                    return
                source.heard_at = loop.time()
                if source.again:
                    raise _Gap("a digest was wrong")
                for event in self._take(source, message):
                    await self._events.put(event)
        finally:
            call.cancel()

    def _take(self, source: _Source, message: registry_pb2.WatchResponse) -> list[FleetEvent]:
        match message.WhichOneof("message"):
            case "snapshot":
                source.pieces.update(records.unpack(message.snapshot))
            case "snapshot_end":
                return self._snapshot(source, message.snapshot_end.revision)
            case "upserts":
                for name, record in records.unpack(message.upserts):
                    source.removals.pop(name, None)
                    source.upserts[name] = record
            case "removals":
                for name in records.unpack_removals(message.removals):
                    source.upserts.pop(name, None)
                    source.removals[name] = None
            case "freshness":
                return self._freshness(source, message.freshness)
        return self._soft(source, message)

    def _soft(self, source: _Source, message: registry_pb2.WatchResponse) -> list[FleetEvent]:
        match message.WhichOneof("message"):
            case "load":
                loads = tuple(
                    load for load in message.load.loads if self._loads.offer(source.endpoint, load, self._owns)
                )
                return [LoadChanged(loads)] if loads else []
            case "digest":
                verdict, update = self._digests.offer(source.endpoint, message.digest, self._owns)
                if verdict is Verdict.GAP and update.replica_id in self.view.replicas:
                    raise _Gap(f"digest of {update.replica_id} does not follow what is held")
                return [DigestChanged(update)] if verdict is Verdict.TAKE else []
            case "dispatches":
                seen = message.dispatches
                own = seen.router_id == self._request.watcher
                return [] if own else [DispatchesSeen(seen.router_id, tuple(seen.dispatches))]
            case "demand":
                told = message.demand
                taken = self._demand.offer(source.endpoint, told)
                return [_demand_seen(told)] if taken else []
        return []

    def _snapshot(self, source: _Source, revision: int) -> list[FleetEvent]:
        others = [s.freshness.revision for s in self._sources.values() if s.connected and s.freshness is not None]
        if revision < self.view.revision and all(other < self.view.revision for other in others):
            # Nobody knows the revision we had: etcd itself went back, restored or replaced.
            log.warning("watch.history_went_back", endpoint=source.endpoint, ours=self.view.revision, now=revision)
            self.view.rewind(revision)
        change = self.view.snapshot(source.pieces, revision)
        source.pieces, source.connected = {}, True
        first = not self.synced.is_set()
        self.synced.set()
        log.info("watch.synced", endpoint=source.endpoint, revision=revision)
        changed = [self._changed(change, snapshot=True)] if change or first else []
        return [*changed, SourceChanged(source.endpoint, True, source.freshness)]

    def _freshness(self, source: _Source, freshness: registry_pb2.Freshness) -> list[FleetEvent]:
        """What came since the last one takes effect now, together."""
        source.freshness = freshness
        if not source.connected:
            # The registry itself has no whole view yet.
            return []
        change = self.view.delta(source.upserts.items(), source.removals, freshness.revision)
        source.upserts, source.removals = {}, {}
        changed = [self._changed(change, snapshot=False)] if change else []
        return [*changed, SourceChanged(source.endpoint, source.connected, freshness)]

    def _changed(self, change: Change, *, snapshot: bool) -> RecordsChanged:
        for kind, name in change.removals:
            if kind is Kind.REPLICAS:
                self._loads.forget(name)
                self._digests.forget(name)
        return RecordsChanged(
            records.pack(change.upserts, self.view.revision),
            records.pack_removals(change.removals, self.view.revision),
            snapshot,
        )

    def _owns(self, endpoint: str, replica_id: str) -> bool:
        """Whether this registry hears, as far as is known, the agent that serves the replica."""
        replica = self.view.replicas.get(replica_id)
        source = self._sources.get(endpoint)
        return replica is not None and source is not None and source.owns(replica.node_id)


def _demand_seen(told: registry_pb2.RouterDemand) -> DemandSeen:
    return DemandSeen(told.router_id, told.began_ns, tuple(told.demand), told.gone, told.age_ms / 1000)
