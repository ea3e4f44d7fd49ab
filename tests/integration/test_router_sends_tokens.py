"""A real vLLM gives the same answer, byte for byte, to the tokens of a prompt as to its text."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import grpc
import pytest
import pytest_asyncio

from stoker.api.inference.v1 import inference_pb2, inference_pb2_grpc
from stoker.local.model import cached
from stoker.router.app import RouterApp
from tests.support.engines import TINY, RunningEngine
from tests.support.router import replica, running_router, tell, tokenizer_of
from tests.support.waiting import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "The stoker feeds the fire.\n\tFünf  Öfen, ½ tonne: 火 🔥 <|x|> </s> 1234567 don't\r\n " * 9
ASKED = {"role": "user", "content": TEXT}
GAUGE = {"type": "function", "function": {"name": "read_gauge", "parameters": {"type": "object", "properties": {}}}}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "read_gauge", "arguments": "{}"}}],
}
TOLD = {"role": "tool", "tool_call_id": "c1", "content": "451"}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}

PARTS = [{"type": "text", "text": "How"}, {"type": "text", "text": "?"}]

COMPLETED: dict[str, dict[str, Any]] = {
    "plain": {},
    "streamed": {"stream": True},
    "streamed with usage": {"stream": True, "stream_options": {"include_usage": True}},
    "logprobs": {"logprobs": 3},
    "prompt logprobs": {"prompt_logprobs": 1},
    "token ids": {"return_token_ids": True},
    "bare": {"add_special_tokens": False},
    "seeded choices": {"n": 3, "temperature": 1.0, "seed": 7},
    "penalties on the prompt": {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    "stops": {"stop": ["e", " "], "include_stop_str_in_output": True},
    "structured": {"response_format": SCHEMA},
    "echoed": {"echo": True},
    "cut": {"truncate_prompt_tokens": 20},
    "salted": {"cache_salt": "s"},
    "odd text": {"prompt": "\u2028 \ud7ff\u0000<s></s><|turn|>  "},
    "short": {"prompt": "a"},
    "one in a list": {"prompt": [TEXT]},
    "two": {"prompt": [TEXT, "a"]},
    "too much output": {"max_tokens": 100_000},
    "too long": {"prompt": "coal " * 20_000},
    "no sampling": {"temperature": -1},
}
CHATTED: dict[str, dict[str, Any]] = {
    "plain": {},
    "streamed": {"stream": True, "stream_options": {"include_usage": True}},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "token ids": {"return_token_ids": True},
    "tools": {"messages": [ASKED, CALLED, TOLD], "tools": [GAUGE]},
    "no tool": {"tools": [GAUGE], "tool_choice": "none"},
    "a tool that nobody parses": {"tools": [GAUGE], "tool_choice": "required"},
    "continued": {
        "messages": [ASKED, {"role": "assistant", "content": "About"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "parts": {"messages": [{"role": "user", "content": PARTS}]},
    "structured": {"response_format": SCHEMA},
    "echoed": {"echo": True},
    "seeded choices": {"n": 2, "temperature": 1.0, "seed": 7},
    "too much output": {"max_tokens": 100_000},
    "no role": {"messages": [{"content": "x"}]},
}  # fmt: skip
OWN = re.compile(rb'"(id|created|request_id)":(?:"[^"]*"|\d+)')
"""What every answer has of its own."""


def joined(stream: bytes) -> dict[str, Any]:
    """What a stream says, however many of its tokens happened to arrive together."""
    events = [json.loads(event.removeprefix(b"data: ")) for event in stream.split(b"\n\n")[:-2]]
    said: dict[str, Any] = {"text": "", "events": []}
    for event in events:
        for choice in event["choices"]:
            said["text"] += choice.pop("text", None) or choice.get("delta", {}).pop("content", "")
        if event not in said["events"]:
            said["events"].append(event)
    assert stream.endswith(b"data: [DONE]\n\n")
    return said


class Ways:
    """The same engine behind two routers: one that sends text, one that sends tokens."""

    def __init__(self, text: RouterApp, tokens: RouterApp, client: aiohttp.ClientSession) -> None:
        self._ports = {"text": text.http_port, "tokens": tokens.http_port}
        self.grpc_ports = {"text": text.rpc.port, "tokens": tokens.rpc.port}
        self._client = client
        self.sent: list[bytes] = []
        """The bodies that the engine was sent."""
        for app in (text, tokens):
            self._watch(app)

    def _watch(self, app: RouterApp) -> None:
        begin = app.engines.begin

        async def watched(method: str, url: str, body: bytes = b"", headers: Any = None) -> Any:
            if url.endswith("completions"):
                self.sent.append(body)
            return await begin(method, url, body, headers)

        app.engines.begin = watched  # type: ignore[method-assign]

    async def ask(self, way: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        async with self._client.post(f"http://127.0.0.1:{self._ports[way]}{path}", json=body) as answer:
            said = OWN.sub(rb'"\1":0', await answer.read())
            return answer.status, joined(said) if answer.content_type == "text/event-stream" else said

    async def alike(self, path: str, body: dict[str, Any]) -> None:
        """Ask both ways, once all of the prompt that can be is in the cache."""
        await self.ask("text", path, body)
        by_text = await self.ask("text", path, body)
        by_tokens = await self.ask("tokens", path, body)
        assert by_tokens == by_text


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ways(vllm: RunningEngine) -> AsyncIterator[Ways]:
    sha256, tokenizer = tokenizer_of(cached(TINY))
    async with contextlib.AsyncExitStack() as stack:
        routers = []
        for sends in ("never", "always"):
            app = await stack.enter_async_context(running_router(f"tokenizer.send_tokens={sends}"))
            app.tokenizers.add(sha256, tokenizer)
            tell(app, replica("tiny-0", vllm.url, sha256=sha256))
            routers.append(app)
        for app in routers:
            target = app.view.targets["tiny-0"]
            await eventually(lambda target=target: target.parity == "ok", "parity with the engine", 60)  # type: ignore[misc]
        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield Ways(routers[0], routers[1], client)


@pytest.mark.parametrize("name", COMPLETED)
async def test_a_completion(ways: Ways, name: str) -> None:
    body = {"model": "tiny", "prompt": TEXT, "max_tokens": 12, "temperature": 0} | COMPLETED[name]
    await ways.alike(COMPLETIONS, body)


@pytest.mark.parametrize("name", CHATTED)
async def test_a_chat(ways: Ways, name: str) -> None:
    body = {"model": "tiny", "messages": [ASKED], "max_tokens": 12, "temperature": 0} | CHATTED[name]
    await ways.alike(CHAT, body)


@pytest.mark.parametrize("kind", ["text", "chat"])
async def test_a_generation_over_grpc(ways: Ways, kind: str) -> None:
    said = {}
    ways.sent.clear()
    for way in ("text", "text", "tokens"):
        request = inference_pb2.GenerateRequest(model="tiny", return_token_ids=True)
        request.sampling.max_tokens, request.sampling.temperature = 12, 0
        if kind == "text":
            request.text = TEXT
        else:
            request.chat.messages.add(role="user").content.add(text=TEXT)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ways.grpc_ports[way]}") as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            answers = [answer async for answer in stub.Generate(request, timeout=20)]
        tokens = [token for answer in answers for token in answer.delta.token_ids]
        said[way] = "".join(answer.delta.text for answer in answers), tokens, answers[-1].finished
    assert said["tokens"] == said["text"]
    assert len(said["text"][1]) == 12
    assert (b"prompt_token_ids" in ways.sent[-1]) == (kind == "chat")
    assert isinstance(json.loads(ways.sent[-1]).get("prompt", []), list)


async def test_tokens_are_what_is_sent(ways: Ways) -> None:
    ways.sent.clear()
    for way in ("text", "tokens"):
        await ways.ask(way, COMPLETIONS, {"model": "tiny", "prompt": TEXT, "max_tokens": 1})
        await ways.ask(way, CHAT, {"model": "tiny", "messages": [ASKED], "max_tokens": 1})
    texts, tokens = [json.loads(body) for body in ways.sent[:2]], [json.loads(body) for body in ways.sent[2:]]
    assert texts[0]["prompt"] == TEXT
    assert "kv_transfer_params" not in texts[1]
    assert isinstance(tokens[0]["prompt"][0], int)
    assert isinstance(tokens[1]["kv_transfer_params"]["prompt_token_ids"][0], int)
