"""`POST /v1/chat/completions`, with tools and structured outputs."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from stoker.sim_engine.api import generate, request
from stoker.sim_engine.api.request import ApiError
from stoker.sim_engine.core import text
from stoker.sim_engine.engine import Call, SimEngine
from stoker.sim_engine.tokenizer import TemplateError, Tokenizer


@dataclass(frozen=True)
class _Answer:
    """What the model must say: nothing in particular, some JSON, or a call of a tool."""

    script: tuple[int, ...] = ()
    tool: str | None = None


async def handle(http: web.Request, engine: SimEngine, tokenizer: Tokenizer) -> web.StreamResponse:
    """One chat, streamed or whole."""
    config = engine.config
    body = await request.body_of(http)
    wanted = request.sampling(body, config, chat=True)
    prompt = _told_tokens(body, tokenizer) or await render(body, tokenizer)
    answer = _answer(body, tokenizer)
    call = request.new_call(config, [prompt], wanted, answer.script)
    head = {"id": f"chatcmpl-{uuid.uuid4().hex[:16]}", "created": int(time.time()), "model": wanted.model}
    with generate.running(engine, call):
        if wanted.stream:
            return await _stream(http, engine, tokenizer, call, wanted, answer, head)
        whole = await generate.choices(engine, tokenizer, call, wanted)
    answers = []
    for index, choice in enumerate(whole):
        message: dict[str, Any] = {"role": "assistant", "content": choice.text}
        if answer.tool is not None:
            message = {"role": "assistant", "content": None, "tool_calls": [_tool_call(answer.tool, choice.text)]}
        answers.append({
            "index": index,
            "message": {**message, "refusal": None},
            "logprobs": _logprobs(tokenizer, choice.deltas, wanted.logprobs),
            "finish_reason": _reason(choice.finish_reason, answer),
            "stop_reason": choice.stop_reason,
        })  # fmt: skip
    generated = sum(len(choice.deltas) for choice in whole)
    told = generate.usage(call, generated, 1, details=config.prompt_tokens_details)
    return web.json_response({**head, "object": "chat.completion", "choices": answers, "usage": told})


async def _stream(
    http: web.Request,
    engine: SimEngine,
    tokenizer: Tokenizer,
    call: Call,
    wanted: request.Sampling,
    answer: _Answer,
    head: dict[str, Any],
) -> web.StreamResponse:
    head = {**head, "object": "chat.completion.chunk"}
    stream = generate.EventStream(http)
    await stream.open()
    generated, named = 0, set[int]()
    async for delta in generate.deltas(engine, tokenizer, call, wanted):
        if not generated:  # as vLLM does: no word before the prefill is done
            for opening in _openings(call, wanted):
                await stream.send({**head, **opening})
        generated += 1
        said: dict[str, Any] = {"content": delta.text}
        if answer.tool is not None:
            piece = {"index": 0, "function": {"arguments": delta.text}}
            if delta.index not in named:
                named.add(delta.index)
                piece = {"index": 0, **_tool_call(answer.tool, delta.text)}
            said = {"tool_calls": [piece]}
        await stream.send({**head, "choices": [{
            "index": delta.index,
            "delta": said,
            "logprobs": _logprobs(tokenizer, [delta], wanted.logprobs),
            "finish_reason": _reason(delta.finish_reason, answer),
            "stop_reason": delta.stop_reason,
            "token_ids": [delta.token] if wanted.token_ids else None,
        }]})  # fmt: skip
    if wanted.include_usage:
        told = generate.usage(call, generated, 1, details=engine.config.prompt_tokens_details)
        await stream.send({**head, "choices": [], "usage": told})
    return await stream.close()


def _openings(call: Call, wanted: request.Sampling) -> Iterator[dict[str, Any]]:
    """What opens the assistant's turn in each choice."""
    prompt = call.requests[0].prompt if wanted.token_ids else None
    for index in range(wanted.n):
        first: dict[str, Any] = {"role": "assistant", "content": ""}
        opened = [{"index": index, "delta": first, "logprobs": None, "finish_reason": None}]
        yield {"choices": opened, "prompt_token_ids": prompt}


def _told_tokens(body: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    """The token ids that a request brings beside its messages; empty where it brings none."""
    told = body.get("kv_transfer_params")
    ids = told.get("prompt_token_ids") if isinstance(told, dict) and not body.get("echo") else None
    if ids is None:
        return []
    known = range(tokenizer.vocabulary_size)
    if not isinstance(ids, list) or not ids or not all(type(one) is int and one in known for one in ids):
        raise ApiError(
            "`kv_transfer_params['prompt_token_ids']` must be a non-empty list of token ids.",
            param="kv_transfer_params.prompt_token_ids",
        )
    return ids


async def render(body: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    """Token ids of a chat or tokenize request. Raises `ApiError` for messages that cannot be rendered."""
    messages = request.messages(body)
    tools = body.get("tools")  # shown to the model even with `tool_choice` "none", as vLLM does
    try:
        prompt = tokenizer.render(
            messages,
            tools,
            add_generation_prompt=bool(body.get("add_generation_prompt", True)),
            **(body.get("chat_template_kwargs") or {}),
        )
    except (TemplateError, ValueError, TypeError) as error:
        raise ApiError(str(error)) from error
    return await tokenizer.encode_aside(prompt, special=bool(body.get("add_special_tokens", False)))


def _answer(body: dict[str, Any], tokenizer: Tokenizer) -> _Answer:
    choice, tools = body.get("tool_choice"), body.get("tools") or []
    functions = {tool["function"]["name"]: tool["function"] for tool in tools if "function" in tool}
    if isinstance(choice, dict):
        name = (choice.get("function") or {}).get("name")
        if name not in functions:
            raise ApiError(f"The tool specified in `tool_choice` does not match any of the specified `tools`: {name}")
        return _calling(functions[name], tokenizer)
    if choice == "required":
        if not functions:
            raise ApiError("When using `tool_choice`, `tools` must be set.")
        return _calling(next(iter(functions.values())), tokenizer)
    schema = _schema(body)
    return _Answer() if schema is None else _Answer(_script(text.example(schema), tokenizer))


def _schema(body: dict[str, Any]) -> Any:
    wanted = body.get("response_format") or {}
    if wanted.get("type") == "json_schema":
        return (wanted.get("json_schema") or {}).get("schema") or {}
    if wanted.get("type") == "json_object":
        return {"type": "object"}
    schema = (body.get("structured_outputs") or {}).get("json")
    return json.loads(schema) if isinstance(schema, str) else schema


def _calling(function: dict[str, Any], tokenizer: Tokenizer) -> _Answer:
    value = text.example(function.get("parameters") or {"type": "object"})
    return _Answer(_script(value, tokenizer), function["name"])


def _script(value: Any, tokenizer: Tokenizer) -> tuple[int, ...]:
    return tuple(tokenizer.encode(json.dumps(value), special=False))


def _reason(reason: str | None, answer: _Answer) -> str | None:
    return "tool_calls" if reason == "stop" and answer.tool is not None else reason


def _tool_call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": _tool_id(), "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool_id() -> str:
    return f"chatcmpl-tool-{uuid.uuid4().hex[:16]}"


def _logprobs(tokenizer: Tokenizer, deltas: Sequence[generate.Delta], count: int | None) -> dict[str, Any] | None:
    if count is None:
        return None
    content = []
    for delta in deltas:
        ranked = [
            {"token": piece, "logprob": value, "bytes": list(piece.encode())}
            for piece, value in generate.alternatives(tokenizer, delta, max(0, count - 1))
        ]
        content.append({**ranked[0], "top_logprobs": ranked[:count]})
    return {"content": content}
