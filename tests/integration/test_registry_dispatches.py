"""Dispatches through real registries: from one router to every other, and to nobody's harm."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from stoker.api.registry.v1 import registry_pb2, registry_pb2_grpc
from stoker.common import rpc
from stoker.common.blocks import pack_keys, unpack_keys
from stoker.registry.client import DispatchAnnouncer, DispatchesSeen
from stoker.registry.core import rendezvous
from tests.support.etcd import EtcdServer, free_port
from tests.support.registry import RegistryUnderTest, Watcher, config, two_registries
from tests.support.waiting import eventually


@pytest.fixture
async def registry(etcd: EtcdServer) -> AsyncIterator[RegistryUnderTest]:
    async with RegistryUnderTest(config(etcd.endpoint)) as running:
        yield running


def announcer(endpoints: list[str], router_id: str = "router-1", **settings: Any) -> DispatchAnnouncer:
    return DispatchAnnouncer(endpoints, router_id, rng=random.Random(1), **settings)


def heard(watcher: Watcher) -> list[registry_pb2.Dispatch]:
    return [d for event in watcher.events if isinstance(event, DispatchesSeen) for d in event.dispatches]


def replicas(watcher: Watcher) -> list[str]:
    return [dispatch.replica_id for dispatch in heard(watcher)]


async def set_all(*events: asyncio.Event) -> None:
    async with asyncio.timeout(60):
        for event in events:
            await event.wait()


async def test_every_other_router_hears_it_and_its_sender_does_not(registry: RegistryUnderTest) -> None:
    endpoints = [registry.endpoint]
    async with (
        Watcher(endpoints) as one,
        Watcher(endpoints) as two,
        announcer(endpoints, "router-1") as teller,
        announcer(endpoints, "test") as same_name,  # the watchers' own
    ):
        await set_all(one.watch.synced, two.watch.synced, teller.connected, same_name.connected)
        same_name.announce("chat-9", 1, [9], 1, 1)
        await eventually(lambda: same_name.sent == 1)
        teller.announce("chat-0", 7, [1, 2**64 - 1], 320, 700, touched=[16, 2**64 - 16])
        teller.announce("code-3", 2, range(10_000), 1, 2, touched=range(0, 160_000, 16))
        for watcher in (one, two):
            await eventually(lambda: len(heard(watcher)) == 2)  # noqa: B023
            first, second = heard(watcher)
            assert (first.replica_id, first.epoch, first.prefill_tokens, first.kv_tokens) == ("chat-0", 7, 320, 700)
            assert list(unpack_keys(first.keys)) == [1, 2**64 - 1]
            assert list(unpack_keys(first.touched)) == [16, 2**64 - 16]
            assert list(unpack_keys(second.keys)) == list(range(4_096)), "of a longer prompt the first blocks"
            assert list(unpack_keys(second.touched)) == list(range(0, 65_536, 16))
            assert first.age_ms >= 15, "as old as the batch it waited for"
        assert {e.sender for w in (one, two) for e in w.events if isinstance(e, DispatchesSeen)} == {"router-1"}


async def test_a_watcher_of_some_deployments_hears_of_those(registry: RegistryUnderTest) -> None:
    endpoints = [registry.endpoint]
    async with Watcher(endpoints, "chat") as watcher, announcer(endpoints) as teller:
        await set_all(watcher.watch.synced, teller.connected)
        for replica in ("code-0", "chat-0", "chat-x-1", "chat-1"):
            teller.announce(replica, 1, [1], 1, 1)
        await eventually(lambda: replicas(watcher) == ["chat-0", "chat-1"])


async def test_a_malformed_dispatch_costs_itself_alone(registry: RegistryUnderTest) -> None:
    async with Watcher([registry.endpoint]) as watcher, rpc.channel(registry.endpoint) as channel:
        await set_all(watcher.watch.synced)
        stub: Any = registry_pb2_grpc.RegistryServiceStub(channel)
        call = stub.Announce()
        bad = [
            registry_pb2.Dispatch(replica_id="chat-1", keys=b"123"),
            registry_pb2.Dispatch(replica_id="../1"),
            registry_pb2.Dispatch(replica_id="chat-2", age_ms=2**32 - 1),
        ]
        good = registry_pb2.Dispatch(replica_id="chat-0", keys=pack_keys([1]))
        await call.write(registry_pb2.AnnounceRequest(router_id="r", dispatches=[*bad, good]))
        await eventually(lambda: replicas(watcher) == ["chat-0"])
        # A stream that changes its name is no stream of a router.
        await call.write(registry_pb2.AnnounceRequest(router_id="someone-else", dispatches=[good]))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await asyncio.wait_for(call, 60)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert rpc.error_from(refused.value).fields[0].field == "router_id"
        assert replicas(watcher) == ["chat-0"]


async def test_a_slow_watcher_loses_the_oldest_and_nothing_else(registry: RegistryUnderTest) -> None:
    async with Watcher([registry.endpoint]) as watcher:
        await set_all(watcher.watch.synced)
        assert registry.registry is not None
        hub = registry.registry.hub
        # Without a pause between: the watcher has no chance to take any of the 8 MB.
        for number in range(8):
            dispatches = [registry_pb2.Dispatch(replica_id=f"chat-{number}", keys=bytes(32_768))] * 32
            hub.pass_on(registry_pb2.Dispatches(router_id="r", dispatches=dispatches))
        await eventually(lambda: "chat-7" in replicas(watcher))
        assert set(replicas(watcher)) == {"chat-5", "chat-6", "chat-7"}
        hub.pass_on(registry_pb2.Dispatches(router_id="r", dispatches=[registry_pb2.Dispatch(replica_id="chat-8")]))
        await eventually(lambda: replicas(watcher)[-1] == "chat-8")
        assert not watcher.watch.stale, "the stream is the same"


async def test_another_registry_takes_over_and_nothing_is_told_twice(etcd: EtcdServer) -> None:
    async with two_registries(etcd.endpoint) as both:
        endpoints = [each.endpoint for each in both]
        first = rendezvous.order("router-1", endpoints)[0]
        async with Watcher(endpoints) as watcher, announcer(endpoints) as teller:
            await set_all(watcher.watch.synced, teller.connected)
            teller.announce("chat-0", 1, [1], 1, 1)
            await eventually(lambda: replicas(watcher) == ["chat-0"])
            (stopped,) = (each for each in both if each.endpoint == first)
            started = asyncio.get_running_loop().time()
            await stopped.stop()
            assert asyncio.get_running_loop().time() - started < 3.0, "a router's stream does not hold it up"
            names = itertools.count(1)

            def told_again() -> bool:
                # One told into the closing stream may be lost.
                teller.announce(f"chat-{next(names)}", 1, [1], 1, 1)
                return len(replicas(watcher)) > 1

            await eventually(told_again)
            assert len(set(replicas(watcher))) == len(replicas(watcher))


async def test_without_any_registry_telling_costs_nothing(etcd: EtcdServer) -> None:
    port = free_port()
    async with announcer([f"127.0.0.1:{port}"], queue_bytes=10_000) as teller:
        for number in range(1_000):
            teller.announce(f"chat-{number}", 1, [number], 1, 1)
        assert teller.dropped > 900
        settings = dataclasses.replace(config(etcd.endpoint), listen=f"127.0.0.1:{port}")
        async with RegistryUnderTest(settings) as late, Watcher([late.endpoint]) as watcher:
            await set_all(watcher.watch.synced, teller.connected)
            teller.announce("now-0", 1, [1], 1, 1)
            await eventually(lambda: "now-0" in replicas(watcher))
            assert len(heard(watcher)) < 100
