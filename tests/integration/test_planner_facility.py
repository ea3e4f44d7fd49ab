"""A planner with a facility, on a real registry and a real etcd: what it obeys, what it says, what it computes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import grpc
import pytest

from stoker.api.common.v1 import common_pb2, placement_pb2
from stoker.api.planner.v1 import planner_pb2, planner_pb2_grpc
from stoker.api.registry.v1 import records_pb2
from stoker.common import rpc
from stoker.common.errors import StokerError
from stoker.control.config import LoopConfig
from stoker.planner import app
from stoker.planner.config import LossConfig, PlannerConfig
from stoker.registry.client import FleetView, RegistryClient
from tests.support.deciders import TTL_S, ObedientAgent, Scaler, planner_status, running
from tests.support.etcd import EtcdServer, free_port
from tests.support.facilities import hall
from tests.support.registry import RegistryUnderTest, Watcher, config, node, spec
from tests.support.waiting import eventually

if TYPE_CHECKING:
    Stub = planner_pb2_grpc.PlannerServiceAsyncStub

R = TypeVar("R")
RUN = records_pb2.WANTED_RUN


@dataclass
class Fleet:
    """A registry, hosts of 4 GPUs, and planners."""

    client: RegistryClient
    view: FleetView
    scaler: Scaler
    endpoint: str
    stack: AsyncExitStack
    planners: list[str] = field(default_factory=list)

    async def host(self, *names: str) -> None:
        for name in names:
            gpus = [common_pb2.Gpu(index=index, uuid=f"{name}-{index}", numa_node=-1) for index in range(4)]
            await self.stack.enter_async_context(ObedientAgent([self.endpoint], node(name, gpus=gpus)))

    @asynccontextmanager
    async def planner(self, candidate: str = "one") -> AsyncIterator[str]:
        settings = PlannerConfig(
            listen=f"127.0.0.1:{free_port()}",
            registries=(self.endpoint,),
            loss=LossConfig(grace_s=0.5, mass_grace_s=1.0, settle_s=0.5),
            loop=LoopConfig(candidate=candidate, leader_ttl_s=TTL_S, tick_s=0.1),
        )
        async with running(app.serve, settings):
            assert await rpc.wait_serving(settings.listen, 10)
            yield settings.listen

    async def want(self, name: str, replicas: int, **fields: object) -> None:
        await self.client.put_deployment(spec(name, replicas=replicas, **fields))
        await self.scaler.want(name, replicas)

    def where(self, deployment: str = "chat") -> dict[str, str]:
        """Its replicas that are to run, with their first nodes."""
        return {
            name: a.members[0].node_id
            for name, a in self.view.assignments.items()
            if a.wanted == RUN and a.deployment == deployment
        }

    def ready(self, count: int) -> bool:
        states = [replica.state for replica in self.view.replicas.values()]
        return states == [records_pb2.STATE_READY] * count

    def booked_once(self) -> bool:
        gpus = [(m.node_id, g) for a in self.view.assignments.values() for m in a.members for g in m.gpu_indices]
        return len(gpus) == len(set(gpus))


@pytest.fixture
async def fleet(etcd_alone: EtcdServer) -> AsyncIterator[Fleet]:
    async with (
        RegistryUnderTest(config(etcd_alone.endpoint, grace_s=1.0)) as registry,
        RegistryClient([registry.endpoint]) as client,
        Watcher([registry.endpoint]) as watcher,
        AsyncExitStack() as stack,
    ):
        scaler = Scaler(client)
        await scaler.lead()
        yield Fleet(client, watcher.watch.view, scaler, registry.endpoint, stack)


async def ask(planner: str, call: Callable[[Stub], Awaitable[R]]) -> R:
    async with rpc.channel(planner) as channel:
        stub: Stub = planner_pb2_grpc.PlannerServiceStub(channel)
        try:
            return await call(stub)
        except grpc.aio.AioRpcError as error:
            raise rpc.error_from(error) from None


async def test_a_facility_bounds_what_is_placed_and_an_edit_stops_nothing(fleet: Fleet) -> None:
    await fleet.host("n1", "n2", "n3")
    # 7 kW a feed: of the two hosts in r1, 2 kW when idle, 5 GPUs may be busy.
    await fleet.client.put_facility(hall({"r1": "n[1-2]", "r2": "n3"}, rack_kw=7))
    async with fleet.planner() as planner:
        await fleet.want("chat", 8, gpus_per_node=1)
        await eventually(lambda: fleet.ready(8))
        assert sorted(fleet.where().values()).count("n3") == 4, "no rack has more than half"
        await fleet.want("chat", 11, gpus_per_node=1)

        async def short() -> bool:
            return sum(entry.replicas for entry in (await planner_status(planner)).unplaced) == 3

        await eventually(short)
        before = dict(fleet.where())
        lowered = await fleet.client.put_facility(hall({"r1": "n1", "r2": "n3"}, rack_kw=4))

        async def said() -> bool:
            status = await planner_status(planner)
            limits = {violation.limit for violation in status.violations}
            return status.facility_revision == lowered.revision and limits == {"node", "power"}

        await eventually(said, within_s=60)
        assert fleet.where() == before, "what runs, runs on"
        unreadable = await fleet.client.put_facility("name: hall\nsites: 7\n")
        assert unreadable.revision > lowered.revision

        async def kept() -> bool:
            status = await planner_status(planner)
            return status.facility_revision == lowered.revision and "sites" in status.facility_problem

        await eventually(kept)
        assert fleet.where() == before
        await fleet.client.remove_facility()
        await eventually(lambda: fleet.ready(11))


async def test_a_facility_edited_during_a_rollout(fleet: Fleet) -> None:
    await fleet.host("n1", "n2", "n3", "n4")
    await fleet.client.put_facility(hall({"r1": "n[1-2]", "r2": "n[3-4]"}))
    async with fleet.planner():
        await fleet.want("chat", 4, gpus_per_node=4)
        await eventually(lambda: fleet.ready(4))
        await fleet.want("chat", 4, gpus_per_node=4, engine_args=["--new"])
        seen: list[bool] = []

        def renewed() -> bool:
            seen.append(fleet.booked_once())
            assignments = fleet.view.assignments.values()
            return fleet.ready(4) and all(a.spec.engine_args == ["--new"] for a in assignments)

        edits = [{"r1": "n[1-2]", "r2": "n[3-4]", "r3": f"x{number}"} for number in range(12)]
        for edit in edits:
            await fleet.client.put_facility(hall(edit))
            await asyncio.sleep(0)
        await eventually(renewed, within_s=60)
        assert all(seen), "a GPU had two owners"


async def test_the_next_planner_goes_on_with_the_same_facility(fleet: Fleet) -> None:
    await fleet.host("n1", "n2")
    await fleet.client.put_facility(hall({"r1": "n1", "r2": "n2"}, rack_kw=3))
    async with fleet.planner("one"):
        await fleet.want("chat", 2, gpus_per_node=1)
        await eventually(lambda: fleet.ready(2))
    placed = fleet.where()
    async with fleet.planner("two") as second:

        async def leads() -> bool:
            return (await planner_status(second)).leading

        await eventually(leads, within_s=60)
        await fleet.want("chat", 6, gpus_per_node=1)

        async def short() -> bool:
            return sum(entry.replicas for entry in (await planner_status(second)).unplaced) == 2

        await eventually(short)
        assert placed.items() <= fleet.where().items(), "planned anew, and nothing moved"
        assert fleet.booked_once()


async def test_what_is_computed_for_operators(fleet: Fleet) -> None:
    await fleet.host("n1", "n2", "n3")
    text = hall({"r1": "n[1-2]", "r2": "n3"}, rack_kw=7)
    await fleet.client.put_facility(text)
    async with fleet.planner() as planner:
        await fleet.want("chat", 4, gpus_per_node=1)
        await eventually(lambda: fleet.ready(4))
        explained = await ask(planner, lambda s: s.Explain(planner_pb2.ExplainRequest(name="chat-0"), timeout=10))
        assert "chat-0 is on n1 in rack r1 with GPUs 0; it shall run." in explained.words
        tightest = explained.limits[0]
        assert (tightest.limit, tightest.used_w, tightest.capacity_w) == (
            "feed r1-a after the loss of source b",
            4000,
            7000,
        )
        lost = planner_pb2.WhatIfRequest(without_racks=["r2"], replicas={"chat": 9})
        found = await ask(planner, lambda s: s.WhatIf(lost, timeout=10))
        assert sum(entry.replicas for entry in found.unplaced) == 4, "r1 carries five busy GPUs"
        assert not found.unplaced_now
        held = await ask(
            planner,
            lambda s: s.Validate(planner_pb2.ValidateRequest(facility=hall({"r1": "n1"}, rack_kw=2)), timeout=10),
        )
        assert (held.racks, held.nodes, held.gpus, list(held.mistakes)) == (1, 1, 4, [])
        assert {violation.limit for violation in held.violations} == {"node", "power"}
        wrong = await ask(
            planner, lambda s: s.Validate(planner_pb2.ValidateRequest(facility="name: x\nsites: 3\n"), timeout=10)
        )
        assert wrong.mistakes[0].startswith("facility:2")
        capacity = await ask(planner, lambda s: s.Capacity(planner_pb2.CapacityRequest(), timeout=10))
        assert (capacity.nodes, capacity.racks) >= (3, 2)
        some = [spec("a", replicas=3, gpus_per_node=4), spec("b", replicas=2, gpus_per_node=2)]
        placed = await ask(
            planner, lambda s: s.Place(planner_pb2.PlaceRequest(facility=text, deployments=some), timeout=10)
        )
        assert len(placed.placed) + sum(entry.replicas for entry in placed.unplaced) == 5
        with pytest.raises(StokerError) as unknown:
            await ask(planner, lambda s: s.Explain(planner_pb2.ExplainRequest(name="nobody-3"), timeout=10))
        assert unknown.value.reason == "NOT_FOUND"
        late = planner_pb2.CapacityRequest(facility=text)
        with pytest.raises(StokerError) as short:
            await ask(planner, lambda s: s.Capacity(late, timeout=0.2))
        assert short.value.reason == "DEADLINE_EXCEEDED"


async def test_a_replica_is_moved_as_asked_and_otherwise_told_why_not(fleet: Fleet) -> None:
    await fleet.host("n1", "n2", "n3")
    await fleet.client.put_facility(hall({"r1": "n[1-2]", "r2": "n3"}))
    async with fleet.planner() as planner:
        await fleet.want("chat", 2, gpus_per_node=1)
        await eventually(lambda: fleet.ready(2))
        assert fleet.where() == {"chat-0": "n1", "chat-1": "n3"}

        async def move(replica: str, to: str) -> None:
            members = [records_pb2.GangMember(rank=0, node_id=to)]
            request = planner_pb2.MoveReplicaRequest(replica_id=replica, members=members)
            await ask(planner, lambda s: s.MoveReplica(request, timeout=20))

        await move("chat-0", "n2")
        await eventually(lambda: fleet.ready(2) and set(fleet.where().values()) == {"n2", "n3"})
        with pytest.raises(StokerError) as refused:
            await move("chat-1", "n1")
        assert refused.value.reason == "MOVE_REFUSED"
        assert "at most 1 of 2" in refused.value.message
        assert fleet.where()["chat-1"] == "n3"


async def test_moves_are_proposed_only_for_a_gain_and_can_be_made(fleet: Fleet) -> None:
    await fleet.host("n1", "n2")
    await fleet.client.put_facility(hall({"r1": "n[1-2]"}))
    async with fleet.planner() as planner:
        # Two single GPUs on either host: no room for one that asks for all four of a host.
        wide = placement_pb2.PlacementPolicy(
            spread=placement_pb2.PlacementSpread(domains=[placement_pb2.FAILURE_DOMAIN_NODE])
        )
        await fleet.want("chat", 2, gpus_per_node=1, placement=wide)
        await eventually(lambda: fleet.ready(2))
        assert set(fleet.where().values()) == {"n1", "n2"}
        await fleet.want("chat", 2, gpus_per_node=1)
        await fleet.want("big", 1, gpus_per_node=4)
        request = planner_pb2.ProposeMovesRequest(time_limit_s=3)
        found = await ask(planner, lambda s: s.ProposeMoves(request, timeout=20))
        assert found.placed_more == 1
        (move,) = found.moves
        made = planner_pb2.MoveReplicaRequest(replica_id=move.replica_id, members=move.to_members)
        await ask(planner, lambda s: s.MoveReplica(made, timeout=20))
        await eventually(lambda: fleet.ready(3) and len(fleet.where("big")) == 1)
        assert len(set(fleet.where().values())) == 1
        again = await ask(planner, lambda s: s.ProposeMoves(request, timeout=20))
        assert not again.moves
