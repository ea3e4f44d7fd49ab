"""A router's stream of dispatches to one registry, which passes them on to the other routers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence

import grpc
import structlog

from stoker.api.registry.v1 import registry_pb2, registry_pb2_grpc
from stoker.common import rpc
from stoker.common.backoff import Backoff
from stoker.common.blocks import pack_keys
from stoker.common.errors import InvalidRequest
from stoker.common.tls import Tls
from stoker.registry.core import rendezvous
from stoker.registry.core.dispatches import MAX_DISPATCHES, MAX_KEYS, MAX_TOKENS, QUEUE_BYTES, DropOldest, aged_ms
from stoker.registry.core.places import Places

log = structlog.get_logger(__name__)

_ADMISSION_S = 3.0
_WRITE_S = 3.0
_LASTING_S = 5.0
# All who lost a registry go to others: not in step.
_SPREAD_S = 0.05
# After this the load is in reports and the digest shows the blocks, or soon will.
_WORTHLESS_S = 2.0
_BATCH_BYTES = 512 * 1024

_Call = grpc.aio.StreamUnaryCall[registry_pb2.AnnounceRequest, registry_pb2.AnnounceResponse]


class DispatchAnnouncer:
    """Tells the other routers, through one registry of `endpoints`, what this one has just dispatched.

    `announce` never waits and never fails. What waits is bounded: the oldest give way, and what no registry took
    within 2 s is not told at all; nothing depends on it. Batches of `batch_s` seconds. The registries are tried
    in the rendezvous order of `router_id`, which must be unique per process; a `FleetWatch` with the same name is
    not told its own. Use it as an async context manager.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        router_id: str,
        *,
        batch_s: float = 0.02,
        queue_bytes: int = QUEUE_BYTES,
        tls: Tls | None = None,
        rng: random.Random | None = None,
    ) -> None:
        if not endpoints:
            raise InvalidRequest.field("endpoints", "give at least one registry as host:port")
        self.router_id = router_id
        self.connected = asyncio.Event()
        """Set while a registry hears this router."""
        self.sent = 0
        """Dispatches handed to a registry so far."""
        self._endpoints = rendezvous.order(router_id, endpoints)
        self._batch_s = batch_s
        self._tls = tls
        self._rng = rng or random.Random()  # noqa: S311 - jitter
        self._backoff = Backoff(first_s=0.1, max_s=3.0)
        self._queue: DropOldest[registry_pb2.Dispatch] = DropOldest(queue_bytes)
        self._expired = 0
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def dropped(self) -> int:
        """Dispatches that were never told: they gave way to newer ones, or grew too old."""
        return self._queue.dropped + self._expired

    def announce(
        self,
        replica_id: str,
        epoch: int,
        keys: Sequence[int],
        prefill_tokens: int,
        kv_tokens: int,
        *,
        dp_rank: int = 0,
    ) -> None:
        """A request went to a replica; `keys` are those of its blocks that the replica's digest does not show.

        Of more than 4,096 keys the first are told; more tokens than a registry takes are told as its most.
        """
        dispatch = registry_pb2.Dispatch(
            replica_id=replica_id,
            dp_rank=dp_rank,
            epoch=epoch,
            keys=pack_keys(keys[:MAX_KEYS]),
            prefill_tokens=min(prefill_tokens, MAX_TOKENS),
            kv_tokens=min(kv_tokens, MAX_TOKENS),
        )
        self._queue.put(dispatch, asyncio.get_running_loop().time())
        self._wake.set()

    async def start(self) -> None:
        """Look for a registry."""
        self._task = asyncio.create_task(self._run(), name=f"announce of {self.router_id}")

    async def close(self) -> None:
        """End the stream; what waits is dropped."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def __aenter__(self) -> DispatchAnnouncer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        places = Places(len(self._endpoints))
        while True:
            endpoint, started = self._endpoints[places.at], loop.time()
            because = await self._try(endpoint)
            if self.connected.is_set():
                self.connected.clear()
                log.warning("announce.lost", endpoint=endpoint, because=because)
            rounds = places.lost(served=loop.time() - started > _LASTING_S)
            spread_s = _SPREAD_S * self._rng.random()
            await asyncio.sleep(self._backoff.delay_s(rounds - 1, self._rng) if rounds else spread_s)

    async def _try(self, endpoint: str) -> str:
        """Announce to one registry for as long as it goes; returns why it ended."""
        try:
            async with rpc.channel(endpoint, self._tls) as channel:
                await self._stream(endpoint, channel)
        except grpc.aio.AioRpcError as error:
            return rpc.error_from(error).message
        except (TimeoutError, asyncio.InvalidStateError) as error:
            return str(error) or "it takes nothing"
        except asyncio.CancelledError:
            # gRPC raises this, too, for a call that the other side has cancelled.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return "it cancelled the stream"
        return "it ended the stream"

    async def _stream(self, endpoint: str, channel: grpc.aio.Channel) -> None:
        stub: registry_pb2_grpc.RegistryServiceAsyncStub = registry_pb2_grpc.RegistryServiceStub(channel)
        call: _Call = stub.Announce()
        try:
            async with asyncio.timeout(_ADMISSION_S):
                await call.wait_for_connection()
            self.connected.set()
            log.info("announce.admitted", endpoint=endpoint)
            await self._converse(call)
        finally:
            call.cancel()

    async def _converse(self, call: _Call) -> None:
        """Write until the registry ends the stream, in whatever way; its error says why."""
        ended = asyncio.create_task(_outcome(call))
        writing = asyncio.create_task(self._write_all(call))
        try:
            await asyncio.wait({ended, writing}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                ended.result()
            else:
                writing.result()
        finally:
            for task in (ended, writing):
                task.cancel()
            await asyncio.gather(ended, writing, return_exceptions=True)

    async def _write_all(self, call: _Call) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(self._batch_s)
            self._wake.clear()
            for request in self._batches(asyncio.get_running_loop().time()):
                async with asyncio.timeout(_WRITE_S):
                    await call.write(request)
                self.sent += len(request.dispatches)

    def _batches(self, now: float) -> Iterator[registry_pb2.AnnounceRequest]:
        batch, size = registry_pb2.AnnounceRequest(router_id=self.router_id), 0
        for since, dispatch in self._queue.take():
            if now - since > _WORTHLESS_S:
                self._expired += 1
                continue
            dispatch.age_ms = aged_ms(0, since, now)
            if size > _BATCH_BYTES or len(batch.dispatches) >= MAX_DISPATCHES:
                yield batch
                batch, size = registry_pb2.AnnounceRequest(router_id=self.router_id), 0
            batch.dispatches.append(dispatch)
            size += len(dispatch.keys)
        if batch.dispatches:
            yield batch


async def _outcome(call: _Call) -> None:
    await call
