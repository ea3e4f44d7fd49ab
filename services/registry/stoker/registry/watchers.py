"""One watcher's stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING

from stoker.api.registry.v1 import registry_pb2
from stoker.common.errors import Exhausted
from stoker.registry.core import records
from stoker.registry.core.outflow import PIECE_BYTES, Interest, Outflow

if TYPE_CHECKING:
    from stoker.registry.hub import Hub


class TooSlow(Exhausted):
    """The watcher takes nothing."""

    reason = "WATCHER_TOO_SLOW"


class WatcherStream:
    """What one watcher is told: a snapshot, then what changes, and each second how fresh it is."""

    def __init__(
        self,
        hub: Hub,
        request: registry_pb2.WatchRequest,
        host: str,
        now: Callable[[], float],
        max_digest_bytes: int,
    ) -> None:
        self.name = request.watcher
        self.host = host
        self.outflow = Outflow(Interest.of(request), max_digest_bytes)
        self._hub = hub
        self._now = now
        self._wake = asyncio.Event()
        self._freshness_due = False
        self._handed_at: float | None = None
        self._dropped: TooSlow | None = None
        self._closing = False

    def wake(self, *, freshness: bool = False) -> None:
        """There is something to tell."""
        self._freshness_due |= freshness
        self._wake.set()

    def close(self) -> None:
        """End the stream in good order: the registry stops."""
        self._closing = True
        self._wake.set()

    def drop_if_stalled(self, stall_s: float) -> bool:
        """Give up on a watcher that has not taken its last message for `stall_s` seconds; frees what waits."""
        if self._handed_at is None or self._now() - self._handed_at < stall_s:
            return False
        self._dropped = TooSlow(
            f"watcher {self.name or 'without a name'!r} took nothing for {stall_s:g} s; reconnect for a snapshot",
            retry_after_s=1.0,
        )
        self.outflow = Outflow(self.outflow.interest)
        return True

    async def messages(self) -> AsyncGenerator[registry_pb2.WatchResponse, None]:
        """The stream, message by message; raises TooSlow once this watcher was given up."""
        async with contextlib.aclosing(self._all()) as messages:
            async for message in messages:
                self._handed_at = self._now()
                yield message
                self._handed_at = None
                if self._dropped is not None:
                    raise self._dropped

    async def _all(self) -> AsyncGenerator[registry_pb2.WatchResponse, None]:
        while not (self._hub.settled.is_set() or self._closing):
            yield registry_pb2.WatchResponse(freshness=self._hub.freshness())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._hub.settled.wait()
        # No await before the snapshot is drawn: changes from here on are in the outflow.
        state = self._hub.state
        self.outflow = Outflow(self.outflow.interest, self.outflow.max_digest_bytes)
        wanted = [item for item in state.records.items() if self.outflow.interest.covers(item[0])]
        revision = self.outflow.told_revision = state.revision
        self.outflow.load(self._hub.loads.all())
        self.outflow.tell_all(self._hub.digests.series())
        now = self._now()
        for report in self._hub.demand.all(now):
            self.outflow.demand(report, now)
        for piece in records.pack_pieces(wanted, revision, PIECE_BYTES):
            yield registry_pb2.WatchResponse(snapshot=piece)
        yield registry_pb2.WatchResponse(
            snapshot_end=registry_pb2.SnapshotEnd(registry_id=self._hub.registry_id, revision=revision)
        )
        self._freshness_due = True
        while not self._closing:
            changed = self.outflow.take_records()
            for message in changed:
                yield message
            if changed or self._freshness_due:
                self._freshness_due = False
                yield registry_pb2.WatchResponse(freshness=self._hub.freshness(self.outflow.told_revision))
            for message in self.outflow.take_soft(self._now()):
                yield message
            if (series := self.outflow.take_untold()) is not None:
                for update in self._hub.digests.snapshot(series, PIECE_BYTES // 8):
                    yield registry_pb2.WatchResponse(digest=update)
                continue
            await self._wake.wait()
            self._wake.clear()
