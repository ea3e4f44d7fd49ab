"""Picked requests: counted while they are on their way, released on every path, and ticketed for their places."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stoker.api.registry.v1 import registry_pb2
from stoker.api.router.v1 import router_pb2
from stoker.common.blocks import block_keys, pack_keys, root_key
from stoker.common.errors import DeadlineExceeded, Exhausted, InvalidRequest, StokerError
from stoker.common.tickets import parse
from stoker.router.config import QueueConfig, TenantsConfig
from stoker.router.core import LoadLedger, Outcome, TenantLimits
from stoker.router.flights.tenants import Caller
from stoker.router.grpc.prompt import of_tokenized
from stoker.router.picking.calls import PickCalls
from stoker.router.picking.picks import Event
from stoker.router.server import RouterServer
from stoker.router.workers.siblings import Siblings
from tests.support.picking import LONGEST_S, SILENCE_S, UNHEARD_S, World, packed

KEYS = f"one {'0a' * 32}"


@pytest.fixture
def world() -> World:
    return World()


async def test_a_pick_names_its_replica_first_and_others_after_it(world: World) -> None:
    picked = await world.pick()
    names = [target.id for target in picked.places]
    assert names[0] == picked.decided.decision.replica
    assert sorted(names) == ["tiny-0", "tiny-1", "tiny-2"]
    assert picked.ticket == "", "no keys, no tickets"
    assert (picked.tokens, picked.cached_tokens) == (640, 0)
    assert world.fleet.load.load(names[0]) > 0
    assert len((await world.pick(alternatives=0)).places) == 1


async def test_a_ticket_is_for_the_places_and_the_amounts(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(KEYS)
    world = World(keys=path)
    picked = await world.pick(caller=Caller("acme"))
    ticket = parse("k", "k", KEYS).read(picked.ticket, world.wall, 0.0)
    assert ticket.places == tuple((target.id, 1) for target in picked.places)
    assert ticket.nonce.hex() == picked.pick_id
    assert (ticket.tenant, ticket.prompt_tokens, ticket.output_tokens) == ("acme", 640, 16)
    assert ticket.expires == world.wall + 10.0 == world.wall + picked.expires_in


async def test_a_pass_is_renewed_long_before_it_ends_and_when_keys_or_clock_change(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(KEYS)
    world = World(keys=path)
    first = world.signer.own_pass()
    assert parse("k", "k", KEYS).read(first, world.wall, 0.0).is_pass
    world.wall += 599
    assert world.signer.own_pass() == first
    world.wall += 2
    assert (second := world.signer.own_pass()) != first
    world.wall -= 7200
    assert world.signer.own_pass() != second
    assert World().signer.own_pass() == ""


@pytest.mark.parametrize("event", [Event.SERVED, Event.FAILED, Event.DROPPED])
async def test_an_end_releases_once(world: World, event: Event) -> None:
    picked = await world.pick()
    assert not world.idle()
    world.picks.tell(picked.pick_id, Event.FIRST_TOKEN)
    for _ in range(2):
        world.picks.tell(picked.pick_id, event)
    world.picks.undo(picked.pick_id)
    assert world.idle()


async def test_what_callers_say_of_success_is_weighed(world: World) -> None:
    """Nobody's word alone clears a replica's faults, ends its ejection, or says what its cache holds."""
    noted = world.router.confirmations._waiting
    health = world.fleet.health

    async def serve(*, first_token: bool = True, took: float = 10.0) -> str:
        picked = await world.pick(alternatives=0)
        if first_token:
            world.picks.tell(picked.pick_id, Event.FIRST_TOKEN)
        world.now += took
        world.picks.tell(picked.pick_id, Event.SERVED)
        assert world.idle()
        return picked.places[0].id

    home = await serve()
    assert len(noted) == 1
    noted.clear()
    health.observe(home, Outcome.FAULT, world.view.targets.keys(), world.now)
    for told in ({"first_token": False}, {"took": 0.0}):
        assert await serve(**told) == home
        assert not health.quiet, told
        assert not noted, told
    picked = await world.pick(alternatives=0)
    assert picked.places[0].id == home
    for _ in range(2):
        health.observe(home, Outcome.FAULT, world.view.targets.keys(), world.now)
    world.picks.tell(picked.pick_id, Event.FIRST_TOKEN)
    world.now += 1.0
    assert health.ejected(home, world.now)
    world.picks.tell(picked.pick_id, Event.SERVED)
    assert health.ejected(home, world.now)
    assert world.idle()
    world.now += 60.0
    assert await serve() == home
    assert health.quiet, "one that is credible clears the record"


async def test_a_pick_may_end_after_its_replica_has_left(world: World) -> None:
    picked = await world.pick()
    left = registry_pb2.Removals(replicas=[picked.places[0].record.replica_id])
    world.view.records(registry_pb2.Records(), left, now=world.now)
    world.picks.tell(picked.pick_id, Event.FIRST_TOKEN)
    world.picks.tell(picked.pick_id, Event.SERVED)
    assert world.idle()


async def test_a_pick_that_is_ready_after_its_deadline_is_given_back(world: World) -> None:
    server = RouterServer(world.router, PickCalls(world.router, world.picker), Siblings.alone())
    prompt = router_pb2.TokenizedPrompt(model="tiny", token_ids=packed(64), max_tokens=1)
    late = SimpleNamespace(invocation_metadata=lambda: (), time_remaining=lambda: -0.01)
    with pytest.raises(DeadlineExceeded):
        await server.Pick(router_pb2.PickRequest(tokenized=prompt), cast(Any, late))
    assert world.idle()
    for left in (1.0, None):
        there = SimpleNamespace(invocation_metadata=lambda: (), time_remaining=lambda left=left: left)
        await server.Pick(router_pb2.PickRequest(tokenized=prompt), cast(Any, there))
    assert len(world.picks) == 2


async def test_reports_come_in_bounded_numbers(world: World) -> None:
    picked = await world.pick()
    server = RouterServer(world.router, PickCalls(world.router, world.picker), Siblings.alone())
    told = router_pb2.PickReport(pick_id=picked.pick_id, event=router_pb2.PICK_EVENT_DROPPED)
    with pytest.raises(InvalidRequest) as refused:
        await server.ReportPicks(router_pb2.ReportPicksRequest(reports=[told] * 10_001), cast(Any, None))
    assert refused.value.fields[0].field == "reports"
    assert not world.idle()
    await server.ReportPicks(router_pb2.ReportPicksRequest(reports=[told] * 10_000), cast(Any, None))
    assert world.idle()


async def test_nobody_ends_anothers(world: World) -> None:
    await world.pick()
    world.picks.tell("0" * 24, Event.SERVED)
    world.picks.tell("", Event.MOVED, 1)
    assert len(world.picks) == 1


async def test_nobody_keeps_a_pick_alive_for_longer_than_a_request_may_take(world: World) -> None:
    picked = await world.pick()
    while world.now < 100.0 + LONGEST_S:
        assert len(world.picks) == 1
        world.picks.tell(picked.pick_id, Event.ALIVE)
        world.now += SILENCE_S / 2
        world.picks.sweep()
    assert world.idle()


async def test_a_first_token_ends_the_prefill(world: World) -> None:
    picked = await world.pick()
    home = picked.places[0].id
    before = world.fleet.load.load(home)
    for _ in range(2):
        world.picks.tell(picked.pick_id, Event.FIRST_TOKEN)
    assert world.fleet.load.load(home) == pytest.approx(before - 640)


async def test_a_caller_who_says_nothing_is_given_up_at_the_tickets_end(world: World) -> None:
    await world.pick()
    world.now += UNHEARD_S - 0.1
    world.picks.sweep()
    assert len(world.picks) == 1
    world.now += 0.1
    world.picks.sweep()
    assert world.idle()


async def test_each_word_holds_a_pick_for_longer(world: World) -> None:
    picked = await world.pick()
    for _ in range(4):
        world.now += SILENCE_S - 1
        world.picks.tell(picked.pick_id, Event.ALIVE)
        world.picks.sweep()
    assert len(world.picks) == 1
    world.now += SILENCE_S
    world.picks.sweep()
    assert world.idle()


async def test_a_pick_that_goes_elsewhere_is_counted_there(world: World) -> None:
    picked = await world.pick()
    first, second = (target.id for target in picked.places[:2])
    world.picks.tell(picked.pick_id, Event.MOVED, 1)
    assert world.fleet.load.load(first) == 0
    assert world.fleet.load.load(second) > 0
    assert world.fleet.load.in_flight == 1
    world.picks.tell(picked.pick_id, Event.MOVED, 9)
    world.picks.tell(picked.pick_id, Event.MOVED, -1)
    world.picks.tell(picked.pick_id, Event.MOVED, 1)
    assert world.view.targets[second].in_flight == 1
    world.picks.tell(picked.pick_id, Event.SERVED)
    assert world.idle()


async def test_a_pick_that_goes_where_nothing_serves_any_more_is_released(world: World) -> None:
    picked = await world.pick()
    second = picked.places[1]
    second.reachable = False
    world.view.pools["tiny"].announce(second)
    world.picks.tell(picked.pick_id, Event.MOVED, 1)
    assert world.idle()


async def test_one_caller_cannot_take_out_the_whole_fleet(world: World) -> None:
    for number in range(60):
        picked = await world.pick(first=1000 * number)
        world.picks.tell(picked.pick_id, Event.FAILED)
    out = [name for name in world.view.targets if world.fleet.health.ejected(name, world.now)]
    assert len(out) <= 1


async def test_limits_and_bounds_are_those_of_relayed_requests() -> None:
    world = World(
        max_in_flight=2, tenants=TenantsConfig(named={"small": TenantLimits(requests_per_s=1.0, burst_s=1.0)})
    )
    await world.pick(caller=Caller("small"))
    with pytest.raises(Exhausted) as limited:
        await world.pick(caller=Caller("small"))
    assert limited.value.reason == "TENANT_LIMIT"
    assert limited.value.retry_after_s
    await world.pick()
    with pytest.raises(Exhausted) as full:
        await world.pick()
    assert full.value.reason == "TOO_MANY_REQUESTS"
    world.picks.close()
    assert world.idle()


async def test_a_pick_waits_for_room_as_long_as_its_caller_lets_it() -> None:
    world = World(replicas=1, queue=QueueConfig(longest_s=5.0))
    await world.pick(10_000)
    with pytest.raises(Exhausted) as held:
        await world.pick(first=50_000, wait_s=0.0)
    assert held.value.reason == "HELD"
    assert held.value.retry_after_s is not None
    assert held.value.retry_after_s >= 0.1
    world.picks.close()
    assert world.idle()
    assert not len(world.router.turns)


async def test_keys_are_those_that_tokens_would_have_given(world: World) -> None:
    tokens = list(range(100))
    keys = block_keys(tokens, 32, root_key("tiny", cache_salt="salt"))
    by_keys = router_pb2.TokenizedPrompt(
        model="tiny", block_keys=pack_keys(keys), prompt_tokens=100, block_size=32, max_tokens=4, cache_salt="salt"
    )
    by_tokens = router_pb2.TokenizedPrompt(model="tiny", token_ids=packed(100), max_tokens=4, cache_salt="salt")
    one, two = [await world.router.plan(of_tokenized(asked)) for asked in (by_keys, by_tokens)]
    assert list(one.request.keys) == list(two.request.keys) == keys
    assert one.tokens == two.tokens == 100
    assert one.source == "tokens"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"token_ids": b"123"}, "token_ids"),
        ({"token_ids": b""}, "token_ids"),
        ({}, "tokenized.prompt"),
        ({"block_keys": b"1234"}, "keys"),
        ({"block_keys": b"", "prompt_tokens": 0, "block_size": 32}, "prompt_tokens"),
        ({"block_keys": b"", "prompt_tokens": 32, "block_size": 32}, "block_keys"),
        ({"block_keys": b"12345678", "prompt_tokens": 32, "block_size": 16}, "block_size"),
        ({"token_ids": packed(20_000)}, "input_tokens"),
        ({"block_keys": bytes(8 * 1_000_001), "prompt_tokens": 20_000, "block_size": 32}, "block_keys"),
        ({"block_keys": b"12345678", "prompt_tokens": 20_000, "block_size": 32}, "input_tokens"),
    ],
)
async def test_what_cannot_be_picked_names_its_field(world: World, fields: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await world.router.plan(of_tokenized(router_pb2.TokenizedPrompt(model="tiny", **fields)))  # type: ignore[arg-type]
    assert [violation.field for violation in refused.value.fields] == [field]
    with pytest.raises(StokerError):
        of_tokenized(router_pb2.TokenizedPrompt(token_ids=packed(4)))


def test_a_request_left_to_reports_is_counted_once_and_not_for_ever() -> None:
    ledger = LoadLedger()
    unreported = ledger.dispatch("a", 100, 10, 1.0)
    ledger.hand_over(unreported, 2.0)
    assert (ledger.load("a"), ledger.in_flight) == (0, 0), "no report since: released"
    seen = ledger.dispatch("a", 100, 10, 3.0)
    ledger.report("a", 500, seen_at=4.0)
    ledger.hand_over(seen, 5.0)
    ledger.hand_over(seen, 5.1)
    assert (ledger.load("a"), ledger.own("a"), ledger.in_flight) == (500, 0, 0), "the report has it"
    ledger.report("a", 0, seen_at=6.0)
    assert ledger.load("a") == 0
