"""A planner, with a scaler, on a real registry and a real etcd: the flow from a deployment to ready replicas."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import pytest

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import records_pb2
from stoker.control.config import LoopConfig
from stoker.planner import app as planner_app
from stoker.planner.config import LossConfig, PlannerConfig
from stoker.registry.client import FleetView, RegistryClient
from stoker.scaler import app as scaler_app
from stoker.scaler.config import ScalerConfig
from tests.support.deciders import TTL_S, ObedientAgent, planner_status, running
from tests.support.etcd import EtcdServer, free_port
from tests.support.registry import RegistryUnderTest, Watcher, config, node, spec
from tests.support.waiting import eventually

LOOP = LoopConfig(leader_ttl_s=TTL_S, tick_s=0.1)


@dataclass
class Fleet:
    client: RegistryClient
    view: FleetView
    planner: str
    endpoint: str

    def replicas(self, wanted: records_pb2.Wanted.ValueType = records_pb2.WANTED_RUN) -> dict[str, str]:
        """Replicas asked to run (or to drain) with the node of rank 0."""
        return {n: a.members[0].node_id for n, a in self.view.assignments.items() if a.wanted == wanted}

    def ready(self, count: int) -> bool:
        """Exactly `count` replicas are assigned, all of them asked to run, all ready."""
        states = [replica.state for replica in self.view.replicas.values()]
        running = len(self.replicas()) == len(self.view.assignments) == count
        return running and states == [records_pb2.STATE_READY] * count

    def placed(self, least: int) -> bool:
        """At least so many replicas are assigned."""
        return len(self.view.assignments) >= least

    @asynccontextmanager
    async def agent(self, of: common_pb2.Node) -> AsyncIterator[ObedientAgent]:
        agent = ObedientAgent([self.endpoint], of)
        async with agent:
            yield agent


@pytest.fixture
async def fleet(etcd_alone: EtcdServer) -> AsyncIterator[Fleet]:
    """Scaler and planner over one registry; no node yet."""
    async with RegistryUnderTest(config(etcd_alone.endpoint, grace_s=1.0)) as registry:
        planner = PlannerConfig(
            listen=f"127.0.0.1:{free_port()}",
            registries=(registry.endpoint,),
            loss=LossConfig(grace_s=0.5, mass_grace_s=1.0, settle_s=0.5),
            loop=LOOP,
        )
        scaler = ScalerConfig(listen="127.0.0.1:0", registries=(registry.endpoint,), loop=LOOP)
        async with (
            RegistryClient([registry.endpoint]) as client,
            Watcher([registry.endpoint]) as watcher,
            running(scaler_app.serve, scaler),
            running(planner_app.serve, planner),
        ):
            yield Fleet(client, watcher.watch.view, planner.listen, registry.endpoint)


def gpus(count: int) -> list[common_pb2.Gpu]:
    return [common_pb2.Gpu(index=index, uuid=f"GPU-{index}") for index in range(count)]


async def test_from_a_deployment_to_ready_replicas_and_back(fleet: Fleet) -> None:
    first, other = (node(name, gpus=gpus(2), labels={"rack": "r1"}) for name in ("n1", "n2"))
    async with fleet.agent(first), fleet.agent(other) as second:
        await fleet.client.put_deployment(spec("chat", replicas=4, gpus_per_node=1))
        await eventually(lambda: fleet.ready(4))
        assert fleet.replicas() == {"chat-0": "n1", "chat-1": "n1", "chat-2": "n2", "chat-3": "n2"}
        taken = {(m.node_id, tuple(m.gpu_indices)) for a in fleet.view.assignments.values() for m in a.members}
        assert taken == {("n1", (0,)), ("n1", (1,)), ("n2", (0,)), ("n2", (1,))}
        # Scaled down: the victims drain, keep their GPUs while they do, and are gone when they have stopped.
        second.finish_draining = False
        await fleet.client.scale_deployment("chat", 2)
        await eventually(lambda: fleet.replicas(records_pb2.WANTED_DRAIN) == {"chat-2": "n2", "chat-3": "n2"})
        await fleet.client.scale_deployment("chat", 4)
        await eventually(lambda: fleet.view.desired["chat"].replicas == 4)

        async def says_why() -> bool:
            return any("chat-2, chat-3" in entry.reason for entry in (await planner_status(fleet.planner)).unplaced)

        await eventually(says_why)
        assert len(fleet.view.assignments) == 4
        second.finish()
        await eventually(lambda: fleet.ready(4))
        await fleet.client.delete_deployment("chat")
        await eventually(lambda: not fleet.view.assignments and not fleet.view.desired)


async def test_a_new_specification_replaces_replicas_and_a_new_count_does_not(fleet: Fleet) -> None:
    async with fleet.agent(node("n1", gpus=gpus(3))):
        await fleet.client.put_deployment(spec("chat", replicas=2, gpus_per_node=1))
        await eventually(lambda: fleet.ready(2))
        before = {name: a.created_revision for name, a in fleet.view.assignments.items()}
        await fleet.client.scale_deployment("chat", 3)
        await eventually(lambda: fleet.ready(3))
        assert before.items() <= {n: a.created_revision for n, a in fleet.view.assignments.items()}.items()
        await fleet.client.put_deployment(spec("chat", replicas=3, gpus_per_node=1, engine_args=["--new"]))

        def renewed() -> bool:
            return fleet.ready(3) and all(a.spec.engine_args == ["--new"] for a in fleet.view.assignments.values())

        await eventually(renewed)


async def test_a_draining_node_is_emptied_and_a_lost_one_replaced(fleet: Fleet) -> None:
    async with fleet.agent(node("n1")), fleet.agent(node("n2")):
        await fleet.client.put_deployment(spec("chat", replicas=2))
        await eventually(lambda: fleet.ready(2))
        assert set(fleet.replicas().values()) == {"n1", "n2"}, "where no racks are named, each host is one"
        await fleet.client.drain_node("n1")
        await eventually(lambda: fleet.ready(2) and set(fleet.replicas().values()) == {"n2"})
        names = fleet.replicas().keys()
        await fleet.client.drain_node("n1", undo=True)
        await eventually(lambda: not fleet.view.nodes["n1"].draining)
        # An operator drains one replica: another takes its part.
        one = min(names)
        await fleet.client.drain_replica(one)
        await eventually(lambda: fleet.ready(2) and fleet.replicas().get(one) != "n2")
    # Both agents are gone, and so are their nodes when their leases end. On a new one all is placed by its old name.
    names = fleet.replicas().keys()
    async with fleet.agent(node("n3")):
        await eventually(lambda: fleet.ready(2) and set(fleet.replicas().values()) == {"n3"}, within_s=60)
        assert fleet.replicas().keys() == names


async def test_gangs_get_distinct_nodes_and_a_port_to_meet(fleet: Fleet) -> None:
    async with fleet.agent(node("n1", gpus=gpus(4))), fleet.agent(node("n2", gpus=gpus(4))):
        await fleet.client.put_deployment(spec("big", replicas=2, gpus_per_node=2, gang_size=2))
        await eventually(lambda: fleet.ready(2))
        big = fleet.view.assignments
        assert all([m.node_id for m in a.members] == ["n1", "n2"] for a in big.values())
        assert len({a.rendezvous_port for a in big.values()} - {0}) == 2


async def test_a_deployment_deleted_while_it_is_placed_leaves_nothing(fleet: Fleet) -> None:
    async with fleet.agent(node("n1", gpus=gpus(64))):
        for seen in (0, 1, 20):  # before anything is written, with the first of it, with all
            await fleet.client.put_deployment(spec("gone", replicas=20, gpus_per_node=1))
            await eventually(partial(fleet.placed, seen))
            await fleet.client.delete_deployment("gone")
            # A marker behind it: what the planner had begun for the other is through by then.
            await fleet.client.put_deployment(spec("next", replicas=1, gpus_per_node=1))
            await eventually(lambda: "next-0" in fleet.replicas())
            await fleet.client.delete_deployment("next")
            await eventually(lambda: not fleet.view.assignments and not fleet.view.desired)


async def test_what_has_no_place_is_told_in_words(fleet: Fleet) -> None:
    async with fleet.agent(node("n1", gpus=gpus(1))):
        await fleet.client.put_deployment(spec("big", replicas=1, gpus_per_node=8))

        async def told() -> bool:
            status = await planner_status(fleet.planner)
            return [(e.deployment, e.replicas) for e in status.unplaced] == [("big", 1)] and status.leading

        await eventually(told)
        reason = (await planner_status(fleet.planner)).unplaced[0].reason
        assert "8 free GPUs" in reason
        assert "1 with fewer than 8 GPUs" in reason
