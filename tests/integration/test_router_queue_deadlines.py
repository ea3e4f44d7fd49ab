"""Who waits in the router for room does so within its own time, and costs no engine anything when that is over."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from stoker.api.inference.v1 import inference_pb2, inference_pb2_grpc
from tests.integration.test_router_openai_http import Stack, stack
from tests.support.waiting import eventually

BODY = {"model": "tiny", "max_tokens": 1, "stream": True}


@asynccontextmanager
async def busy(folder: Path) -> AsyncIterator[Stack]:
    """One engine, at work on a long prefill as long as the block runs."""
    slow = ("--sim-prefill-tokens-per-s", "20", "--max-num-batched-tokens", "32")
    async with stack(folder, "routing.hold_s=0", args=slow) as running:
        asking = asyncio.create_task(running.post("/v1/completions", {**BODY, "prompt": "coal " * 2_000}))
        target = running.app.view.targets["tiny-0"]
        await eventually(lambda: target.in_flight == 1, "the engine is at work")
        try:
            yield running
            # Nothing that waited is left anywhere, while the engine is at work still.
            assert target.in_flight == 1
            assert running.app.view.pools["tiny"].fleet.load.in_flight == 1
            await eventually(lambda: len(running.app.router.turns) == 0, "nobody is left in the line")
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)


async def prompts_seen(running: Stack) -> float:
    async with running.http.get(f"{running.engines['tiny-0'].url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return sum(float(line.split()[-1]) for line in lines if line.startswith(names))


async def test_a_deadline_that_passes_in_the_line_ends_the_request_before_any_prefill(tmp_path: Path) -> None:
    async with busy(tmp_path) as running:
        asked = {**BODY, "prompt": "and water"}
        began = asyncio.get_running_loop().time()
        status, headers, got = await running.post("/v1/completions", asked, headers={"x-request-timeout": "0.5"})
        assert status == 504, got
        assert 0.4 < asyncio.get_running_loop().time() - began < 30
        assert json.loads(got)["error"]["code"] == "deadline_exceeded"
        assert "x-stoker-replica" not in headers
        assert await prompts_seen(running) == 1


async def test_the_same_over_grpc(tmp_path: Path) -> None:
    async with busy(tmp_path) as running, grpc.aio.insecure_channel(f"127.0.0.1:{running.app.rpc.port}") as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(inference_pb2.GenerateRequest(model="tiny", text="and water"), timeout=0.5)
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await call.read()
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await eventually(lambda: running.app.router.in_flight == 1, "the call is over here too")
        assert await prompts_seen(running) == 1


async def test_who_goes_while_it_waits_leaves_the_line_at_once(tmp_path: Path) -> None:
    async with busy(tmp_path) as running:
        asking = asyncio.create_task(running.post("/v1/completions", {**BODY, "prompt": "and water"}))
        await eventually(lambda: len(running.app.router.turns) == 1, "it waits")
        asking.cancel()
        with pytest.raises((asyncio.CancelledError, aiohttp.ClientError)):
            await asking
        await eventually(lambda: len(running.app.router.turns) == 0, "it has left")
        assert await prompts_seen(running) == 1
