"""A router's stream to one registry: its dispatches for the other routers, and the demand it sees."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import grpc
import structlog

from stoker.api.registry.v1 import registry_pb2, registry_pb2_grpc
from stoker.common import rpc
from stoker.common.backoff import Backoff
from stoker.common.blocks import pack_keys
from stoker.common.errors import InvalidRequest
from stoker.common.tls import Tls
from stoker.registry.core import rendezvous
from stoker.registry.core.demand import MAX_MODELS
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
_DEMAND_EVERY_S, _DEMAND_AT_MOST_EVERY_S = 1.0, 0.1
# Of demand that does not change, watchers hear at least this often: they take silence for an end.
_WHOLE_EVERY = 10

Demands = Callable[[bool], Iterable[registry_pb2.Demand]]
"""Demand by model: what changed since the last call, or with True all of it."""
_Call = grpc.aio.StreamUnaryCall[registry_pb2.AnnounceRequest, registry_pb2.AnnounceResponse]


class DispatchAnnouncer:
    """Tells the other routers, through one registry of `endpoints`, what this one has just dispatched, and those who
    scale what `demand` it sees: each second what changed, all of it at least each ten.

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
        demand: Demands | None = None,
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
        self._demand = demand
        self._began_ns = time.time_ns()
        self._reports = 0
        self._due = float("inf")
        """When demand is to be told next, by the loop's clock."""
        self._told_at = 0.0
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
        touched: Sequence[int] = (),
    ) -> None:
        """A request went to a replica; `keys` are those of its blocks that the replica's digest does not show,
        `touched` the sampled ones of all its blocks.

        Of more than 4,096 keys the first are told; more tokens than a registry takes are told as its most.
        """
        dispatch = registry_pb2.Dispatch(
            replica_id=replica_id,
            dp_rank=dp_rank,
            epoch=epoch,
            keys=pack_keys(keys[:MAX_KEYS]),
            touched=pack_keys(touched[:MAX_KEYS]),
            prefill_tokens=min(prefill_tokens, MAX_TOKENS),
            kv_tokens=min(kv_tokens, MAX_TOKENS),
        )
        self._queue.put(dispatch, asyncio.get_running_loop().time())
        self._wake.set()

    def hurry(self) -> None:
        """Demand has changed so that somebody may wait for it to be told: tell it within a tenth of a second."""
        self._due = min(self._due, self._told_at + _DEMAND_AT_MOST_EVERY_S)
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
        loop, told = asyncio.get_running_loop(), 0
        self._due = loop.time() if self._demand is not None else float("inf")
        while True:
            await self._something(self._due)
            requests = list(self._batches(loop.time()))
            if loop.time() >= self._due:
                requests += self._demanded(whole=told % _WHOLE_EVERY == 0)
                self._told_at, told = loop.time(), told + 1
                self._due = self._told_at + _DEMAND_EVERY_S
            for request in requests:
                async with asyncio.timeout(_WRITE_S):
                    await call.write(request)
                self.sent += len(request.dispatches)

    async def _something(self, due: float) -> None:
        """Wait for dispatches, a batch of them, or until `due` by the loop's clock."""
        try:
            async with asyncio.timeout_at(None if due == float("inf") else due):
                await self._wake.wait()
        except TimeoutError:
            return
        await asyncio.sleep(self._batch_s)
        self._wake.clear()

    def _demanded(self, *, whole: bool) -> Iterator[registry_pb2.AnnounceRequest]:
        """What demand there is; one message without any where there is none, as a sign of life."""
        try:
            models = list(self._demand(whole)) if self._demand is not None else []
        except Exception:  # what cannot be counted must not silence the dispatches
            log.exception("announce.demand_not_counted")
            return
        for start in range(0, max(1, len(models)), MAX_MODELS):
            self._reports += 1
            report = registry_pb2.RouterDemand(
                began_ns=self._began_ns, sequence=self._reports, demand=models[start : start + MAX_MODELS]
            )
            yield registry_pb2.AnnounceRequest(router_id=self.router_id, demand=report)

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
            size += len(dispatch.keys) + len(dispatch.touched)
        if batch.dispatches:
            yield batch


async def _outcome(call: _Call) -> None:
    await call
