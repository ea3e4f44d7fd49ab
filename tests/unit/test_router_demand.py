"""The demand that a router sees: each way in counted once, whatever becomes of a request."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from stoker.api.common.v1 import common_pb2, scaling_pb2
from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.common import log_buckets
from stoker.common.errors import Exhausted, Unavailable
from stoker.router import core
from stoker.router.config import QueueConfig, TenantsConfig
from stoker.router.flights.tenants import Caller
from stoker.router.picking.picks import Event
from stoker.router.prompts.plan import Plan
from stoker.router.prompts.prompt import COMPLETIONS, Asked, Prompt, tokenized
from tests.support.picking import World, packed
from tests.support.router import replica

SLO = scaling_pb2.ScalingSlo(ttft_s=0.5, itl_s=0.02)


def deployed(world: World, name: str = "tiny", **spec: object) -> None:
    record = records_pb2.Deployment(spec=common_pb2.DeploymentSpec(name=name, **spec), generation=1)  # type: ignore[arg-type]
    world.view.records(registry_pb2.Records(deployments=[record]), now=world.now)


def told(world: World, *, whole: bool = True) -> dict[str, registry_pb2.Demand]:
    return {demand.model: demand for demand in world.router.demand.report(whole)}


def asked(tokens: int = 640, first: int = 0) -> Asked:
    return Asked(
        COMPLETIONS, "tiny", Prompt(b"", tokenized=tokenized(packed(tokens, first)), max_output_tokens=16), True
    )


async def planned(world: World, tokens: int = 640) -> Plan:
    return await world.router.plan(asked(tokens))


async def test_a_request_counts_once_however_many_tries_it_takes() -> None:
    world = World()
    plan = await planned(world)
    first = await world.router.board(plan, "id")
    first.faulted()
    first.abandon()
    with await world.router.board(plan, "id", first.decided.target.siblings) as second:
        assert told(world)["tiny"].in_flight == 1
        second.used(640, 320, 16)
        second.served()
    tiny = told(world)["tiny"]
    assert (tiny.arrivals, tiny.prompt_tokens, tiny.prompt_tokens_squared) == (1, 640, 640**2)
    assert (tiny.finished, tiny.failed, tiny.cancelled, tiny.refused, tiny.in_flight) == (1, 1, 0, 0, 0)
    assert (tiny.compared_tokens, tiny.cached_tokens, tiny.output_tokens) == (640, 320, 16)


async def test_a_picked_request_is_demand_like_any_other() -> None:
    world = World()
    for event in (Event.SERVED, Event.FAILED, Event.DROPPED):
        picked = await world.pick()
        if event is Event.SERVED:
            world.now += 1.0
            world.picks.tell(picked.pick_id, Event.FIRST_TOKEN)
        world.picks.tell(picked.pick_id, event)
    tiny = told(world)["tiny"]
    assert (tiny.arrivals, tiny.finished, tiny.failed, tiny.cancelled) == (3, 1, 1, 1)
    assert (tiny.judged, tiny.ttft.sum_s) == (1, 1.0)


async def test_what_was_predicted_is_what_the_decision_credited() -> None:
    world = World()
    plan = await planned(world)
    with world.router.fly(world.router.choose(plan), "id"):
        pass
    decided = world.router.choose(plan)
    assert decided.decision.cached_tokens > 0, "what was just sent there"
    with world.router.fly(decided, "id"):
        pass
    assert told(world)["tiny"].predicted_cached_tokens == decided.decision.cached_tokens


async def test_answers_are_judged_by_the_policy() -> None:
    world = World()
    deployed(world, scaling=scaling_pb2.ScalingPolicy(slo=SLO))

    async def answer(first_s: float, rest_s: float, generated: int | None) -> None:
        with await world.router.board(await planned(world), "id") as flight:
            world.now += first_s
            flight.first_token()
            world.now += rest_s
            flight.used(640, None, generated)
            flight.served()

    await answer(0.5, 0.3, 16)  # 20 ms a token
    await answer(0.6, 0.3, 16)  # late
    await answer(0.4, 0.6, 16)  # slow
    await answer(0.4, 0.6, None)  # how fast nobody can say
    await answer(0.4, 0.6, 1)  # nothing lies between one token
    tiny = told(world)["tiny"]
    assert (tiny.judged, tiny.within_slo) == (5, 3)
    assert sum(tiny.ttft.counts) == 5
    assert tiny.ttft.sum_s == pytest.approx(2.3)
    assert sum(tiny.itl.counts) == 3
    assert tiny.itl.sum_s == pytest.approx(0.02 + 0.02 + 0.04)
    assert log_buckets.share_within(tiny.ttft.counts, 0.55) == pytest.approx(0.8, abs=0.2)


async def test_what_is_no_stream_is_not_judged_and_what_failed_neither() -> None:
    world = World()
    with await world.router.board(await planned(world), "id") as whole:
        whole.served()
    with await world.router.board(await planned(world), "id") as broken:
        broken.first_token()
        broken.faulted()
    tiny = told(world)["tiny"]
    assert (tiny.finished, tiny.judged, list(tiny.ttft.counts)) == (1, 0, [])


async def test_a_carrier_that_measured_the_first_token_is_believed() -> None:
    world = World()
    with await world.router.board(await planned(world), "id") as flight:
        world.now += 0.9
        flight.first_token()  # heard late
        flight.first_token_after(0.2)
        flight.served()
    assert told(world)["tiny"].ttft.sum_s == pytest.approx(0.2)


async def test_the_time_in_the_queue_counts() -> None:
    world = World()
    plan, came = await planned(world), world.now
    world.now += 2.0
    with await world.router.board(plan, "id", since=came) as flight:
        flight.first_token()
        flight.served()
    assert told(world)["tiny"].ttft.sum_s == pytest.approx(2.0)


async def test_those_who_wait_are_told_with_the_time_of_the_first() -> None:
    world = World(1, queue=QueueConfig(limit=2, longest_s=60.0))
    flights = []
    while (flight := world.router.board_at_once(await planned(world), "id")) is not None:
        flights.append(flight)
    waiting = []
    for _ in range(2):
        waiting.append(asyncio.create_task(world.router.board(await planned(world), "id")))
        await asyncio.sleep(0)
        world.now += 1.5
    tiny = told(world)["tiny"]
    assert (tiny.queued, tiny.held, tiny.oldest_queued_s) == (2, 0, 3.0)
    with pytest.raises(Exhausted):
        await world.router.board(await planned(world), "id")
    assert told(world)["tiny"].refused == 1
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    for flight in flights:
        flight.abandon()
    tiny = told(world)["tiny"]
    assert (tiny.queued, tiny.in_flight) == (0, 0)
    assert tiny.arrivals == len(flights) + 4, "each that was planned"


async def test_who_finds_no_replica_is_turned_away_and_told() -> None:
    world = World(1)
    deployed(world)
    world.view.records(
        registry_pb2.Records(replicas=[replica("tiny-0", "http://e", state=records_pb2.STATE_BACKOFF)]), now=0
    )
    with pytest.raises(Unavailable):
        await world.router.board(await planned(world), "id")
    world.view.records(None, registry_pb2.Removals(replicas=["tiny-0"]), now=0)
    with pytest.raises(Unavailable):
        await planned(world)
    assert told(world)["tiny"].refused == 2


async def test_explaining_is_no_demand() -> None:
    world = World()
    await world.router.draft(asked())
    world.router.choose(await world.router.draft(asked()))
    assert told(world)["tiny"].arrivals == 0


async def test_only_what_changed_is_told_unless_all_is_asked_for() -> None:
    world = World()
    deployed(world, "idle", served_model_name="quiet", lora_adapters=[common_pb2.LoraAdapter(name="poet", path="p")])
    deployed(world)
    first = told(world, whole=False)
    assert {name: list(demand.deployments) for name, demand in first.items()} == {
        "tiny": ["tiny"],
        "quiet": ["idle"],
        "poet": ["idle"],
    }, "zero is told: it is not unknown"
    assert not told(world, whole=False)
    flight = await world.router.board(await planned(world), "id")
    assert set(told(world, whole=False)) == {"tiny"}
    assert not told(world, whole=False)
    flight.abandon()
    assert set(told(world, whole=False)) == {"tiny"}
    assert set(told(world)) == {"tiny", "quiet", "poet"}


async def test_an_adapter_is_a_model_of_its_own() -> None:
    world = World(0)
    adapted = replica("tiny-0", "http://e", models=("tiny", "poet"))
    world.view.records(registry_pb2.Records(replicas=[adapted]), now=0)
    plan = await world.router.plan(replace(asked(), model="poet"))
    with await world.router.board(plan, "id"):
        pass
    tellings = told(world)
    assert (tellings["poet"].arrivals, tellings["tiny"].arrivals) == (1, 0)


def test_models_are_bounded() -> None:
    world = World()
    for number in range(2_000):
        world.router.demand.of(f"m{number}").arrivals += 1
    assert len(told(world)) == 1_024


def test_every_outcome_ends_a_try() -> None:
    tally = core.Tally(tries=len(core.Outcome) + 1)
    tally.ends += [(outcome, (None, None, None), None, 0.0) for outcome in core.Outcome]
    assert tally.in_flight == 1, "before they are counted"
    tally.fold()
    assert tally.in_flight == 1
    assert (tally.finished, tally.failed, tally.cancelled) == (1, 1, len(core.Outcome) - 2)


async def test_ends_that_nobody_counts_are_bounded() -> None:
    world = World()
    decided = world.router.choose(await planned(world))
    for _ in range(core.MOST_ENDS + 5):
        world.router.fly(decided, "id").abandon()
    tally = world.router.demand.of("tiny")
    assert (tally.cancelled, len(tally.ends), tally.in_flight) == (core.MOST_ENDS, 5, 0)


async def test_a_tenant_over_its_limit_is_no_demand() -> None:
    """Replicas started for it would not be let do anything."""
    world = World(tenants=TenantsConfig(limits=core.TenantLimits(requests_per_s=1.0)))
    refused = 0
    for _ in range(80):
        try:
            await world.router.plan(asked(), Caller("greedy"))
        except Exhausted:
            refused += 1
    assert refused
    assert told(world)["tiny"].arrivals == 80 - refused


def test_a_policy_that_only_a_later_release_can_read_costs_nobody_the_model() -> None:
    world = World()
    written = scaling_pb2.ScalingPolicy(
        kind=scaling_pb2.SCALING_KIND_SLO, schedules=[scaling_pb2.ScalingSchedule(begins="sunrise", ends="23:00")]
    )
    deployed(world, scaling=written)
    assert world.view.deployed.serving("tiny") == ("tiny",)
    assert not world.view.deployed.wakes("tiny")
