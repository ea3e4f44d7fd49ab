"""A watcher that has one digest told anew keeps everything else."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from stoker.api.registry.v1 import records_pb2, registry_pb2, registry_pb2_grpc
from stoker.common import rpc
from stoker.registry.client import DigestChanged, FleetWatch, RecordsChanged
from tests.support.registry import ALL_TOPICS, snapshot
from tests.support.waiting import eventually


class Registry(registry_pb2_grpc.RegistryServiceServicer):
    """Tells each watcher the same two replicas and their digests."""

    def __init__(self) -> None:
        self.streams = 0
        self.speaks = asyncio.Event()
        """Set: a stream gives one more sign of life."""

    async def Watch(
        self, request: registry_pb2.WatchRequest, context: Any
    ) -> AsyncIterator[registry_pb2.WatchResponse]:
        self.streams += 1
        replicas = [records_pb2.Replica(replica_id=name, node_id="n", epoch=1) for name in ("chat-0", "chat-1")]
        yield registry_pb2.WatchResponse(snapshot=registry_pb2.Records(revision=5, replicas=replicas))
        yield registry_pb2.WatchResponse(snapshot_end=registry_pb2.SnapshotEnd(registry_id="r", revision=5))
        for name in ("chat-0", "chat-1"):
            yield registry_pb2.WatchResponse(digest=snapshot(name, {1, 2}, 3))
        while True:
            yield registry_pb2.WatchResponse(freshness=registry_pb2.Freshness(revision=5, nodes=["n"]))
            await self.speaks.wait()
            self.speaks.clear()


async def test_only_the_digest_that_was_wrong_is_told_anew() -> None:
    registry = Registry()  # type: ignore[abstract]
    server = rpc.RpcServer.bind("127.0.0.1:0", ())
    registry_pb2_grpc.add_RegistryServiceServicer_to_server(registry, server.server)
    await server.start()
    told: Counter[str] = Counter()
    records = 0

    async def listen(watch: FleetWatch) -> None:
        nonlocal records
        async for event in watch.events():
            if isinstance(event, DigestChanged):
                told[event.update.replica_id] += 1
            records += isinstance(event, RecordsChanged)

    try:
        async with FleetWatch([f"127.0.0.1:{server.port}"], ALL_TOPICS, rng=random.Random(1)) as watch:
            listening = asyncio.create_task(listen(watch))
            await eventually(lambda: told == {"chat-0": 1, "chat-1": 1}, "both are told")
            watch.resync("chat-0")
            registry.speaks.set()
            # Sooner than silence, after 3 s, would have the stream opened again.
            await eventually(lambda: told["chat-0"] == 2, "it is told anew", 2.0)
            assert registry.streams == 2, "by a stream of its own"
            assert told["chat-1"] == 1
            assert records == 1, "records go on from where they are"
            listening.cancel()
    finally:
        await server.stop(0)
