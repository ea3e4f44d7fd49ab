"""The gRPC inference API: decides, then passes messages on as bytes, an engine's or a node agent's."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any, Protocol, TypeVar

import grpc
import structlog
from google.protobuf.message import DecodeError, Message

from stoker.api.inference.v1 import inference_pb2
from stoker.common import otel, rpc, tickets
from stoker.common.errors import Code, InvalidRequest, StokerError
from stoker.common.otel import Span
from stoker.router import metrics, tracing
from stoker.router.config import LimitsConfig
from stoker.router.decisions.decided import Decided, told
from stoker.router.fleet.pools import Pool, Target
from stoker.router.flights.continuation import Continuations, Course
from stoker.router.flights.flight import Flight
from stoker.router.flights.routing import Router
from stoker.router.grpc.channels import Channels
from stoker.router.grpc.continuation import Silent, carried, fields_of
from stoker.router.grpc.engine import EngineCall
from stoker.router.grpc.prompt import of_embed, of_generate, of_tokenize, request_id_of
from stoker.router.http.engines import EngineFailed, Engines
from stoker.router.prompts.plan import Plan
from stoker.router.prompts.prompt import Asked
from stoker.router.prompts.sent import SendTokens

log = structlog.get_logger(__name__)

SERVICE = "stoker.api.inference.v1.InferenceService"

Context = grpc.aio.ServicerContext[Any, Any]
M = TypeVar("M", bound=Message)

_ELSEWHERE = {Code.UNAVAILABLE}
_ANSWERED = {"ENGINE_ERROR", "ENGINE_UNAVAILABLE"}
"""The engine lives, and says that it failed."""
_FAULTS = {Code.UNAVAILABLE, Code.INTERNAL, Code.DEADLINE_EXCEEDED}


# The first byte of a response that is the last one: the tag of its only field.
_FINISHED = inference_pb2.GenerateResponse(finished=inference_pb2.Finished()).SerializeToString()[:1]

_Stream = grpc.aio.UnaryStreamCall[bytes, bytes]


class _Placed(Protocol):
    """A request that names its replica."""

    replica_id: str

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's name
        """The message as bytes."""
        ...


class InferenceServer:
    """Serves InferenceService for a router."""

    def __init__(
        self,
        router: Router,
        channels: Channels,
        limits: LimitsConfig,
        own_pass: Callable[[], str] = str,
        engines: Engines | None = None,
        send_tokens: SendTokens = "never",
    ) -> None:
        """Generations go to `engines`, where given, or by node agents: text, which those tokenize anew.

        `own_pass` gives the ticket that nodes ask for, empty where they do not.
        """
        self._engines = engines
        self._send_tokens = send_tokens
        self._own_pass = own_pass
        self._router = router
        self._channels = channels
        self._limits = limits
        self._continuations = Continuations(router, limits.continuation)
        self._ending: set[_Stream | asyncio.Task[None]] = set()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register all methods. Those that relay take and give bytes."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Generate": grpc.unary_stream_rpc_method_handler(self.generate),
            "Embed": grpc.unary_unary_rpc_method_handler(self.embed),
            "Tokenize": grpc.unary_unary_rpc_method_handler(self.tokenize),
            "ListModels": grpc.unary_unary_rpc_method_handler(
                self.list_models,
                request_deserializer=inference_pb2.ListModelsRequest.FromString,
                response_serializer=inference_pb2.ListModelsResponse.SerializeToString,
            ),
            "GetModel": grpc.unary_unary_rpc_method_handler(
                self.get_model,
                request_deserializer=inference_pb2.GetModelRequest.FromString,
                response_serializer=inference_pb2.GetModelResponse.SerializeToString,
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    # --- relayed -------------------------------------------------------------------------------------------

    async def generate(self, raw: bytes, context: Context) -> AsyncIterator[bytes]:
        """Stream a generation from the replica that the router chooses."""
        request = _parse(inference_pb2.GenerateRequest, raw)
        with _accounted("Generate", context) as account, self._router.admit():
            request.request_id = request_id_of(request.request_id)
            asked = of_generate(request, raw)
            plan = await self._plan(asked, request.request_id, context, account)
            answer = self._continuations.begin(asked, plan, fields_of(request), plan.pool.max_output_tokens)
            course = Course(self._router.clock()) if answer is None else answer.course
            leg = functools.partial(self._generated, context=context, account=account, course=course)
            whole = leg(plan, request) if answer is None else carried(self._continuations, answer, request, leg)
            async for message in whole:
                yield message
            account.outcome = "ok"

    async def _generated(
        self, plan: Plan, request: inference_pb2.GenerateRequest, context: Context, account: _Account, course: Course
    ) -> AsyncGenerator[bytes, None]:
        while True:
            with tracing.waiting(account.span):
                boarded = await self._router.board(plan, request.request_id, course.avoided, since=course.since)
            with boarded as flight, tracing.attempt(account.span, flight) as span:
                decided = flight.decided
                _tell(context, decided)
                course.serving, request.replica_id = decided.target.id, decided.target.record.replica_id
                call = self._call(request, decided, context, course, span)
                started: bytes | None = None
                flowing = finished = False
                try:
                    while not finished and (message := await self._next(call, flight, flowing, course)) is not None:
                        if started is None:
                            # Held back until output follows: until then another replica can still take over.
                            started = _started(message, request.request_id, decided)
                            continue
                        if not flowing:
                            flowing = course.flowing = True
                            flight.first_token()
                            account.first_token()
                            yield started
                        finished = _finished(message, flight)
                        yield message
                    if not flowing and started is not None:
                        yield started
                    flight.served()
                except Silent as error:
                    span.failed(error)
                    flight.faulted()
                    if not flight.moved:
                        raise
                except (grpc.aio.AioRpcError, StokerError) as error:
                    failure = rpc.error_from(error) if isinstance(error, grpc.aio.AioRpcError) else error
                    span.failed(failure)
                    self._blame(flight, failure, context)
                    if flowing or not _may_retry(failure, flight, course.tried):
                        raise failure from error
                else:
                    return
                finally:
                    if finished:
                        self._last_words(call)
                    else:
                        call.cancel()
            course.tried |= decided.target.siblings

    def _call(
        self, request: inference_pb2.GenerateRequest, decided: Decided, context: Context, course: Course, span: Span
    ) -> _Stream | EngineCall:
        """One try on one replica."""
        target = decided.target
        seconds = self._time_left(context, course.since)
        if self._engines is not None:
            headers = {**_trace(context, span), **target.headers}
            return EngineCall(self._engines, decided, request, headers, seconds, self._limits, self._send_tokens)
        return self._channels.stream(target.record.agent_endpoint, f"/{SERVICE}/Generate")(
            request.SerializeToString(), timeout=seconds, metadata=self._shown(context, target, span)
        )

    async def _next(self, call: _Stream | EngineCall, flight: Flight, flowing: bool, course: Course) -> bytes | None:
        """The agent's next message, None at the end. Raises Silent when the engine says nothing for too long."""
        seconds = self._limits.idle_s if flowing else self._limits.first_byte_s
        try:
            async with asyncio.timeout(seconds) as until:
                if not flowing:
                    may_retry = functools.partial(flight.may_retry, course.tried)
                    flight.movable(until, course.avoided, may_retry)
                message = await call.read()
        except TimeoutError:
            target = flight.decided.target
            raise Silent(f"replica {target.id} said nothing for {seconds:g} s; ask again") from None
        return message if isinstance(message, bytes) else None

    def _last_words(self, call: _Stream | EngineCall) -> None:
        """All is said; what ends the stream may come in its own time, and nobody waits for it."""
        ending = asyncio.get_running_loop().create_task(call.end()) if isinstance(call, EngineCall) else call
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def embed(self, raw: bytes, context: Context) -> bytes:
        """Embed texts on the replica that the router chooses."""
        request = _parse(inference_pb2.EmbedRequest, raw)
        return await self._unary("Embed", request, of_embed(request, raw), context, request.request_id)

    async def tokenize(self, raw: bytes, context: Context) -> bytes:
        """Tokenize as the engines do: by asking one."""
        request = _parse(inference_pb2.TokenizeRequest, raw)
        return await self._unary("Tokenize", request, of_tokenize(request, raw), context, "")

    async def _unary(self, method: str, request: _Placed, asked: Asked, context: Context, request_id: str) -> bytes:
        with _accounted(method, context) as account, self._router.admit():
            request_id = request_id_of(request_id)
            plan = await self._plan(asked, request_id, context, account)
            tried: frozenset[str] = frozenset()
            since = self._router.clock()
            while True:
                with tracing.waiting(account.span):
                    boarded = await self._router.board(plan, request_id, tried, since=since)
                with boarded as flight, tracing.attempt(account.span, flight) as span:
                    decided = flight.decided
                    _tell(context, decided)
                    request.replica_id = decided.target.record.replica_id
                    call = self._channels.unary(decided.target.record.agent_endpoint, f"/{SERVICE}/{method}")
                    try:
                        async with asyncio.timeout(None) as until:
                            flight.movable(until, tried, functools.partial(flight.may_retry, tried))
                            answer: bytes = await call(
                                request.SerializeToString(),
                                timeout=self._time_left(context, since),
                                metadata=self._shown(context, decided.target, span),
                            )
                    except TimeoutError:  # found dead: on to the next
                        flight.faulted()
                    except grpc.aio.AioRpcError as error:
                        failure = rpc.error_from(error)
                        span.failed(failure)
                        self._blame(flight, failure, context)
                        if not _may_retry(failure, flight, tried):
                            raise failure from error
                    else:
                        if method == "Embed":
                            flight.served()
                        account.outcome = "ok"
                        return answer
                tried |= decided.target.siblings

    async def _plan(self, asked: Asked, request_id: str, context: Context, account: _Account) -> Plan:
        metadata = _metadata(context)
        caller = self._router.tenants.caller(metadata, asked.priority)
        tracing.asked(account.span, request_id, asked)
        if self._router.holding.needed(asked.model):
            with tracing.waiting(account.span):
                await self._router.holding.wait(asked.model, caller, None)
        with account.span.child("plan"):
            plan = await self._router.plan(asked, caller, policy=metadata.get("x-stoker-policy", ""))
        tracing.planned(account.span, plan)
        return plan

    def _shown(self, context: Context, target: Target, span: Span) -> list[tuple[str, str]]:
        """What goes to the agent beside the request: trace context, which rank is meant, and this router's pass."""
        shown = [*_trace(context, span).items(), *target.headers.items()]
        ticket = self._own_pass()
        return [*shown, (tickets.HEADER, ticket)] if ticket else shown

    def _time_left(self, context: Context, since: float) -> float:
        """Seconds until a call that came at `since` must end; waiting and earlier tries have used some of them."""
        own = max(0.0, self._limits.request_s - (self._router.clock() - since))
        left = context.time_remaining()
        return own if left is None else min(left, own)

    def _blame(self, flight: Flight, failure: StokerError, context: Context) -> None:
        if isinstance(failure, EngineFailed) and failure.refused:
            self._router.view.reached(flight.decided.target, False)
        hurried = failure.code is Code.DEADLINE_EXCEEDED and context.time_remaining() is not None
        if failure.reason in _ANSWERED:
            flight.erred()
        elif failure.code in _FAULTS and not hurried:
            flight.faulted()

    # --- answered here -------------------------------------------------------------------------------------

    async def list_models(self, request: inference_pb2.ListModelsRequest, context: Context) -> Any:
        """All models of the fleet."""
        view = self._router.view
        models = [_model(pool, name) for pool in view.pools.values() for name in (pool.model, *sorted(pool.adapters))]
        models += [self._asleep(name) for name in view.asleep()]
        return inference_pb2.ListModelsResponse(models=sorted(models, key=lambda model: model.id))

    async def get_model(self, request: inference_pb2.GetModelRequest, context: Context) -> Any:
        """One model. NOT_FOUND names those that there are."""
        _parse_name(request.model)
        if request.model in self._router.view.asleep():
            return inference_pb2.GetModelResponse(model=self._asleep(request.model))
        pool, adapter = self._router.view.resolve(request.model)
        return inference_pb2.GetModelResponse(model=_model(pool, adapter or pool.model))

    def _asleep(self, name: str) -> inference_pb2.Model:
        """A model that is scaled to zero."""
        return inference_pb2.Model(id=name, deployment=self._router.view.deployed.serving(name)[0])


def _may_retry(failure: StokerError, flight: Flight, tried: frozenset[str]) -> bool:
    return failure.code in _ELSEWHERE and flight.may_retry(tried)


def _parse_name(model: str) -> None:
    if not model:
        raise InvalidRequest.field("model", "name a model, one that ListModels lists")


def _model(pool: Pool, name: str) -> inference_pb2.Model:
    targets = [
        target for target in pool.targets.values() if name == pool.model or name in target.record.engine.model_names
    ]
    return inference_pb2.Model(
        id=name,
        deployment=targets[0].record.deployment if targets else "",
        parent=pool.model if name != pool.model else "",
        max_model_len=pool.max_model_len,
        block_size=pool.block_size,
        ready_replicas=sum(target.ready for target in targets),
    )


def _parse(kind: type[M], raw: bytes) -> M:
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise InvalidRequest.field("request", f"is no valid {kind.DESCRIPTOR.name}: {error}") from error


def _started(message: bytes, request_id: str, decided: Decided) -> bytes:
    """The agent's first message, with what the router knows."""
    response = inference_pb2.GenerateResponse.FromString(message)
    if response.WhichOneof("event") != "started":
        raise StokerError(
            f"the agent of {decided.target.id} did not begin its stream with Started: versions that do not fit",
            reason="BAD_STREAM",
        )
    response.started.request_id = request_id
    response.started.replica_id = decided.target.id
    response.started.reason = decided.decision.reason.value
    if decided.plan.tokens is not None:
        response.started.predicted_cached_tokens = decided.decision.cached_tokens
    return response.SerializeToString()


def _finished(message: bytes, flight: Flight) -> bool:
    """Whether it is the last one; then what it says of usage is counted."""
    if message[:1] != _FINISHED:
        return False
    usage = inference_pb2.GenerateResponse.FromString(message).finished.usage
    cached = usage.cached_prompt_tokens if usage.HasField("cached_prompt_tokens") else None
    flight.used(usage.prompt_tokens, cached, usage.completion_tokens)
    return True


def _tell(context: Context, decided: Decided) -> None:
    """Let the call's trailing metadata say what was decided, however it ends."""
    context.set_trailing_metadata(tuple(told(decided).items()))


def _metadata(context: Context) -> dict[str, str]:
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


def _trace(context: Context, span: Span) -> Mapping[str, str]:
    """The trace context of a try, for the agent or the engine."""
    if span.headers:
        return span.headers
    return {key: value for key, value in _metadata(context).items() if key in otel.CONTEXT_HEADERS}


class _Account:
    """Counts a call once, by how it ended, and has its span."""

    def __init__(self, api: str, span: Span, clock: Callable[[], float]) -> None:
        self.span = span
        self._api = api
        self._clock = clock
        self._arrived = clock()
        self._told = False
        self.outcome = "failed"

    def first_token(self) -> None:
        if not self._told:
            metrics.of(metrics.TTFT, self._api).observe(self._clock() - self._arrived)
        self._told = True

    def __enter__(self) -> _Account:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            self.outcome = "cancelled"
        elif isinstance(error, StokerError):
            self.outcome = metrics.outcome_of(error)
        metrics.of(metrics.REQUESTS, self._api, self.outcome).inc()
        self.span.__exit__(kind, error, trace)


def _accounted(method: str, context: Context) -> _Account:
    span = otel.begin(f"{SERVICE}/{method}", _metadata(context)) if otel.on() else otel.NOT_TRACED
    span.set(otel.RPC_SYSTEM, "grpc")
    span.set(otel.RPC_METHOD, f"{SERVICE}/{method}")
    return _Account(f"grpc_{method.lower()}", span, asyncio.get_running_loop().time)
