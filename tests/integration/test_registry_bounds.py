"""A registry on a real etcd, and those who ask too much of it or overtake each other."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import AsyncIterator

import grpc
import pytest

from stoker.api.registry.v1 import records_pb2, registry_pb2, registry_pb2_grpc
from stoker.common import rpc
from stoker.common.errors import Code, StokerError
from stoker.etcd import EtcdClient
from stoker.registry.client import RegistryClient
from stoker.registry.core import keys
from tests.support.etcd import EtcdServer
from tests.support.registry import Agent, RegistryUnderTest, Watcher, assignment, config, node
from tests.support.waiting import eventually


@pytest.fixture
async def registry(etcd: EtcdServer) -> AsyncIterator[RegistryUnderTest]:
    async with EtcdClient([etcd.endpoint]) as client:
        await client.delete(keys.PREFIX, prefix=True)
    settings = config(etcd.endpoint)
    few = dataclasses.replace(settings.watch, max_watchers_per_host=3)
    async with RegistryUnderTest(dataclasses.replace(settings, watch=few)) as running:
        yield running


@pytest.fixture
async def client(registry: RegistryUnderTest) -> AsyncIterator[RegistryClient]:
    async with RegistryClient([registry.endpoint]) as calls:
        yield calls


async def test_one_host_has_so_many_watches_and_gets_them_back(registry: RegistryUnderTest) -> None:
    request = registry_pb2.WatchRequest(topics=[registry_pb2.TOPIC_NODES])
    async with rpc.channel(registry.endpoint) as channel:
        stub: registry_pb2_grpc.RegistryServiceAsyncStub = registry_pb2_grpc.RegistryServiceStub(channel)
        calls = [stub.Watch(request) for _ in range(3)]
        for call in calls:
            assert isinstance(await call.read(), registry_pb2.WatchResponse)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Watch(request).read()
        error = rpc.error_from(refused.value)
        assert (error.code, error.reason) == (Code.UNAVAILABLE, "TOO_MANY_WATCHERS")
        assert "3 from ipv4:127.0.0.1 are open" in error.message
        calls[0].cancel()

        async def served() -> bool:
            with contextlib.suppress(grpc.aio.AioRpcError):
                return isinstance(await stub.Watch(request).read(), registry_pb2.WatchResponse)
            return False

        await eventually(served)


async def test_one_host_has_so_many_streams_of_announcements(registry: RegistryUnderTest) -> None:
    async with rpc.channel(registry.endpoint) as channel:
        stub: registry_pb2_grpc.RegistryServiceAsyncStub = registry_pb2_grpc.RegistryServiceStub(channel)
        calls = [stub.Announce() for _ in range(3)]
        for call in calls:
            await call.wait_for_connection()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Announce()
        assert rpc.error_from(refused.value).reason == "TOO_MANY_ANNOUNCERS"
        calls[0].cancel()

        async def admitted() -> bool:
            call = stub.Announce()
            with contextlib.suppress(grpc.aio.AioRpcError):
                await call.wait_for_connection()
                return True
            return False

        await eventually(admitted)


async def test_an_absurd_load_costs_itself_alone(registry: RegistryUnderTest, client: RegistryClient) -> None:
    endpoints = [registry.endpoint]
    async with Watcher(endpoints) as watcher, Agent(endpoints, node("n1")) as agent:
        fence = (await client.acquire_leadership("planner", "p", 30.0)).fence
        await client.apply_assignments(fence, [assignment("chat-0", "n1"), assignment("chat-1", "n1")])
        await eventually(watcher.ready("chat-0", "chat-1"))
        good = registry_pb2.ReplicaLoad(replica_id="chat-0", epoch=1, sequence=1, running=7)
        bad = registry_pb2.ReplicaLoad(replica_id="chat-1", epoch=1, sequence=1, kv_usage=math.nan)
        agent.session.publish_load([bad, good])
        await eventually(lambda: "chat-0" in watcher.loads)
        agent.session.publish_load([registry_pb2.ReplicaLoad(replica_id="chat-1", epoch=1, sequence=2, running=1)])
        await eventually(lambda: "chat-1" in watcher.loads)
        assert watcher.loads["chat-1"].sequence == 2
        assert agent.failure is None


async def test_no_leadership_is_promised_for_longer_than_its_lease(client: RegistryClient) -> None:
    first = await client.acquire_leadership("scaler", "me", 2.0)
    again = await client.acquire_leadership("scaler", "me", 60.0)
    assert again.fence == first.fence
    assert again.ttl_ms <= 2_000
    for ttl_s in (0.5, 61.0):
        with pytest.raises(StokerError) as refused:
            await client.acquire_leadership("scaler", "me", ttl_s)
        assert [field.field for field in refused.value.fields] == ["ttl_ms"]


async def test_a_planner_does_not_undo_a_drain_that_it_has_not_seen(client: RegistryClient) -> None:
    fence = (await client.acquire_leadership("planner", "p", 30.0)).fence
    seen = await client.apply_assignments(fence, [assignment("chat-0", "n1"), assignment("chat-1", "n1")])
    drained = await client.drain_replica("chat-0")
    both = [assignment("chat-0", "n2"), assignment("chat-1", "n2")]
    for puts, deletes in ((both, ()), ((), ("chat-0",))):
        with pytest.raises(StokerError) as refused:
            await client.apply_assignments(fence, puts, deletes, decided_at=seen)
        assert refused.value.reason == "CONFLICT"
        assert "assignments/chat-0 was changed" in refused.value.message
    assert drained.wanted == records_pb2.WANTED_DRAIN

    async def written() -> records_pb2.Assignment | None:
        found = (await client.get_fleet()).records.assignments
        return next((each for each in found if each == drained), None)

    await eventually(written)
    fleet = (await client.get_fleet()).records
    assert {each.members[0].node_id for each in fleet.assignments} == {"n1"}, "all of a write or nothing"
    await client.apply_assignments(fence, [assignment("chat-1", "n2")], ["chat-0"], decided_at=fleet.revision)


async def test_the_same_write_twice_is_no_conflict_with_itself(client: RegistryClient) -> None:
    fence = (await client.acquire_leadership("planner", "p", 30.0)).fence
    seen = (await client.get_fleet()).records.revision
    for _ in range(2):
        await client.apply_assignments(fence, [assignment("chat-0", "n1")], decided_at=seen or 1)
