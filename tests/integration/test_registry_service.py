"""The registry on a real etcd: membership, deployments, assignments, leaders, streams."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from functools import partial

import grpc
import pytest

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import records_pb2, registry_pb2, registry_pb2_grpc
from stoker.common import rpc
from stoker.common.errors import Code, StokerError
from stoker.etcd import EtcdClient
from stoker.registry.client import FleetWatch, Leadership, RegistryClient, SourceChanged, Superseded
from stoker.registry.core import keys
from stoker.registry.nodes import NodeStore
from tests.support.etcd import EtcdServer
from tests.support.registry import (
    ALL_TOPICS,
    Agent,
    RegistryUnderTest,
    Watcher,
    assignment,
    config,
    delta,
    node,
    snapshot,
    spec,
    status,
    two_registries,
)
from tests.support.waiting import eventually


@contextlib.asynccontextmanager
async def leading(client: RegistryClient, role: str) -> AsyncIterator[common_pb2.Fence]:
    async with Leadership(client, role, f"{role}-1", 3.0, rng=random.Random(1)) as leadership:
        yield await leadership.wait_leading()


planner = partial(leading, role="planner")


# Deployments


async def test_generations_rise_with_each_change_and_guard_against_lost_updates(client: RegistryClient) -> None:
    first = await client.put_deployment(spec("chat"), expected_generation=0)
    assert first.generation == 1
    assert (await client.put_deployment(spec("chat"))).generation == 1, "an unchanged specification is no change"
    second = await client.put_deployment(spec("chat", replicas=2), expected_generation=1)
    assert second.generation == 2
    with pytest.raises(StokerError) as refused:
        await client.put_deployment(spec("chat", replicas=9), expected_generation=1)
    assert (refused.value.reason, refused.value.metadata["generation"]) == ("GENERATION_MISMATCH", "2")
    scaled = await client.scale_deployment("chat", 5)
    assert (scaled.previous_replicas, scaled.deployment.spec.replicas, scaled.deployment.generation) == (2, 5, 3)
    await client.delete_deployment("chat")
    with pytest.raises(StokerError) as gone:
        await client.scale_deployment("chat", 1)
    assert gone.value.code is Code.NOT_FOUND


async def test_concurrent_scaling_loses_no_generation(client: RegistryClient) -> None:
    await client.put_deployment(spec("chat", replicas=100))
    scaled = await asyncio.gather(*(client.scale_deployment("chat", n) for n in range(1, 6)))
    assert sorted(s.deployment.generation for s in scaled) == [2, 3, 4, 5, 6]
    # Each saw as "previous" what another wrote: none was overwritten unseen.
    assert {s.previous_replicas for s in scaled} - {s.deployment.spec.replicas for s in scaled} == {100}


async def test_every_bad_field_is_named(client: RegistryClient) -> None:
    bad = spec("Chat!", model=" ", engine="tgi", replicas=10_000_000, gang_size=1000)
    with pytest.raises(StokerError) as refused:
        await client.put_deployment(bad)
    assert refused.value.code is Code.INVALID_ARGUMENT
    assert {f.field for f in refused.value.fields} == {
        "spec.name",
        "spec.model",
        "spec.engine",
        "spec.replicas",
        "spec.gang_size",
    }
    assert all(f.description for f in refused.value.fields)


# Leaders


async def test_two_race_and_one_leads(client: RegistryClient, registry: RegistryUnderTest) -> None:
    async with RegistryClient([registry.endpoint]) as other:
        results = await asyncio.gather(
            client.acquire_leadership("scaler", "a", 2.0),
            other.acquire_leadership("scaler", "b", 2.0),
            return_exceptions=True,
        )
    won = [r for r in results if isinstance(r, registry_pb2.AcquireLeadershipResponse)]
    lost = [r for r in results if isinstance(r, StokerError)]
    assert (len(won), len(lost)) == (1, 1)
    assert lost[0].reason == "NOT_LEADER"
    assert lost[0].metadata["leader"] == "ab"[results.index(won[0])]
    again = await client.acquire_leadership("scaler", "ab"[results.index(won[0])], 2.0)
    assert again.fence == won[0].fence, "asking again after a lost answer gives the same right"


async def test_a_dead_leader_is_replaced_within_its_ttl_and_fenced(client: RegistryClient) -> None:
    dead = await client.acquire_leadership("scaler", "dead", 2.0)
    async with Leadership(client, "scaler", "next", 2.0, rng=random.Random(2)) as leadership:
        started = asyncio.get_running_loop().time()
        fence = await leadership.wait_leading()
        # etcd looks for expired leases every 500 ms.
        assert asyncio.get_running_loop().time() - started < 2.0 + 10
        assert fence.revision > dead.fence.revision
        desired = records_pb2.Desired(deployment="chat", replicas=1)
        with pytest.raises(StokerError) as refused:
            await client.set_desired(dead.fence, [desired])
        assert refused.value.reason == "FENCED"
        await client.set_desired(fence, [desired])
        with pytest.raises(StokerError) as late:
            await client.renew_leadership(dead.fence, dead.lease_id, timeout_s=1)
        assert late.value.reason == "NOT_LEADER"


async def test_a_leader_writes_what_is_its_roles_alone(client: RegistryClient) -> None:
    desired = records_pb2.Desired(deployment="chat", replicas=0)
    async with leading(client, "planner") as plans, leading(client, "scaler") as scales:
        for fence in (plans, common_pb2.Fence(role="anyone", revision=scales.revision)):
            with pytest.raises(StokerError) as refused:
                await client.set_desired(fence, [desired])
            assert [f.field for f in refused.value.fields] == ["fence.role"]
        for fence in (scales, common_pb2.Fence(role="anyone", revision=plans.revision)):
            with pytest.raises(StokerError) as refused:
                await client.apply_assignments(fence, [], ["chat-0"])
            assert [f.field for f in refused.value.fields] == ["fence.role"]


async def test_nobody_leads_what_there_is_not(client: RegistryClient) -> None:
    with pytest.raises(StokerError) as refused:
        await client.acquire_leadership("anyone", "me", 5.0)
    assert [f.field for f in refused.value.fields] == ["role"]


async def test_writes_of_one_leader_do_not_refuse_each_other(
    client: RegistryClient, registry: RegistryUnderTest
) -> None:
    async with leading(client, "scaler") as fence, Watcher([registry.endpoint]) as watcher:
        revisions = await asyncio.gather(
            *(client.set_desired(fence, [records_pb2.Desired(deployment="chat", replicas=n)]) for n in range(5))
        )
        await eventually(lambda: watcher.watch.view.revision >= max(revisions))
        last = revisions.index(max(revisions))
        assert watcher.watch.view.desired["chat"].replicas == last


async def test_a_write_that_etcd_runs_late_changes_nothing(etcd: EtcdServer, registry: RegistryUnderTest) -> None:
    async with EtcdClient([etcd.endpoint]) as raw:
        store, n1, chat = NodeStore(raw, 4), node("n1"), assignment("chat-0", "n1")
        registered = await store.register(n1, [], 0, list)
        starting = status(n1, chat, records_pb2.STATE_STARTING)
        first = await store.write_members(n1, registered, [starting], [], {})
        assert first is not None
        ready = await store.write_members(n1, registered, [status(n1, chat)], [], {("chat-0", 0): first})
        assert ready is not None
        assert await store.write_members(n1, registered, [starting], [], {}) is None
        assert await store.write_members(n1, registered, [starting], [], {("chat-0", 0): first}) is None
        kept = await raw.get(keys.member("chat-0", 0))
        assert kept is not None
        assert records_pb2.MemberStatus.FromString(kept.value).state == records_pb2.STATE_READY
        assert await store.member_revisions([("chat-0", 0), ("chat-0", 1)]) == {
            ("chat-0", 0): ready,
            ("chat-0", 1): 0,
        }
        await store.leave(n1, registered)
        assert await raw.get(keys.member("chat-0", 0)) is None


async def test_resigning_hands_over_at_once(client: RegistryClient) -> None:
    first = Leadership(client, "scaler", "first", 60.0, rng=random.Random(3))
    await first.start()
    await first.wait_leading()
    async with Leadership(client, "scaler", "second", 2.0, rng=random.Random(4)) as second:
        await eventually(lambda: second.leader == "first")
        await first.resign()
        assert first.fence is None
        assert first.lost.is_set()
        await asyncio.wait_for(second.wait_leading(), 60)


# Assignments and membership


async def test_an_assigned_replica_runs_and_is_announced(client: RegistryClient, registry: RegistryUnderTest) -> None:
    endpoints = [registry.endpoint]
    async with Watcher(endpoints) as watcher, Agent(endpoints, node("n1")) as agent, planner(client) as fence:
        await client.apply_assignments(fence, [assignment("chat-0", "n1")])
        await eventually(watcher.ready("chat-0"))
        replica = watcher.watch.view.replicas["chat-0"]
        assert (replica.node_id, replica.agent_endpoint) == ("n1", "127.0.0.1:7330")
        assert replica.engine.http_url == "http://127.0.0.1:8000"
        assert agent.assignments is not None
        assert agent.assignments.assignments[0].created_revision > 0
        assert watcher.watch.view.assignments["chat-0"].fence == fence
        await client.apply_assignments(fence, [], ["chat-0"])
        await eventually(lambda: "chat-0" not in watcher.watch.view.replicas)
        await eventually(lambda: agent.assignments is not None and not agent.assignments.assignments)


async def test_a_gang_is_ready_when_all_are(client: RegistryClient, registry: RegistryUnderTest) -> None:
    endpoints = [registry.endpoint]
    async with (
        Watcher(endpoints) as watcher,
        Agent(endpoints, node("n1")) as leader,
        Agent(endpoints, node("n2")) as member,
        planner(client) as fence,
    ):
        member.run_assigned = False
        await client.apply_assignments(fence, [assignment("big-0", "n1", "n2")])
        # Each member is told of the other: its state, and its node for the address.
        await eventually(lambda: member.assignments is not None and len(member.assignments.peers) == 1)
        assert member.assignments is not None
        assert [n.node_id for n in member.assignments.nodes] == ["n1"]
        assert watcher.watch.view.replicas["big-0"].state == records_pb2.STATE_PENDING
        told = member.assignments.assignments[0]
        member.session.publish_member(status(member.session.node, told, rank=1))
        await eventually(watcher.ready("big-0"))
        member.session.publish_member(status(member.session.node, told, records_pb2.STATE_BACKOFF, rank=1))
        await eventually(lambda: watcher.watch.view.replicas["big-0"].state == records_pb2.STATE_BACKOFF)
        await eventually(
            lambda: (
                leader.assignments is not None
                and [p.state for p in leader.assignments.peers] == [records_pb2.STATE_BACKOFF]
            )
        )


async def test_a_newer_incarnation_wins_and_the_older_stops(registry: RegistryUnderTest, etcd: EtcdServer) -> None:
    async with (
        RegistryUnderTest(config(etcd.endpoint)) as other,
        Agent([registry.endpoint], node("n1", incarnation=1)) as old,
    ):
        await asyncio.wait_for(old.session.connected.wait(), 60)
        async with Agent([other.endpoint], node("n1", incarnation=2)) as new:
            await asyncio.wait_for(new.session.connected.wait(), 60)
            await eventually(lambda: old.failure is not None)
            assert isinstance(old.failure, Superseded)
            assert old.failure.metadata["incarnation"] == "2"
            async with Agent([registry.endpoint], node("n1", incarnation=1)) as late:
                await eventually(lambda: isinstance(late.failure, Superseded))
            assert new.failure is None


async def test_goodbye_ends_membership_at_once_and_silence_at_the_leases_end(registry: RegistryUnderTest) -> None:
    endpoints = [registry.endpoint]
    async with Watcher(endpoints) as watcher:
        async with Agent(endpoints, node("n1")) as polite, Agent(endpoints, node("n2")):
            await eventually(lambda: {"n1", "n2"} <= watcher.watch.view.nodes.keys())
            await polite.session.goodbye()
            await eventually(lambda: "n1" not in watcher.watch.view.nodes, within_s=1.0)
            assert "n2" in watcher.watch.view.nodes
        await eventually(lambda: "n2" not in watcher.watch.view.nodes)


async def test_a_node_stays_draining_over_its_agents_restart(
    client: RegistryClient, registry: RegistryUnderTest
) -> None:
    endpoints = [registry.endpoint]
    with pytest.raises(StokerError) as unknown:
        await client.drain_node("n1")
    assert unknown.value.code is Code.NOT_FOUND
    async with Watcher(endpoints) as watcher:
        async with Agent(endpoints, node("n1")), planner(client) as fence:
            await client.apply_assignments(fence, [assignment("chat-0", "n1")])
            await eventually(watcher.ready("chat-0"))
            assert await client.drain_node("n1") == ("chat-0",)
            await eventually(lambda: watcher.watch.view.nodes["n1"].draining)
            drained = await client.drain_replica("chat-0")
            assert drained.wanted == records_pb2.WANTED_DRAIN
            await eventually(lambda: watcher.watch.view.replicas["chat-0"].wanted == records_pb2.WANTED_DRAIN)
        async with Agent(endpoints, node("n1", incarnation=2)):
            await eventually(lambda: watcher.watch.view.nodes["n1"].incarnation == 2)
            assert watcher.watch.view.nodes["n1"].draining
            await client.drain_node("n1", undo=True)
            await eventually(lambda: not watcher.watch.view.nodes["n1"].draining)


# Load and digests


async def test_load_and_digests_reach_every_watcher(client: RegistryClient, registry: RegistryUnderTest) -> None:
    endpoints = [registry.endpoint]
    async with Watcher(endpoints) as early, Agent(endpoints, node("n1")) as agent, planner(client) as fence:
        await client.apply_assignments(fence, [assignment("chat-0", "n1")])
        await eventually(early.ready("chat-0"))
        agent.store("chat-0", 1, 2)  # no snapshot before: the registry must ask for one
        agent.store("chat-0", 3)
        agent.load("chat-0", 1, 7)
        await eventually(lambda: early.blocks.get("chat-0") == {1, 2, 3})
        async with Watcher(endpoints) as late:
            await eventually(lambda: late.blocks.get("chat-0") == {1, 2, 3})
            await eventually(lambda: late.loads.keys() == {"chat-0"})
            agent.store("chat-0", 4)
            agent.load("chat-0", 2, 9)
            for watcher in (early, late):
                await eventually(lambda: watcher.blocks["chat-0"] == {1, 2, 3, 4})  # noqa: B023
                await eventually(lambda: watcher.loads["chat-0"].running == 9)  # noqa: B023


async def test_a_digest_gap_leads_to_a_resync(client: RegistryClient, registry: RegistryUnderTest) -> None:
    endpoints = [registry.endpoint]
    async with Watcher(endpoints) as watcher, Agent(endpoints, node("n1")) as agent, planner(client) as fence:
        await client.apply_assignments(fence, [assignment("chat-0", "n1")])
        await eventually(watcher.ready("chat-0"))
        agent.store("chat-0", 1)
        await eventually(lambda: watcher.blocks.get("chat-0") == {1})
        # The step with block 2 is lost on the way.
        agent.blocks["chat-0"].add(2)
        agent.sequences["chat-0"] += 1
        agent.store("chat-0", 3)
        await eventually(lambda: watcher.blocks["chat-0"] == {1, 2, 3})
        # A step that says something else than it does: the XOR finds out.
        agent.sequences["chat-0"] += 1
        agent.session.publish_digest(delta("chat-0", {1, 2, 3, 4, 5}, agent.sequences["chat-0"], {4}))
        agent.blocks["chat-0"] = {1, 2, 3, 4, 5}
        await eventually(lambda: watcher.blocks["chat-0"] == {1, 2, 3, 4, 5})


async def test_a_replica_is_doubtful_while_a_tier_lacks_its_snapshot(
    client: RegistryClient, registry: RegistryUnderTest
) -> None:
    endpoints = [registry.endpoint]
    told: list[str] = []

    async def listen(watch: FleetWatch) -> None:
        async for event in watch.events():
            if isinstance(event, SourceChanged) and event.freshness is not None:
                told[:] = event.freshness.doubtful_replicas

    async with Watcher(endpoints) as watcher, Agent(endpoints, node("n1")) as agent, planner(client) as fence:
        await client.apply_assignments(fence, [assignment("chat-0", "n1")])
        await eventually(watcher.ready("chat-0"))
        async with FleetWatch(endpoints, ALL_TOPICS) as watch:
            listening = asyncio.create_task(listen(watch))
            agent.store("chat-0", 1)
            step = delta("chat-0", {7}, 5, {7})
            step.tier = common_pb2.TIER_CPU  # the agent answers for its GPU tier alone
            agent.session.publish_digest(step)
            await eventually(lambda: told == ["chat-0"])
            await eventually(lambda: watcher.blocks.get("chat-0") == {1})
            assert (await client.get_fleet()).freshness.doubtful_replicas == ["chat-0"]
            whole = snapshot("chat-0", {7}, 5)
            whole.tier = common_pb2.TIER_CPU
            agent.session.publish_digest(whole)
            await eventually(lambda: not told)
            listening.cancel()


async def test_a_large_digest_comes_in_pieces_and_is_replaced_in_one_step(
    client: RegistryClient, registry: RegistryUnderTest
) -> None:
    endpoints = [registry.endpoint]
    async with Agent(endpoints, node("n1")) as agent, planner(client) as fence, Watcher(endpoints) as ready:
        await client.apply_assignments(fence, [assignment("chat-0", "n1")])
        await eventually(ready.ready("chat-0"))
        keys_held = {random.Random(5).getrandbits(64) + i for i in range(300_000)}
        agent.blocks["chat-0"] = {k % 2**64 for k in keys_held}
        agent.session._want_resync("chat-0")
        await eventually(lambda: len(ready.blocks.get("chat-0", ())) == 300_000)
        async with Watcher(endpoints) as late:
            await eventually(lambda: "chat-0" in late.blocks)
            assert late.blocks == ready.blocks


async def test_reports_of_others_replicas_are_refused_and_cost_nothing_else(
    client: RegistryClient, registry: RegistryUnderTest
) -> None:
    endpoints = [registry.endpoint]
    async with Watcher(endpoints) as watcher, Agent(endpoints, node("n1")) as agent, planner(client) as fence:
        await client.apply_assignments(fence, [assignment("chat-0", "n1")])
        await eventually(watcher.ready("chat-0"))
        agent.load("other-0", 1, 1)
        agent.session.publish_digest(
            registry_pb2.DigestUpdate(replica_id="chat-0", epoch=1, sequence=1, added=b"seven..", snapshot=True)
        )
        agent.store("chat-0", 1)
        await eventually(lambda: watcher.blocks.get("chat-0") == {1})
        assert "other-0" not in watcher.loads
        assert agent.failure is None


async def test_a_watcher_that_reads_nothing_is_disconnected(registry: RegistryUnderTest) -> None:
    assert registry.registry is not None
    hub = registry.registry.hub
    async with Watcher([registry.endpoint]) as healthy, rpc.channel(registry.endpoint) as channel:
        stub: registry_pb2_grpc.RegistryServiceAsyncStub = registry_pb2_grpc.RegistryServiceStub(channel)
        call = stub.Watch(registry_pb2.WatchRequest(topics=[registry_pb2.TOPIC_DEPLOYMENTS], watcher="stuck"))
        await call.read()
        await eventually(lambda: len(hub._watchers) == 2)
        async with RegistryClient([registry.endpoint]) as client:
            padding = ["x" * 4000] * 20

            async def stuck_is_gone() -> bool:
                padding[0] = str(random.random())
                await client.put_deployment(spec("chat", engine_args=padding))
                return len(hub._watchers) == 1

            await eventually(stuck_is_gone, within_s=60)
        assert healthy.watch.view.deployments["chat"].generation > 1

        async def drain() -> None:
            while isinstance(await call.read(), registry_pb2.WatchResponse):
                pass

        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await drain()
        assert rpc.error_from(refused.value).reason == "WATCHER_TOO_SLOW"


async def test_a_watcher_that_leaves_in_the_middle_of_a_message_is_forgotten(registry: RegistryUnderTest) -> None:
    assert registry.registry is not None
    hub = registry.registry.hub
    async with rpc.channel(registry.endpoint) as channel, RegistryClient([registry.endpoint]) as client:
        stub: registry_pb2_grpc.RegistryServiceAsyncStub = registry_pb2_grpc.RegistryServiceStub(channel)
        call = stub.Watch(registry_pb2.WatchRequest(topics=[registry_pb2.TOPIC_DEPLOYMENTS]))
        await call.read()

        async def a_message_waits() -> bool:
            """How much the connection's buffers take before is the host's affair."""
            await client.put_deployment(spec("chat", engine_args=[str(random.random()), "x" * 100_000]))
            now = time.monotonic()
            return any(w._handed_at is not None and now - w._handed_at > 0.2 for w in hub._watchers)

        await eventually(a_message_waits, within_s=60)
        call.cancel()
        await eventually(lambda: not hub._watchers)


async def test_a_watch_without_topics_and_a_stream_without_hello_are_refused(registry: RegistryUnderTest) -> None:
    async with rpc.channel(registry.endpoint) as channel:
        stub: registry_pb2_grpc.RegistryServiceAsyncStub = registry_pb2_grpc.RegistryServiceStub(channel)
        watch = stub.Watch(registry_pb2.WatchRequest())
        report = stub.Report()
        await report.write(registry_pb2.ReportRequest(heartbeat=registry_pb2.Heartbeat()))
        for call, field in ((watch, "topics"), (report, "hello")):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
            error = rpc.error_from(refused.value)
            assert error.code is Code.INVALID_ARGUMENT
            assert [f.field for f in error.fields] == [field]


async def test_a_watch_of_one_deployment_hears_of_no_other(
    client: RegistryClient, registry: RegistryUnderTest
) -> None:
    endpoints = [registry.endpoint]
    async with Watcher(endpoints, "chat") as watcher, Watcher(endpoints) as everything:
        await client.put_deployment(spec("chat"))
        await client.put_deployment(spec("code"))
        await eventually(lambda: "code" in everything.watch.view.deployments)
        await eventually(lambda: watcher.watch.view.revision >= everything.watch.view.revision)
        assert watcher.watch.view.deployments.keys() == {"chat"}


async def test_two_registries_tell_one_story(registry: RegistryUnderTest, etcd: EtcdServer) -> None:
    async with two_registries(etcd.endpoint) as (a, b):
        endpoints = [a.endpoint, b.endpoint]
        async with contextlib.AsyncExitStack() as stack:
            watcher = await stack.enter_async_context(Watcher(endpoints))
            client = await stack.enter_async_context(RegistryClient(endpoints))
            agents = [await stack.enter_async_context(Agent(endpoints, node(f"n{i}"))) for i in range(6)]
            fence = await stack.enter_async_context(planner(client))
            await client.apply_assignments(fence, [assignment(f"chat-{i}", f"n{i}") for i in range(6)])
            await eventually(watcher.ready(*(f"chat-{i}" for i in range(6))))
            for i, agent in enumerate(agents):
                agent.store(f"chat-{i}", i + 1)
            await eventually(lambda: watcher.blocks == {f"chat-{i}": {i + 1} for i in range(6)})
            assert a.registry is not None
            assert b.registry is not None
            spread = (len(a.registry.hub._agents), len(b.registry.hub._agents))
            assert sum(spread) == 6
            upserts = [n.node_id for c in watcher.changes() for n in c.upserts.nodes]
            assert sorted(upserts) == [f"n{i}" for i in range(6)], "each change is told once, not once a registry"
