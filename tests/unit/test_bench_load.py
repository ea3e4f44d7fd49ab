"""The load generator against servers that answer exactly as told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from aiohttp import web

from stoker.api.common.v1 import common_pb2
from stoker.api.inference.v1 import inference_pb2, inference_pb2_grpc
from stoker.bench import load
from stoker.bench.load import Job, Target, drive
from stoker.bench.workloads import Prompt

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
USAGE = {"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}


@asynccontextmanager
async def http_server(handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    app.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        assert runner.addresses
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def stream(request: web.Request, *events: dict[str, Any] | Awaitable[None]) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"content-type": "text/event-stream", "x-stoker-replica": "r-0"})
    await answer.prepare(request)
    for event in events:
        if isinstance(event, dict):
            await answer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        else:
            await event
    await answer.write(b"data: [DONE]\n\n")
    return answer


def text(content: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": content}]}


async def test_a_request_carries_policy_and_salt_and_is_counted() -> None:
    seen: list[tuple[str | None, dict[str, Any]]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append((request.headers.get("x-stoker-policy"), await request.json()))
        return await stream(request, text("a"), text("b"), {"choices": [], "usage": USAGE})

    async with http_server(handler) as url:
        job = Job([Prompt(2, text="hello")], [Target("http", url)], "m", clients=3, policy="round_robin", salt="s")
        outcome = await drive(job)
    (sample,) = outcome.samples
    assert not sample.error
    assert (sample.prompt_tokens, sample.cached_tokens, sample.completion_tokens) == (10, 4, 2)
    assert sample.replica == "r-0"
    policy, body = seen[0]
    assert policy == "round_robin"
    assert (body["cache_salt"], body["prompt"], body["max_tokens"]) == ("s", "hello", 2)


async def test_a_tenant_is_named_where_the_prompt_has_one() -> None:
    seen: list[str | None] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers.get("x-stoker-tenant"))
        return await stream(request, text("a"), {"choices": [], "usage": USAGE})

    async with http_server(handler) as url:
        prompts = [Prompt(2, text="hello", tenant="half"), Prompt(2, text="hello")]
        outcome = await drive(Job(prompts, [Target("http", url)], "m", clients=1))
    assert seen == ["half", None]
    assert [sample.tenant for sample in outcome.samples] == ["half", ""]


async def test_a_conversation_is_named_where_that_is_asked_for() -> None:
    seen: list[str | None] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers.get("x-session-id"))
        return await stream(request, text("a"), {"choices": [], "usage": USAGE})

    chat = Prompt(2, messages=(("user", "hello"),), group="conversation-7")
    async with http_server(handler) as url:
        await drive(Job([chat], [Target("http", url)], "m", sessions=True))
        await drive(Job([Prompt(2, text="hello", group="prefix-1")], [Target("http", url)], "m", sessions=True))
        await drive(Job([chat], [Target("http", url)], "m"))
    assert seen == ["conversation-7", None, None]


class Clock:
    """In place of the module `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


async def test_the_first_token_is_content_not_the_opening_of_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looked, has_content = Clock(), asyncio.Event(), load._has_content

    def looking(choice: dict[str, Any]) -> bool:
        looked.set()
        return has_content(choice)

    monkeypatch.setattr(load, "time", clock)
    monkeypatch.setattr(load, "_has_content", looking)

    async def later() -> None:
        await asyncio.wait_for(looked.wait(), 10)  # the opening was looked at
        clock.now = 5.0

    async def handler(request: web.Request) -> web.StreamResponse:
        role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
        content = {"choices": [{"index": 0, "delta": {"content": "x"}}]}
        return await stream(request, role, later(), content, {"choices": [], "usage": USAGE})

    async with http_server(handler) as url:
        prompt = Prompt(2, messages=(("user", "hello"),))
        outcome = await drive(Job([prompt], [Target("http", url)], "m"))
    assert outcome.samples[0].ttft_s == 5.0


async def test_a_turn_waits_for_the_one_before() -> None:
    running: set[str] = set()
    overlaps: list[str] = []
    together = asyncio.Barrier(3)

    async def handler(request: web.Request) -> web.StreamResponse:
        name = (await request.json())["prompt"].split()[0]
        if name in running:
            overlaps.append(name)
        running.add(name)
        await together.wait()  # one turn of each conversation
        running.discard(name)
        return await stream(request, text("x"))

    prompts = [Prompt(1, text=f"c{n % 3} {n}", after=n - 3 if n >= 3 else -1) for n in range(12)]
    async with http_server(handler) as url, asyncio.timeout(10):
        outcome = await drive(Job(prompts, [Target("http", url)], "m", clients=6))
    assert len(outcome.samples) == 12
    assert overlaps == []


async def test_failures_are_told_apart_and_stop_nothing() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        match (await request.json())["prompt"]:
            case "refused":
                return web.json_response({"error": {"message": "no"}}, status=503)
            case "broken":
                return await stream(request, text("a"), {"error": {"message": "died"}})
            case "empty":
                return await stream(request)
        return await stream(request, text("fine"))

    prompts = [Prompt(1, text=t) for t in ("refused", "broken", "empty", "fine")]
    async with http_server(handler) as url:
        outcome = await drive(Job(prompts, [Target("http", url)], "m", clients=1))
    assert [s.error for s in outcome.samples] == ["http_503", "stream_error", "no_output", ""]


class _Inference(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self) -> None:
        self.policies: list[str] = []
        self.served = asyncio.Event()

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.policies += [str(v) for k, v in context.invocation_metadata() or () if k == "x-stoker-policy"]
        if request.text == "refused":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no")
        self.served.set()
        yield inference_pb2.GenerateResponse(started=inference_pb2.Started(replica_id="r-1"))
        yield inference_pb2.GenerateResponse(delta=inference_pb2.Delta(text="x"))
        usage = common_pb2.Usage(prompt_tokens=7, cached_prompt_tokens=3, completion_tokens=1)
        yield inference_pb2.GenerateResponse(finished=inference_pb2.Finished(usage=usage))


async def test_grpc_and_http_clients_share_a_run() -> None:
    server, servicer = grpc.aio.server(), _Inference()  # type: ignore[abstract]

    async def handler(request: web.Request) -> web.StreamResponse:
        await servicer.served.wait()  # so that neither client takes all there is
        return await stream(request, text("x"))

    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with http_server(handler) as url:
            prompts = [Prompt(1, text="refused"), *(Prompt(1, text=f"{n}") for n in range(9))]
            targets = [Target("grpc", f"127.0.0.1:{port}"), Target("http", url)]
            outcome = await drive(Job(prompts, targets, "m", clients=2, policy="stoker"))
    finally:
        await server.stop(None)
    assert outcome.samples[0].error == "grpc_unavailable"
    assert {s.api for s in outcome.samples} == {"grpc", "http"}
    good = [s for s in outcome.samples if s.api == "grpc" and not s.error]
    assert {(s.prompt_tokens, s.cached_tokens, s.replica) for s in good} == {(7, 3, "r-1")}
    assert set(servicer.policies) == {"stoker"}
