"""The gRPC inference API: decides, then passes messages on as bytes, an engine's or a node agent's."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from stoker.api.inference.v1 import inference_pb2
from stoker.common import rpc, tickets
from stoker.common.errors import Code, InvalidRequest, StokerError
from stoker.common.otel import Span
from stoker.router import tracing
from stoker.router.config import LimitsConfig
from stoker.router.decisions.decided import Decided
from stoker.router.fleet.pools import Pool, Target
from stoker.router.flights.continuation import Continuations, Course
from stoker.router.flights.flight import Flight
from stoker.router.flights.planning import planned
from stoker.router.flights.routing import Router
from stoker.router.grpc.call import SERVICE, Call, Context
from stoker.router.grpc.channels import Channels
from stoker.router.grpc.continuation import Silent, carried, fields_of
from stoker.router.grpc.engine import EngineCall
from stoker.router.grpc.prompt import of_embed, of_generate, of_tokenize, request_id_of
from stoker.router.http.engines import EngineFailed, Engines
from stoker.router.prompts.plan import Plan
from stoker.router.prompts.prompt import Asked
from stoker.router.prompts.sent import SendTokens

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
        with Call("Generate", context) as call, self._router.admit():
            request.request_id = request_id_of(request.request_id)
            asked = of_generate(request, raw)
            call.read = asked.fields
            plan = await self._plan(asked, request.request_id, call)
            answer = self._continuations.begin(asked, plan, fields_of(request), plan.pool.max_output_tokens)
            course = Course(self._router.clock()) if answer is None else answer.course
            leg = functools.partial(self._generated, call=call, course=course)
            whole = leg(plan, request) if answer is None else carried(self._continuations, answer, request, leg)
            async for message in whole:
                yield message
            call.outcome = "ok"

    async def _generated(
        self, plan: Plan, request: inference_pb2.GenerateRequest, call: Call, course: Course
    ) -> AsyncGenerator[bytes, None]:
        while True:
            with tracing.waiting(call.span):
                boarded = await self._router.board(plan, request.request_id, course.avoided, since=course.since)
            with boarded as flight, tracing.attempt(call.span, flight) as span:
                decided = flight.decided
                call.tell(decided)
                course.serving, request.replica_id = decided.target.id, decided.target.record.replica_id
                stream = self._stream(request, decided, call, course, span)
                started: bytes | None = None
                flowing = finished = False
                try:
                    while not finished and (message := await self._next(stream, flight, flowing, course)) is not None:
                        if started is None:
                            # Held back until output follows: until then another replica can still take over.
                            started = _started(message, request.request_id, decided)
                            continue
                        if not flowing:
                            flowing = course.flowing = True
                            flight.first_token()
                            call.first_token()
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
                    self._blame(flight, failure, call)
                    if flowing or not _may_retry(failure, flight, course.tried):
                        raise failure from error
                else:
                    return
                finally:
                    if finished:
                        self._last_words(stream)
                    else:
                        stream.cancel()
            course.tried |= decided.target.siblings

    def _stream(
        self, request: inference_pb2.GenerateRequest, decided: Decided, call: Call, course: Course, span: Span
    ) -> _Stream | EngineCall:
        """One try on one replica."""
        target = decided.target
        seconds = self._time_left(call, course.since)
        if self._engines is not None:
            headers = {**call.trace(span), **target.headers}
            return EngineCall(
                self._engines, decided, request, call.read, headers, seconds, self._limits, self._send_tokens
            )
        return self._channels.stream(target.record.agent_endpoint, f"/{SERVICE}/Generate")(
            request.SerializeToString(), timeout=seconds, metadata=self._shown(call, target, span)
        )

    async def _next(
        self, stream: _Stream | EngineCall, flight: Flight, flowing: bool, course: Course
    ) -> bytes | None:
        """The agent's next message, None at the end. Raises Silent when the engine says nothing for too long."""
        seconds = self._limits.idle_s if flowing else self._limits.first_byte_s
        try:
            async with asyncio.timeout(seconds) as until:
                if not flowing:
                    may_retry = functools.partial(flight.may_retry, course.tried)
                    flight.movable(until, course.avoided, may_retry)
                message = await stream.read()
        except TimeoutError:
            target = flight.decided.target
            raise Silent(f"replica {target.id} said nothing for {seconds:g} s; ask again") from None
        return message if isinstance(message, bytes) else None

    def _last_words(self, stream: _Stream | EngineCall) -> None:
        """All is said; what ends the stream may come in its own time, and nobody waits for it."""
        ending = asyncio.get_running_loop().create_task(stream.end()) if isinstance(stream, EngineCall) else stream
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
        with Call(method, context) as call, self._router.admit():
            request_id = request_id_of(request_id)
            plan = await self._plan(asked, request_id, call)
            tried: frozenset[str] = frozenset()
            since = self._router.clock()
            while True:
                with tracing.waiting(call.span):
                    boarded = await self._router.board(plan, request_id, tried, since=since)
                with boarded as flight, tracing.attempt(call.span, flight) as span:
                    decided = flight.decided
                    call.tell(decided)
                    request.replica_id = decided.target.record.replica_id
                    ask = self._channels.unary(decided.target.record.agent_endpoint, f"/{SERVICE}/{method}")
                    try:
                        async with asyncio.timeout(None) as until:
                            flight.movable(until, tried, functools.partial(flight.may_retry, tried))
                            answer: bytes = await ask(
                                request.SerializeToString(),
                                timeout=self._time_left(call, since),
                                metadata=self._shown(call, decided.target, span),
                            )
                    except TimeoutError:  # found dead: on to the next
                        flight.faulted()
                    except grpc.aio.AioRpcError as error:
                        failure = rpc.error_from(error)
                        span.failed(failure)
                        self._blame(flight, failure, call)
                        if not _may_retry(failure, flight, tried):
                            raise failure from error
                    else:
                        if method == "Embed":
                            flight.served()
                        call.outcome = "ok"
                        return answer
                tried |= decided.target.siblings

    async def _plan(self, asked: Asked, request_id: str, call: Call) -> Plan:
        return await planned(self._router, asked, call.metadata, call.span, request_id)

    def _shown(self, call: Call, target: Target, span: Span) -> list[tuple[str, str]]:
        """What goes to the agent beside the request: trace context, which rank is meant, and this router's pass."""
        shown = [*call.trace(span).items(), *target.headers.items()]
        ticket = self._own_pass()
        return [*shown, (tickets.HEADER, ticket)] if ticket else shown

    def _time_left(self, call: Call, since: float) -> float:
        """Seconds until a call that came at `since` must end; waiting and earlier tries have used some of them."""
        own = max(0.0, self._limits.request_s - (self._router.clock() - since))
        left = call.time_left
        return own if left is None else min(left, own)

    def _blame(self, flight: Flight, failure: StokerError, call: Call) -> None:
        if isinstance(failure, EngineFailed) and failure.refused:
            self._router.view.reached(flight.decided.target, False)
        hurried = failure.code is Code.DEADLINE_EXCEEDED and call.time_left is not None
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
