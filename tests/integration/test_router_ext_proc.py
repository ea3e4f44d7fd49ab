"""The endpoint-picker protocol: through a real Envoy as the gateway, and spoken by a plain gRPC client."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stoker.api.envoy.v1 import ext_proc_pb2 as pb
from stoker.router.envoy import ext_proc
from stoker.router.envoy.flights import Flights
from tests.integration.test_router_openai_http import GREEDY, SLOW, Stack, stack
from tests.support.engines import FAST
from tests.support.envoy import running_gateway
from tests.support.waiting import eventually

EXT_PROC = "listen.ext_proc=127.0.0.1:0"
PICKED = "x-gateway-destination-endpoint"
PROMPT = "Once upon a time there was a stoker " * 30
MODES = ("BUFFERED", "FULL_DUPLEX_STREAMED")


@contextlib.asynccontextmanager
async def gateway(
    folder: Path, mode: str, *settings: str, args: tuple[str, ...] = FAST, count: int = 2
) -> AsyncIterator[tuple[Stack, str, Flights]]:
    async with (
        stack(folder, EXT_PROC, *settings, args=args, count=count) as running,
        running_gateway(running.app, [engine.url for engine in running.engines.values()], folder, mode) as url,
    ):
        assert running.app.ext_proc is not None
        yield running, url, running.app.ext_proc.flights


def idle(running: Stack, flights: Flights) -> bool:
    app = running.app
    return not len(flights) and not app.router.in_flight and not any(t.in_flight for t in app.view.targets.values())


# --- a real gateway ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_a_gateway_sends_requests_where_the_router_says(tmp_path: Path, mode: str) -> None:
    async with gateway(tmp_path, mode) as (running, url, flights):
        body = {**GREEDY, "prompt": PROMPT, "max_tokens": 3}
        _, _, direct = await running.post("/v1/completions", body)
        replicas = []
        for _ in range(4):
            async with running.http.post(f"{url}/v1/completions", json=body) as got:
                assert got.status == 200, await got.text()
                replicas.append(got.headers["x-stoker-replica"])
                assert (await got.json())["choices"][0]["text"] in direct.decode()
            await eventually(lambda: idle(running, flights), "released", 10.0)
        assert len(set(replicas)) == 1, "the same prefix goes home"
        served = running.app.router.recent.of(got.headers["x-request-id"])
        assert served is not None
        assert served.source == "tokens"


@pytest.mark.parametrize("mode", MODES)
async def test_a_stream_is_counted_as_long_as_it_lasts(tmp_path: Path, mode: str) -> None:
    async with gateway(tmp_path, mode, args=SLOW) as (running, url, flights):
        body = {**GREEDY, "prompt": "slowly", "max_tokens": 40, "ignore_eos": True, "stream": True}
        async with running.http.post(f"{url}/v1/completions", json=body) as got:
            first = await got.content.readany()
            assert running.app.router.in_flight == 1
            (flight,) = flights.now()
            assert flight.token_seen
            rest = await got.content.readany()
            assert len(flights) == 1
            assert (first + rest + await got.read()).endswith(b"data: [DONE]\n\n")
        await eventually(lambda: idle(running, flights), "released at its end", 10.0)


@pytest.mark.parametrize("mode", MODES)
async def test_a_client_that_goes_is_released(tmp_path: Path, mode: str) -> None:
    async with gateway(tmp_path, mode, args=SLOW) as (running, url, flights):
        body = {**GREEDY, "prompt": "gone", "max_tokens": 400, "ignore_eos": True, "stream": True}
        async with running.http.post(f"{url}/v1/completions", json=body) as got:
            await got.content.readany()
        await eventually(lambda: idle(running, flights), "released when the client left", 10.0)


@pytest.mark.parametrize("mode", MODES)
async def test_a_gateway_goes_on_with_the_next_engine_of_the_list(tmp_path: Path, mode: str) -> None:
    async with gateway(tmp_path, mode, "checks.interval_s=60") as (running, url, flights):
        body = {**GREEDY, "prompt": PROMPT, "max_tokens": 2}
        async with running.http.post(f"{url}/v1/completions", json=body) as got:
            home = got.headers["x-stoker-replica"]
        running.engines[home].process.kill()
        await running.engines[home].process.wait()
        async with running.http.post(f"{url}/v1/completions", json=body) as got:
            assert got.status == 200, await got.text()
        await eventually(lambda: idle(running, flights), "released", 10.0)


@pytest.mark.parametrize("mode", MODES)
async def test_a_client_cannot_choose_the_rank(tmp_path: Path, mode: str) -> None:
    async with gateway(tmp_path, mode, count=1) as (running, url, _):
        body, named = {**GREEDY, "prompt": "x", "max_tokens": 2}, {"x-data-parallel-rank": "7"}
        async with running.http.post(f"{url}/v1/completions", json=body, headers=named) as got:
            assert got.status == 200, await got.text()


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"model": "nobody", "prompt": "x"}, 404, b"model_not_found"),
        ({"model": "tiny", "prompt": "x", "max_tokens": 10_000_000}, 400, b"max_model_len"),
    ],
)
async def test_refusals_are_the_routers_own(tmp_path: Path, body: Any, status: int, says: bytes) -> None:
    async with gateway(tmp_path, "BUFFERED", count=1) as (running, url, flights):
        async with running.http.post(f"{url}/v1/completions", json=body) as got:
            assert (got.status, got.content_type) == (status, "application/json")
            assert says in await got.read()
        assert idle(running, flights)


# --- a plain client ----------------------------------------------------------------------------------------


class Gateway:
    """One request of a gateway of the test's own."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        call = channel.stream_stream(
            f"/{ext_proc.SERVICE}/Process",
            request_serializer=pb.Told.SerializeToString,
            response_deserializer=pb.Say.FromString,
        )
        self.stream: Any = call(timeout=30)

    async def tells(self, **piece: Any) -> None:
        await self.stream.write(pb.Told(**piece))

    async def hears(self) -> pb.Say:
        said = await asyncio.wait_for(self.stream.read(), 10)
        assert isinstance(said, pb.Say), await self.stream.details()
        return said

    async def asks(self, body: Any, mode: Any = pb.BODY_MODE_BUFFERED, **metadata: Any) -> pb.Say:
        context = pb.Metadata()
        for space, values in metadata.items():
            context.filter_metadata[space.replace("__", ".")].update(values)
        await self.tells(
            request_headers=headers(**{":method": "POST", ":path": "/v1/completions"}),
            metadata_context=context,
            protocol_config=pb.BodyModes(request_body_mode=mode),
        )
        if mode == pb.BODY_MODE_BUFFERED:
            assert (await self.hears()).WhichOneof("piece") == "request_headers"
        await self.tells(request_body=pb.Body(body=json.dumps(body).encode(), end_of_stream=True))
        return await self.hears()


def headers(**values: str) -> pb.Headers:
    return pb.Headers(
        headers=pb.HeaderMap(
            headers=[pb.Header(key=name, raw_value=value.encode()) for name, value in values.items()]
        )
    )


def header(change: pb.Change, name: str) -> str:
    for option in change.response.header_mutation.set_headers:
        if option.header.key == name:
            return option.header.raw_value.decode()
    return ""


@contextlib.asynccontextmanager
async def spoken(
    folder: Path, *settings: str, count: int = 3
) -> AsyncIterator[tuple[Stack, grpc.aio.Channel, Flights]]:
    async with stack(folder, EXT_PROC, *settings, count=count) as running:
        assert running.app.ext_proc is not None
        async with grpc.aio.insecure_channel(f"127.0.0.1:{running.app.ext_proc.port}") as channel:
            yield running, channel, running.app.ext_proc.flights


def addresses(running: Stack) -> dict[str, str]:
    return {engine.url.removeprefix("http://"): name for name, engine in running.engines.items()}


BODY = {**GREEDY, "prompt": PROMPT, "max_tokens": 2}


async def test_header_and_metadata_name_the_same_engines_in_order(tmp_path: Path) -> None:
    async with spoken(tmp_path) as (running, channel, flights):
        one = Gateway(channel)
        said = await one.asks(BODY)
        named = header(said.request_body, PICKED)
        assert said.request_body.response.clear_route_cache
        assert said.dynamic_metadata.fields["envoy.lb"].struct_value.fields[PICKED].string_value == named
        known = addresses(running)
        assert sorted(known[each] for each in named.split(",")) == sorted(known.values())
        home = known[named.split(",")[0]]
        assert running.app.view.targets[home].in_flight == 1
        await one.tells(response_headers=headers(**{":status": "200"}))
        answered = await one.hears()
        assert header(answered.response_headers, "x-stoker-replica") == home
        await one.stream.done_writing()
        await eventually(lambda: idle(running, flights), "released when the stream ends", 10.0)


async def test_the_engine_that_served_is_the_one_that_counts(tmp_path: Path) -> None:
    async with spoken(tmp_path) as (running, channel, flights):
        one = Gateway(channel)
        first, second, _ = header((await one.asks(BODY)).request_body, PICKED).split(",")
        known, targets = addresses(running), running.app.view.targets
        context = pb.Metadata()
        context.filter_metadata["envoy.lb"].update({"x-gateway-destination-endpoint-served": second})
        await one.tells(response_headers=headers(**{":status": "200"}), metadata_context=context)
        answered = await one.hears()
        assert header(answered.response_headers, "x-stoker-replica") == known[second]
        assert (targets[known[first]].in_flight, targets[known[second]].in_flight) == (0, 1)
        one.stream.cancel()
        await eventually(lambda: idle(running, flights), "released", 10.0)


async def test_a_subset_binds_and_an_empty_one_is_unavailable(tmp_path: Path) -> None:
    async with spoken(tmp_path) as (running, channel, flights):
        *_, last = addresses(running)
        for subset, wanted in (([last], last), ([], None), (["127.0.0.1:1"], None)):
            for _ in range(2):  # read anew, and recalled
                one = Gateway(channel)
                hint: Any = {"envoy__lb__subset_hint": {"x-gateway-destination-endpoint-subset": subset}}
                said = await one.asks(BODY, **hint)
                if wanted is None:
                    assert said.immediate_response.status.code == 503
                    assert b"no_replica" in said.immediate_response.body
                else:
                    assert header(said.request_body, PICKED) == wanted
                one.stream.cancel()
        await eventually(lambda: idle(running, flights), "released", 10.0)


async def test_what_has_to_be_dropped_gets_429_with_the_time_to_come_back(tmp_path: Path) -> None:
    async with spoken(tmp_path, "tenants.limits={requests_per_s: 0.1, burst_s: 10}", count=1) as (_, channel, _):
        await Gateway(channel).asks(BODY)
        refused = (await Gateway(channel).asks(BODY)).immediate_response
        assert refused.status.code == 429
        assert "retry-after" in {each.header.key.lower() for each in refused.headers.set_headers}


async def test_a_body_that_has_to_be_sent_back_comes_back_whole(tmp_path: Path) -> None:
    async with spoken(tmp_path, count=1) as (_, channel, _):
        one, body = Gateway(channel), {**BODY, "user": "u" * 200_000}
        said = await one.asks(body, pb.BODY_MODE_FULL_DUPLEX_STREAMED)
        assert header(said.request_headers, PICKED)
        sent, ended = b"", False
        while not ended:
            piece = (await one.hears()).request_body.response.body_mutation.streamed_response
            sent, ended = sent + piece.body, piece.end_of_stream
        assert json.loads(sent) == body


async def test_other_body_modes_and_orders_are_refused_and_nothing_is_held(tmp_path: Path) -> None:
    async with spoken(tmp_path, count=1) as (running, channel, flights):
        piecemeal = Gateway(channel)
        await piecemeal.tells(request_headers=headers(**{":method": "POST", ":path": "/v1/completions"}))
        await piecemeal.hears()
        await piecemeal.tells(request_body=pb.Body(body=b"{"))
        assert await piecemeal.stream.code() == grpc.StatusCode.UNIMPLEMENTED
        backwards = Gateway(channel)
        await backwards.tells(response_headers=headers(**{":status": "200"}))
        assert await backwards.stream.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert idle(running, flights)


async def test_health_is_told_by_the_names_of_the_protocol(tmp_path: Path) -> None:
    async with spoken(tmp_path, count=1) as (running, channel, _):
        stub: Any = health_pb2_grpc.HealthStub(channel)

        async def status(name: str) -> int:
            return int((await stub.Check(health_pb2.HealthCheckRequest(service=name))).status)

        names = ("liveness", "readiness", ext_proc.SERVICE)
        serving, resting = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        assert [await status(name) for name in names] == [serving] * 3
        assert running.app.ext_proc is not None
        await running.app.ext_proc.set_serving(False)
        assert [await status(name) for name in names] == [serving, resting, resting]
