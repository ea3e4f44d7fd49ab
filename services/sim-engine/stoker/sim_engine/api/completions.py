"""`POST /v1/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from stoker.sim_engine.api import generate, request
from stoker.sim_engine.api.request import ApiError
from stoker.sim_engine.engine import SimEngine
from stoker.sim_engine.tokenizer import Tokenizer


async def handle(http: web.Request, engine: SimEngine, tokenizer: Tokenizer) -> web.StreamResponse:
    """One or more prompts, as text or token ids, streamed or whole."""
    config = engine.config
    body = await request.body_of(http)
    wanted = request.sampling(body, config, chat=False)
    prompts = await _prompts(body.get("prompt"), tokenizer)
    echo = [tokenizer.decode(prompt) if body.get("echo") else "" for prompt in prompts]
    call = request.new_call(config, prompts, wanted)
    head = {
        "id": f"cmpl-{uuid.uuid4().hex[:16]}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": wanted.model,
    }
    with generate.running(engine, call):
        if wanted.stream:
            stream = generate.EventStream(http)
            await stream.open()
            generated, offsets, begun = 0, [0] * len(call.requests), set[int]()
            async for delta in generate.deltas(engine, tokenizer, call, wanted):
                generated += 1
                text, prompt = delta.text, None
                if delta.index not in begun:
                    begun.add(delta.index)
                    text = echo[delta.index // wanted.n] + text
                    prompt = call.requests[delta.index].prompt if wanted.token_ids else None
                shown = _logprobs(tokenizer, [delta], wanted.logprobs, offsets[delta.index])
                offsets[delta.index] += len(delta.text)
                ids = {"prompt_token_ids": prompt, "token_ids": [delta.token] if wanted.token_ids else None}
                await stream.send({**head, "choices": [{**_choice(delta, text, shown), **ids}]})
            if wanted.include_usage:
                told = generate.usage(call, generated, len(prompts), details=config.prompt_tokens_details)
                await stream.send({**head, "choices": [], "usage": told})
            return await stream.close()
        whole = await generate.choices(engine, tokenizer, call, wanted)
    answers = []
    for index, choice in enumerate(whole):
        shown = _logprobs(tokenizer, choice.deltas, wanted.logprobs, 0)
        answers.append(_choice(choice.deltas[-1], echo[index // wanted.n] + choice.text, shown))
    generated = sum(len(choice.deltas) for choice in whole)
    told = generate.usage(call, generated, len(prompts), details=config.prompt_tokens_details)
    return web.json_response({**head, "choices": answers, "usage": told})


def _choice(delta: generate.Delta, text: str, logprobs: object) -> dict[str, Any]:
    return {
        "index": delta.index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": delta.finish_reason,
        "stop_reason": delta.stop_reason,
    }


async def _prompts(given: Any, tokenizer: Tokenizer) -> list[list[int]]:
    if given is None or given in ("", []):
        raise ApiError("Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)",
                       param="prompt")  # fmt: skip
    if isinstance(given, str) or (isinstance(given, list) and isinstance(given[0], int)):
        given = [given]
    if not isinstance(given, list):
        raise ApiError("prompt must be a string, an array of strings, or arrays of token ids.", param="prompt")
    return [
        await tokenizer.encode_aside(one) if isinstance(one, str) else _token_ids(one, tokenizer) for one in given
    ]


def _token_ids(given: Any, tokenizer: Tokenizer) -> list[int]:
    if not isinstance(given, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in given):
        raise ApiError("prompt must be a string, an array of strings, or arrays of token ids.", param="prompt")
    for token in given:
        if not 0 <= token < tokenizer.vocabulary_size:
            raise ApiError(f"Token id {token} is out of vocabulary")
    return given


def _logprobs(
    tokenizer: Tokenizer, deltas: Sequence[generate.Delta], count: int | None, offset: int
) -> dict[str, Any] | None:
    if count is None:
        return None
    shown: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for delta in deltas:
        ranked = generate.alternatives(tokenizer, delta, count)
        shown["text_offset"].append(offset)
        shown["tokens"].append(delta.text)
        shown["token_logprobs"].append(ranked[0][1])
        shown["top_logprobs"].append(dict(ranked))
        offset += len(delta.text)
    return shown
