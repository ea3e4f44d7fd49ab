"""stoker.client before a real registry, a real agent with simulated engines, and a router: with tickets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
import pytest_asyncio

from stoker.api.inference.v1 import inference_pb2, inference_pb2_grpc
from stoker.api.router.v1 import router_pb2, router_pb2_grpc
from stoker.client import AsyncClient, Client, ClientSettings, Generation, Interrupted
from stoker.common import rpc
from stoker.common.errors import InvalidRequest, NotFound, StokerError, Unavailable
from stoker.common.tickets import HEADER
from tests.support.etcd import EtcdServer, free_port
from tests.support.fleet import Fleet, running_fleet
from tests.support.picking import packed
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

BY = pytest.mark.parametrize("by", ["grpc", "http"])
PROMPT = "The boiler wants coal. " * 20


@dataclass
class Site:
    """A fleet whose nodes ask for tickets."""

    fleet: Fleet
    keys: Path

    @property
    def router(self) -> str:
        return f"127.0.0.1:{self.fleet.router.rpc.port}"

    @property
    def http(self) -> str:
        endpoint = self.fleet.router.pick_http
        assert endpoint is not None
        return f"http://127.0.0.1:{endpoint.number}"

    def routers(self, by: str) -> list[str]:
        """As a client is told of them that picks by gRPC or by HTTP."""
        return [self.http, self.router] if by == "http" else [self.router]

    def idle(self) -> bool:
        app = self.fleet.router
        return not (app.router.in_flight or len(app.picks) or app.view.pools["tiny"].fleet.load.in_flight)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory, etcd: EtcdServer) -> AsyncIterator[Site]:
    folder = tmp_path_factory.mktemp("client")
    keys = folder / "ticket-keys"
    keys.write_text(f"one {'0a' * 32}\n")
    async with running_fleet(
        folder,
        etcd,
        settings=[f"tickets.keys={keys}", "listen.pick=127.0.0.1:0"],
        agent_settings=[f"tickets.keys={keys}"],
    ) as fleet:
        yield Site(fleet, keys)


@BY
async def test_a_request_goes_straight_to_the_node_that_was_picked(site: Site, by: str) -> None:
    async with AsyncClient(site.routers(by)) as client:
        first = await client.generate("tiny", by + PROMPT, max_tokens=5, ignore_eos=True, request_id="mine")
        assert first.usage.completion_tokens == 5
        assert first.text
        assert (first.served.relayed, first.served.request_id, first.served.reason) == (False, "mine", "ring")
        target = site.fleet.router.view.targets[first.served.replica_id]
        await eventually(lambda: target.known_blocks > 0, "the digest of what was served")
        again = await client.generate("tiny", by + PROMPT, max_tokens=5, ignore_eos=True)
        assert (again.served.replica_id, again.served.reason) == (first.served.replica_id, "exact")
        assert again.usage.cached_prompt_tokens == again.served.predicted_cached_tokens
        await eventually(site.idle, "the router hears of the ends")


@BY
async def test_tokens_chat_and_text_have_the_same_way(site: Site, by: str) -> None:
    async with AsyncClient(site.routers(by)) as client:
        by_tokens = await client.generate("tiny", list(range(10, 80)), max_tokens=3, ignore_eos=True)
        assert by_tokens.usage.prompt_tokens == 70
        chat = [{"role": "system", "content": "You stoke."}, {"role": "user", "content": "Coal?"}]
        by_chat = await client.generate("tiny", chat, max_tokens=3, ignore_eos=True)
        assert by_chat.usage.completion_tokens == 3
        assert [model.id for model in await client.models()] == ["tiny"]


@BY
async def test_leaving_a_stream_frees_the_engine_and_the_router(site: Site, by: str) -> None:
    async with AsyncClient(site.routers(by)) as client:
        async with client.stream("tiny", PROMPT, max_tokens=8_000, ignore_eos=True) as stream:
            chunk = await anext(stream)
            assert stream.served is not None
            assert chunk.index == 0
        await eventually(site.idle, "released")

        async def none_left() -> bool:
            url = site.fleet.router.view.targets[stream.served.replica_id].url  # type: ignore[union-attr]
            async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as answer:
                lines = (await answer.text()).splitlines()
            return any(line.startswith("vllm:num_requests_running") and line.endswith(" 0.0") for line in lines)

        await eventually(none_left, "the engine stops within a second or so", 60)


async def test_a_deadline_ends_a_stream_and_says_what_came(site: Site) -> None:
    async with AsyncClient([site.router]) as client:
        stream = client.stream("tiny", PROMPT, max_tokens=8_000, ignore_eos=True, timeout_s=1.0)
        first = await anext(stream)
        with pytest.raises(Interrupted) as late:
            await stream.rest()
        assert late.value.reason == "DEADLINE_EXCEEDED"
        assert late.value.text[0].startswith(first.text)
        assert len(late.value.text[0]) > len(first.text)
        await eventually(site.idle, "released")


@BY
async def test_what_is_wrong_is_said_by_kind(site: Site, by: str) -> None:
    async with AsyncClient(site.routers(by)) as client:
        with pytest.raises(NotFound) as unknown:
            await client.generate("nobody", "x")
        assert unknown.value.reason == "MODEL_NOT_FOUND"
        with pytest.raises(InvalidRequest):
            await client.generate("tiny", "x", warmth=3)
        with pytest.raises(InvalidRequest):
            await client.generate("tiny", "x", temperature=-5, max_tokens=1)
        with pytest.raises(InvalidRequest):
            await client.generate("tiny", list(range(20_000)), max_tokens=1)
    with pytest.raises(InvalidRequest):
        AsyncClient([])
    await eventually(site.idle, "released")


async def test_another_router_is_asked_where_one_does_not_answer(site: Site) -> None:
    for _ in range(3):
        async with AsyncClient([f"127.0.0.1:{free_port()}", site.router]) as client:
            assert (await client.generate("tiny", "x", max_tokens=1)).served.relayed is False
    async with AsyncClient([f"127.0.0.1:{free_port()}"]) as client:
        with pytest.raises(Unavailable, match="connect"):
            await client.generate("tiny", "x", max_tokens=1)


@BY
async def test_through_the_router_where_no_node_can_be_reached(site: Site, by: str) -> None:
    """The agents' addresses lead nowhere for this client; relayed requests carry the router's own pass."""
    async with AsyncClient(site.routers(by), ClientSettings(direct=False)) as relaying:
        assert (await relaying.generate("tiny", "x", max_tokens=1)).served.relayed
    async with AsyncClient(site.routers(by)) as client:
        nowhere = f"127.0.0.1:{free_port()}"
        real = client._ways._channels.to
        agent = site.fleet.agent.endpoint
        client._ways._channels.to = lambda endpoint: real(nowhere if endpoint == agent else endpoint)  # type: ignore[method-assign]
        for _ in range(2):
            served = (await client.generate("tiny", "x", max_tokens=1)).served
            assert served.relayed
        await eventually(site.idle, "what was picked and not used is given back")
        health = site.fleet.router.view.pools["tiny"].fleet.health
        assert health.quiet, "no replica is blamed for the client's network"


@BY
async def test_a_client_for_threads(site: Site, by: str) -> None:
    def use() -> tuple[str, Generation, int]:
        with Client(site.routers(by)) as client:
            with client.stream("tiny", PROMPT, max_tokens=4, ignore_eos=True) as stream:
                text = "".join(chunk.text for chunk in stream)
            assert stream.usage is not None
            assert stream.usage.completion_tokens == 4
            with client.stream("tiny", PROMPT, max_tokens=8_000, ignore_eos=True) as left:
                next(left)
            with pytest.raises(NotFound):
                client.generate("nobody", "x")
            return text, client.generate("tiny", PROMPT, max_tokens=4, ignore_eos=True), len(client.models())

    text, whole, models = await asyncio.to_thread(use)
    assert text
    assert whole.text
    assert not whole.served.relayed
    assert models == 1
    await eventually(site.idle, "released")


# --- tickets, as the node sees them ---------------------------------------------------------------------------


async def picked(site: Site, tokens: int = 8, max_tokens: int = 2, alternatives: int = 2) -> router_pb2.PickResponse:
    async with rpc.channel(site.router) as channel:
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)
        prompt = router_pb2.TokenizedPrompt(model="tiny", token_ids=packed(tokens, 10), max_tokens=max_tokens)
        answer: router_pb2.PickResponse = await stub.Pick(
            router_pb2.PickRequest(tokenized=prompt, alternatives=alternatives), timeout=10
        )
    return answer


async def at_the_node(site: Site, replica_id: str, ticket: str, max_tokens: int = 2) -> str:
    request = inference_pb2.GenerateRequest(
        model="tiny",
        token_ids=inference_pb2.TokenIds(ids=range(10, 18)),
        sampling=inference_pb2.Sampling(max_tokens=max_tokens),
        replica_id=replica_id,
    )
    async with rpc.channel(site.fleet.agent.endpoint) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        metadata = [(HEADER, ticket)] if ticket else []
        try:
            async for _ in stub.Generate(request, timeout=10, metadata=metadata):
                pass
        except grpc.aio.AioRpcError as error:
            return rpc.error_from(error).reason
    return "OK"


async def test_a_node_takes_what_was_picked_and_nothing_else(site: Site) -> None:
    pick = await picked(site)
    here, ticket = pick.places[0], pick.ticket
    assert await at_the_node(site, here.replica_id, "") == "TICKET_MISSING"
    assert await at_the_node(site, here.replica_id, ticket[:-4] + "AAA=") == "TICKET_INVALID"
    assert await at_the_node(site, here.replica_id, ticket, max_tokens=3) == "TICKET_EXCEEDED"
    pick = await picked(site)
    here, there = pick.places
    assert await at_the_node(site, here.replica_id, pick.ticket) == "OK"
    assert await at_the_node(site, here.replica_id, pick.ticket) == "TICKET_USED"
    alone = await picked(site, alternatives=0)
    other = next(place for place in (here, there) if place.replica_id != alone.places[0].replica_id)
    assert await at_the_node(site, other.replica_id, alone.ticket) == "TICKET_WRONG_REPLICA"
    site.fleet.router.picks.close()


# --- over HTTP ------------------------------------------------------------------------------------------------


async def test_a_pick_of_the_openai_body_that_will_be_sent(site: Site) -> None:
    async with aiohttp.ClientSession(site.http) as http:
        body = {"model": "tiny", "prompt": list(range(10, 18)), "max_tokens": 2}
        async with http.post("/pick", json=body, headers={"x-request-id": "by-http"}) as answer:
            assert answer.status == 200
            pick = await answer.json()
        assert pick["request_id"] == "by-http"
        assert pick["prompt_tokens"] == 8
        assert await at_the_node(site, pick["places"][0]["replica_id"], pick["ticket"]) == "OK"
        told = [{"pick_id": pick["pick_id"], "event": event} for event in ("first_token", "served")]
        async with http.post("/picks", data=json.dumps(told)) as answer:
            assert answer.status == 200
    assert site.idle()


async def test_without_a_grpc_address_nothing_is_relayed_and_that_is_said(site: Site) -> None:
    async with AsyncClient([site.http]) as client:
        assert not (await client.generate("tiny", "x", max_tokens=1)).served.relayed
        with pytest.raises(StokerError, match="by gRPC alone"):
            await client.models()
        nowhere = f"127.0.0.1:{free_port()}"
        real = client._ways._channels.to
        client._ways._channels.to = lambda endpoint: real(nowhere)  # type: ignore[method-assign]
        for _ in range(2):
            with pytest.raises(Unavailable, match="connect"):
                await client.generate("tiny", "x", max_tokens=1)
    await eventually(site.idle, "released")
    for address in ("ftp://r1:7382", "http://r1:7382/path", "http://"):
        with pytest.raises(InvalidRequest):
            AsyncClient([address])


@pytest.mark.parametrize("closes", ["asked to", "by itself"])
async def test_a_pick_outlives_the_connection_that_it_was_asked_on(site: Site, closes: str) -> None:
    headers = {"connection": "close"} if closes == "asked to" else {}
    async with (
        aiohttp.ClientSession(site.http, headers=headers) as http,
        http.post("/pick", json={"model": "tiny", "prompt": "x", "max_tokens": 2}) as answer,
    ):
        pick = await answer.json()
    endpoint = site.fleet.router.pick_http
    assert endpoint is not None
    await eventually(lambda: not endpoint.connections.open, "its connection is closed")
    assert len(site.fleet.router.picks) == 1, "its request is on its way"
    async with aiohttp.ClientSession(site.http) as http:
        await http.post("/picks", json=[{"pick_id": pick["pick_id"], "event": "served"}])
    assert site.idle()


@pytest.mark.parametrize(
    ("path", "body", "kind", "status", "code"),
    [
        ("/pick", b"{", "application/json", 400, "invalid_request"),
        ("/pick", b'{"model": "nobody", "prompt": "x"}', "application/json", 404, "model_not_found"),
        ("/pick", b"\xff", "application/json", 400, "invalid_request"),
        ("/picks", b'[{"pick_id": "x", "event": "exploded"}]', "application/json", 400, "invalid_request"),
        (
            "/picks",
            b'[{"pick_id": "x", "event": "moved", "place": %d}]' % 2**70,
            "application/json",
            400,
            "invalid_request",
        ),
        ("/else", b"", "application/json", 404, "not_found"),
    ],
)
async def test_what_http_refuses(site: Site, path: str, body: bytes, kind: str, status: int, code: str) -> None:
    async with (
        aiohttp.ClientSession(site.http) as http,
        http.post(path, data=body, headers={"content-type": kind}) as answer,
    ):
        assert answer.status == status
        assert (await answer.json())["error"]["code"] == code
    assert site.idle()
