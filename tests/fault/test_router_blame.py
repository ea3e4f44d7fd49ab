"""Whose fault is it? A caller who is slow, or in a hurry, says nothing of the replica that serves it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import grpc
import pytest
from aiohttp import web

from stoker.api.inference.v1 import inference_pb2, inference_pb2_grpc
from stoker.common import rpc
from stoker.router import metrics
from stoker.router.app import RouterApp
from tests.support.router import replica, running_router, tell
from tests.support.waiting import eventually, forever

pytestmark = pytest.mark.fault

Engine = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def router_before(engine: Engine, *settings: str, agent: str = "") -> AsyncIterator[RouterApp]:
    """A router with one replica, whose engine is healthy and answers as given."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response() if request.path == "/health" else await engine(request)

    server = await asyncio.get_running_loop().create_server(web.Server(handle), "127.0.0.1", 0)
    try:
        async with running_router("parity=false", *settings) as app:
            port = server.sockets[0].getsockname()[1]
            tell(app, replica("tiny-0", f"http://127.0.0.1:{port}", agent=agent))
            yield app
    finally:
        server.close()


async def endless(request: web.BaseRequest) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    with contextlib.suppress(ConnectionError):
        while True:
            await answer.write(b"data: " + b"x" * 65_536 + b"\n\n")
    return answer


async def test_a_reader_who_stands_still_is_cut_off_and_blames_nobody() -> None:
    async with router_before(endless, "limits.idle_s=0.3") as app:
        fleet = app.view.pools["tiny"].fleet
        body = json.dumps({"model": "tiny", "prompt": "x", "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        for _ in range(4):
            with socket.create_connection(("127.0.0.1", app.http_port)) as client:
                client.setblocking(False)
                await asyncio.get_running_loop().sock_sendall(client, head + body)
                await eventually(lambda: app.router.in_flight == 1, "it is under way")
                await eventually(lambda: app.router.in_flight == 0, "the reader is cut off")
        assert fleet.load.in_flight == 0
        assert fleet.health.quiet


async def test_an_engine_that_falls_silent_is_blamed() -> None:
    async def silent(request: web.BaseRequest) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b"data: {}\n\n")
        await forever()

    async with router_before(silent, "limits.idle_s=0.3") as app, aiohttp.ClientSession() as http:
        body = {"model": "tiny", "prompt": "x", "stream": True}
        async with http.post(f"http://127.0.0.1:{app.http_port}/v1/completions", json=body) as answer:
            assert b"error" in await answer.read()
        assert not app.view.pools["tiny"].fleet.health.quiet


async def test_a_stored_response_that_does_not_come_is_a_timeout() -> None:
    async def stores(request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "GET":
            await forever()
        return web.json_response({"id": "resp_1", "object": "response"})

    async with router_before(stores, "limits.idle_s=0.3") as app, aiohttp.ClientSession() as http:
        url = f"http://127.0.0.1:{app.http_port}/v1/responses"
        async with http.post(url, json={"model": "tiny", "input": "x"}) as answer:
            assert answer.status == 200, await answer.text()
        async with http.get(f"{url}/resp_1") as answer:
            assert answer.status == 504, await answer.text()
            assert "tiny-0" in await answer.text()


async def test_other_methods_on_a_stored_response_do_not_reach_its_engine() -> None:
    asked: list[str] = []

    async def stores(request: web.BaseRequest) -> web.StreamResponse:
        asked.append(request.method)
        return web.json_response({"id": "resp_1", "object": "response"})

    async with router_before(stores, "limits.idle_s=0.3") as app, aiohttp.ClientSession() as http:
        url = f"http://127.0.0.1:{app.http_port}/v1/responses"
        async with http.post(url, json={"model": "tiny", "input": "x"}) as answer:
            assert answer.status == 200, await answer.text()
        for method, path, allowed in (("HEAD", "resp_1", "GET"), ("GET", "resp_1/cancel", "POST")):
            async with http.request(method, f"{url}/{path}") as answer:
                assert (answer.status, answer.headers.get("Allow")) == (405, allowed)
        assert asked == ["POST"]


async def test_a_response_that_is_only_announced_has_not_been_prefilled() -> None:
    go_on = asyncio.Event()

    async def announces(request: web.BaseRequest) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for event in (b"created", b"in_progress", b"output_text.delta", b"completed"):
            if event == b"output_text.delta":
                await go_on.wait()
            await answer.write(b'event: response.%s\ndata: {"type": "response.%s"}\n\n' % (event, event))
            if event == b"output_text.delta":
                await forever()
        return answer

    async with router_before(announces) as app, aiohttp.ClientSession() as http:
        fleet = app.view.pools["tiny"].fleet
        body = {"model": "tiny", "input": "word " * 1_000, "stream": True}
        async with http.post(f"http://127.0.0.1:{app.http_port}/v1/responses", json=body) as answer:
            assert b"created" in await answer.content.readuntil(b"\n\n")
            assert b"in_progress" in await answer.content.readuntil(b"\n\n")
            assert fleet.load.backlog("tiny-0", 1.0, 0.0) > 100
            go_on.set()
            assert b"delta" in await answer.content.readuntil(b"\n\n")
            assert fleet.load.backlog("tiny-0", 1.0, 0.0) == 0


class SilentAgent(inference_pb2_grpc.InferenceServiceServicer):
    """Begins each stream, and says so many words before it falls silent."""

    def __init__(self, words: int = 0) -> None:
        self._words = words

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        yield inference_pb2.GenerateResponse(started=inference_pb2.Started(request_id=request.request_id))
        for _ in range(self._words):
            yield inference_pb2.GenerateResponse(delta=inference_pb2.Delta(text="word "))
        await forever()


@contextlib.asynccontextmanager
async def router_before_agent(agent: SilentAgent, *settings: str) -> AsyncIterator[tuple[RouterApp, Any]]:
    """A router before an agent of the test's own, with a stub to call it."""
    server = rpc.RpcServer.bind("127.0.0.1:0", ())
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(agent, server.server)
    await server.start()
    try:
        async with (
            router_before(endless, "grpc_path=agent", *settings, agent=f"127.0.0.1:{server.port}") as app,
            rpc.channel(f"127.0.0.1:{app.rpc.port}") as channel,
        ):
            yield app, inference_pb2_grpc.InferenceServiceStub(channel)
    finally:
        await server.stop(0)


async def listen(call: Any, said: Counter[str]) -> None:
    async for response in call:
        said[response.WhichOneof("event")] += 1


async def test_a_grpc_caller_in_a_hurry_blames_nobody() -> None:
    async with router_before_agent(SilentAgent()) as (app, stub):  # type: ignore[abstract]
        fleet = app.view.pools["tiny"].fleet
        for _ in range(5):
            call = stub.Generate(inference_pb2.GenerateRequest(model="tiny", text="x"), timeout=0.2)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
            assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await eventually(lambda: fleet.load.in_flight == 0, "all is released")
        assert fleet.health.quiet


@pytest.mark.parametrize(("words", "limit"), [(0, "limits.first_byte_s=0.3"), (3, "limits.idle_s=0.3")])
async def test_a_grpc_stream_that_falls_silent_ends_and_blames_its_replica(words: int, limit: str) -> None:
    async with router_before_agent(SilentAgent(words), limit) as (app, stub):  # type: ignore[abstract]
        timeouts = metrics.REQUESTS.labels("grpc_generate", "timeout")._value.get
        before = timeouts()
        call = stub.Generate(inference_pb2.GenerateRequest(model="tiny", text="x"))
        said: Counter[str] = Counter()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await listen(call, said)
        assert said["delta"] == words
        assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "tiny-0" in str(refused.value.details())
        assert app.view.pools["tiny"].fleet.load.in_flight == 0
        assert not app.view.pools["tiny"].fleet.health.quiet
        assert timeouts() == before + 1
