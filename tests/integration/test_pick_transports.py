"""Pick by gRPC and by the Connect protocol: the same calls, answers and errors, before one router's picking side."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from stoker.api.inference.v1 import inference_pb2
from stoker.api.router.v1 import router_pb2, router_pb2_grpc
from stoker.client import ClientSettings
from stoker.client.deadline import Deadline
from stoker.client.routers import MODELS, PICK, REPORT, Routers
from stoker.common.blocks import block_keys, pack_keys, root_key
from stoker.common.channels import Channels
from stoker.common.errors import Code, StokerError
from stoker.common.rpc import RpcServer
from stoker.router import metrics
from stoker.router.config import LimitsConfig, TenantsConfig
from stoker.router.core import TenantLimits
from stoker.router.http.port import Port
from stoker.router.picking.calls import PickCalls
from stoker.router.picking.routes import PickRoutes, refused
from stoker.router.server import RouterServer
from stoker.router.workers.siblings import Siblings
from tests.support.etcd import free_port
from tests.support.picking import World, packed
from tests.support.waiting import eventually

TRANSPORTS = ("grpc", "http")
LIMITS = LimitsConfig(max_body_bytes=1024 * 1024)


@dataclass
class Site:
    """One picking side, and who calls it by one transport."""

    world: World
    address: str
    routers: Routers
    port: Port

    async def call(self, request: Any, seconds: float = 10.0, **metadata: str) -> Any:
        method = REPORT if isinstance(request, router_pb2.ReportPicksRequest) else PICK
        named = [(name.replace("_", "-"), value) for name, value in metadata.items()]
        return await self.routers.call(self.address, method, request, seconds, named)

    async def refusal(self, request: Any, seconds: float = 10.0, **metadata: str) -> StokerError:
        with pytest.raises(StokerError) as refused:
            await self.call(request, seconds, **metadata)
        return refused.value


@contextlib.asynccontextmanager
async def site(transport: str, **world: Any) -> AsyncIterator[Site]:
    """Served by both; asked by one."""
    picking = World(clock=time.monotonic, **world)
    calls = PickCalls(picking.router, picking.picker)
    server = RpcServer.bind("127.0.0.1:0", ())
    router_pb2_grpc.add_RouterServiceServicer_to_server(
        RouterServer(picking.router, calls, Siblings.alone()), server.server
    )
    await server.start()
    routes = PickRoutes(picking.router, calls, LIMITS)
    port = Port("x", "127.0.0.1:0", routes.answer, LIMITS, time.monotonic, example="", refuse=refused)
    await port.start()
    channels = Channels()
    addresses = {"grpc": f"127.0.0.1:{server.port}", "http": f"http://127.0.0.1:{port.number}"}
    routers = Routers([addresses[transport]], channels, ClientSettings(), random.Random(1))
    try:
        yield Site(picking, addresses[transport], routers, port)
    finally:
        await routers.close()
        await channels.close()
        port.close()
        await server.stop(0)


def tokens(count: int = 64, first: int = 0, **more: Any) -> router_pb2.PickRequest:
    prompt = router_pb2.TokenizedPrompt(model="tiny", token_ids=packed(count, first), max_tokens=8)
    return router_pb2.PickRequest(tokenized=prompt, **more)


def generate(**fields: Any) -> router_pb2.PickRequest:
    return router_pb2.PickRequest(request=inference_pb2.GenerateRequest(model="tiny", **fields))


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_prompt_in_every_form_is_picked_for(transport: str) -> None:
    keys = pack_keys(block_keys(range(64), 32, root_key("tiny")))
    by_keys = router_pb2.TokenizedPrompt(model="tiny", block_keys=keys, prompt_tokens=64, block_size=32)
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content=[{"text": "Coal?"}])])  # type: ignore[list-item]
    async with site(transport) as here:
        for request in (
            tokens(),
            router_pb2.PickRequest(tokenized=by_keys),
            generate(text="Coal?"),
            generate(token_ids=inference_pb2.TokenIds(ids=range(64))),
            generate(chat=chat),
        ):
            answer = await here.call(request)
            assert [place.replica_id for place in answer.places][1:], request
            assert answer.pick_id
        assert len(here.world.picks) == 5
        counted = await here.call(tokens(alternatives=0))
        assert (counted.prompt_tokens, counted.predicted_cached_tokens, len(counted.places)) == (64, 61, 1), (
            "speculation is credited by 0.95"
        )
        assert counted.expires_in_ms == 10_000


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_reports_end_picks(transport: str) -> None:
    async with site(transport) as here:
        answer = await here.call(tokens())
        assert not here.world.idle()
        told = [
            router_pb2.PickReport(pick_id=answer.pick_id, event=event)
            for event in (router_pb2.PICK_EVENT_FIRST_TOKEN, router_pb2.PICK_EVENT_SERVED)
        ]
        await here.call(router_pb2.ReportPicksRequest(reports=told))
        assert here.world.idle()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("request_", "code", "reason", "field"),
    [
        (router_pb2.PickRequest(), Code.INVALID_ARGUMENT, "INVALID_REQUEST", "subject"),
        (tokens(20_000), Code.INVALID_ARGUMENT, "INVALID_REQUEST", "input_tokens"),
        (generate(), Code.INVALID_ARGUMENT, "INVALID_REQUEST", "prompt"),
        (
            router_pb2.PickRequest(tokenized=router_pb2.TokenizedPrompt(model="nobody", token_ids=packed(8))),
            Code.NOT_FOUND,
            "MODEL_NOT_FOUND",
            None,
        ),
        (
            router_pb2.ReportPicksRequest(reports=[router_pb2.PickReport(pick_id="x")] * 10_001),
            Code.INVALID_ARGUMENT,
            "INVALID_REQUEST",
            "reports",
        ),
    ],
    ids=["nothing", "too long", "no prompt", "no model", "too many reports"],
)
async def test_what_is_wrong_has_the_same_name(
    transport: str, request_: Any, code: Code, reason: str, field: str | None
) -> None:
    async with site(transport) as here:
        error = await here.refusal(request_)
        assert (error.code, error.reason) == (code, reason)
        assert [each.field for each in error.fields] == ([field] if field else [])
        assert error.message
        assert here.world.idle()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_limits_and_their_delays_are_told(transport: str) -> None:
    limits = TenantsConfig(named={"small": TenantLimits(requests_per_s=0.5, burst_s=2.0)})
    async with site(transport, tenants=limits) as here:
        await here.call(tokens(), x_stoker_tenant="small")
        limited = await here.refusal(tokens(), x_stoker_tenant="small")
        assert (limited.code, limited.reason) == (Code.RESOURCE_EXHAUSTED, "TENANT_LIMIT")
        assert 0 < (limited.retry_after_s or 0) <= 2
        named = await here.refusal(tokens(), x_stoker_policy="astrology")
        assert [each.field for each in named.fields] == ["x-stoker-policy"]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_who_may_not_wait_is_held_and_who_waits_is_released_when_it_gives_up(transport: str) -> None:
    before = metrics.of(metrics.REQUESTS, "pick", "cancelled")._value.get()
    async with site(transport, replicas=1) as here:
        first = await here.call(tokens(10_000))
        held = await here.refusal(tokens(first=50_000, max_wait_ms=0))
        assert (held.code, held.reason) == (Code.RESOURCE_EXHAUSTED, "HELD")
        waiting = asyncio.create_task(here.call(tokens(first=50_000)))
        await eventually(lambda: len(here.world.router.turns) == 1, "it waits")
        waiting.cancel()
        await eventually(lambda: len(here.world.router.turns) == 0, "who gives up is let go at once")
        assert len(here.world.picks) == here.world.router.in_flight == 1
        late = await here.refusal(tokens(first=50_000), seconds=0.2)
        assert late.code is Code.DEADLINE_EXCEEDED
        await eventually(lambda: here.world.router.in_flight == 1, "released")
        report = router_pb2.PickReport(pick_id=first.pick_id, event=router_pb2.PICK_EVENT_SERVED)
        await here.call(router_pb2.ReportPicksRequest(reports=[report]))
        assert here.world.idle()
    assert metrics.of(metrics.REQUESTS, "pick", "cancelled")._value.get() > before


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_who_waits_is_served_when_there_is_room(transport: str) -> None:
    async with site(transport, replicas=1) as here:
        first = await here.call(tokens(10_000))
        waiting = asyncio.create_task(here.call(tokens(first=50_000)))
        await eventually(lambda: len(here.world.router.turns) == 1, "it waits")
        report = router_pb2.PickReport(pick_id=first.pick_id, event=router_pb2.PICK_EVENT_SERVED)
        await here.call(router_pb2.ReportPicksRequest(reports=[report]))
        assert (await waiting).places[0].replica_id == "tiny-0"


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_router_that_is_not_there_is_passed_over(transport: str) -> None:
    async with site(transport) as here:
        nobody = ("http://" if transport == "http" else "") + f"127.0.0.1:{free_port()}"
        for seed in range(4):
            channels = Channels()
            routers = Routers([nobody, here.address], channels, ClientSettings(), random.Random(seed))
            router, answer = await routers.ask(routers.pickers, PICK, tokens(), Deadline(5))
            assert router == here.address
            assert answer.places
            await routers.close()
            await channels.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_method_that_is_not_served_is_unimplemented(transport: str) -> None:
    async with site(transport) as here:
        with pytest.raises(StokerError) as refused_:
            await here.routers.call(here.address, MODELS, inference_pb2.ListModelsRequest(), 5)
        assert refused_.value.code is Code.UNIMPLEMENTED


async def test_a_kept_connection_that_was_closed_meanwhile_costs_no_call() -> None:
    async with site("http") as here:
        await here.call(tokens())
        for connection in list(here.port.connections.open):
            connection.abort()
        answers = await asyncio.gather(*(here.call(tokens()) for _ in range(3)))
        assert len({answer.pick_id for answer in answers}) == 3


async def test_json_says_the_same() -> None:
    async with site("http") as here, aiohttp.ClientSession(here.address) as http:
        path = "/stoker.api.router.v1.RouterService"
        body = {"request": {"model": "tiny", "text": "Coal?", "requestId": "mine"}, "unknown": 1}
        async with http.post(f"{path}/Pick", json=body) as answer:
            assert (answer.status, answer.content_type) == (200, "application/json")
            said = await answer.json()
        assert said["requestId"] == "mine"
        assert said["places"][0]["agentEndpoint"].endswith(":7330")
        told = {"reports": [{"pickId": said["pickId"], "event": "PICK_EVENT_DROPPED"}]}
        async with http.post(f"{path}/ReportPicks", json=told) as answer:
            assert (answer.status, await answer.json()) == (200, {})
        assert here.world.idle()
        async with http.post(f"{path}/Pick", json={"request": {"model": "nobody", "text": "x"}}) as answer:
            assert answer.status == 404
            refusal = await answer.json()
        assert (refusal["code"], refusal["details"][0]["type"]) == ("not_found", "google.rpc.ErrorInfo")
