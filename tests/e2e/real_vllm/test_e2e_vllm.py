"""Whole stacks on real vLLM, on the CPU: two replicas, the unmodified OpenAI client, plain gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import grpc
import openai
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from openai import AsyncOpenAI, OpenAI
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from stoker.api.inference.v1 import inference_pb2, inference_pb2_grpc
from stoker.api.router.v1 import router_pb2, router_pb2_grpc
from stoker.bench import routing
from stoker.bench.stats import CacheCounters
from stoker.cli.fleet import Registries, wait_settled
from stoker.cli.serving import Serving
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.vllm,
    pytest.mark.timeout(300),
]

LONG = " ".join(f"word{n % 97} number {n}" for n in range(150))


@pytest.fixture(scope="module")
def client(stack: Serving) -> Iterator[OpenAI]:
    url = f"{stack.state.endpoints.http[0]}/v1"
    with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture
def stub(stack: Serving) -> Iterator[Any]:
    with grpc.insecure_channel(stack.state.endpoints.router[0]) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


def generate(text: str, **sampling: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        model="tiny", text=text, sampling=inference_pb2.Sampling(temperature=0, **sampling)
    )


# --- the OpenAI client ---------------------------------------------------------------------------------------


def test_models(client: OpenAI) -> None:
    assert [m.id for m in client.models.list().data] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_chat_streams_its_usage_last(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=6,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6


def test_several_choices_with_logprobs(client: OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="Once", n=2, max_tokens=3, logprobs=2, temperature=0.9, extra_body={"ignore_eos": True}
    )
    assert [c.index for c in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert len(choice.logprobs.token_logprobs or ()) == 3


def blanks(stack: Serving) -> dict[str, int]:
    """A bias against all tokens of white space: random weights would go on with them for ever."""
    model = stack.fleet.records.deployments[0].spec.model
    tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
    return {str(n): -100 for n in range(tokenizer.get_vocab_size()) if tokenizer.decode([n]).isspace()}


def test_structured_output(stack: Serving, client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Is it so?"}],
        max_tokens=64,
        response_format={"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema}},
        logit_bias=blanks(stack),
    )
    assert isinstance(json.loads(answer.choices[0].message.content or "")["ok"], bool)


def test_a_required_tool_is_called(stack: Serving, client: OpenAI) -> None:
    mood = {
        "type": "object",
        "properties": {"mood": {"type": "string", "enum": ["good", "bad"]}},
        "required": ["mood"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "How are you?"}],
        tools=[{"type": "function", "function": {"name": "tell", "parameters": mood, "strict": True}}],
        tool_choice={"type": "function", "function": {"name": "tell"}},
        max_tokens=64,
        logit_bias=blanks(stack),
    )
    calls = answer.choices[0].message.tool_calls or []
    assert [c.function.name for c in calls if c.type == "function"] == ["tell"]
    assert json.loads(calls[0].function.arguments)["mood"] in ("good", "bad")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model": "nothing"}, openai.NotFoundError),
        ({"max_tokens": -1}, openai.BadRequestError),
        ({"temperature": "hot"}, openai.BadRequestError),
        ({"prompt": LONG * 40}, openai.BadRequestError),
    ],
)
def test_a_bad_request_is_the_callers_fault(client: OpenAI, change: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error) as raised:
        client.completions.create(**{"model": "tiny", "prompt": "x", "max_tokens": 2} | change)  # type: ignore[call-overload]
    assert "Traceback" not in str(raised.value)


# --- gRPC ----------------------------------------------------------------------------------------------------


def test_generate_says_who_serves_streams_and_counts(stub: Any) -> None:
    steps = list(stub.Generate(generate("Once", max_tokens=5, ignore_eos=True), timeout=60))
    assert steps[0].started.replica_id in ("tiny-0", "tiny-1")
    assert steps[0].started.request_id
    assert all(s.HasField("delta") for s in steps[1:-1])
    assert steps[-2].delta.finish_reason == "length"
    assert steps[-1].finished.usage.completion_tokens == 5


def test_tokenize_counts_what_generate_counts(stub: Any) -> None:
    tokens = stub.Tokenize(inference_pb2.TokenizeRequest(model="tiny", text="Once upon a time"), timeout=10)
    steps = list(stub.Generate(generate("Once upon a time", max_tokens=1), timeout=60))
    assert steps[-1].finished.usage.prompt_tokens == len(tokens.token_ids)


def test_an_unknown_model_has_a_reason(stub: Any) -> None:
    request = inference_pb2.GenerateRequest(model="nothing", text="x")
    with pytest.raises(grpc.RpcError) as raised:
        list(stub.Generate(request, timeout=10))
    status = rpc_status.from_call(raised.value)
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.reason


# --- what only whole stacks can show -------------------------------------------------------------------------


async def test_a_repeated_prefix_is_found_again(stack: Serving) -> None:
    before = await routing.cache_counters(stack.engine_urls())
    async with grpc.aio.insecure_channel(stack.state.endpoints.router[0]) as channel:
        aio = inference_pb2_grpc.InferenceServiceStub(channel)
        served, cached = [], []
        router = router_pb2_grpc.RouterServiceStub(channel)

        async def reported() -> bool:
            """The engine's own word on the prefix has come as far as the router."""
            asked = router_pb2.ExplainRequest(request=generate(f"{LONG} and more"))
            candidates = (await router.Explain(asked, timeout=10)).decision.candidates
            return any(c.confidence == "exact" and c.matched_tokens > 500 for c in candidates)

        for turn in range(3):
            steps = [s async for s in aio.Generate(generate(f"{LONG} and {turn}", max_tokens=2), timeout=60)]
            served.append(steps[0].started.replica_id)
            cached.append(steps[-1].finished.usage.cached_prompt_tokens)
            await eventually(reported, "the router has heard of the prefix's blocks")
    after = await routing.cache_counters(stack.engine_urls())
    assert len(set(served)) == 1
    assert cached[0] < 32
    assert min(cached[1:]) > 500
    assert after.hits - before.hits >= sum(cached[1:])
    assert CacheCounters(after.queries, after.hits).since(before) is not None


async def running(stack: Serving) -> float:
    """Requests in all engines, by their own gauges."""
    total = 0.0
    async with aiohttp.ClientSession() as session:
        for url in stack.engine_urls():
            async with session.get(f"{url}/metrics") as answer:
                for family in text_string_to_metric_families(await answer.text()):
                    if family.name in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
                        total += sum(s.value for s in family.samples)
    return total


async def seconds_until(stack: Serving, wanted: float, within_s: float) -> float:
    began = time.monotonic()

    async def so_many() -> bool:
        return await running(stack) == wanted

    await eventually(so_many, f"{wanted:g} requests run", within_s)
    return time.monotonic() - began


async def stops_within_a_second(
    stack: Serving, begin: Callable[[], Awaitable[Callable[[], Awaitable[None]]]]
) -> None:
    """Begin a long generation, cancel it, watch the engine's own gauge; the median of three is what counts."""
    took = []
    for _ in range(3):
        await seconds_until(stack, 0, 30)
        cancel = await begin()
        assert await running(stack) == 1
        await cancel()
        took.append(await seconds_until(stack, 0, 10))
    assert median(took) < 1.0, took


async def test_a_cancelled_grpc_call_stops_in_the_engine(stack: Serving) -> None:
    async with grpc.aio.insecure_channel(stack.state.endpoints.router[0]) as channel:
        aio = inference_pb2_grpc.InferenceServiceStub(channel)

        async def begin() -> Callable[[], Awaitable[None]]:
            call = aio.Generate(generate("Go on", max_tokens=6000, ignore_eos=True), timeout=120)
            async for step in call:
                if step.HasField("delta"):
                    break

            async def cancel() -> None:
                call.cancel()

            return cancel

        await stops_within_a_second(stack, begin)


async def test_a_closed_http_stream_stops_in_the_engine(stack: Serving) -> None:
    url = f"{stack.state.endpoints.http[0]}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as http:

        async def begin() -> Callable[[], Awaitable[None]]:
            stream = await http.completions.create(
                model="tiny", prompt="Go on", max_tokens=6000, stream=True, extra_body={"ignore_eos": True}
            )
            async for _ in stream:
                break
            return stream.close

        await stops_within_a_second(stack, begin)


async def test_only_streams_on_a_killed_engine_fail_and_it_comes_back(stack: Serving) -> None:
    """Eight streams run, one engine is killed: the other's streams end well, nothing hangs, all recovers."""
    async with grpc.aio.insecure_channel(stack.state.endpoints.router[0]) as channel:
        aio = inference_pb2_grpc.InferenceServiceStub(channel)
        served: dict[int, str] = {}
        ended: dict[int, grpc.StatusCode | None] = {}
        begun = asyncio.Event()

        async def stream(number: int) -> None:
            request = generate(f"{number} " * 100, max_tokens=150, ignore_eos=True)
            with contextlib.suppress(asyncio.CancelledError):
                try:
                    async for step in aio.Generate(request, timeout=90):
                        if step.HasField("started"):
                            served[number] = step.started.replica_id
                        if step.HasField("delta") and len(served) == 8:
                            begun.set()
                    ended[number] = None
                except grpc.aio.AioRpcError as error:
                    ended[number] = error.code()

        streams = [asyncio.create_task(stream(number)) for number in range(8)]
        await asyncio.wait_for(begun.wait(), 60)
        victim = stack.fleet.replicas("tiny")[0]
        os.kill(victim.members[0].pid, signal.SIGKILL)
        await asyncio.wait_for(asyncio.gather(*streams), 100)
        for number, code in ended.items():
            if served[number] != victim.replica_id:
                assert code is None, f"stream {number} on {served[number]} failed: {code}"
            else:
                assert code in (None, grpc.StatusCode.UNAVAILABLE)
        assert None in ended.values()

        # The survivor serves at once; the killed one starts again by itself.
        steps = [s async for s in aio.Generate(generate("Still there?", max_tokens=2), timeout=30)]
        assert steps[-1].HasField("finished")
    async with Registries(stack.state.endpoints.registry) as registries:
        fleet = await wait_settled(registries, "tiny", timeout_s=150)
    revived = fleet.replicas("tiny")[0]
    assert revived.members[0].pid != victim.members[0].pid
    assert revived.epoch > victim.epoch


def test_the_stacks_files_stay_in_its_home(stack: Serving) -> None:
    home = Path(stack.state.services[0].log).parent
    assert {p.name for p in home.iterdir()} >= {"etcd", "registry.log", "router.log", "node-1", "node-2"}
