"""Turns a call's tokens into text: stop strings, log-probabilities, usage, server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from stoker.sim_engine.api.request import ApiError, Sampling
from stoker.sim_engine.core import text
from stoker.sim_engine.engine import Call, SimEngine
from stoker.sim_engine.tokenizer import Tokenizer


@dataclass(frozen=True)
class Delta:
    """What one token adds to one choice."""

    index: int
    token: int
    text: str
    finish_reason: str | None
    stop_reason: str | None = None


@dataclass
class Choice:
    """A whole choice, for answers that do not stream."""

    deltas: list[Delta] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(delta.text for delta in self.deltas)

    @property
    def finish_reason(self) -> str | None:
        """Why it ended."""
        return self.deltas[-1].finish_reason if self.deltas else None

    @property
    def stop_reason(self) -> str | None:
        """The stop string that ended it."""
        return self.deltas[-1].stop_reason if self.deltas else None


@contextmanager
def running(engine: SimEngine, call: Call) -> Iterator[None]:
    """Start a call; on leaving, however that happens, no sequence of it lives on."""
    try:
        engine.submit(call)
    except ValueError as error:
        raise ApiError(str(error)) from error
    try:
        yield
    finally:
        for request in call.requests:
            engine.abort(request)


async def deltas(engine: SimEngine, tokenizer: Tokenizer, call: Call, wanted: Sampling) -> AsyncIterator[Delta]:
    """The call's text as it comes, its choices interleaved."""
    tails = [""] * len(call.requests)
    unfinished = set(range(len(call.requests)))
    while unfinished:
        token = await call.tokens.get()
        if token.index not in unfinished:
            continue
        tails[token.index], piece, hit = _stopped(tails[token.index], tokenizer.text(token.id), wanted.stop)
        reason = "stop" if hit is not None else token.finish_reason
        if reason is not None:
            unfinished.discard(token.index)
            engine.abort(call.requests[token.index], reason)
        yield Delta(token.index, token.id, piece, reason, hit)


async def choices(engine: SimEngine, tokenizer: Tokenizer, call: Call, wanted: Sampling) -> list[Choice]:
    """The call's choices, whole."""
    whole = [Choice() for _ in call.requests]
    async for delta in deltas(engine, tokenizer, call, wanted):
        whole[delta.index].deltas.append(delta)
    return whole


def _stopped(tail: str, piece: str, stops: tuple[str, ...]) -> tuple[str, str, str | None]:
    """The text to remember, the text to send, and the stop string that was met."""
    if not stops:
        return "", piece, None
    joined = tail + piece
    found = [(at, stop) for stop in stops if (at := joined.find(stop)) >= 0]
    if found:
        at, stop = min(found)
        return "", joined[len(tail) : at] if at >= len(tail) else "", stop
    return joined[-max(map(len, stops)) :], piece, None


def usage(call: Call, generated: int, prompts: int, *, details: bool) -> dict[str, Any]:
    """The usage object. The prompt counts once, however many choices it has."""
    each = len(call.requests) // prompts
    prompt_tokens = sum(len(request.prompt) for request in call.requests[::each])
    told: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + generated,
        "completion_tokens": generated,
    }
    if details:
        told["prompt_tokens_details"] = {"cached_tokens": call.cached_tokens}
    return told


def alternatives(tokenizer: Tokenizer, delta: Delta, count: int) -> list[tuple[str, float]]:
    """The token itself and `count` others, with made-up log-probabilities that fall."""
    sayable = tokenizer.sayable
    start = text.mix(delta.token) % len(sayable)
    others = [tokenizer.text(sayable[(start + i) % len(sayable)]) for i in range(count)]
    return [(piece, text.logprob(delta.index, delta.token, rank)) for rank, piece in enumerate([delta.text, *others])]


class EventStream:
    """A response of server-sent events. Leaving it writes the end mark only if all went well."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})

    async def open(self) -> None:
        """Send the headers."""
        await self._response.prepare(self._request)

    async def send(self, value: object, event: str | None = None) -> None:
        """Send one event."""
        name = f"event: {event}\n" if event else ""
        await self._response.write(f"{name}data: {json.dumps(value, separators=(',', ':'))}\n\n".encode())

    async def close(self, *, done: bool = True) -> web.StreamResponse:
        """End the stream, with OpenAI's end mark."""
        if done:
            await self._response.write(b"data: [DONE]\n\n")
        await self._response.write_eof()
        return self._response
