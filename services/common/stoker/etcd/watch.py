"""A watch that neither loses nor repeats anything: over reconnects, compactions and frozen servers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Self

import grpc
import structlog

from stoker.etcd import wire
from stoker.etcd.core import watch as core
from stoker.etcd.core.types import Delta, RangeResult, Snapshot
from stoker.etcd.core.watch import Event, Resume
from stoker.etcd.errors import Compacted, EtcdUnavailable, to_error
from stoker.etcd.transport import CallFailed, Connection, Transport, unary

log = structlog.get_logger(__name__)

_RETRY_FLOOR_S = 0.05
_FIRST_ASK_S = 0.5


@dataclass(frozen=True)
class WatchTimes:
    """How a watch checks that its server still lives. Seconds.

    The silence after which a server is left plus the time to reach another stays below the 10 s at which a
    caller should call its view stale.
    """

    progress_s: float = 2.0
    """How often the server is asked for a sign of progress."""
    silence_s: float = 5.0
    """Without any message for this long the server is left for another."""
    retry_cap_s: float = 2.0
    """The longest wait between two tries."""
    buffered: int = 256
    """Deltas held for a slow consumer before reading stops and etcd holds the rest."""


class _Reload(Exception):
    """History cannot be continued: read everything again and deliver the difference."""

    def __init__(self, how: Resume) -> None:
        super().__init__(how.name)
        self.how = how


class Watch:
    """An endless asynchronous iterator over one prefix: one Snapshot, then Deltas in revision order.

    Failures are retried for ever behind the iterator, so a consumer sees them only as `staleness()`. What is
    raised is what trying again cannot help, such as EtcdDenied. Waiting for the next item may be cancelled
    at any time without losing one.
    """

    def __init__(
        self,
        transport: Transport,
        read_all: Callable[[str], Awaitable[RangeResult]],
        prefix: str,
        times: WatchTimes,
    ) -> None:
        self._transport = transport
        self._read_all = read_all
        self._prefix = prefix
        self._times = times
        self._revision = 0
        self._cluster = 0
        self._known: dict[str, int] = {}
        self._loaded = False
        self._fresh_at = float("-inf")
        self._failures = 0
        self._on_close: Callable[[Watch], None] = lambda _: None
        # None only wakes the consumer, so that it sees that the task has ended.
        self._items: asyncio.Queue[Snapshot | Delta | None] = asyncio.Queue(times.buffered)
        self._task = asyncio.create_task(self._run(), name=f"etcd watch {prefix}")
        self._task.add_done_callback(self._wake)

    @property
    def revision(self) -> int:
        """The revision up to which this watch has read; 0 before the snapshot."""
        return self._revision

    def staleness(self, now: float | None = None) -> float:
        """Age, in seconds, of the last proof that nothing newer was missing; infinite before the first.

        A proof is an answer to a question, dated to when it was asked. `now` is the event loop's clock.
        """
        return (_now() if now is None else now) - self._fresh_at

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Snapshot | Delta:
        while True:
            if self._items.empty() and self._task.done():
                if not self._task.cancelled() and (error := self._task.exception()):
                    raise error
                raise StopAsyncIteration
            if (item := await self._items.get()) is not None:
                return item

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the watch; whoever waits for an item gets the end of the iteration."""
        self._task.cancel()
        await asyncio.wait({self._task})
        self._on_close(self)

    def on_close(self, callback: Callable[[Watch], None]) -> None:
        """Have `callback` called when the watch is closed."""
        self._on_close = callback

    def _wake(self, _: object) -> None:
        # A full queue needs no waking: its consumer is not waiting.
        with contextlib.suppress(asyncio.QueueFull):
            self._items.put_nowait(None)

    async def _run(self) -> None:
        how = Resume.RELOAD
        while True:
            try:
                if how is not Resume.CONTINUE:
                    await self._load(how)
                    how = Resume.CONTINUE
                connection = self._transport.pick()
                await self._follow(connection)
            except _Reload as reload:
                how = reload.how
                log.info("etcd watch reads all again", prefix=self._prefix, how=how.name, after=self._revision)
            except Compacted:
                # Compacted between two pages of the range: start over.
                pass
            except EtcdUnavailable as error:
                log.warning("etcd watch waits", prefix=self._prefix, cause=error.message)
            except CallFailed as error:
                self._transport.failed(connection, error.failure)
                if not error.failure.passing:
                    raise to_error(f"watch {self._prefix}", error.failure, connection.address) from error
                log.info("etcd watch moves on", prefix=self._prefix, cause=error.failure.text)
            # The first retry may be immediate; a second one never is, whatever the endpoints' health.
            floor = _RETRY_FLOOR_S if self._failures else 0.0
            await asyncio.sleep(max(floor, self._transport.pause(self._failures, self._times.retry_cap_s)))
            self._failures += 1

    async def _load(self, how: Resume) -> None:
        """Read everything; deliver it whole the first time, and the difference from then on."""
        asked = _now()
        result = await self._read_all(self._prefix)
        if not self._loaded:
            delta = None
            item: Snapshot | Delta = Snapshot(result.revision, result.kvs)
        else:
            item = delta = core.diff(self._known, result.kvs, result.revision, how)
        self._known = {kv.key: kv.mod_revision for kv in result.kvs}
        self._revision = result.revision
        self._loaded = True
        if how is Resume.RELOAD_ALL:
            self._cluster = 0
        if delta is None or delta.puts or delta.deletes:
            await self._items.put(item)
        self._fresh_at = asked

    async def _follow(self, connection: Connection) -> None:
        """Watch at one endpoint from where we are, until it fails (CallFailed) or history ends (_Reload)."""
        await self._check_history(connection)
        call = connection.watch.Watch(metadata=wire.HAS_LEADER)
        connection.stream_opened()
        try:
            async with asyncio.timeout(self._times.silence_s):
                await call.write(self._create_request())
            await self._read(call, connection)
        except TimeoutError as error:
            raise CallFailed.timeout("the watch could not be started") from error
        except grpc.aio.AioRpcError as error:
            raise CallFailed.of(error) from error
        except asyncio.InvalidStateError as error:
            raise CallFailed.timeout("the watch stream has ended") from error
        finally:
            connection.stream_ended()
            call.cancel()

    async def _check_history(self, connection: Connection) -> None:
        """Make sure, by a linearizable read, that this endpoint is served and continues our history."""
        request = wire.rpc.RangeRequest(key=b"\0", count_only=True)
        header = (await unary(connection.kv.Range, request, self._transport.attempt_timeout_s)).header
        how = core.resume(self._revision, self._cluster or header.cluster_id, header.revision, header.cluster_id)
        if how is not Resume.CONTINUE:
            raise _Reload(how)
        self._cluster = header.cluster_id

    def _create_request(self) -> Any:
        return wire.rpc.WatchRequest(
            create_request=wire.rpc.WatchCreateRequest(
                **wire.span(self._prefix, prefix=True),
                # One revision again, which is dropped: a watch that starts in the future of an idle store
                # gets no answer about its progress from newer servers (etcd#20229).
                start_revision=self._revision,
                progress_notify=True,
                fragment=True,
            )
        )

    async def _read(self, call: Any, connection: Connection) -> None:
        """Read responses, and ask for progress in between; a read is never cancelled, which would end all."""
        held: list[Event] = []
        asked: float | None = None
        heard_at = _now()
        # Not at once: older servers (etcd#15220) may answer ahead of the events that are still to come.
        ask_at = heard_at + min(_FIRST_ASK_S, self._times.progress_s)
        reading = asyncio.ensure_future(call.read())
        try:
            while True:
                if connection.replaced:
                    raise CallFailed.timeout("certificates were renewed")
                now = _now()
                if now >= ask_at:
                    async with asyncio.timeout(self._times.silence_s):
                        await call.write(_PROGRESS)
                    # A server that is still sending events may leave a question unanswered: the oldest one
                    # dates the answer that comes.
                    asked = now if asked is None else asked
                    ask_at = now + self._times.progress_s
                wake_at = min(ask_at, heard_at + self._times.silence_s)
                await asyncio.wait({reading}, timeout=max(0.0, wake_at - now))
                if not reading.done():
                    if _now() >= heard_at + self._times.silence_s:
                        raise CallFailed.timeout(f"silent for {self._times.silence_s:g} s")
                    continue
                response = reading.result()
                if response is grpc.aio.EOF:
                    raise CallFailed.timeout("the server ended the watch")
                self._failures = 0
                self._transport.worked(connection)
                held = await self._take(response, held)
                if response.watch_id == _REQUESTED and not response.created and asked is not None:
                    self._fresh_at, asked = asked, None
                # Time spent waiting for the consumer is not the server's silence.
                heard_at = _now()
                reading = asyncio.ensure_future(call.read())
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _take(self, response: Any, held: list[Event]) -> list[Event]:
        """Deliver what one response completes; returns the events of a revision still incomplete."""
        if response.canceled:
            if response.compact_revision:
                raise _Reload(Resume.RELOAD)
            raise CallFailed.timeout(f"the watch was refused: {response.cancel_reason or 'no reason given'}")
        events, held = core.complete(held, [wire.event(e) for e in response.events], more=response.fragment)
        for delta in core.deltas(events, self._revision):
            await self._items.put(delta)
            core.advance(self._known, delta)
            self._revision = delta.revision
        # The server's own, timed notice comes after every event before it; the answer to a request may not
        # (etcd#15220), so it proves freshness and never moves the revision.
        if not response.events and not response.created and response.watch_id != _REQUESTED and not held:
            self._revision = max(self._revision, response.header.revision)
        return held


_PROGRESS = wire.rpc.WatchRequest(progress_request=wire.rpc.WatchProgressRequest())

# The watch id of answers to progress requests, which concern every watch of a stream.
_REQUESTED = -1


def _now() -> float:
    return asyncio.get_running_loop().time()
