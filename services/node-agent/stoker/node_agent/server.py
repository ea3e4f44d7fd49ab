# ruff: noqa: N802 - methods are named by the protocol
"""proto ⇄ core: InferenceService for the replicas of this host, and NodeService."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import aiohttp
import grpc
import msgspec

from stoker.api.common.v1 import common_pb2
from stoker.api.inference.v1 import inference_pb2, inference_pb2_grpc
from stoker.api.node.v1 import node_pb2, node_pb2_grpc
from stoker.common import otel
from stoker.common.errors import DeadlineExceeded, Exhausted, InvalidRequest, NotFound, Unavailable
from stoker.common.otel import Span
from stoker.common.tickets import Ticket
from stoker.node_agent import state_files, tokenizer_files
from stoker.node_agent.core.task import by_priority
from stoker.node_agent.gate import Gate, hold_to
from stoker.node_agent.life import Life
from stoker.node_agent.member import MemberRunner
from stoker.node_agent.relay import Relay
from stoker.node_agent.retiring import WARMING
from stoker.node_agent.supervisor import Supervisor
from stoker.openai import RANK_HEADER
from stoker.openai import body as openai_body
from stoker.openai.stream import refusal

SERVICE = "stoker.api.inference.v1.InferenceService"

_PASSED_ON = (*otel.CONTEXT_HEADERS, RANK_HEADER)
"""W3C trace context and the rank that a router chose, handed to the engine as they came."""
_PIECE_BYTES = 1 << 20
_MAX_ANSWER_BYTES = 64 << 20
_MAX_LOG_LINES = 10_000
_FOLLOW_S = 0.25
_UNARY_TIMEOUT_S = 60.0
_MAX_TEXTS = 2048
_FULL = 0.9
"""Share of the KV cache in use above which nothing is computed that nobody waits for."""
_LAST = (1 << 31) - 1

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServer(inference_pb2_grpc.InferenceServiceServicer):
    """Generates, embeds and tokenizes on the engines of this host."""

    def __init__(
        self, supervisor: Supervisor, relay: Relay, session: aiohttp.ClientSession, max_choices: int, gate: Gate
    ) -> None:
        self._gate = gate
        self._supervisor = supervisor
        self._relay = relay
        self._session = session
        self._max_choices = max_choices

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Started, Deltas, Finished."""
        with _span("Generate", request.model, context) as span:
            runner = self._supervisor.serving(request.replica_id, request.model)
            life, info = runner.life, runner.engine_info
            if life is None or info is None:
                raise Unavailable(f"replica {runner.replica_id} has no engine now", reason="REPLICA_NOT_READY")
            hold_to(self._admitted(runner, context), request)
            if _warms(context):
                request = _last_in_line(request, runner, life)
            path, body = openai_body.build(
                request,
                request.model or info.model_names[0],
                max_model_len=info.max_model_len,
                max_output=runner.member.task.max_output_tokens,
                max_n=self._max_choices,
            )
            request_id = request.request_id or f"req-{secrets.token_hex(12)}"
            headers = _headers(context, request_id, span)
            span.set(otel.REPLICA, runner.replica_id)
            span.set(otel.REQUEST_ID, request_id)
            started = inference_pb2.Started(request_id=request_id, replica_id=runner.replica_id)
            stream = self._relay.stream(
                runner.replica_id, life.client.base_url + path, body, headers, started, context.time_remaining()
            )
            async for response in stream:
                if span.recording:
                    _tell(span, response)
                yield response

    async def Embed(self, request: inference_pb2.EmbedRequest, context: Context) -> inference_pb2.EmbedResponse:
        """One vector per text."""
        if not request.texts or len(request.texts) > _MAX_TEXTS:
            raise InvalidRequest.field("texts", f"give 1 to {_MAX_TEXTS} texts, not {len(request.texts)}")
        runner = self._supervisor.serving(request.replica_id, request.model)
        self._admitted(runner, context)
        body: dict[str, Any] = {"model": request.model, "input": list(request.texts), "encoding_format": "float"}
        if request.HasField("dimensions"):
            body["dimensions"] = request.dimensions
        with _span("Embed", request.model, context) as span:
            answer = await self._ask(runner, "/v1/embeddings", body, context, request.request_id, span)
        vectors = sorted(answer["data"], key=lambda item: item["index"])
        usage = answer.get("usage") or {}
        return inference_pb2.EmbedResponse(
            embeddings=[inference_pb2.Embedding(values=item["embedding"]) for item in vectors],
            usage=common_pb2.Usage(prompt_tokens=usage.get("prompt_tokens") or 0),
        )

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """Token ids, as Generate would see them."""
        runner = self._supervisor.serving(request.replica_id, request.model)
        self._admitted(runner, context)
        body: dict[str, Any] = {"model": request.model} if request.model else {}
        match request.WhichOneof("prompt"):
            case "text":
                body["prompt"] = request.text
            case "chat":
                body |= openai_body.chat_fields(request.chat)
            case _:
                raise InvalidRequest.field("prompt", "missing; set one of text or chat")
        if request.HasField("add_special_tokens"):
            body["add_special_tokens"] = request.add_special_tokens
        with _span("Tokenize", request.model, context) as span:
            answer = await self._ask(runner, "/tokenize", body, context, "", span)
        return inference_pb2.TokenizeResponse(
            token_ids=answer["tokens"], max_model_len=answer.get("max_model_len") or 0
        )

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        """Models and adapters of this host."""
        models = self._models()
        return inference_pb2.ListModelsResponse(models=[models[name] for name in sorted(models)])

    async def GetModel(
        self, request: inference_pb2.GetModelRequest, context: Context
    ) -> inference_pb2.GetModelResponse:
        """One model or adapter."""
        models = self._models()
        if request.model not in models:
            known = ", ".join(sorted(models)) or "none"
            raise NotFound(
                f"model: {request.model[:80]!r} is not served here; known: {known}", reason="MODEL_NOT_FOUND"
            )
        return inference_pb2.GetModelResponse(model=models[request.model])

    def _admitted(self, runner: MemberRunner, context: Context) -> Ticket | None:
        return self._gate.check(context.invocation_metadata(), runner.replica_id, runner.member.epoch)

    def _models(self) -> dict[str, inference_pb2.Model]:
        models: dict[str, inference_pb2.Model] = {}
        for runner in self._supervisor.runners:
            info = runner.engine_info
            if info is None or not runner.member.task.leads:
                continue
            for name in info.model_names:
                model = models.setdefault(
                    name,
                    inference_pb2.Model(
                        id=name,
                        deployment=runner.member.task.deployment,
                        parent="" if name == info.model_names[0] else info.model_names[0],
                        max_model_len=info.max_model_len,
                        block_size=info.block_size,
                    ),
                )
                model.ready_replicas += runner.member.serving
        return models

    async def _ask(
        self, runner: MemberRunner, path: str, body: Mapping[str, Any], context: Context, request_id: str, span: Span
    ) -> Any:
        """One answer of an engine.

        Raises InvalidRequest for what it refuses, Unavailable when it is away, DeadlineExceeded when it is late.
        """
        if runner.life is None:
            raise Unavailable(f"replica {runner.replica_id} has no engine now", reason="REPLICA_NOT_READY")
        left_s = context.time_remaining()
        timeout = aiohttp.ClientTimeout(total=_UNARY_TIMEOUT_S if left_s is None else max(left_s, 0.001))
        headers = _headers(context, request_id, span)
        span.set(otel.REPLICA, runner.replica_id)
        url = runner.life.client.base_url + path
        try:
            async with self._session.post(url, json=body, headers=headers, timeout=timeout) as response:
                content = await response.content.read(_MAX_ANSWER_BYTES)
                while not response.content.at_eof() and len(content) < _MAX_ANSWER_BYTES:
                    content += await response.content.read(_MAX_ANSWER_BYTES - len(content))
                if response.status != 200:
                    raise refusal(response.status, content)
        except aiohttp.ClientError as error:
            raise Unavailable(f"{url}: {error!r}", reason="ENGINE_UNREACHABLE") from error
        except TimeoutError as error:
            raise DeadlineExceeded(f"{url} did not answer in time; allow more, or ask for less") from error
        except OSError as error:
            raise Unavailable(f"{url}: {error!r}", reason="ENGINE_UNREACHABLE") from error
        return msgspec.json.decode(content)


def _warms(context: Context) -> bool:
    return any(name == WARMING for name, _ in context.invocation_metadata() or ())


def _last_in_line(
    request: inference_pb2.GenerateRequest, runner: MemberRunner, life: Life
) -> inference_pb2.GenerateRequest:
    """One that only warms the cache, behind all others. Raises Exhausted where somebody waits or room is scarce."""
    load = life.load
    waiting, usage = (None, None) if load is None else (load.waiting, load.kv_usage)
    if waiting is None or waiting > 0 or (usage is not None and usage > _FULL):
        raise Exhausted(
            f"replica {runner.replica_id} has enough to do; warm it later", reason="ENGINE_BUSY", retry_after_s=0.5
        )
    if not by_priority(runner.member.task.engine_args):
        return request
    behind = inference_pb2.GenerateRequest()
    behind.CopyFrom(request)
    behind.priority = _LAST
    return behind


def _span(method: str, model: str, context: Context) -> Span:
    if not otel.on():
        return otel.NOT_TRACED
    metadata = {name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)}
    span = otel.begin(f"{SERVICE}/{method}", metadata)
    span.set(otel.RPC_SYSTEM, "grpc")
    span.set(otel.RPC_METHOD, f"{SERVICE}/{method}")
    span.set(otel.REQUEST_MODEL, model)
    return span


def _tell(span: Span, response: inference_pb2.GenerateResponse) -> None:
    """Note in the span what a message says of the generation."""
    if response.HasField("finished"):
        usage = response.finished.usage
        span.set(otel.USAGE_INPUT_TOKENS, usage.prompt_tokens)
        span.set(otel.USAGE_OUTPUT_TOKENS, usage.completion_tokens)
        if usage.HasField("cached_prompt_tokens"):
            span.set(otel.USAGE_CACHED_TOKENS, usage.cached_prompt_tokens)


def _headers(context: Context, request_id: str, span: Span) -> dict[str, str]:
    metadata = context.invocation_metadata() or ()
    headers = {name: value for name, value in metadata if name in _PASSED_ON and isinstance(value, str)}
    headers = otel.carried(headers, span)
    if request_id:
        if not request_id.isprintable() or not request_id.isascii() or len(request_id) > 256:
            raise InvalidRequest.field("request_id", "must be at most 256 printable ASCII characters")
        headers["x-request-id"] = request_id
    return headers


class NodeServer(node_pb2_grpc.NodeServiceServicer):
    """What this host can tell of itself and its engines."""

    def __init__(self, node: common_pb2.Node, supervisor: Supervisor, connected: Callable[[], bool]) -> None:
        self._node = node
        self._supervisor = supervisor
        self._connected = connected

    async def GetNode(self, request: node_pb2.GetNodeRequest, context: Context) -> node_pb2.GetNodeResponse:
        """The node and its members."""
        return node_pb2.GetNodeResponse(
            node=self._node, members=self._supervisor.statuses(), connected=self._connected()
        )

    async def FetchTokenizer(
        self, request: node_pb2.FetchTokenizerRequest, context: Context
    ) -> AsyncIterator[node_pb2.FetchTokenizerResponse]:
        """The tokenizer's files, in pieces."""
        runner = self._supervisor.find(request.replica_id)
        files = await asyncio.to_thread(tokenizer_files.find, runner.member.task)
        if "tokenizer.json" not in files:
            raise NotFound(
                f"replica_id: the model of {request.replica_id} has no tokenizer.json on node {self._node.node_id}",
                reason="TOKENIZER_NOT_FOUND",
            )
        for name, content in files.items():
            for at in range(0, max(len(content), 1), _PIECE_BYTES):
                yield node_pb2.FetchTokenizerResponse(name=name, data=content[at : at + _PIECE_BYTES])

    async def TailLog(
        self, request: node_pb2.TailLogRequest, context: Context
    ) -> AsyncIterator[node_pb2.TailLogResponse]:
        """Last lines of an engine's log, and what follows where asked."""
        if request.lines > _MAX_LOG_LINES:
            raise InvalidRequest.field("lines", f"must be at most {_MAX_LOG_LINES}, is {request.lines}")
        path = self._supervisor.find(request.replica_id).log_path
        tail = state_files.Tail(path)
        lines = await asyncio.to_thread(tail.last, request.lines or 100)
        while True:
            if lines:
                yield node_pb2.TailLogResponse(lines=lines)
            if not request.follow:
                return
            await asyncio.sleep(_FOLLOW_S)
            lines = await asyncio.to_thread(tail.more)
