"""Replicas that die in the middle of an OpenAI stream: another goes on, where that can be done truly."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stoker.local.model import cached
from stoker.router import metrics
from tests.integration.test_router_openai_http import TOOL, Stack, normal, stack
from tests.support.engines import TINY
from tests.support.router import replica, running_router, tell, tokenizer_of
from tests.support.waiting import eventually

pytestmark = pytest.mark.fault

TOKENS = 60
SLOWLY = ("--sim-step-ms", "15", "--enable-prompt-tokens-details")
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "Feed the fire, stoker. " * 20


def body(path: str, **more: Any) -> dict[str, Any]:
    asked = {"prompt": PROMPT} if path == COMPLETION else {"messages": [{"role": "user", "content": PROMPT}]}
    shared = {"model": "tiny", "max_tokens": TOKENS, "temperature": 0, "stream": True, "ignore_eos": True}
    return {**shared, "stream_options": {"include_usage": True}, **asked, **more}


@dataclass
class Heard:
    """A stream, read as a client reads it."""

    raw: bytes = b""
    events: list[dict[str, Any]] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [choice for event in self.events for choice in event.get("choices", ())]

    @property
    def text(self) -> str:
        return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in self.choices)

    @property
    def tokens(self) -> list[int]:
        return [token for choice in self.choices for token in choice.get("token_ids") or ()]

    @property
    def finish(self) -> tuple[str, Any]:
        ended = [choice for choice in self.choices if choice.get("finish_reason")]
        assert len(ended) == 1, ended
        return ended[0]["finish_reason"], ended[0].get("stop_reason")


@asynccontextmanager
async def running(folder: Path, *settings: str, count: int = 2) -> AsyncIterator[Stack]:
    async with stack(folder, *settings, count=count, args=SLOWLY) as started:
        yield started
        await eventually(lambda: started.app.router.in_flight == 0, "no request is left")
        assert started.app.view.pools["tiny"].fleet.load.in_flight == 0
        assert not any(target.in_flight or target.waiting for target in started.app.view.targets.values())


async def hear(started: Stack, path: str, asked: dict[str, Any], *, kills: int = 0, after: int = 8) -> Heard:
    """Stream; whoever serves is killed after so many pieces, and again after so many more."""
    heard, killed, pieces = Heard(), set[str](), 0
    async with started.http.post(started.url + path, json=asked) as answer:
        assert answer.status == 200
        async for piece in answer.content.iter_any():
            heard.raw += piece
            pieces += 1
            serving = {target.id for target in started.app.view.targets.values() if target.in_flight} - killed
            if pieces >= after and len(killed) < kills and serving:
                killed |= serving
                pieces = 0
                for name in serving:
                    os.killpg(started.engines[name].process.pid, signal.SIGKILL)
    assert len(killed) == kills
    for block in heard.raw.decode().split("\n\n"):
        if block.startswith(":"):
            heard.comments.append(block)
        elif block and block != "data: [DONE]":
            heard.events.append(json.loads(block.removeprefix("data: ")))
    return heard


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
async def test_a_greedy_answer_is_the_same_with_and_without_a_death(tmp_path: Path, path: str) -> None:
    async with running(tmp_path) as started:
        taken = metrics.of(metrics.RETRIES, "taken")._value.get()
        whole = await hear(started, path, body(path))
        joined = await hear(started, path, body(path), kills=1)
        assert joined.text == whole.text
        assert joined.finish == whole.finish == ("length", None)
        assert joined.tokens == [], "nobody asked for them"
        assert joined.raw.endswith(b"data: [DONE]\n\n")
        (comment,) = joined.comments
        assert comment.startswith(": continued by tiny-")
        assert comment.endswith(" tokens")
        assert not whole.comments
        assert {(e["id"], e["object"], e["created"], e["model"]) for e in joined.events} == {
            (joined.events[0]["id"], whole.events[0]["object"], joined.events[0]["created"], "tiny")
        }
        usage, before = joined.events[-1]["usage"], whole.events[-1]["usage"]
        assert "prompt_tokens_details" not in usage, "what the dead one had found is not known"
        assert usage == {name: before[name] for name in usage}
        assert metrics.of(metrics.RETRIES, "taken")._value.get() == taken + 1, "within the retry budget"


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
async def test_what_may_be_continued_passes_untouched_where_nothing_dies(tmp_path: Path, path: str) -> None:
    async with running(tmp_path) as started:
        through = await hear(started, path, body(path))
        direct = Heard()
        async with started.http.post(started.engines["tiny-0"].url + path, json=body(path)) as answer:
            direct.raw = await answer.read()
        assert normal(through.raw) == normal(direct.raw)


async def test_token_ids_that_were_asked_for_go_on_too(tmp_path: Path) -> None:
    async with running(tmp_path) as started:
        asked = body(COMPLETION, return_token_ids=True)
        whole = await hear(started, COMPLETION, asked)
        joined = await hear(started, COMPLETION, asked, kills=1)
        assert joined.tokens == whole.tokens
        assert len(whole.tokens) == TOKENS


async def test_an_answer_survives_two_deaths(tmp_path: Path) -> None:
    async with running(tmp_path, count=3) as started:
        whole = await hear(started, CHAT, body(CHAT))
        joined = await hear(started, CHAT, body(CHAT), kills=2)
        assert joined.text == whole.text
        assert len(joined.comments) == 2
        assert joined.events[-1]["usage"]["completion_tokens"] == TOKENS


async def test_a_stop_text_across_the_seam_ends_the_answer(tmp_path: Path) -> None:
    async with running(tmp_path) as started:
        whole = (await hear(started, COMPLETION, body(COMPLETION))).text
        stop = whole[10 : len(whole) * 2 // 3]
        joined = await hear(started, COMPLETION, body(COMPLETION, stop=stop), kills=1)
        assert joined.finish == ("stop", stop)
        assert whole.startswith(joined.text)
        assert stop not in joined.text
        assert joined.raw.endswith(b"data: [DONE]\n\n")


async def test_a_sampled_answer_goes_on_within_its_budget_of_tokens(tmp_path: Path) -> None:
    async with running(tmp_path) as started:
        asked = body(CHAT, temperature=0.8, min_tokens=TOKENS)
        joined = await hear(started, CHAT, asked, kills=1)
        assert joined.finish == ("length", None)
        assert joined.events[-1]["usage"]["completion_tokens"] == TOKENS


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ((), {"tools": [TOOL]}),
        ((), {"temperature": 0.5, "n": 2}),
        ((), {"logprobs": True}),
        ((), {"temperature": 0.5, "seed": 1}),
        ((), {"frequency_penalty": 0.5}),
        ((), {"return_token_ids": False}),
        ((), {"a_field_of_tomorrow": 1}),
        (("limits.continuation=never",), {}),
        (("limits.retries=0",), {}),
    ],
)
async def test_what_cannot_be_continued_truly_says_that_it_broke(
    tmp_path: Path, settings: tuple[str, ...], more: dict[str, Any]
) -> None:
    async with running(tmp_path, *settings) as started:
        asked = body(CHAT, max_tokens=400, **more)
        joined = await hear(started, CHAT, asked, kills=1, after=2)
        assert joined.events[-1]["error"]["code"] == "engine_failed"
        assert b"[DONE]" not in joined.raw
        assert not joined.comments


async def test_without_budget_nothing_goes_on(tmp_path: Path) -> None:
    async with running(tmp_path) as started:
        while started.app.router.budget.take():
            pass
        joined = await hear(started, COMPLETION, body(COMPLETION), kills=1)
        assert joined.events[-1]["error"]["code"] == "engine_failed"


async def test_the_openai_client_reads_a_joined_stream(tmp_path: Path) -> None:
    async with running(tmp_path) as started:
        client = await started.client()
        text, killed, chunks = "", False, 0
        asked = {name: value for name, value in body(CHAT).items() if name != "ignore_eos"}
        async for chunk in await client.chat.completions.create(**asked):
            chunks += 1
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            if chunks == 9 and not killed:
                killed = True
                serving = next(target.id for target in started.app.view.targets.values() if target.in_flight)
                os.killpg(started.engines[serving].process.pid, signal.SIGKILL)
        whole = await hear(started, CHAT, body(CHAT))
        assert text == whole.text
        await client.close()


@pytest.mark.parametrize("whole_events", [1, 2, 3])
async def test_what_is_missing_at_the_end_is_said_once(tmp_path: Path, whole_events: int) -> None:
    """An engine that dies after its last token: before its usage, before the end mark, or with nothing missing."""

    def event(choices: list[Any], **more: Any) -> bytes:
        body = {
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 7,
            "model": "tiny",
            "choices": choices,
            **more,
        }
        return b"data: " + json.dumps(body).encode() + b"\n\n"

    told = [
        event([{"index": 0, "text": "hot", "finish_reason": "stop", "token_ids": [7]}]),
        event([], usage={"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}),
        b"data: [DONE]\n\n",
    ]

    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n")
        if b"/health" in asked:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            await writer.drain()
            writer.close()
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for said in told[:whole_events]:
            writer.write(b"%x\r\n%b\r\n" % (len(said), said))
        await writer.drain()
        await reader.read(64)
        writer.close()  # a chunked body without its end: broken

    sha256, tokenizer = tokenizer_of(cached(TINY))
    servers = [await asyncio.start_server(engine, "127.0.0.1", 0) for _ in range(2)]
    urls = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    async with running_router("parity=false") as app, aiohttp.ClientSession() as http:
        app.tokenizers.add(sha256, tokenizer)
        tell(app, *[replica(f"r-{number}", url, sha256=sha256) for number, url in enumerate(urls)])
        asked = {"model": "tiny", "prompt": "How hot?", "stream": True, "stream_options": {"include_usage": True}}
        async with http.post(f"http://127.0.0.1:{app.http_port}/v1/completions", json=asked) as answer:
            got = await answer.read()
    for server in servers:
        server.close()
    assert got.count(b"[DONE]") == got.count(b'"usage"') == got.count(b'"hot"') == 1
    assert got.endswith(b"data: [DONE]\n\n")
    assert b'"error"' not in got
