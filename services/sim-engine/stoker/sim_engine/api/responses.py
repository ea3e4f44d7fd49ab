"""`POST /v1/responses`: plain text in, plain text out, streamed or whole."""

from __future__ import annotations

import time
import uuid
from typing import Any

from aiohttp import web

from stoker.sim_engine.api import chat, generate, request
from stoker.sim_engine.engine import Call, SimEngine
from stoker.sim_engine.tokenizer import Tokenizer


async def handle(http: web.Request, engine: SimEngine, tokenizer: Tokenizer) -> web.StreamResponse:
    """One response."""
    config = engine.config
    body = await request.body_of(http)
    wanted = request.sampling(body, config, chat=True, limit_field="max_output_tokens")
    # As vLLM: on this route the tokenizer adds its begin mark to the one of the template.
    prompt = await chat.render({"messages": _messages(body), "add_special_tokens": True}, tokenizer)
    call = request.new_call(config, [prompt], wanted)
    shell = {
        "id": f"resp_{uuid.uuid4().hex[:16]}",
        "object": "response",
        "created_at": int(time.time()),
        "model": wanted.model,
        "instructions": body.get("instructions"),
        "parallel_tool_calls": True,
        "tool_choice": "none",
        "tools": [],
        "temperature": body.get("temperature", 1.0),
        "top_p": body.get("top_p", 1.0),
        "max_output_tokens": wanted.max_tokens,
        "incomplete_details": None,
        "metadata": body.get("metadata"),
    }
    item = f"msg_{uuid.uuid4().hex[:16]}"
    with generate.running(engine, call):
        if wanted.stream:
            return await _stream(http, engine, tokenizer, call, wanted, shell, item)
        (whole,) = await generate.choices(engine, tokenizer, call, wanted)
    return web.json_response(_finished(shell, item, whole, call))


async def _stream(
    http: web.Request,
    engine: SimEngine,
    tokenizer: Tokenizer,
    call: Call,
    wanted: request.Sampling,
    shell: dict[str, Any],
    item: str,
) -> web.StreamResponse:
    stream = generate.EventStream(http)
    await stream.open()
    sent = 0

    async def send(kind: str, **fields: Any) -> None:
        nonlocal sent
        await stream.send({**fields, "sequence_number": sent, "type": f"response.{kind}"}, f"response.{kind}")
        sent += 1

    begun = {**shell, "output": [], "status": "in_progress", "usage": None}
    at = {"output_index": 0, "content_index": 0, "item_id": item}
    empty = {"id": item, "content": [], "role": "assistant", "status": "in_progress", "type": "message"}
    await send("created", response=begun)
    await send("in_progress", response=begun)
    await send("output_item.added", item=empty, output_index=0)
    await send("content_part.added", **at, part=_part(""))
    whole = generate.Choice()
    async for delta in generate.deltas(engine, tokenizer, call, wanted):
        whole.deltas.append(delta)
        await send("output_text.delta", **at, delta=delta.text, logprobs=[])
    done = _finished(shell, item, whole, call)
    await send("output_text.done", **at, text=whole.text, logprobs=[])
    await send("content_part.done", **at, part=_part(whole.text))
    await send("output_item.done", item=done["output"][0], output_index=0)
    await send("completed" if done["status"] == "completed" else "incomplete", response=done)
    return await stream.close(done=False)


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    given = body.get("input")
    if given is None:
        raise request.missing("input")
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
    if instructions := body.get("instructions"):
        messages.insert(0, {"role": "system", "content": instructions})
    return messages


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}


def _finished(shell: dict[str, Any], item: str, whole: generate.Choice, call: Call) -> dict[str, Any]:
    told = generate.usage(call, len(whole.deltas), 1, details=True)
    cut = whole.finish_reason == "length"
    message = {
        "id": item,
        "content": [_part(whole.text)],
        "role": "assistant",
        "status": "completed",
        "type": "message",
    }
    return {
        **shell,
        "output": [message],
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "usage": {
            "input_tokens": told["prompt_tokens"],
            "input_tokens_details": told["prompt_tokens_details"],
            "output_tokens": told["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": told["total_tokens"],
        },
    }
