"""Agents, a registry and an etcd as real processes, with simulated engines."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from stoker.api.inference.v1 import inference_pb2
from stoker.api.node.v1 import node_pb2, node_pb2_grpc
from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.common import rpc
from stoker.common.errors import Code
from stoker.local.model import cached
from stoker.registry.client import DigestChanged, FleetWatch, RecordsChanged
from tests.support.agents import (
    Agent,
    Planner,
    Registry,
    inference,
    member,
    planning,
    reaches,
    registry_running,
    until,
)
from tests.support.etcd import EtcdServer

READY, BACKOFF = records_pb2.STATE_READY, records_pb2.STATE_BACKOFF


@pytest.fixture(scope="module")
def model() -> str:
    return str(cached())


@pytest.fixture(scope="module")
def registry(etcd: EtcdServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with registry_running(tmp_path_factory.mktemp("registry"), etcd.endpoint) as process:
        yield process


@pytest.fixture
async def planner(registry: Registry, model: str) -> AsyncIterator[Planner]:
    async with planning(registry, model) as planner:
        yield planner


@pytest.fixture
def agent(registry: Registry, tmp_path: Path) -> Iterator[Agent]:
    with Agent(tmp_path, f"node-{tmp_path.name[-12:].strip('_')}", [registry.endpoint]).running() as agent:
        yield agent


async def ask(agent: Agent, **fields: object) -> list[inference_pb2.GenerateResponse]:
    async with inference(agent) as stub:
        return [response async for response in stub.Generate(inference_pb2.GenerateRequest(**fields), timeout=30)]  # type: ignore[arg-type]


def sampling(**fields: object) -> inference_pb2.Sampling:
    return inference_pb2.Sampling(**fields)  # type: ignore[arg-type]


async def test_an_assignment_becomes_a_ready_replica_that_serves(agent: Agent, planner: Planner) -> None:
    await planner.assign("serve-0", agent.node_id)
    status = await reaches(agent, "serve-0", READY)
    assert status.attempt == 1
    assert status.engine.model_names == ["serve"]
    assert status.engine.block_size > 0
    assert len(status.engine.tokenizer_sha256) == 64

    responses = await ask(agent, model="serve", text="once upon a time " * 40, sampling=sampling(max_tokens=12))
    assert responses[0].started.replica_id == "serve-0"
    assert responses[-1].finished.usage.completion_tokens == 12
    again = await ask(agent, model="serve", text="once upon a time " * 40, sampling=sampling(max_tokens=1))
    assert again[-1].finished.usage.cached_prompt_tokens > 0
    assert [r.delta.finish_reason for r in responses if r.delta.finish_reason] == ["length"]


async def test_every_kind_of_prompt(agent: Agent, planner: Planner) -> None:
    await planner.assign("kinds-0", agent.node_id)
    await reaches(agent, "kinds-0", READY)
    chat = inference_pb2.Chat(
        messages=[
            inference_pb2.ChatMessage(role="user", content=[inference_pb2.ContentPart(text="What is a cache?")])
        ]
    )
    async with inference(agent) as stub:
        tokens = await stub.Tokenize(inference_pb2.TokenizeRequest(model="kinds", text="a cache is warm"))
        rendered = await stub.Tokenize(inference_pb2.TokenizeRequest(model="kinds", chat=chat))
        assert len(rendered.token_ids) > 4
    by_ids = await ask(
        agent,
        model="kinds",
        token_ids=inference_pb2.TokenIds(ids=tokens.token_ids),
        sampling=sampling(max_tokens=5, n=2, logprobs=2),
        return_token_ids=True,
    )
    assert by_ids[-1].finished.usage.prompt_tokens == len(tokens.token_ids)
    assert {r.delta.index for r in by_ids if r.HasField("delta")} == {0, 1}
    for index in (0, 1):
        mine = [r.delta for r in by_ids if r.HasField("delta") and r.delta.index == index]
        assert sum(len(delta.logprobs) for delta in mine) == 5
    by_chat = await ask(agent, model="kinds", chat=chat, sampling=sampling(max_tokens=4))
    assert by_chat[-1].finished.usage.prompt_tokens == len(rendered.token_ids)
    assert "".join(r.delta.text for r in by_chat)


async def test_bad_requests_name_the_field(agent: Agent, planner: Planner) -> None:
    await planner.assign("bad-0", agent.node_id)
    await reaches(agent, "bad-0", READY)
    cases: list[tuple[dict[str, object], Code, str | None]] = [
        ({"model": "bad", "text": ""}, Code.INVALID_ARGUMENT, "text"),
        (
            {"model": "bad", "text": "x", "sampling": sampling(temperature=-1)},
            Code.INVALID_ARGUMENT,
            "sampling.temperature",
        ),
        ({"model": "bad", "text": "x", "sampling": sampling(n=100_000)}, Code.INVALID_ARGUMENT, "sampling.n"),
        ({"model": "other", "text": "x"}, Code.NOT_FOUND, None),
        ({"model": "bad", "text": "x", "replica_id": "nobody-0"}, Code.NOT_FOUND, None),
    ]
    for fields, code, field in cases:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(agent, **fields)
        error = rpc.error_from(caught.value)
        assert error.code is code, (fields, error)
        if field:
            assert [f.field for f in error.fields] == [field]
    assert await ask(agent, model="bad", text="still alive", sampling=sampling(max_tokens=1))


async def test_a_killed_engine_is_out_at_once_and_comes_back(agent: Agent, planner: Planner) -> None:
    await planner.assign("phoenix-0", agent.node_id)
    first = await reaches(agent, "phoenix-0", READY)
    await ask(agent, model="phoenix", text="warm the cache " * 60, sampling=sampling(max_tokens=1))
    watch = FleetWatch(
        planner.client._endpoints, [registry_pb2.TOPIC_REPLICAS, registry_pb2.TOPIC_DIGESTS], watcher="test"
    )
    seen: dict[str, float] = {}
    async with watch:

        async def follow() -> None:
            async for event in watch.events():
                match event:
                    case RecordsChanged():
                        for replica in event.upserts.replicas:
                            if replica.replica_id == "phoenix-0" and replica.state == BACKOFF:
                                seen.setdefault("out", time.monotonic())
                    case DigestChanged() if event.update.replica_id == "phoenix-0":
                        if event.update.count:
                            seen.setdefault("held", time.monotonic())
                        elif event.update.epoch > first.epoch:
                            seen.setdefault("withdrawn", time.monotonic())

        following = asyncio.create_task(follow())
        await until("the digest is told", lambda: "held" in seen)
        killed = time.monotonic()
        os.kill(first.pid, signal.SIGKILL)
        await until("the fleet hears of it", lambda: {"out", "withdrawn"} <= seen.keys())
        following.cancel()
    # Usually a tenth of a second; on crowded cores still before its node's lease could have told.
    assert seen["out"] - killed < 2.5
    assert seen["withdrawn"] - killed < 2.5
    second = await reaches(agent, "phoenix-0", READY)
    assert second.pid != first.pid
    assert second.attempt == 2
    assert second.epoch > first.epoch
    assert second.exit_code == -9
    assert (first.first_start, second.first_start) == (True, False), "the second start finds the weights there"


async def test_a_crash_loop_shows_the_logs_last_lines(agent: Agent, planner: Planner) -> None:
    await planner.assign("crash-0", agent.node_id, model="/no/such/model")
    status = await reaches(agent, "crash-0", BACKOFF)
    assert status.exit_code not in (0, None)
    assert "/no/such/model" in status.last_error
    assert len(status.last_error.encode()) <= 4096

    async def tried_again() -> bool:
        now = await member(agent, "crash-0")
        return now is not None and now.attempt >= 3

    await until("three attempts", tried_again)


async def test_a_drain_waits_for_the_running_request(agent: Agent, planner: Planner) -> None:
    assignment = await planner.assign("calm-0", agent.node_id, args=["--sim-step-ms", "50"])
    await reaches(agent, "calm-0", READY)
    request = asyncio.create_task(ask(agent, model="calm", text="a long answer", sampling=sampling(max_tokens=40)))
    await until("it runs", lambda: _running(agent, "calm-0"))
    assignment.wanted = records_pb2.WANTED_DRAIN
    await planner.change(assignment)
    await reaches(agent, "calm-0", records_pb2.STATE_DRAINING)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(agent, model="calm", text="too late", replica_id="calm-0")
    assert rpc.error_from(caught.value).reason == "REPLICA_DRAINING"
    assert (await request)[-1].finished.usage.completion_tokens == 40
    status = await reaches(agent, "calm-0", records_pb2.STATE_STOPPED)
    assert status.last_error == ""
    await planner.remove("calm-0")
    await until("it is forgotten", lambda: _absent(agent, "calm-0"))
    assert agent.engine_pids() == []


async def test_a_cancelled_request_frees_the_engine_within_a_second(agent: Agent, planner: Planner) -> None:
    await planner.assign("cancel-0", agent.node_id, args=["--sim-step-ms", "20"])
    await reaches(agent, "cancel-0", READY)
    request = inference_pb2.GenerateRequest(model="cancel", text="on and on", sampling=sampling(max_tokens=5000))
    took = []
    async with inference(agent) as stub:
        for _ in range(3):
            call = stub.Generate(request)
            await call.read()
            await call.read()
            assert await _running(agent, "cancel-0") == 1
            call.cancel()
            cancelled = time.monotonic()
            await until("the engine is free", lambda: _idle(agent, "cancel-0"), within_s=30.0)
            took.append(time.monotonic() - cancelled)
    assert min(took) < 1.0, "others may hold the cores, but not each time"


async def test_a_deadline_frees_the_engine(agent: Agent, planner: Planner) -> None:
    await planner.assign("late-0", agent.node_id, args=["--sim-step-ms", "20"])
    await reaches(agent, "late-0", READY)
    async with inference(agent) as stub:
        call = stub.Generate(
            inference_pb2.GenerateRequest(model="late", text="on and on", sampling=sampling(max_tokens=5000)),
            timeout=0.5,
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _exhaust(call)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until("the engine is free", lambda: _idle(agent, "late-0"), within_s=30.0)


async def test_streams_on_a_killed_engine_fail_at_once(agent: Agent, planner: Planner) -> None:
    await planner.assign("dies-0", agent.node_id, args=["--sim-step-ms", "20"])
    status = await reaches(agent, "dies-0", READY)
    async with inference(agent) as stub:
        call = stub.Generate(
            inference_pb2.GenerateRequest(model="dies", text="on and on", sampling=sampling(max_tokens=5000))
        )
        await call.read()
        assert (await call.read()).delta.text
        os.kill(status.pid, signal.SIGKILL)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(_exhaust(call), timeout=30)
        error = rpc.error_from(caught.value)
        assert (error.code, error.reason) == (Code.UNAVAILABLE, "ENGINE_DIED")
        assert error.metadata["emitted"] == "true"


async def test_tokenizer_and_log_are_told(agent: Agent, planner: Planner) -> None:
    await planner.assign("files-0", agent.node_id)
    await reaches(agent, "files-0", READY)
    async with rpc.channel(agent.endpoint) as channel:
        stub = node_pb2_grpc.NodeServiceStub(channel)
        names = {p.name async for p in stub.FetchTokenizer(node_pb2.FetchTokenizerRequest(replica_id="files-0"))}
        assert "tokenizer.json" in names
        assert not any(name.endswith(".safetensors") for name in names)
        lines = [line async for r in stub.TailLog(node_pb2.TailLogRequest(replica_id="files-0")) for line in r.lines]
        assert lines


async def _exhaust(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def _metric(agent: Agent, replica_id: str, name: str) -> float:
    status = await member(agent, replica_id)
    assert status is not None
    async with aiohttp.ClientSession() as session, session.get(f"{status.engine.http_url}/metrics") as response:
        text = await response.text()
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"vllm:{name}{{"))


async def _running(agent: Agent, replica_id: str) -> float:
    return await _metric(agent, replica_id, "num_requests_running")


async def _idle(agent: Agent, replica_id: str) -> bool:
    return await _running(agent, replica_id) == 0


async def _absent(agent: Agent, replica_id: str) -> bool:
    return await member(agent, replica_id) is None
