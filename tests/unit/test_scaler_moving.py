"""What replicas that are replaced have computed elsewhere before they go."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest

from stoker.api.common.v1 import common_pb2, scaling_pb2
from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.common.blocks import block_keys, pack_keys, root_key, sampled
from stoker.registry.client import DigestChanged, DispatchesSeen, FleetView, LoadChanged, RegistryClient
from stoker.registry.core import scaling, validation
from stoker.registry.core.records import Kind, Name, Record
from stoker.scaler.config import ScalerConfig
from stoker.scaler.core.moving import Move, Runner, next_move
from stoker.scaler.core.values import Load, Replica, Standing
from stoker.scaler.core.victims import choose
from stoker.scaler.rounds import ScalerRound
from stoker.scaler.watching import Watching
from tests.support.registry import snapshot

pytestmark = pytest.mark.looptime

RUN = records_pb2.WANTED_RUN
FENCE = common_pb2.Fence(role="scaler", revision=7)
WALL = 1_700_000_000.0


def test_what_drains_goes_together_and_what_stays_takes_over() -> None:
    runners = [
        Runner("chat-0", ready=True, displaced=True),
        Runner("chat-1", ready=True),
        Runner("chat-2", ready=True, displaced=True),
        Runner("chat-3", ready=False, displaced=True),
        Runner("chat-4", ready=False),
    ]
    assert next_move(runners) == Move(("chat-0", "chat-2"), ("chat-1", "chat-4"))


def test_a_new_specification_takes_over_one_by_one() -> None:
    runners = [
        Runner("chat-2", ready=True, outdated=True),
        Runner("chat-10", ready=True, outdated=True),
        Runner("chat-11", ready=False),
    ]
    assert next_move(runners) == Move(("chat-10",), ("chat-11",)), "by ordinal, as the planner takes them"
    assert next_move(runners, ["chat-2"]) == Move(("chat-2",), ("chat-11",)), "unless the scaler named another"
    assert next_move(runners[:2]) is None, "nobody is there yet"
    other = [Runner("chat-2", ready=True, outdated=True, alike=False), Runner("chat-3", ready=True)]
    assert next_move(other) is None, "of another model"
    assert next_move([Runner("chat-2", ready=True)]) is None


def test_replicas_that_are_replaced_are_what_is_too_much_the_cheapest_first_whatever_their_domain() -> None:
    def replica(name: str, standing: Standing = Standing.READY, *, moving: bool = False) -> Replica:
        return Replica(name, "chat", standing, domain="r1" if moving else "r2", moving=moving)

    loads = {name: Load(0.0, running, 0) for name, running in (("chat-0", 1), ("chat-1", 5), ("chat-2", 0))}
    replicas = [
        replica("chat-0", moving=True),
        replica("chat-1", moving=True),
        replica("chat-2"),
        replica("chat-3", Standing.STARTING),
    ]

    def victims(surplus: int, before: Sequence[str] = ()) -> tuple[str, ...]:
        return choose(replicas, surplus, loads, 0.0, fresh_s=10.0, before=before, domain_least=1).victims

    assert victims(1) == ("chat-0",), "before what starts in its place"
    assert victims(1, ["chat-1"]) == ("chat-1",), "once chosen"
    assert victims(1, ["chat-2"]) == ("chat-0",)
    assert victims(3) == ("chat-0", "chat-1", "chat-3")
    assert victims(4) == ("chat-0", "chat-1", "chat-3"), "the last in its rack"


class World:
    """One deployment before a registry that takes what is written."""

    def __init__(self) -> None:
        self.view = FleetView()
        self.written: list[records_pb2.Desired] = []
        watching = Watching(self.view, 2.0, lambda: WALL + now())
        self.round = ScalerRound(cast(RegistryClient, self), self.view, watching, ScalerConfig())

    def put(self, *records: tuple[Kind, str, Record]) -> None:
        named: list[tuple[Name, Record]] = [((kind, name), record) for kind, name, record in records]
        self.view.delta(named, (), self.view.revision + 1)

    def deploy(self, generation: int, replicas: int, **fields: object) -> None:
        spec = common_pb2.DeploymentSpec(name="chat", model="m", replicas=replicas)
        spec.MergeFrom(common_pb2.DeploymentSpec(**fields))  # type: ignore[arg-type]
        self.put((Kind.DEPLOYMENTS, "chat", records_pb2.Deployment(spec=spec, generation=generation)))

    def run_on(self, name: str, node: str, state: records_pb2.State.ValueType = records_pb2.STATE_READY) -> None:
        deployment = self.view.deployments["chat"]
        replica = records_pb2.Replica(
            replica_id=name,
            deployment="chat",
            node_id=node,
            state=state,
            wanted=RUN,
            epoch=1,
            generation=deployment.generation,
            engine=records_pb2.EngineInfo(block_size=16),
        )
        replica.members.add(replica_id=name, node_id=node, state=state)
        assignment = records_pb2.Assignment(replica_id=name, deployment="chat", spec=deployment.spec, wanted=RUN)
        self.put((Kind.REPLICAS, name, replica), (Kind.ASSIGNMENTS, name, assignment))

    def node(self, name: str, *, draining: bool = False) -> None:
        self.put((Kind.NODES, name, common_pb2.Node(node_id=name, draining=draining)))

    async def set_desired(
        self, fence: common_pb2.Fence, desired: Sequence[records_pb2.Desired], removed: Sequence[str] = ()
    ) -> int:
        validation.require(scaling.decisions(desired))
        assert all(each.fence == FENCE for each in desired)
        self.written += desired
        self.put(*[(Kind.DESIRED, each.deployment, each) for each in desired])
        return self.view.revision

    async def look(self) -> list[records_pb2.Desired]:
        """What a round writes, some time later."""
        await asyncio.sleep(2)
        self.written.clear()
        await self.round.run(self.view, FENCE, now())
        return list(self.written)

    async def warm(self, name: str, user: str, minutes: int = 20) -> set[int]:
        """A replica holds a prompt that is asked for each minute."""
        keys = block_keys(range(16 * 2_000), 16, root_key("m", cache_salt=user))
        self.round.hear(DigestChanged(snapshot(name, set(keys), 1)), now())
        dispatch = registry_pb2.Dispatch(replica_id=name, touched=pack_keys(sampled(keys)))
        for _ in range(minutes):
            await asyncio.sleep(60)
            load = registry_pb2.ReplicaLoad(replica_id=name, epoch=1, running=1, waiting=0)
            load.prefill_tokens_per_s = 10_000.0
            self.round.hear(LoadChanged((load,)), now())
            self.round.hear(DispatchesSeen("router-1", (dispatch,)), now())
        return set(keys)


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.fixture
def world() -> World:
    there = World()
    for node in ("n1", "n2"):
        there.node(node)
    there.deploy(1, 1)
    there.run_on("chat-0", "n1")
    return there


async def test_before_a_nodes_replica_goes_its_prompts_are_named_for_its_replacement(world: World) -> None:
    keys = await world.warm("chat-0", "a")
    (first,) = await world.look()
    assert not first.warmings, "nothing moves"
    world.node("n1", draining=True)
    assert await world.look() == [], "nobody could take it over"
    world.run_on("chat-1", "n2", records_pb2.STATE_STARTING)
    (desired,) = await world.look()
    assert {warming.from_replica for warming in desired.warmings} == {"chat-0"}
    assert {warming.to_replica for warming in desired.warmings} == {"chat-1"}
    assert {warming.leaf for warming in desired.warmings} <= keys
    assert (desired.replicas, desired.reason, list(desired.victims)) == (1, first.reason, ["chat-0"])
    assert await world.look() == [], "said once"
    await world.warm("chat-0", "b", minutes=3)
    (again,) = await world.look()
    assert len({warming.leaf for warming in again.warmings} - keys) > 0, "what is asked for since is named as well"
    assert again.decided_at == desired.decided_at, "nothing else was decided"


async def test_a_new_specification_warms_what_it_is_replaced_by_unless_it_is_another_model(world: World) -> None:
    await world.warm("chat-0", "a")
    world.deploy(2, 1, scaling=scaling_pb2.ScalingPolicy(bounds=scaling_pb2.ScalingBounds(most=9)))
    world.run_on("chat-1", "n2")
    assert not any(desired.warmings for desired in await world.look()), "the same specification but for its policy"
    world.deploy(3, 1, engine_args=["--max-num-seqs", "8"])
    world.run_on("chat-1", "n2")
    await world.look()  # the generation is news of its own
    await world.look()
    assert {warming.to_replica for warming in world.view.desired["chat"].warmings} == {"chat-1"}
    world.deploy(4, 1, model="another")
    world.run_on("chat-1", "n2")
    await world.look()
    await world.look()
    assert not world.view.desired["chat"].warmings


async def test_a_fleet_that_moves_as_a_whole_is_told_within_a_records_bounds(world: World) -> None:
    for number in range(12):
        world.run_on(f"chat-{number}", "n1")
        await world.warm(f"chat-{number}", str(number), minutes=6)
    world.deploy(1, 12)
    world.node("n1", draining=True)
    world.run_on("chat-12", "n2")
    await world.look()
    await world.look()
    assert 0 < len(world.view.desired["chat"].warmings) <= scaling.MAX_WARMINGS
