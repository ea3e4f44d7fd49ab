"""Replicas retire by a real planner on a real registry and a real etcd; the scaler's plan is written by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from stoker.api.registry.v1 import records_pb2
from stoker.control.config import LoopConfig
from stoker.planner import app
from stoker.planner.config import PlannerConfig, RetireConfig
from stoker.registry.client import FleetView, RegistryClient
from tests.support.deciders import TTL_S, ObedientAgent, Scaler, planner_status, running
from tests.support.etcd import EtcdServer, free_port
from tests.support.registry import RegistryUnderTest, Watcher, config, node, spec
from tests.support.waiting import eventually

RUN, RETIRE, DRAIN = records_pb2.WANTED_RUN, records_pb2.WANTED_RETIRE, records_pb2.WANTED_DRAIN
WARMINGS = [
    records_pb2.Warming(leaf=71, from_replica="chat-1", to_replica="chat-0", tokens=900),
    records_pb2.Warming(leaf=72, from_replica="chat-1", to_replica="chat-2", tokens=800),
    records_pb2.Warming(leaf=73, from_replica="chat-1", to_replica="chat-0", tokens=700),
]


@dataclass
class Fleet:
    """Three ready replicas on one node."""

    registry: RegistryUnderTest
    view: FleetView
    scaler: Scaler
    agent: ObedientAgent

    @asynccontextmanager
    async def planner(self, candidate: str, retire: RetireConfig | None = None) -> AsyncIterator[str]:
        settings = PlannerConfig(
            listen=f"127.0.0.1:{free_port()}",
            registries=(self.registry.endpoint,),
            retire=retire or RetireConfig(timeout_s=60.0),
            loop=LoopConfig(candidate=candidate, leader_ttl_s=TTL_S, tick_s=0.1),
        )
        async with running(app.serve, settings):
            yield settings.listen

    def wanted(self, replica: str) -> records_pb2.Wanted.ValueType | None:
        assignment = self.view.assignments.get(replica)
        return assignment.wanted if assignment is not None else None

    def ready(self, count: int) -> bool:
        states = [replica.state for replica in self.view.replicas.values()]
        return states == [records_pb2.STATE_READY] * count

    async def begin(self) -> None:
        await eventually(lambda: self.ready(3))
        await self.scaler.want("chat", 2, ["chat-1"], WARMINGS)
        await eventually(lambda: self.wanted("chat-1") == RETIRE)


@pytest.fixture
async def fleet(etcd_alone: EtcdServer) -> AsyncIterator[Fleet]:
    async with (
        RegistryUnderTest(config(etcd_alone.endpoint, grace_s=1.0)) as registry,
        RegistryClient([registry.endpoint]) as client,
        Watcher([registry.endpoint]) as watcher,
        ObedientAgent([registry.endpoint], node("n1")) as agent,
    ):
        scaler = Scaler(client)
        await scaler.lead()
        await client.put_deployment(spec("chat", replicas=3))
        await scaler.want("chat", 3)
        assert isinstance(agent, ObedientAgent)
        yield Fleet(registry, watcher.watch.view, scaler, agent)


async def test_a_victim_retires_then_drains_then_is_gone(fleet: Fleet) -> None:
    async with fleet.planner("one"):
        await fleet.begin()
        retirement = fleet.view.assignments["chat-1"].retirement
        assert [(each.leaf, each.successor, each.tokens) for each in retirement.prefixes] == [
            (71, 0, 900),
            (72, 1, 800),
            (73, 0, 700),
        ]
        endpoint = fleet.agent.session.node.grpc_endpoint
        assert [(each.replica_id, each.agent_endpoint) for each in retirement.successors] == [
            ("chat-0", endpoint),
            ("chat-2", endpoint),
        ]
        assert retirement.timeout_s == 60.0
        await eventually(lambda: fleet.view.replicas["chat-1"].wanted == RETIRE)
        assert fleet.ready(3), "it serves on"
        fleet.agent.finish_draining = False
        fleet.agent.retire()
        await eventually(lambda: fleet.wanted("chat-1") == DRAIN)
        assert not fleet.view.assignments["chat-1"].HasField("retirement")
        fleet.agent.finish()
        await eventually(lambda: "chat-1" not in fleet.view.assignments and fleet.ready(2))


async def test_wanted_again_it_runs_on_as_the_same_replica(fleet: Fleet) -> None:
    async with fleet.planner("one"):
        await fleet.begin()
        created = fleet.view.assignments["chat-1"].created_revision
        await fleet.scaler.want("chat", 3)
        await eventually(lambda: fleet.wanted("chat-1") == RUN)
        assert fleet.view.assignments["chat-1"].created_revision == created
        assert not fleet.view.assignments["chat-1"].HasField("retirement")
        assert len(fleet.view.assignments) == 3
        # And once more: what an agent said of the first time is not taken for the second.
        await fleet.scaler.want("chat", 2, ["chat-1"], WARMINGS)
        await eventually(lambda: fleet.wanted("chat-1") == RETIRE)
        fleet.agent.retire()
        await eventually(lambda: "chat-1" not in fleet.view.assignments)


async def test_an_agent_that_never_says_that_it_is_done_keeps_nothing(fleet: Fleet) -> None:
    async with fleet.planner("one", RetireConfig(timeout_s=0.5, grace_s=0.5)):
        await fleet.begin()
        await eventually(lambda: "chat-1" not in fleet.view.assignments)
        assert fleet.ready(2)


async def test_another_planner_goes_on_where_the_first_one_ended(fleet: Fleet) -> None:
    retire = RetireConfig(timeout_s=1.0, grace_s=0.5)
    async with fleet.planner("one", RetireConfig(timeout_s=1.0, grace_s=300.0)):
        await fleet.begin()
    async with fleet.planner("two", retire) as second:

        async def leads() -> bool:
            return (await planner_status(second)).leading

        await eventually(leads, within_s=60)
        await eventually(lambda: "chat-1" not in fleet.view.assignments, within_s=60)
        assert fleet.ready(2)


async def test_an_operators_drain_ends_a_retirement(fleet: Fleet) -> None:
    async with fleet.planner("one"), RegistryClient([fleet.registry.endpoint]) as client:
        await fleet.begin()
        await client.drain_replica("chat-1")
        await eventually(lambda: "chat-1" not in fleet.view.assignments)


async def test_a_view_that_is_lost_meanwhile_ends_in_the_same(fleet: Fleet) -> None:
    async with fleet.planner("one", RetireConfig(timeout_s=2.0, grace_s=0.5)):
        await fleet.begin()
        await fleet.registry.stop()
        await fleet.registry.start()
        await eventually(lambda: "chat-1" not in fleet.view.assignments and fleet.ready(2), within_s=60)
