"""`stoker explain`: where a request would go, and why."""

from __future__ import annotations

from typing import Annotated, Any

import grpc
import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from stoker.api.inference.v1 import inference_pb2, inference_pb2_grpc
from stoker.api.router.v1 import router_pb2, router_pb2_grpc
from stoker.cli.addresses import Addresses, RouterOption, secured
from stoker.cli.fleet import explained
from stoker.cli.loop import run
from stoker.cli.output import Format, FormatOption, Output
from stoker.common import rpc
from stoker.common.errors import InvalidRequest, NotFound

_CALL_S = 30.0


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(epilog='Example: stoker explain "You are a helpful assistant. What is a KV cache?"')(explain)


def explain(
    prompt: Annotated[str, typer.Argument(help="A prompt to route in thought.", show_default=False)] = "",
    request_id: Annotated[str, typer.Option("--request-id", help="A request that this router decided lately.")] = "",
    model: Annotated[str, typer.Option("--model", help="Served model. Default: the only one.")] = "",
    chat: Annotated[bool, typer.Option("--chat", help="Take the prompt as a user's chat message.")] = False,
    salt: Annotated[str, typer.Option("--cache-salt", help="cache_salt of the request.")] = "",
    router: RouterOption = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Show every candidate replica's cost, bound and expected cache hit for a prompt or a past request."""
    if bool(prompt) == bool(request_id):
        raise InvalidRequest.field("PROMPT", "give either a prompt or --request-id")
    target = Addresses.find("", router).require_routers()[0]
    out = Output(output)

    async def work() -> router_pb2.ExplainResponse:
        async with rpc.channel(target, secured(router)) as channel:
            try:
                request = router_pb2.ExplainRequest(request_id=request_id)
                if prompt:
                    name = model or await _only_model(channel)
                    request = router_pb2.ExplainRequest(request=_generate(prompt, name, chat=chat, salt=salt))
                return await router_pb2_grpc.RouterServiceStub(channel).Explain(request, timeout=_CALL_S)
            except grpc.RpcError as failure:
                raise explained(target, failure) from failure

    value = as_json(run(work()))
    out.result(value, *as_tables(value))


async def _only_model(channel: grpc.aio.Channel) -> str:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    models = (await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=_CALL_S)).models
    names = [m.id for m in models if not m.parent]
    if not names:
        raise NotFound("the router knows no model; deploy one with `stoker deploy -f FILE`")
    if len(names) > 1:
        raise InvalidRequest.field("--model", f"several models are served, name one: {', '.join(names)}")
    return names[0]


def _generate(prompt: str, model: str, *, chat: bool, salt: str) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(model=model, cache_salt=salt)
    if chat:
        part = inference_pb2.ContentPart(text=prompt)
        request.chat.messages.append(inference_pb2.ChatMessage(role="user", content=[part]))
    else:
        request.text = prompt
    return request


def as_json(answer: router_pb2.ExplainResponse) -> dict[str, Any]:
    """A decision as plain values."""
    decision = answer.decision
    return {
        "replica": decision.replica_id or None,
        "reason": decision.reason,
        "policy": answer.policy,
        "prompt_tokens": answer.prompt_tokens if answer.HasField("prompt_tokens") else None,
        "blocks": answer.blocks,
        "predicted_cached_tokens": decision.predicted_cached_tokens,
        "age_ms": answer.age_ms,
        "candidates": [
            {
                "replica": c.replica_id,
                "cost_s": c.cost_s,
                "load_tokens": c.load_tokens,
                "bound_tokens": c.bound_tokens,
                "open": c.open,
                "matched_tokens": c.matched_tokens,
                "confidence": c.confidence,
                "ring_rank": c.ring_rank,
            }
            for c in decision.candidates
        ],
        "excluded": [{"replica": e.replica_id, "reason": e.reason} for e in decision.excluded],
    }


def as_tables(value: dict[str, Any]) -> list[RenderableType]:
    """The same for people."""
    tokens = value["prompt_tokens"]
    size = f"{tokens} tokens, {value['blocks']} full blocks" if tokens is not None else "tokens unknown"
    where = value["replica"] or "nowhere"
    cached = value["predicted_cached_tokens"]
    head = Text.assemble(("→ ", "bold"), (where, "bold green"), f" ({value['reason']}, policy {value['policy']}); ")
    head.append(f"prompt: {size}, {cached} expected in the cache")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("candidate", "cost", "load / bound (tokens)", "open", "cached tokens", "confidence", "ring"):
        table.add_column(column)
    for c in value["candidates"]:
        table.add_row(
            c["replica"],
            f"{c['cost_s'] * 1000:.1f} ms",
            f"{c['load_tokens']} / {c['bound_tokens']}",
            "yes" if c["open"] else "no",
            str(c["matched_tokens"]),
            c["confidence"],
            str(c["ring_rank"]),
        )
    shown: list[RenderableType] = [head, table] if value["candidates"] else [head]
    shown += [f"excluded: {e['replica']} ({e['reason']})" for e in value["excluded"]]
    return shown
