"""kill -9 of a real vLLM in the middle of its answers: what their readers get is what they would have got."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import aiohttp
import grpc
import pytest

from stoker.api.inference.v1 import inference_pb2, inference_pb2_grpc
from stoker.cli.serving import Serving
from tests.support.waiting import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.fault, pytest.mark.timeout(300)]

PROMPT = "The stoker feeds the fire and minds the gauge. " * 12
TOKENS = 200
BODY: dict[str, Any] = {
    "model": "tiny", "temperature": 0, "ignore_eos": True, "max_tokens": TOKENS, "stream": True,
    "stream_options": {"include_usage": True},
}  # fmt: skip


class Reader:
    """Reads one answer, however it comes."""

    def __init__(self) -> None:
        self.text = ""
        self.pieces = 0
        self.replica = ""
        self.tokens = 0
        self.continued = False
        self.raw = b""

    async def grpc(self, endpoint: str) -> None:
        request = inference_pb2.GenerateRequest(
            model="tiny",
            text=PROMPT,
            sampling=inference_pb2.Sampling(temperature=0, ignore_eos=True, max_tokens=TOKENS),
        )
        async with grpc.aio.insecure_channel(endpoint) as channel:
            async for step in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=120):
                self.replica = step.started.replica_id or self.replica
                self.text += step.delta.text
                self.pieces += step.HasField("delta")
                self.tokens = step.finished.usage.completion_tokens
                self.continued = step.finished.continued

    async def http(self, url: str, path: str, more: dict[str, Any]) -> None:
        async with aiohttp.ClientSession() as session, session.post(url + path, json={**BODY, **more}) as answer:
            assert answer.status == 200
            self.replica = answer.headers["x-stoker-replica"]
            async for line in answer.content:
                self.raw += line
                self.continued |= line.startswith(b": continued by")
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        self.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                        self.pieces += 1
                    self.tokens = (event.get("usage") or {}).get("completion_tokens", 0)


def ways(stack: Serving) -> dict[str, tuple[Reader, Any]]:
    """One question by each API, not asked yet."""
    url = stack.state.endpoints.http[0]
    readers = {way: Reader() for way in ("grpc", "completion", "chat")}
    chat = {"messages": [{"role": "user", "content": PROMPT}]}
    return {
        "grpc": (readers["grpc"], readers["grpc"].grpc(stack.state.endpoints.router[0])),
        "completion": (readers["completion"], readers["completion"].http(url, "/v1/completions", {"prompt": PROMPT})),
        "chat": (readers["chat"], readers["chat"].http(url, "/v1/chat/completions", chat)),
    }


async def test_events_pass_as_the_engine_would_have_sent_them_unasked(stack: Serving) -> None:
    """The router asks for token ids; its clients see none, and nothing else is different."""
    through, direct = Reader(), Reader()
    url = stack.state.endpoints.http[0]
    await through.http(url, "/v1/completions", {"prompt": PROMPT, "max_tokens": 6})
    home = stack.engine_urls()[int(through.replica.rpartition("-")[2])]
    async with aiohttp.ClientSession() as session:
        body = {**BODY, "prompt": PROMPT, "max_tokens": 6}
        async with session.post(f"{home}/v1/completions", json=body) as answer:
            direct.raw = await answer.read()

    def bare(raw: bytes) -> list[Any]:
        events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith(b"data: {")]
        for event in events:
            for varying in ("id", "created", "usage"):
                event.pop(varying, None)
        return events

    assert bare(through.raw) == bare(direct.raw)


async def test_a_greedy_answer_is_the_same_with_and_without_a_death(stack: Serving) -> None:
    whole = ways(stack)
    for reader, asking in whole.values():
        await asking
        assert reader.tokens == TOKENS
        assert not reader.continued

    broken = ways(stack)
    asked = [asyncio.create_task(asking) for _, asking in broken.values()]

    def under_way() -> bool:
        return min(reader.pieces for reader, _ in broken.values()) >= 20

    await eventually(under_way, "twenty pieces of every answer have come", 60)
    victim = broken["completion"][0].replica
    pid = next(r.members[0].pid for r in stack.fleet.replicas("tiny") if r.replica_id == victim)
    os.killpg(pid, signal.SIGKILL)
    await asyncio.wait_for(asyncio.gather(*asked), 120)

    assert broken["completion"][0].continued
    for way, (reader, _) in broken.items():
        assert reader.tokens == TOKENS
        assert reader.continued == (reader.replica == victim)
        assert reader.text == whole[way][0].text, way
