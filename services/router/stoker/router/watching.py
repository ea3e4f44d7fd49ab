"""Feeds the view from the registries, and sees to what a change of the fleet entails."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import structlog

from stoker.api.registry.v1 import registry_pb2
from stoker.common.blocks import sampled
from stoker.common.tls import Tls
from stoker.registry.client import (
    Demands,
    DigestChanged,
    DispatchAnnouncer,
    DispatchesSeen,
    FleetWatch,
    LoadChanged,
    RecordsChanged,
    SourceChanged,
)
from stoker.registry.client.events import FleetEvent
from stoker.router import core, metrics
from stoker.router.decisions.decided import Decided
from stoker.router.fleet.view import View

log = structlog.get_logger(__name__)

_TOPICS = (
    registry_pb2.TOPIC_DEPLOYMENTS,
    registry_pb2.TOPIC_REPLICAS,
    registry_pb2.TOPIC_LOAD,
    registry_pb2.TOPIC_DIGESTS,
    registry_pb2.TOPIC_DISPATCHES,
)
# A wrong digest has all told anew; wrong ones that keep coming must not keep all registries busy.
_RESYNC_PAUSE_S = 15.0


class Watching:
    """Runs until cancelled. `changed` is called after each change of records."""

    def __init__(
        self,
        view: View,
        registries: tuple[str, ...],
        watcher: str,
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        secure: Tls | None = None,
    ) -> None:
        self._view = view
        self._registries = registries
        self._watcher = watcher
        self._changed = changed
        self._secure = secure
        self._clock = clock

    async def run(self) -> None:
        """Watch; begin anew when an event could not be taken."""
        while True:
            async with FleetWatch(self._registries, _TOPICS, watcher=self._watcher, tls=self._secure) as watch:
                await self._follow(watch)

    async def _follow(self, watch: FleetWatch) -> None:
        """Apply events, and have wrong digests told anew; returns when everything must be."""
        first = True
        may_resync_at = self._clock() + _RESYNC_PAUSE_S
        lost, wrong = False, set[str]()
        async with contextlib.aclosing(watch.events()) as events:  # type: ignore[type-var]
            async for event in events:
                try:
                    if self._apply(event, whole=first) is core.Sync.RESYNC and isinstance(event, DigestChanged):
                        wrong.add(event.update.replica_id)
                except Exception:
                    # The last view serves on; what this event should have told comes with a new watch.
                    log.exception("view.event_not_taken", kind=type(event).__name__)
                    lost = True
                if isinstance(event, RecordsChanged) and event.snapshot:
                    first = False
                if (lost or wrong) and self._clock() >= may_resync_at:
                    if lost:
                        return
                    _resync(watch, wrong)
                    may_resync_at = self._clock() + _RESYNC_PAUSE_S

    def _apply(self, event: FleetEvent, *, whole: bool) -> core.Sync:
        """Take one event; RESYNC when a digest is wrong."""
        now = self._clock()
        match event:
            case RecordsChanged(upserts, removals, snapshot):
                self._view.records(upserts, removals, now=now, snapshot=snapshot, whole=snapshot and whole)
                self._changed()
            case LoadChanged(loads):
                self._view.load(loads, now)
            case DigestChanged(update):
                if self._view.digest(update, now) is core.Sync.RESYNC:
                    log.error("view.digest_wrong", replica=update.replica_id, sequence=update.sequence)
                    return core.Sync.RESYNC
            case DispatchesSeen(_, dispatches):
                metrics.OVERHEARD.inc(len(dispatches))
                self._view.dispatched(dispatches, now)
            case SourceChanged(endpoint, connected, freshness):
                self._view.source(endpoint, connected, freshness, now)
                metrics.REGISTRIES.set(sum(source.connected for source in self._view.sources.values()))
        return core.Sync.APPLIED


def _resync(watch: FleetWatch, wrong: set[str]) -> None:
    while wrong:
        watch.resync(wrong.pop())
        metrics.RESYNCS.inc()


class Announcing:
    """Tells the other routers of each dispatch, so that they send the same prefix to the same place meanwhile."""

    def __init__(self) -> None:
        self._announcer: DispatchAnnouncer | None = None

    async def start(
        self, registries: tuple[str, ...], router_id: str, secure: Tls | None = None, demand: Demands | None = None
    ) -> None:
        """Begin to tell, and of `demand` too."""
        self._announcer = DispatchAnnouncer(registries, router_id, demand=demand, tls=secure)
        await self._announcer.start()

    async def close(self) -> None:
        """Tell no more."""
        if self._announcer is not None:
            await self._announcer.close()

    def hurry(self) -> None:
        """Tell demand soon."""
        if self._announcer is not None:
            self._announcer.hurry()

    def measure(self) -> None:
        """Export whether the others hear this router."""
        if self._announcer is not None:
            metrics.ANNOUNCING.set(self._announcer.connected.is_set())
            metrics.UNSAID.set(self._announcer.dropped)

    def tell(self, decided: Decided) -> None:
        """Note a dispatch for the others; never waits. Keys over bytes go along: all routers make the same, and what
        is worth keeping shows in them as well."""
        if self._announcer is None:
            return
        plan, target = decided.plan, decided.target
        told = core.Dispatched.of(plan.request, decided.decision)
        self._announcer.announce(
            target.record.replica_id,
            target.record.epoch,
            told.keys,
            told.prefill_tokens,
            told.kv_tokens,
            dp_rank=target.rank or 0,
            touched=sampled(plan.request.keys),
        )


async def loop_lag(tick_s: float = 0.05) -> None:
    """Measure how late this loop is, for ever. A standstill longer than a tick is always seen, if not all of it."""
    now = asyncio.get_running_loop().time
    while True:
        due = now() + tick_s
        await asyncio.sleep(tick_s)
        metrics.LOOP_LAG.observe(max(0.0, now() - due))


async def every(seconds: float, *actions: Callable[[], None]) -> None:
    """Call each action every so many seconds; one that fails is logged and called again."""
    while True:
        await asyncio.sleep(seconds)
        for action in actions:
            try:
                action()
            except Exception:
                log.exception("router.periodic_failed")
