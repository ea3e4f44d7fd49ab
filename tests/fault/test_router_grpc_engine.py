"""gRPC generations straight from an engine: what goes wrong there, and what the caller and the fleet learn of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from aiohttp import web

from stoker.api.inference.v1 import inference_pb2, inference_pb2_grpc
from stoker.common import rpc
from stoker.common.errors import Code, StokerError
from stoker.router.app import RouterApp
from stoker.router.grpc.engine import EngineCall
from stoker.router.grpc.prompt import of_generate
from tests.fault.test_router_blame import router_before
from tests.support.etcd import free_port
from tests.support.router import replica, running_router, tell
from tests.support.waiting import eventually, forever

REQUEST = inference_pb2.GenerateRequest(model="tiny", text="x", sampling=inference_pb2.Sampling(seed=1))
"""Seeded: such an answer does not go on elsewhere, so what breaks it off is told."""


def token(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text}]}).encode() + b"\n\n"


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 3}}\n\ndata: [DONE]\n\n'


@contextlib.asynccontextmanager
async def asked(
    *pieces: bytes, then: str = "end", settings: tuple[str, ...] = ()
) -> AsyncIterator[tuple[RouterApp, Any]]:
    """A router before an engine that says these pieces, with a stub to call it."""

    async def engine(request: web.BaseRequest) -> web.StreamResponse:
        if then == "refuse":
            return web.json_response({"error": {"message": "no such thing", "param": "top_k"}}, status=400)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for piece in pieces:
            await answer.write(piece)
        if then == "silence":
            await forever()
        if then == "break" and request.transport is not None:
            request.transport.close()
        if then == "endless":
            with contextlib.suppress(ConnectionError):
                while True:
                    await answer.write(token("x" * 10_000))
        return answer

    async with (
        router_before(engine, *settings) as app,
        rpc.channel(f"127.0.0.1:{app.rpc.port}") as channel,
    ):
        yield app, inference_pb2_grpc.InferenceServiceStub(channel)


async def heard(stub: Any) -> list[inference_pb2.GenerateResponse]:
    return [response async for response in stub.Generate(REQUEST, timeout=20)]


async def failure(stub: Any) -> StokerError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await heard(stub)
    return rpc.error_from(failed.value)


async def test_what_arrives_together_leaves_together() -> None:
    async with asked(token("one ") + token("two ") + token("three") + USAGE) as (app, stub):
        started, delta, finished = await heard(stub)
        assert started.started.replica_id == "tiny-0"
        assert delta.delta.text == "one two three"
        assert finished.finished.usage.completion_tokens == 3
        assert app.view.pools["tiny"].fleet.load.in_flight == 0


async def test_the_connection_serves_the_next_call() -> None:
    async with asked(token("one"), USAGE) as (app, stub):
        for _ in range(3):
            await heard(stub)
            await asyncio.sleep(0)
        assert len(app.engines._client._all) <= 2  # the health check's, and ours


async def test_an_engine_that_falls_silent_is_blamed() -> None:
    async with asked(token("one"), then="silence", settings=("limits.idle_s=0.3",)) as (app, stub):
        assert (await failure(stub)).code is Code.DEADLINE_EXCEEDED
        assert not app.view.pools["tiny"].fleet.health.quiet


async def test_an_engine_that_breaks_off_is_told_and_blamed() -> None:
    async with asked(token("one"), then="break") as (app, stub):
        error = await failure(stub)
        assert (error.code, error.reason, error.metadata["emitted"]) == (Code.UNAVAILABLE, "ENGINE_DIED", "true")
        assert not app.view.pools["tiny"].fleet.health.quiet


async def test_what_the_engine_refuses_is_the_callers_own_and_names_the_field() -> None:
    async with asked(then="refuse") as (app, stub):
        error = await failure(stub)
        assert error.code is Code.INVALID_ARGUMENT
        assert error.fields[0].field == "sampling.top_k"
        assert app.view.pools["tiny"].fleet.health.quiet


@pytest.mark.parametrize("request_id", ["a\r\nX-Other: b", "a\nb", "é", "a\0b", "a b\x7f"])
async def test_a_request_id_that_no_header_can_hold_is_its_callers_fault_alone(request_id: str) -> None:
    async with asked(token("one"), USAGE) as (app, stub):
        odd = inference_pb2.GenerateRequest(model="tiny", text="x", request_id=request_id)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Generate(odd, timeout=20).read()
        error = rpc.error_from(failed.value)
        assert (error.code, error.fields[0].field) == (Code.INVALID_ARGUMENT, "request_id")
        assert app.view.pools["tiny"].fleet.health.quiet
        assert app.view.pools["tiny"].fleet.load.in_flight == 0


async def test_the_deployments_bound_holds_though_the_replica_has_just_left() -> None:
    async with asked(token("one"), USAGE) as (app, _):
        pool = app.view.pools["tiny"]
        pool.max_output_tokens = 50
        decided = app.router.choose(await app.router.plan(of_generate(REQUEST, REQUEST.SerializeToString())))
        tell(app, removed=["tiny-0"])
        assert decided.target.pool is None
        call = EngineCall(app.engines, decided, REQUEST, {}, {}, 1.0, app.config.limits, "always")
        assert json.loads(await call._sent.to(decided.target))["max_tokens"] == 50
        call.cancel()


async def test_a_reader_who_stands_still_lets_the_engine_go() -> None:
    async with asked(then="endless", settings=("limits.idle_s=0.3",)) as (app, stub):
        call = stub.Generate(REQUEST)
        await call.read()
        await eventually(lambda: not any(c._exchange for c in app.engines._client._all), "the engine is let go")
        error: StokerError | None = None
        try:
            while await call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as failed:
            error = rpc.error_from(failed)
        assert error is not None
        assert error.reason == "SLOW_READER"
        await eventually(lambda: app.router.in_flight == 0, "all is released")
        assert app.view.pools["tiny"].fleet.health.quiet


async def test_a_caller_who_goes_lets_the_engine_go() -> None:
    async with asked(token("one"), then="silence") as (app, stub):
        call = stub.Generate(REQUEST)
        await call.read()
        call.cancel()
        await eventually(lambda: app.router.in_flight == 0, "all is released")
        await eventually(lambda: not any(c._exchange for c in app.engines._client._all), "the engine is let go")


async def test_a_refused_connection_is_proof() -> None:
    async with (
        running_router("parity=false", "checks.interval_s=60") as app,
        rpc.channel(f"127.0.0.1:{app.rpc.port}") as channel,
    ):
        tell(app, replica("tiny-0", f"http://127.0.0.1:{free_port()}"))
        app.view.targets["tiny-0"].reachable = True
        assert (await failure(inference_pb2_grpc.InferenceServiceStub(channel))).code is Code.UNAVAILABLE
        assert not app.view.targets["tiny-0"].reachable
