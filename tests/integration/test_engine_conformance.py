"""One set of promises, kept by both engines: what Stoker relies on in vLLM, and what the simulation imitates."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from tokenizers import Tokenizer as Backend

from stoker.common.errors import InvalidRequest
from stoker.local.model import cached
from stoker.node_agent.engine.events import Batch, Event, Removed, Stored
from stoker.node_agent.engine.protocol import Health
from stoker.node_agent.engine.stream import KvEventStream, Received
from stoker.sim_engine.core.blocks import BlockPool, TokenSequence
from stoker.sim_engine.tokenizer import Tokenizer
from tests.support.collector import CALLER, Collector, collecting
from tests.support.engines import TINY, RunningEngine, running_engine
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK = 32
BLOCKS = 40
MAX_LEN = 1024

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
MESSAGE = "body.messages.0.ChatCompletionDeveloperMessageParam"
USER = {"role": "user"}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def traces() -> AsyncIterator[tuple[str, Collector]]:
    async with collecting() as found:
        yield found


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["sim", pytest.param("vllm", marks=pytest.mark.vllm)]
)
async def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, traces: tuple[str, Collector]
) -> AsyncIterator[RunningEngine]:
    kind: str = request.param
    args = [
        *("--num-gpu-blocks-override", str(BLOCKS)),
        *("--max-model-len", str(MAX_LEN)),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *("--otlp-traces-endpoint", traces[0]),
    ]
    args += ["--enforce-eager"] if kind == "vllm" else ["--sim-speed", "10"]
    async with running_engine(kind, tmp_path_factory.mktemp(kind), args=args) as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(cached(TINY))


@pytest.fixture(scope="module")
def no_blanks() -> dict[str, float]:
    """A bias against tokens of nothing but blanks: JSON allows any number of them, and a random model obliges."""
    backend = Backend.from_file(str(cached(TINY) / "tokenizer.json"))
    blanks = [token for token in range(backend.get_vocab_size()) if not backend.decode([token]).strip()]
    return {str(token): -100.0 for token in blanks}


async def post(engine: RunningEngine, path: str, body: Mapping[str, Any], status: int = 200) -> dict[str, Any]:
    async with engine.session.post(engine.url + path, json={"model": engine.model, **body}) as response:
        answer = await response.json()
        assert response.status == status, answer
        return dict(answer)


async def complete(engine: RunningEngine, prompt: object, **fields: Any) -> dict[str, Any]:
    return await post(engine, "/v1/completions", {"prompt": prompt, "max_tokens": 1, "temperature": 0, **fields})


async def stream(engine: RunningEngine, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a streamed answer; asserts its end mark."""
    chunks: list[dict[str, Any]] = []
    body = {"model": engine.model, "stream": True, "stream_options": {"include_usage": True}, **body}
    async with engine.session.post(engine.url + path, json=body) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        lines = [line.decode().strip() async for line in response.content]
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    chunks.extend(json.loads(one) for one in data[:-1])
    return chunks


def cached_tokens(answer: Mapping[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def prompt_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300, 3000) for _ in range(length)]


async def events_until(engine: RunningEngine, enough: Callable[[list[Event]], bool]) -> list[Event]:
    """All events of the engine's life, in order, until there are enough: a late subscriber gets them by replay."""
    seen: list[Event] = []
    expected = 0
    async with KvEventStream(engine.kv) as following, asyncio.timeout(60):
        async for item in following:
            assert isinstance(item, Received), item
            assert isinstance(item.batch, Batch), item
            assert item.seq == expected
            expected += 1
            seen.extend(item.batch.events)
            if enough(seen):
                return seen
    raise AssertionError("unreachable")


def stored_chain(events: list[Event], prompt: list[int], salt: str | None = None) -> list[Stored]:
    """The events that store a prompt's full blocks, first to last."""
    chain: list[Stored] = []
    at, parent, full = 0, None, len(prompt) // BLOCK * BLOCK
    for event in events:
        if not isinstance(event, Stored) or event.parent != parent or at >= full:
            continue
        if (parent is None and event.salt != salt) or list(event.tokens) != prompt[at : at + len(event.tokens)]:
            continue
        chain.append(event)
        at += len(event.tokens)
        parent = event.hashes[-1]
    return chain if at == full else []


async def test_answers_health_and_says_what_it_is(engine: RunningEngine) -> None:
    assert await engine.client.health() is Health.SERVING
    info = await engine.client.info()
    assert (info.model, info.max_model_len, info.block_size) == ("tiny", MAX_LEN, BLOCK)
    assert (info.kv_blocks, info.prefix_caching, info.version) == (BLOCKS, True, "0.32.0")


@pytest.mark.parametrize("special", [True, False])
async def test_tokenizes_like_the_tokenizer_alone(engine: RunningEngine, tokenizer: Tokenizer, special: bool) -> None:
    text = "def main():\n    return 'naïve ☕' # <tool_call>"
    tokens = await engine.client.tokenize(text, add_special_tokens=special)
    assert tokens == tokenizer.encode(text, special=special)
    assert await engine.client.detokenize(tokens) == tokenizer.decode(tokens)


@pytest.mark.parametrize("tools", [None, [WEATHER, TIME]])
async def test_renders_chats_like_the_template_alone(
    engine: RunningEngine, tokenizer: Tokenizer, tools: list[dict[str, Any]] | None
) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Weather in Rome?"}, {"type": "text", "text": "Now."}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call-1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call-1", "content": "21 °C"},
        {"role": "user", "content": "And Oslo?"},
    ]
    ours = tokenizer.encode(tokenizer.render(messages, tools), special=False)
    assert await engine.client.tokenize_chat(messages, tools) == ours
    answer = await post(
        engine, "/v1/chat/completions", {"messages": messages, "tools": tools, "tool_choice": "auto", "max_tokens": 1}
        if tools else {"messages": messages, "max_tokens": 1},
    )  # fmt: skip
    assert answer["usage"]["prompt_tokens"] == len(ours)


async def test_takes_a_chats_tokens_from_beside_its_messages(engine: RunningEngine) -> None:
    chat = {"messages": [{"role": "user", "content": "How hot is it?"}], "max_tokens": 1}
    told: dict[str, Any] = {"kv_transfer_params": {"prompt_token_ids": [5, 6, 7]}}
    answer = await post(engine, "/v1/chat/completions", {**chat, **told})
    assert answer["usage"]["prompt_tokens"] == 3
    for none in ([], ["5"], [-1]):
        told = {"kv_transfer_params": {"prompt_token_ids": none}}
        refused = await post(engine, "/v1/chat/completions", {**chat, **told}, 400)
        assert refused["error"]["param"] == "kv_transfer_params.prompt_token_ids"


async def test_completion_is_the_same_streamed_or_whole(engine: RunningEngine) -> None:
    prompt = prompt_of(1, 50)
    whole = await complete(engine, prompt, max_tokens=8)
    chunks = await stream(engine, "/v1/completions", {"prompt": prompt, "max_tokens": 8, "temperature": 0})
    choice = whole["choices"][0]
    assert choice["finish_reason"] == "length"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]) == choice["text"]
    usage = {"prompt_tokens": 50, "completion_tokens": 8, "total_tokens": 58}
    assert usage.items() <= whole["usage"].items()
    assert usage.items() <= chunks[-1]["usage"].items()
    assert chunks[-1]["choices"] == []


async def test_chat_streams_role_then_content_then_reason(engine: RunningEngine) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "temperature": 0}
    whole = await post(engine, "/v1/chat/completions", body)
    chunks = await stream(engine, "/v1/chat/completions", body)
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert choices[0]["delta"]["role"] == "assistant"
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    assert text == whole["choices"][0]["message"]["content"]
    assert [choice["finish_reason"] for choice in choices][-1] == whole["choices"][0]["finish_reason"]
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)


async def test_a_chats_stream_opens_with_its_first_token(engine: RunningEngine) -> None:
    """Whoever routes takes the first event for the end of the prefill."""
    words = " ".join(f"{number}" for number in range(300))
    body = {"model": engine.model, "stream": True, "max_tokens": 2, "messages": [{"role": "user", "content": words}]}
    began = time.perf_counter()
    async with engine.session.post(engine.url + "/v1/chat/completions", json=body) as response:
        came = [time.perf_counter() - began async for line in response.content if line.startswith(b"data: ")]
    opening, first_token = came[:2]
    assert opening > 0.5 * first_token, came


async def test_second_identical_prompt_is_cached_in_whole_blocks(engine: RunningEngine) -> None:
    prompt = prompt_of(2, 3 * BLOCK + 7)
    assert cached_tokens(await complete(engine, prompt)) == 0
    assert cached_tokens(await complete(engine, prompt)) == 3 * BLOCK


async def test_a_prompt_of_whole_blocks_recomputes_its_last(engine: RunningEngine) -> None:
    prompt = prompt_of(3, 2 * BLOCK)
    await complete(engine, prompt)
    assert cached_tokens(await complete(engine, prompt)) == BLOCK


async def test_salt_isolates_and_is_announced(engine: RunningEngine) -> None:
    prompt = prompt_of(4, 2 * BLOCK + 1)
    await complete(engine, prompt)
    assert cached_tokens(await complete(engine, prompt, cache_salt="tenant-a")) == 0
    assert cached_tokens(await complete(engine, prompt, cache_salt="tenant-b")) == 0
    assert cached_tokens(await complete(engine, prompt, cache_salt="tenant-a")) == 2 * BLOCK
    events = await events_until(engine, lambda seen: bool(stored_chain(seen, prompt, "tenant-b")))
    heads = {stored_chain(events, prompt, salt)[0].hashes[0] for salt in (None, "tenant-a", "tenant-b")}
    assert len(heads) == 3


async def test_events_tell_the_blocks_of_a_prompt_and_of_its_answer(engine: RunningEngine) -> None:
    prompt = prompt_of(5, 5 * BLOCK + BLOCK - 1)
    answer = await complete(engine, prompt, max_tokens=BLOCK + 2, ignore_eos=True, return_token_ids=True)
    assert answer["usage"]["completion_tokens"] == BLOCK + 2
    # The last token generated has no KV: 6 blocks and a half are full once it is out.
    events = await events_until(
        engine, lambda seen: len(stored_chain(seen, prompt)) > 0 and _blocks_after(seen, prompt) >= 7
    )
    chain = stored_chain(events, prompt)
    assert sum(len(event.hashes) for event in chain) == 5
    assert all(event.block_size == BLOCK and event.tier == "GPU" for event in chain)
    assert all(event.lora is None and not any(event.extras) for event in chain)


def _blocks_after(events: list[Event], prompt: list[int]) -> int:
    """Blocks of the sequence that begins with `prompt`, those of its answer included."""
    chain = stored_chain(events, prompt)
    known = {name for event in chain for name in event.hashes}
    for event in events:
        if isinstance(event, Stored) and event.parent in known:
            known.update(event.hashes)
    return len(known)


async def test_eviction_is_announced_and_takes_the_least_recent(engine: RunningEngine) -> None:
    old = prompt_of(6, 4 * BLOCK + 1)
    await complete(engine, old)
    for seed in range(100, 100 + BLOCKS // 8):
        await complete(engine, prompt_of(seed, 9 * BLOCK + 1))
    assert cached_tokens(await complete(engine, old)) == 0

    def gone(seen: list[Event]) -> bool:
        names = {name for event in stored_chain(seen, old) for name in event.hashes}
        removed = {name for event in seen if isinstance(event, Removed) for name in event.hashes}
        return bool(names) and names <= removed

    await events_until(engine, gone)


async def test_reuses_what_the_pure_block_pool_says(engine: RunningEngine) -> None:
    """A random workload, one request at a time: hits are predicted to the token by the simulation's core."""
    rng = random.Random(20_26)
    prefixes = [prompt_of(1000 + i, rng.randrange(2, 9) * BLOCK) for i in range(8)]
    pool = BlockPool(BLOCKS, BLOCK)
    # Fill both caches with the same thing first: nothing of earlier tests is left to hit or evict.
    work = [prompt_of(2000 + i, 7 * BLOCK) for i in range(BLOCKS // 7 + 1)]
    work += [[*rng.choice(prefixes), *prompt_of(rng.randrange(1 << 30), rng.randrange(1, 60))] for _ in range(60)]
    for at, prompt in enumerate(work):
        sequence = TokenSequence(list(prompt))
        hits = pool.lookup(sequence)
        assert pool.allocate(sequence, hits, len(prompt))
        pool.free(sequence)
        found = cached_tokens(await complete(engine, prompt))
        assert found == len(hits) * BLOCK, f"request {at} of seed 2026"


async def test_metrics_say_everything_that_load_holds(engine: RunningEngine) -> None:
    before = await engine.client.load()
    prompt = prompt_of(7, 2 * BLOCK + 5)
    await complete(engine, prompt, max_tokens=4, ignore_eos=True)
    await complete(engine, prompt, max_tokens=4, ignore_eos=True)

    async def counted() -> bool:
        now = await engine.client.load()
        return now.generation_tokens == (before.generation_tokens or 0) + 8

    await eventually(counted, within_s=60)
    after = await engine.client.load()
    assert not [name for name, value in vars(after).items() if value is None]
    assert (after.running, after.waiting, after.kv_cache_usage) == (0, 0, 0.0)
    assert _grew(before.prompt_tokens, after.prompt_tokens) == 2 * len(prompt)
    assert _grew(before.prefix_cache_queries, after.prefix_cache_queries) == 2 * len(prompt)
    assert _grew(before.prefix_cache_hits, after.prefix_cache_hits) == 2 * BLOCK
    assert _grew(before.cached_prompt_tokens, after.cached_prompt_tokens) == 2 * BLOCK
    assert before.ttft_seconds is not None
    assert after.ttft_seconds is not None
    assert after.ttft_seconds.count - before.ttft_seconds.count == 2
    assert before.itl_seconds is not None
    assert after.itl_seconds is not None
    assert after.itl_seconds.count - before.itl_seconds.count == 6
    for was, now in ((before.queue_seconds, after.queue_seconds), (before.prefill_seconds, after.prefill_seconds)):
        assert was is not None
        assert now is not None
        assert (now.count - was.count, now.sum >= was.sum) == (2, True)
    assert after.ttft_seconds.buckets[-1] == (float("inf"), after.ttft_seconds.count)


def _grew(before: float | None, after: float | None) -> float:
    assert before is not None
    assert after is not None
    return after - before


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_frees_its_blocks(engine: RunningEngine, streamed: bool) -> None:
    async def running(count: int) -> bool:
        return (await engine.client.load()).running == count

    before = (await engine.client.load()).generation_tokens
    # A connection of its own: closing it is the only word the engine gets.
    async with aiohttp.ClientSession() as session:
        body = {"model": engine.model, "prompt": prompt_of(8, 100), "max_tokens": 900, "ignore_eos": True}
        call = asyncio.create_task(_read(session, engine.url + "/v1/completions", {**body, "stream": streamed}))
        await eventually(lambda: running(1), within_s=60)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    await eventually(lambda: running(0))
    after = await engine.client.load()
    assert after.kv_cache_usage == 0.0
    assert _grew(before, after.generation_tokens) < 900


async def _read(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> None:
    async with session.post(url, json=body) as response:
        await response.read()


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "words"),
    [
        ("/v1/completions", {"prompt": [300] * (MAX_LEN + 1)}, 400, "input_tokens", "maximum context length is 1024"),
        ("/v1/completions", {"model": "other", "prompt": "x"}, 404, "model", "`other` does not exist"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens", "at least 1"),
        ("/v1/completions", {"prompt": "x", "temperature": "hot"}, 400, "body.temperature", "valid number"),
        ("/v1/completions", {"prompt": "x", "cache_salt": ""}, 400, "cache_salt", "non-empty"),
        ("/v1/completions", {"prompt": ""}, 400, "prompt", "prompt"),
        ("/v1/completions", {"prompt": [1 << 20]}, 400, None, "out of vocabulary"),
        ("/v1/completions", {"prompt": "x", "n": 2, "temperature": 0}, 400, None, "greedy"),
        ("/v1/chat/completions", {}, 400, "body.messages", "Field required"),
        ("/v1/chat/completions", {"messages": []}, 400, None, "empty conversation"),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, 400, f"{MESSAGE}.role", "Field required"),
        ("/v1/chat/completions", {"messages": [{"role": 3, "content": "x"}]}, 400, f"{MESSAGE}.role", "'developer'"),
        ("/v1/chat/completions", {"messages": [USER | {"content": 5}]}, 400, f"{MESSAGE}.content", "valid string"),
        ("/v1/chat/completions", {"messages": [{"role": "alien", "content": "x"}]}, 400, None, "not alien"),
    ],
)
async def test_bad_requests_are_refused_in_the_same_words(
    engine: RunningEngine, path: str, body: dict[str, Any], status: int, param: str | None, words: str
) -> None:
    error = (await post(engine, path, body, status))["error"]
    assert error["code"] == status
    assert error["param"] == param
    assert words in error["message"]


async def test_client_maps_refusals_and_ignores_unknown_fields(engine: RunningEngine) -> None:
    with pytest.raises(InvalidRequest, match="not alien"):
        await engine.client.tokenize_chat([{"role": "alien", "content": "x"}])
    await complete(engine, "x", no_such_field={"a": 1})


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_tool_calls_carry_arguments_that_fit(
    engine: RunningEngine, no_blanks: dict[str, float], choice: object
) -> None:
    body = {
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": [WEATHER],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "logit_bias": no_blanks,
    }
    answer = (await post(engine, "/v1/chat/completions", body))["choices"][0]
    assert answer["message"].get("tool_calls"), answer
    (call, *_) = answer["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")


async def test_structured_output_fits_its_schema(engine: RunningEngine, no_blanks: dict[str, float]) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
        "required": ["ok", "size"],
        "additionalProperties": False,
    }
    body = {
        "messages": [{"role": "user", "content": "Say"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
        "max_tokens": 60,
        "logit_bias": no_blanks,
    }
    answer = (await post(engine, "/v1/chat/completions", body))["choices"][0]
    value = json.loads(answer["message"]["content"])
    assert isinstance(value["ok"], bool)
    assert value["size"] in ("small", "large")
    assert answer["finish_reason"] == "stop"


async def test_several_choices_with_logprobs(engine: RunningEngine) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "n": 2, "max_tokens": 3, "ignore_eos": True}
    answer = await post(engine, "/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": 2})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 6
    for choice in answer["choices"]:
        content = choice["logprobs"]["content"]
        assert len(content) == 3
        assert all(one["logprob"] <= 0 and len(one["top_logprobs"]) >= 2 for one in content)
        assert all(bytes(one["bytes"]).decode(errors="replace") == one["token"] for one in content)
    completion = await complete(engine, "Hi", max_tokens=3, logprobs=2, ignore_eos=True)
    shown = completion["choices"][0]["logprobs"]
    assert len(shown["tokens"]) == len(shown["token_logprobs"]) == len(shown["top_logprobs"]) == 3
    assert shown["text_offset"][0] == 0
    chunks = await stream(engine, "/v1/chat/completions", chat)
    assert {chunk["choices"][0]["index"] for chunk in chunks if chunk["choices"]} == {0, 1}


async def test_stop_strings_end_the_answer_before_them(engine: RunningEngine) -> None:
    prompt = prompt_of(9, 20)
    text = (await complete(engine, prompt, max_tokens=12, ignore_eos=True))["choices"][0]["text"]
    stop = text[len(text) // 2 :][:3]
    choice = (await complete(engine, prompt, max_tokens=12, ignore_eos=True, stop=[stop]))["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop
    assert choice["text"] == text[: text.index(stop)]


async def test_responses_api_streamed_and_whole(engine: RunningEngine, tokenizer: Tokenizer) -> None:
    body = {"input": "hello", "max_output_tokens": 4, "temperature": 0}
    whole = await post(engine, "/v1/responses", body)
    text = whole["output"][0]["content"][0]["text"]
    assert whole["usage"]["output_tokens"] == 4
    async with engine.session.post(engine.url + "/v1/responses", json={**body, "stream": True}) as response:
        lines = [line.decode().strip() async for line in response.content]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert events[0]["type"] == "response.created"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    deltas = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert deltas == text
    # Unlike a chat, a response's prompt gets the tokenizer's begin mark on top of the template's own.
    rendered = tokenizer.render([{"role": "user", "content": "hello"}], None)
    assert whole["usage"]["input_tokens"] == len(tokenizer.encode(rendered, special=True))


async def test_a_generation_is_a_span_in_its_callers_trace(
    engine: RunningEngine, traces: tuple[str, Collector]
) -> None:
    _, collector = traces
    collector.spans.clear()
    body = {"model": engine.model, "prompt": "Once upon a time", "max_tokens": 2}
    async with engine.session.post(
        f"{engine.url}/v1/completions", json=body, headers={"traceparent": CALLER}
    ) as response:
        assert response.status == 200
    await eventually(lambda: any(name == "llm_request" for _, name in collector.spans), "the engine's span", 60)
    [span] = [span for (_, name), span in collector.spans.items() if name == "llm_request"]
    assert span.parent_span_id.hex() == CALLER.split("-")[2]
