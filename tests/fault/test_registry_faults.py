"""Kills, freezes and restarts around the registry: nothing flaps, nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stoker.api.registry.v1 import records_pb2
from stoker.etcd import EtcdClient
from stoker.registry.client import Leadership, RegistryClient, SourceChanged
from stoker.registry.core import keys
from tests.support.etcd import EtcdCluster, EtcdServer, key_gone, lease_outlived
from tests.support.registry import (
    LEASE_TTL_S,
    Agent,
    RegistryProcess,
    RegistryUnderTest,
    Watcher,
    assignment,
    config,
    node,
    spec,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.fault


@pytest.fixture
async def processes(etcd_alone: EtcdServer, tmp_path: Path) -> AsyncIterator[list[RegistryProcess]]:
    """Two registries as processes."""
    registries = [RegistryProcess(etcd_alone.endpoint, tmp_path) for _ in range(2)]
    try:
        for each in registries:
            each.start()
        for each in registries:
            await each.serving()
        yield registries
    finally:
        for each in registries:
            each.kill()


async def assign(client: RegistryClient, **nodes: str) -> None:
    async with Leadership(client, "planner", "planner-1", 3.0, rng=random.Random(1)) as leadership:
        fence = await leadership.wait_leading()
        await client.apply_assignments(fence, [assignment(f"{r}-0", n) for r, n in nodes.items()])


def at(registries: list[RegistryProcess], agent: Agent) -> tuple[RegistryProcess, RegistryProcess]:
    """The registry that this agent prefers, and the other."""
    preferred = agent.session._endpoints[0]
    first = next(r for r in registries if r.endpoint == preferred)
    return first, next(r for r in registries if r is not first)


@pytest.mark.parametrize("how", ["kill", "freeze"])
async def test_an_agent_moves_to_another_registry_unseen(
    processes: list[RegistryProcess], etcd_alone: EtcdServer, how: str
) -> None:
    endpoints = [each.endpoint for each in processes]
    async with (
        Watcher(endpoints) as watcher,
        RegistryClient(endpoints, attempt_timeout_s=1.0) as client,
        Agent(endpoints, node("n1")) as agent,
        EtcdClient([etcd_alone.endpoint]) as raw,
    ):
        await assign(client, chat="n1")
        await eventually(watcher.ready("chat-0"))
        agent.store("chat-0", 1)
        await eventually(lambda: watcher.blocks.get("chat-0") == {1})
        lease_id = agent.session.lease_id
        first, second = at(processes, agent)
        getattr(first, how)()
        # A killed peer is noticed at once, a frozen one by its silence.
        await eventually(lambda: not watcher.watch._sources[first.endpoint].connected, within_s=60)
        await eventually(
            lambda: (
                agent.session.connected.is_set()
                and agent.events
                and len([e for e in agent.events if getattr(e, "endpoint", "") == second.endpoint]) > 0
            ),
            within_s=60,
        )
        agent.store("chat-0", 2)
        agent.load("chat-0", 1, 3)
        await eventually(lambda: watcher.blocks["chat-0"] == {1, 2})
        await eventually(lambda: "chat-0" in watcher.loads)
        assert agent.session.lease_id == lease_id, "the second registry goes on with the lease"
        await lease_outlived(raw, LEASE_TTL_S + 1)
        assert await raw.get(keys.node("n1")) is not None, "whoever renews the lease now, does"
        assert watcher.removed() == set()
        assert watcher.ready("chat-0")()
        assert len(watcher.states("chat-0")) == len(set(watcher.states("chat-0"))), "no state was told twice"
        if how == "freeze":
            first.thaw()
            await eventually(lambda: watcher.watch._sources[first.endpoint].connected, within_s=60)
            agent.store("chat-0", 3)
            await eventually(lambda: watcher.blocks["chat-0"] == {1, 2, 3})
            assert watcher.removed() == set()


async def test_a_restarted_registry_tells_nothing_twice(processes: list[RegistryProcess]) -> None:
    only = [processes[0].endpoint]
    async with Watcher(only) as watcher, RegistryClient(only) as client, Agent(only, node("n1")) as agent:
        await client.put_deployment(spec("chat"))
        await assign(client, chat="n1")
        await eventually(watcher.ready("chat-0"))
        await eventually(lambda: "planner" not in watcher.watch.view.leaders)
        agent.store("chat-0", 1)
        await eventually(lambda: watcher.blocks.get("chat-0") == {1})
        seen = len(watcher.events)
        processes[0].kill()
        await eventually(lambda: isinstance(watcher.events[-1], SourceChanged) and not watcher.events[-1].connected)
        assert watcher.ready("chat-0")(), "the last view stays"
        processes[0].start()
        await eventually(lambda: watcher.watch._sources[only[0]].connected, within_s=60)
        agent.store("chat-0", 2)
        await eventually(lambda: watcher.blocks["chat-0"] == {1, 2}, within_s=60)
        changes = [e for e in watcher.events[seen:] if e in watcher.changes()]
        assert watcher.removed() == set()
        assert not any(c.upserts.replicas or c.upserts.deployments or c.upserts.nodes for c in changes)


async def test_etcd_killed_and_restarted_under_everyone(etcd_alone: EtcdServer) -> None:
    settings = config(etcd_alone.endpoint, lease_ttl_s=3)
    settings = dataclasses.replace(settings, watch=dataclasses.replace(settings.watch, stale_s=1.0))
    async with RegistryUnderTest(settings) as a, RegistryUnderTest(settings) as b:
        endpoints = [a.endpoint, b.endpoint]
        async with (
            Watcher(endpoints) as watcher,
            RegistryClient(endpoints) as client,
            Agent(endpoints, node("n1")) as agent,
            EtcdClient([etcd_alone.endpoint]) as raw,
        ):
            await assign(client, chat="n1")
            await eventually(watcher.ready("chat-0"))
            agent.store("chat-0", 1)
            await eventually(lambda: watcher.blocks.get("chat-0") == {1})
            etcd_alone.kill()
            assert a.registry is not None
            hub, already_s = a.registry.hub, a.registry.hub.staleness_s()
            await eventually(lambda: watcher.watch.stale, within_s=60)
            # Load and digests flow without etcd.
            agent.store("chat-0", 2)
            agent.load("chat-0", 1, 3)
            await eventually(lambda: watcher.blocks["chat-0"] == {1, 2})
            await eventually(lambda: "chat-0" in watcher.loads)
            await eventually(lambda: hub.staleness_s() > already_s + 3.5, "etcd is away for longer than the lease")
            etcd_alone.start()
            await eventually(lambda: not watcher.watch.stale, within_s=60)
            await lease_outlived(raw, 4)
            assert await raw.get(keys.node("n1")) is not None, "somebody renewed the lease since etcd is back"
            assert watcher.removed() == set()
            assert watcher.ready("chat-0")()
            assert agent.failure is None
            # And the way through etcd works again.
            await client.put_deployment(spec("after"))
            await eventually(lambda: "after" in watcher.watch.view.deployments)


async def test_an_agent_is_admitted_while_etcd_is_lost_and_registered_when_it_is_back(etcd_alone: EtcdServer) -> None:
    async with RegistryUnderTest(config(etcd_alone.endpoint)) as registry:
        endpoints = [registry.endpoint]
        async with Watcher(endpoints) as watcher:
            etcd_alone.kill()
            async with Agent(endpoints, node("n1")) as agent:
                await asyncio.wait_for(agent.session.connected.wait(), 60)
                assert agent.session.lease_id == 0
                assert "n1" not in watcher.watch.view.nodes
                etcd_alone.start()
                await eventually(lambda: "n1" in watcher.watch.view.nodes)
                await eventually(lambda: agent.session.lease_id != 0)


async def test_a_replaced_etcd_is_filled_again_by_the_agents(etcd_alone: EtcdServer) -> None:
    async with RegistryUnderTest(config(etcd_alone.endpoint, grace_s=5.0)) as registry:
        endpoints = [registry.endpoint]
        async with (
            Watcher(endpoints) as watcher,
            Agent(endpoints, node("n1")) as agent,
            EtcdClient([etcd_alone.endpoint]) as raw,
        ):
            await eventually(lambda: "n1" in watcher.watch.view.nodes)
            before = agent.session.lease_id
            for n in range(50):
                await raw.put(f"{keys.PREFIX}unknown/{n}", b"", idempotent=True)
            etcd_alone.wipe()
            etcd_alone.start()
            await eventually(lambda: agent.session.lease_id not in {0, before})

            async def known() -> bool:
                return await raw.get(keys.node("n1")) is not None

            await eventually(known)
            await eventually(lambda: "n1" in watcher.watch.view.nodes)
            async with RegistryClient(endpoints) as client:
                await client.put_deployment(spec("after"))
            await eventually(lambda: "after" in watcher.watch.view.deployments)


async def test_a_mass_expiry_is_doubted(etcd_alone: EtcdServer) -> None:
    async with RegistryUnderTest(
        config(etcd_alone.endpoint, lease_ttl_s=2, drop_share=0.2, grace_s=4.0, pace_s=0.2)
    ) as registry:
        endpoints = [registry.endpoint]
        nodes = {f"n{i}": node(f"n{i}") for i in range(10)}
        async with Watcher(endpoints) as watcher:
            async with contextlib.AsyncExitStack() as stack:
                for each in nodes.values():
                    await stack.enter_async_context(Agent(endpoints, each))
                await eventually(lambda: watcher.watch.view.nodes.keys() == nodes.keys())
            # All agents fell silent at once. One fifth goes, the rest is held.
            hub = registry.registry.hub if registry.registry is not None else None
            assert hub is not None
            await eventually(lambda: len(hub.state.guard.held) == 8, within_s=60)
            assert len(watcher.watch.view.nodes) == 8
            held = sorted(hub.state.guard.held)
            async with contextlib.AsyncExitStack() as stack:
                for node_id in held[:4]:
                    await stack.enter_async_context(Agent(endpoints, node(node_id, incarnation=2)))
                await eventually(lambda: len(hub.state.guard.held) == 4)
                # Those that came back were never gone; the others go one by one.
                await eventually(lambda: watcher.removed() == nodes.keys() - set(held[:4]))
                assert watcher.watch.view.nodes.keys() == set(held[:4])
                removals = [c.removals.nodes for c in watcher.changes() if c.removals.nodes]
                assert all(len(names) == 1 for names in removals[-4:])


async def test_compaction_under_the_registry_loses_nothing(etcd_alone: EtcdServer) -> None:
    async with RegistryUnderTest(config(etcd_alone.endpoint)) as registry:
        endpoints = [registry.endpoint]
        async with Watcher(endpoints) as watcher, RegistryClient(endpoints) as client:
            for name in ("stays", "goes", "changes"):
                await client.put_deployment(spec(name))
            await eventually(lambda: len(watcher.watch.view.deployments) == 3)
            hub = registry.registry.hub if registry.registry is not None else None
            assert hub is not None
            assert hub._watch is not None
            # The watch is cut off while history moves on and is compacted away.
            etcd_alone.freeze()
            await eventually(lambda: hub.staleness_s() > 6, within_s=60)
            etcd_alone.thaw()
            async with EtcdClient([etcd_alone.endpoint]) as raw:
                await raw.delete(keys.deployment("goes"))
                revision = await raw.put(keys.deployment("changes"), _deployment("changes", 5), idempotent=True)
                await raw.compact(revision)

            def told() -> list[tuple[str, int]]:
                return [(d.spec.name, d.spec.replicas) for c in watcher.changes() for d in c.upserts.deployments]

            def removed() -> list[str]:
                return [name for c in watcher.changes() for name in c.removals.deployments]

            await eventually(lambda: ("changes", 5) in told() and removed())
            assert removed() == ["goes"]
            assert [name for name, _ in told()].count("stays") == 1


async def test_all_registries_away_for_longer_than_a_lease(
    processes: list[RegistryProcess], etcd_alone: EtcdServer
) -> None:
    only = processes[0]
    endpoints = [only.endpoint]
    async with (
        Watcher(endpoints) as watcher,
        RegistryClient(endpoints) as client,
        Agent(endpoints, node("n1")),
        Agent(endpoints, node("n2")),
        EtcdClient([etcd_alone.endpoint]) as raw,
    ):
        await assign(client, chat="n1", code="n2")
        await eventually(watcher.ready("chat-0", "code-0"))
        processes[1].kill()
        only.kill()
        for node_id in ("n1", "n2"):
            await key_gone(raw, keys.node(node_id))
        only.start()
        await eventually(lambda: watcher.watch._sources[only.endpoint].connected, within_s=60)
        assert watcher.removed() == set()
        for replica_id in ("chat-0", "code-0"):
            assert watcher.states(replica_id)[-1] == records_pb2.STATE_READY
            assert len(watcher.states(replica_id)) <= 2, "pending, ready, and nothing since"


async def test_a_cluster_that_loses_its_leader_is_not_noticed(etcd_cluster: EtcdCluster) -> None:
    async with RegistryUnderTest(config(etcd_cluster.endpoints)) as registry:
        endpoints = [registry.endpoint]
        async with (
            Watcher(endpoints) as watcher,
            RegistryClient(endpoints) as client,
            Agent(endpoints, node("n1")),
            EtcdClient(etcd_cluster.endpoints) as raw,
        ):
            await assign(client, chat="n1")
            await eventually(watcher.ready("chat-0"))
            for endpoint in etcd_cluster.endpoints:
                async with EtcdClient([endpoint]) as one:
                    status = await one.status()
                if status.leader == status.member_id:
                    etcd_cluster.at(endpoint).kill()
                    break
            await client.put_deployment(spec("after"))
            await eventually(lambda: "after" in watcher.watch.view.deployments)
            await lease_outlived(raw, LEASE_TTL_S + 1)
            assert await raw.get(keys.node("n1")) is not None
            assert watcher.removed() == set()
            assert watcher.ready("chat-0")()


async def test_sigterm_hands_over_and_exits_clean(processes: list[RegistryProcess]) -> None:
    endpoints = [each.endpoint for each in processes]
    async with Watcher(endpoints) as watcher, Agent(endpoints, node("n1")) as agent:
        await asyncio.wait_for(agent.session.connected.wait(), 60)
        first, _ = at(processes, agent)
        assert await asyncio.to_thread(first.terminate) == 0
        await eventually(lambda: agent.session.connected.is_set())
        assert watcher.removed() == set()


def _deployment(name: str, replicas: int) -> bytes:
    return records_pb2.Deployment(spec=spec(name, replicas=replicas), generation=2).SerializeToString()
