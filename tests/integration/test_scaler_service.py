"""A scaler on a real registry and a real etcd."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial

import pytest

from stoker.common import rpc
from stoker.control.config import LoopConfig
from stoker.registry.client import FleetView, RegistryClient
from stoker.scaler import app
from stoker.scaler.config import ScalerConfig
from tests.support.deciders import TTL_S, running, scaler_status
from tests.support.etcd import EtcdServer, free_port
from tests.support.registry import RegistryUnderTest, Watcher, config, spec
from tests.support.waiting import eventually


@pytest.fixture
async def registry(etcd_alone: EtcdServer) -> AsyncIterator[RegistryUnderTest]:
    async with RegistryUnderTest(config(etcd_alone.endpoint)) as registry:
        yield registry


def settings(registry: RegistryUnderTest, candidate: str = "one") -> ScalerConfig:
    return ScalerConfig(
        listen=f"127.0.0.1:{free_port()}",
        registries=(registry.endpoint,),
        loop=LoopConfig(candidate=candidate, leader_ttl_s=TTL_S, tick_s=0.1),
    )


def wants(view: FleetView, deployment: str, replicas: int) -> bool:
    return deployment in view.desired and view.desired[deployment].replicas == replicas


async def test_counts_follow_the_deployments(registry: RegistryUnderTest) -> None:
    mine = settings(registry)
    async with (
        RegistryClient([registry.endpoint]) as client,
        Watcher([registry.endpoint]) as watcher,
        running(app.serve, mine),
    ):
        view = watcher.watch.view
        assert await rpc.wait_serving(mine.listen, 10)
        await client.put_deployment(spec("chat", replicas=3))
        await client.put_deployment(spec("code", replicas=1))
        await eventually(lambda: {name: d.replicas for name, d in view.desired.items()} == {"chat": 3, "code": 1})
        chat = view.desired["chat"]
        assert (chat.reason, chat.generation) == ("FIXED", view.deployments["chat"].generation)
        assert chat.fence.revision == view.leaders["scaler"].revision
        await client.scale_deployment("chat", 5)
        await eventually(lambda: view.desired["chat"].replicas == 5)
        await client.delete_deployment("code")
        await eventually(lambda: view.desired.keys() == {"chat"})
        told = await scaler_status(mine.listen)
        assert told.leading
        assert told.leader.candidate == "one"
        assert [(d.deployment, d.replicas) for d in told.decisions] == [("chat", 5)]


async def test_a_restart_goes_on_from_what_is_persisted_and_writes_nothing(registry: RegistryUnderTest) -> None:
    async with RegistryClient([registry.endpoint]) as client, Watcher([registry.endpoint]) as watcher:
        view = watcher.watch.view
        async with running(app.serve, settings(registry)):
            await client.put_deployment(spec("chat", replicas=7))
            await eventually(lambda: "chat" in view.desired)
        before = view.desired["chat"]
        await eventually(lambda: "scaler" not in view.leaders, within_s=TTL_S - 1)
        second = settings(registry, "two")
        async with running(app.serve, second):
            await eventually(lambda: "scaler" in view.leaders)
            await client.put_deployment(spec("later", replicas=1))
            await eventually(lambda: "later" in view.desired)
            assert view.desired["chat"] == before
            assert (await scaler_status(second.listen)).leader.candidate == "two"


async def test_a_standby_serves_its_status_and_writes_nothing(registry: RegistryUnderTest) -> None:
    first, second = settings(registry, "one"), settings(registry, "two")
    async with RegistryClient([registry.endpoint]) as client, Watcher([registry.endpoint]) as watcher:
        view = watcher.watch.view
        async with running(app.serve, first):
            await eventually(lambda: "scaler" in view.leaders)
            async with running(app.serve, second):
                assert await rpc.wait_serving(second.listen, 10)
                told = await scaler_status(second.listen)
                assert (told.leading, told.leader.candidate) == (False, "one")
                for replicas in range(1, 6):
                    await client.put_deployment(spec("chat", replicas=replicas))
                    await eventually(partial(wants, view, "chat", replicas))
                await eventually(lambda: any(d.replicas == 5 for c in watcher.changes() for d in c.upserts.desired))
                fences = {d.fence.revision for c in watcher.changes() for d in c.upserts.desired}
                assert fences == {view.leaders["scaler"].revision}


async def test_it_waits_for_a_registry_that_is_not_there_yet(etcd_alone: EtcdServer) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    mine = ScalerConfig(listen=f"127.0.0.1:{free_port()}", registries=(endpoint,), loop=LoopConfig(tick_s=0.1))
    async with running(app.serve, mine):
        assert not await rpc.wait_serving(mine.listen, 0.5)
        async with RegistryUnderTest(replace(config(etcd_alone.endpoint), listen=endpoint)):
            assert await rpc.wait_serving(mine.listen, 10)
            async with RegistryClient([endpoint]) as client, Watcher([endpoint]) as watcher:
                await client.put_deployment(spec("chat", replicas=2))
                await eventually(lambda: "chat" in watcher.watch.view.desired, within_s=60)
