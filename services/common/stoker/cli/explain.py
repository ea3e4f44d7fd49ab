"""`stoker explain`: where a request would go, or went, and why."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

import grpc
import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from stoker.api.inference.v1 import inference_pb2, inference_pb2_grpc
from stoker.api.router.v1 import router_pb2, router_pb2_grpc
from stoker.cli.addresses import Addresses, RegistryOption, RouterOption, secured
from stoker.cli.fleet import explained
from stoker.cli.loop import run
from stoker.cli.output import Format, FormatOption, Output
from stoker.common import rpc
from stoker.common.errors import Code, InvalidRequest, NotFound, StokerError
from stoker.common.tls import Tls

_CALL_S = 30.0
_RECALL_S = 5.0  # a router that does not answer must not keep the others' answer from view

_WORDS = {
    "exact": "its reported KV blocks cover most of what is known of the prompt",
    "speculative": "the prefix was sent there a moment ago, so its blocks should be there by now",
    "ring": "no replica holds the prefix; this is its home on the ring",
    "spill": "a better match, or the prefix's home, is full or costs more",
    "least_loaded": "all replicas are over their bound; this one is least over",
    "round_robin": "the baseline policy takes replicas in turn",
    "panic": "most replicas are ejected, so the verdict is doubted and all are tried",
}
_EXCLUDED = {
    "already_tried": "it failed this request before",
    "pinned_elsewhere": "only the chosen one can serve this request",
    "draining": "it takes nothing new",
    "retiring": "it is about to drain, and is not alone in holding most of the prompt",
    "unhealthy": "the router cannot reach it",
    "not_ready": "it is not ready",
    "ejected": "it failed too often just now",
    "no_adapter": "it does not serve the adapter",
}


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(epilog='Example: stoker explain "You are a helpful assistant. What is a KV cache?"')(explain)


def explain(
    prompt: Annotated[str, typer.Argument(help="A prompt to route in thought.", show_default=False)] = "",
    request_id: Annotated[
        str, typer.Option("--request-id", help="A request decided lately, by any of the routers: all are asked.")
    ] = "",
    model: Annotated[str, typer.Option("--model", help="Served model. Default: the only one.")] = "",
    chat: Annotated[bool, typer.Option("--chat", help="Take the prompt as a user's chat message.")] = False,
    salt: Annotated[str, typer.Option("--cache-salt", help="cache_salt of the request.")] = "",
    registry: RegistryOption = "",
    router: RouterOption = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Show every candidate replica's cost, bound and expected cache hit for a prompt or a past request."""
    if bool(prompt) == bool(request_id):
        raise InvalidRequest.field("PROMPT", "give either a prompt or --request-id")
    targets, tls = Addresses.find(registry, router).require_routers(), secured(router)
    out = Output(output)

    async def decided_now() -> router_pb2.ExplainResponse:
        target = targets[0]
        async with rpc.channel(target, tls) as channel:
            try:
                name = model or await _only_model(channel)
                request = router_pb2.ExplainRequest(request=_generate(prompt, name, chat=chat, salt=salt))
                return await router_pb2_grpc.RouterServiceStub(channel).Explain(request, timeout=_CALL_S)
            except grpc.RpcError as failure:
                raise explained(target, failure) from failure

    value = as_json(run(decided_now() if prompt else recalled(request_id, targets, tls)))
    out.result(value, *as_tables(value))


async def recalled(request_id: str, targets: Sequence[str], tls: Tls | None) -> router_pb2.ExplainResponse:
    """The latest decision for a request, of whichever router took it.

    Raises NotFound where all have forgotten it, naming those that do not answer.
    """
    request = router_pb2.ExplainRequest(request_id=request_id)

    async def ask(target: str) -> router_pb2.ExplainResponse | StokerError:
        async with rpc.channel(target, tls) as channel:
            try:
                return await router_pb2_grpc.RouterServiceStub(channel).Explain(request, timeout=_RECALL_S)
            except grpc.RpcError as failure:
                return explained(target, failure)

    answers = await asyncio.gather(*map(ask, targets))
    found = [answer for answer in answers if not isinstance(answer, StokerError)]
    if found:
        return min(found, key=lambda answer: answer.age_ms)
    errors = {t: e for t, e in zip(targets, answers, strict=True) if isinstance(e, StokerError)}
    silent = sorted(t for t, e in errors.items() if e.code is not Code.NOT_FOUND)
    if len(silent) == len(errors):
        raise errors[silent[0]]
    known = f"; {', '.join(silent)} cannot be asked now" if silent else ""
    raise NotFound(
        f"request {request_id!r} is not among the last ones that {', '.join(sorted(errors.keys() - set(silent)))} "
        f"decided{known}",
        reason="DECISION_FORGOTTEN",
    )


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
        "why": _WORDS.get(decision.reason),
        "policy": answer.policy,
        "prompt_tokens": answer.prompt_tokens if answer.HasField("prompt_tokens") else None,
        "blocks": answer.blocks,
        "predicted_cached_tokens": decision.predicted_cached_tokens,
        "age_ms": answer.age_ms,
        "attempt": answer.attempt,
        "waited_ms": answer.waited_ms,
        "candidates": [
            {
                "replica": c.replica_id,
                "cost_s": c.cost_s,
                "load_tokens": c.load_tokens,
                "adds_tokens": c.adds_tokens,
                "bound_tokens": c.bound_tokens,
                "open": c.open,
                "matched_tokens": c.matched_tokens,
                "credited_tokens": c.credited_tokens,
                "confidence": c.confidence,
                "trust": c.trust,
                "ring_rank": c.ring_rank,
            }
            for c in decision.candidates
        ],
        "excluded": [
            {"replica": e.replica_id, "reason": e.reason, "why": _EXCLUDED.get(e.reason)} for e in decision.excluded
        ],
    }


def as_tables(value: dict[str, Any]) -> list[RenderableType]:
    """The same for people."""
    tokens = value["prompt_tokens"]
    size = f"{tokens} tokens, {value['blocks']} full blocks" if tokens is not None else "tokens unknown"
    where = value["replica"] or "nowhere"
    cached = value["predicted_cached_tokens"]
    head = Text.assemble(("→ ", "bold"), (where, "bold green"), f" ({value['reason']}, policy {value['policy']}); ")
    head.append(f"prompt: {size}, {cached} expected in the cache")
    shown: list[RenderableType] = [head]
    if value["why"]:
        shown.append(f"because {value['why']}")
    if value["age_ms"] or value["attempt"] > 1 or value["waited_ms"]:
        past = f"decided {value['age_ms'] / 1000:.1f} s ago, after {value['waited_ms']} ms in the router"
        shown.append(past + (f", attempt {value['attempt']}" if value["attempt"] > 1 else ""))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in (
        "candidate",
        "cost",
        "load + adds / bound (tokens)",
        "open",
        "matched tokens",
        "confidence",
        "ring",
    ):
        table.add_column(column)
    for c in value["candidates"]:
        table.add_row(
            c["replica"],
            f"{c['cost_s'] * 1000:.1f} ms",
            f"{c['load_tokens']} + {c['adds_tokens']} / {c['bound_tokens']}",
            "yes" if c["open"] else "no",
            str(c["matched_tokens"]),
            c["confidence"] if c["confidence"] == "none" else f"{c['confidence']}, trust {c['trust']:.2f}",
            str(c["ring_rank"]),
        )
    if value["candidates"]:
        shown.append(table)
    for e in value["excluded"]:
        why = f"{e['reason']}: {e['why']}" if e["why"] else e["reason"]
        shown.append(f"no candidate: {e['replica']} ({why})")
    return shown
