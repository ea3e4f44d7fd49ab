"""Requests for a model that is scaled to zero: held while a replica starts, within bounds, and let go fairly."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stoker.api.common.v1 import common_pb2, scaling_pb2
from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.common.errors import DeadlineExceeded, Exhausted, StokerError, Unavailable
from stoker.router import core
from stoker.router.config import QueueConfig
from stoker.router.fleet.view import View
from stoker.router.flights.holding import Holding
from stoker.router.flights.tenants import NOBODY, Caller
from tests.support.router import replica

pytestmark = pytest.mark.looptime

SLO, FIXED = scaling_pb2.SCALING_KIND_SLO, scaling_pb2.SCALING_KIND_FIXED


class World:
    def __init__(self, limit: int = 10, longest_s: float = 30.0) -> None:
        self.view = View(core.RoutingConfig(), core.HealthConfig())
        self.refused: list[str] = []
        self.order: list[str] = []
        config = QueueConfig(limit=limit, longest_s=longest_s)
        self.began = 0
        self.holding = Holding(self.view, config, self.now, self.refused.append, self._count)

    def _count(self) -> None:
        self.began += 1

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def deploy(self, name: str = "tiny", *, kind: Any = SLO, paused: bool = False, **bounds: int) -> None:
        spec = common_pb2.DeploymentSpec(name=name, lora_adapters=[common_pb2.LoraAdapter(name="poet", path="p")])
        spec.scaling.kind = kind
        spec.scaling.bounds.CopyFrom(scaling_pb2.ScalingBounds(**bounds))
        record = records_pb2.Deployment(spec=spec, generation=1)
        if paused:
            record.pause.note = "incident"
        self.tell(registry_pb2.Records(deployments=[record]))

    def tell(self, records: registry_pb2.Records | None, removals: registry_pb2.Removals | None = None) -> None:
        self.view.records(records, removals, now=self.now(), snapshot=True)
        self.holding.pump()

    def ready(self, state: Any = records_pb2.STATE_READY) -> None:
        self.tell(
            registry_pb2.Records(replicas=[replica("tiny-0", "http://e", models=("tiny", "poet"), state=state)])
        )

    def wait(self, caller: Caller = NOBODY, until: float | None = None, model: str = "tiny") -> asyncio.Task[None]:
        async def held() -> None:
            await self.holding.wait(model, caller, until)
            self.order.append(caller.tenant)

        return asyncio.create_task(held())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_request_is_held_until_a_replica_is_ready() -> None:
    world = World()
    world.deploy(least=0)
    assert world.holding.needed("tiny")
    one, two = world.wait(), world.wait(model="poet")
    await asyncio.sleep(5)
    world.ready(records_pb2.STATE_STARTING)
    await settle()
    assert [(w.model, world.now() - w.since, w.held) for w in world.holding.waiting()] == [
        ("tiny", 5.0, True),
        ("poet", 5.0, True),
    ]
    world.ready()
    await asyncio.gather(one, two)
    assert len(world.holding) == 0
    assert not world.holding.needed("tiny")
    assert not world.refused
    assert world.began == 2, "of each model the first"


@pytest.mark.parametrize(
    ("settings", "held"),
    [
        ({"least": 0}, True),
        ({"least": 0, "most": 3}, True),
        ({}, False),
        ({"least": 1}, False),
        ({"least": 0, "most": 0}, False),
        ({"least": 0, "paused": True}, False),
        ({"least": 0, "kind": FIXED}, False),
        ({"least": 0, "kind": 77}, False),
    ],
)
async def test_only_who_would_be_started_for_is_held(settings: dict[str, Any], held: bool) -> None:
    world = World()
    world.deploy(**settings)
    assert world.holding.needed("tiny") is held
    assert world.holding.needed("poet") is held
    assert not world.holding.needed("nobody")


async def test_one_deployment_of_several_is_enough() -> None:
    world = World()
    world.deploy("other", least=1)
    spec = common_pb2.DeploymentSpec(name="dear", served_model_name="other")
    spec.scaling.kind = SLO
    spec.scaling.bounds.least = 0
    assert not world.holding.needed("other")
    world.tell(registry_pb2.Records(deployments=[records_pb2.Deployment(spec=spec)]))
    assert world.holding.needed("other")
    world.tell(None, registry_pb2.Removals(deployments=["dear"]))
    assert not world.holding.needed("other")


async def test_a_replica_on_its_way_out_does_not_serve() -> None:
    world = World()
    world.deploy(least=0)
    world.ready(records_pb2.STATE_DRAINING)
    assert world.holding.needed("tiny")
    world.ready(records_pb2.STATE_UNHEALTHY)
    assert world.holding.needed("tiny")
    world.ready()
    (target,) = world.view.targets.values()
    world.view.reached(target, False)
    assert world.holding.needed("tiny"), "found dead"
    world.view.reached(target, True)
    assert not world.holding.needed("tiny")
    world.tell(None, registry_pb2.Removals(replicas=["tiny-0"]))
    assert world.holding.needed("tiny")


async def test_after_the_queues_longest_wait_it_is_told_so_and_when_to_come_again() -> None:
    world = World(longest_s=30.0)
    world.deploy(least=0)
    held = world.wait()
    with pytest.raises(Unavailable) as late:
        await held
    assert world.now() == pytest.approx(30.0)
    assert (late.value.reason, late.value.retry_after_s) == ("NOT_STARTED", 5.0)
    assert (world.refused, len(world.holding)) == (["tiny"], 0)


async def test_a_callers_own_time_is_kept() -> None:
    world = World(longest_s=30.0)
    world.deploy(least=0)
    with pytest.raises(DeadlineExceeded):
        await world.wait(until=world.now() + 4.0)
    assert world.now() == pytest.approx(4.0)
    with pytest.raises(Unavailable):
        await world.wait(until=world.now() + 99.0)
    assert world.now() == pytest.approx(34.0)


async def test_their_number_is_bounded() -> None:
    world = World(limit=2)
    world.deploy(least=0)
    held = [world.wait() for _ in range(2)]
    await settle()
    with pytest.raises(Exhausted) as full:
        await world.wait()
    assert (full.value.reason, full.value.retry_after_s, world.refused) == ("QUEUE_FULL", 5.0, ["tiny"])
    held.pop().cancel()
    await settle()
    held.append(world.wait())
    await settle()
    assert len(world.holding) == 2
    world.ready()
    await asyncio.gather(*(task for task in held if not task.cancelled()), return_exceptions=True)
    assert len(world.holding) == 0


async def test_they_go_by_priority_and_the_tenants_in_turn() -> None:
    world = World()
    world.deploy(least=0)
    callers = [Caller("greedy"), Caller("greedy"), Caller("greedy"), Caller("a"), Caller("urgent", -5), Caller("b")]
    held = [world.wait(caller) for caller in callers]
    await settle()
    world.ready()
    await asyncio.gather(*held)
    assert world.order == ["urgent", "greedy", "a", "b", "greedy", "greedy"]


async def test_who_goes_away_leaves_nothing_behind() -> None:
    world = World()
    world.deploy(least=0)
    held = world.wait()
    await settle()
    held.cancel()
    await settle()
    assert held.cancelled()
    assert len(world.holding) == 0
    again = world.wait()
    await settle()
    world.ready()
    again.cancel()  # in the moment that it may go
    await settle()
    assert len(world.holding) == 0


async def test_when_nothing_would_be_started_any_more_nobody_waits() -> None:
    world = World()
    world.deploy(least=0)
    held = world.wait()
    await settle()
    world.deploy(least=0, paused=True)
    await held
    assert world.now() == 0.0
    with pytest.raises(StokerError) as refused:
        world.view.resolve("tiny")
    assert refused.value.reason == "NO_REPLICA"


async def test_a_replica_that_dies_at_once_has_them_wait_on() -> None:
    world = World()
    world.deploy(least=0)
    held = world.wait()
    await settle()
    world.ready()
    world.ready(records_pb2.STATE_BACKOFF)
    await settle()
    assert not held.done()
    world.ready()
    await held
