"""Leases: renewals of all of them on one stream, and one that is renewed in the background."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Self

import grpc
import structlog

from stoker.etcd import wire
from stoker.etcd.core.failure import Kind, judge
from stoker.etcd.core.lease import Term, extend
from stoker.etcd.errors import EtcdError, LeaseLost
from stoker.etcd.transport import CallFailed, Connection, Transport

log = structlog.get_logger(__name__)

_RETRY_S = 0.1


class _Stream:
    """One LeaseKeepAlive stream to one endpoint; answers are matched to requests by lease id."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        # Each lease's waiters, oldest first: etcd answers in the order it was asked.
        self._waiting: dict[int, list[asyncio.Future[float]]] = defaultdict(list)
        self._call = connection.lease.LeaseKeepAlive(self._outgoing(), metadata=wire.HAS_LEADER)
        connection.stream_opened()
        self._reader = asyncio.create_task(self._read(), name=f"etcd renewals at {connection.address}")
        self._reader.add_done_callback(lambda _: connection.stream_ended())

    @property
    def ended(self) -> bool:
        return self._reader.done()

    async def renew(self, lease_id: int, timeout: float) -> float:
        """The TTL, 0 when the lease is gone; raises CallFailed."""
        if self.ended:
            raise CallFailed(judge("UNAVAILABLE", "the renewal stream has ended"))
        answer: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting[lease_id].append(answer)
        self._requests.put_nowait(wire.rpc.LeaseKeepAliveRequest(ID=lease_id))
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError as error:
            # A mute server: let go of the stream, so that all its waiters move on with us.
            self.abandon()
            raise CallFailed.timeout(f"no renewal within {timeout:.1f} s") from error

    async def _outgoing(self) -> AsyncIterator[Any]:
        while True:
            yield await self._requests.get()

    async def _read(self) -> None:
        failure = judge("UNAVAILABLE", "the renewal stream was ended")
        try:
            async for response in self._call:
                waiters = self._waiting.get(response.ID, [])
                if waiters:
                    answer = waiters.pop(0)
                    if not answer.done():
                        answer.set_result(float(response.TTL))
                if not waiters:
                    self._waiting.pop(response.ID, None)
        except grpc.aio.AioRpcError as error:
            failure = CallFailed.of(error).failure
        finally:
            self._call.cancel()
            for waiters in self._waiting.values():
                for answer in waiters:
                    if not answer.done():
                        answer.set_exception(CallFailed(failure))
            self._waiting.clear()

    def abandon(self) -> None:
        """End the stream; whoever still waits on it gets CallFailed."""
        self._reader.cancel()

    async def close(self) -> None:
        self.abandon()
        await asyncio.gather(self._reader, return_exceptions=True)


class Renewals:
    """Renews leases, however many, over one stream that is opened again where and when needed."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._stream: _Stream | None = None

    def now(self) -> float:
        """Monotonic seconds."""
        return asyncio.get_running_loop().time()

    async def once(self, lease_id: int, timeout: float, attempt_timeout: float | None = None) -> float:
        """Renew within `timeout` seconds, over all tries, and return the TTL.

        Raises LeaseLost when etcd no longer knows the lease, EtcdUnavailable when nobody answers.
        """

        async def attempt(connection: Connection, seconds: float) -> float:
            try:
                return await self._on(connection).renew(lease_id, min(seconds, attempt_timeout or seconds))
            except CallFailed as error:
                if error.failure.kind is Kind.LEASE_GONE:
                    return 0.0
                raise

        ttl = await self._transport.call("renew lease", attempt, timeout=timeout, idempotent=True)
        if ttl <= 0:
            raise LeaseLost(f"etcd lease {lease_id:x} expired or was revoked; its keys are gone")
        return ttl

    def _on(self, connection: Connection) -> _Stream:
        stream = self._stream
        if stream is None or stream.ended or stream.connection is not connection:
            if stream is not None:
                stream.abandon()
            self._stream = stream = _Stream(connection)
        return stream

    async def close(self) -> None:
        """End the stream; renewals under way fail."""
        if self._stream is not None:
            await self._stream.close()
            self._stream = None


class Lease:
    """A lease that is renewed in the background, at a third of its TTL.

    It counts as lost when etcd says so, or, without a word from etcd, TTL seconds after the last renewal
    that was answered had been sent. Loss is final: a late answer does not bring it back.
    """

    def __init__(
        self,
        renewals: Renewals,
        lease_id: int,
        sent: float,
        ttl: float,
        *,
        revoke: Callable[[int], Awaitable[None]],
    ) -> None:
        self.id = lease_id
        self.lost = asyncio.Event()
        self.lost_because = ""
        self._renewals = renewals
        self._term = Term(sent, ttl)
        self._revoke = revoke
        self._on_stop: Callable[[Lease], None] = lambda _: None
        self._task = asyncio.create_task(self._run(), name=f"etcd lease {lease_id:x}")
        self._task.add_done_callback(self._ended)

    @property
    def ttl_s(self) -> float:
        """The TTL that etcd granted, seconds."""
        return self._term.ttl

    @property
    def deadline(self) -> float:
        """Monotonic seconds (the event loop's clock) from which on the lease is lost unless renewed."""
        return self._term.deadline

    def alive(self) -> bool:
        """Whether the lease surely lives now: correct also before the background task has run again."""
        return not self.lost.is_set() and self._renewals.now() < self._term.deadline

    async def stop(self) -> None:
        """Stop renewing; etcd lets the lease expire."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._on_stop(self)

    async def revoke(self) -> None:
        """Stop renewing and end the lease at once, with its keys."""
        await self.stop()
        await self._revoke(self.id)

    def on_stop(self, callback: Callable[[Lease], None]) -> None:
        """Have `callback` called when renewing has ended for good."""
        self._on_stop = callback

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.lost.is_set():
            await self.stop()
        else:
            await self.revoke()

    async def _run(self) -> None:
        while self.alive():
            await asyncio.sleep(max(0.0, self._term.renew_at - self._renewals.now()))
            if not self.alive():
                break
            sent = self._renewals.now()
            try:
                ttl = await self._renewals.once(self.id, self._term.deadline - sent, self._term.attempt_timeout(sent))
            except LeaseLost as error:
                self._lose(error.message)
                return
            except EtcdError as error:
                log.warning("etcd lease not renewed", lease=f"{self.id:x}", cause=error.message)
                await asyncio.sleep(min(_RETRY_S, max(0.0, self._term.deadline - self._renewals.now())))
            else:
                if self.alive():
                    self._term = extend(self._term, sent, ttl)
        self._lose(f"etcd lease {self.id:x}: no renewal was answered within its TTL of {self.ttl_s:g} s")

    def _ended(self, task: asyncio.Task[None]) -> None:
        # A fault in renewing must not leave anybody waiting for a loss that is never told.
        if not task.cancelled() and task.exception() and not self.lost.is_set():
            self._lose(f"etcd lease {self.id:x}: renewing failed: {task.exception()!r}")

    def _lose(self, because: str) -> None:
        log.warning("etcd lease lost", lease=f"{self.id:x}", cause=because)
        self.lost_because = because
        self.lost.set()
        self._on_stop(self)
