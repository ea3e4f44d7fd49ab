"""gRPC as every Stoker service speaks it: options, standard services, and errors with details.

A handler raises `StokerError`; the caller gets a `google.rpc.Status` with `ErrorInfo` (reason), `RetryInfo`
and `BadRequest` where they apply. Anything else a handler raises costs that call alone: INTERNAL, logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import structlog
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from stoker.common.errors import Code, FieldViolation, InvalidRequest, StokerError
from stoker.common.tls import Tls

log = structlog.get_logger(__name__)

# gRPC's own logger writes unstructured lines about every GOAWAY; what matters reaches us as statuses.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

ERROR_DOMAIN = "stoker"

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Largest gRPC message in either direction: 16 MiB, about two million prompt tokens. See docs/errors.md."""

_MOST_MESSAGE, _MOST_FIELDS = 2_500, 1_000
"""Bytes of an error's message, and of what it says of fields, as a header carries them: percent-encoded. Clients take
8 KiB of trailers for sure, in which the message is twice; what has more loses its code and reason, too."""

_KEEPALIVE: list[tuple[str, int]] = [
    # A peer that vanished without a FIN is noticed within 13 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *_KEEPALIVE,
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name, the least time that one attempt to connect is given, handshake included.
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # Without a pool of its own a channel shares the subchannel's back-off with every other in the process.
    ("grpc.use_local_subchannel_pool", 1),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    *_KEEPALIVE,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Who connects and says nothing is let go.
    ("grpc.server_handshake_timeout_ms", 20_000),
]


def channel(target: str, tls: Tls | None = None) -> grpc.aio.Channel:
    """A channel to `target` (host:port) with Stoker's keepalive, back-off and message bounds.

    With `tls` it is made with the certificates of now, and keeps them for its whole life; without, plain text.
    """
    if tls is None:
        return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(target, tls.channel_credentials(), options=CHANNEL_OPTIONS)


# --- errors ------------------------------------------------------------------------------------------------


def status_of(error: StokerError) -> status_pb2.Status:
    """The error as `google.rpc.Status` with its details, no longer than trailers may be."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=error.metadata)
    details: list[Any] = [info]
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    if error.fields:
        violations = [
            error_details_pb2.BadRequest.FieldViolation(field=f.field, description=f.description)
            for f in _fitting(error.fields)
        ]
        details.append(error_details_pb2.BadRequest(field_violations=violations))
    packed = []
    for detail in details:
        any_detail = any_pb2.Any()
        any_detail.Pack(detail)
        packed.append(any_detail)
    code = code_pb2.Code.Value(error.code.name)
    return status_pb2.Status(code=code, message=_shortened(error.message, _MOST_MESSAGE), details=packed)


def _fitting(fields: Iterable[FieldViolation]) -> Iterator[FieldViolation]:
    """As many of the fields as are told, the last of them shortened."""
    left = _MOST_FIELDS
    for each in fields:
        field, description = _shortened(each.field, left), _shortened(each.description, left)
        yield FieldViolation(field, description)
        left -= _encoded(field) + _encoded(description)
        if left <= 0:
            return


def _shortened(text: str, most: int) -> str:
    """The text, or as much of its beginning as takes `most` bytes in a header."""
    kept = text[:most]
    while _encoded(kept) > most:
        kept = kept[: len(kept) * 9 // 10]
    return text if kept == text else f"{kept}… and {len(text) - len(kept):,} characters more"


def _encoded(text: str) -> int:
    """Bytes of the text in a header: three for each that is no printable ASCII."""
    raw = text.encode(errors="replace")
    return sum(1 if 0x20 <= byte <= 0x7E else 3 for byte in raw)


def error_from(call_error: grpc.RpcError) -> StokerError:
    """What a server said, as the error it raised; transport failures become UNAVAILABLE and the like."""
    status = None
    try:
        status = rpc_status.from_call(call_error)
    except (ValueError, AttributeError):  # details that contradict the status line: trust the line
        log.debug("rpc.status_details_unreadable")
    grpc_code = getattr(call_error, "code", lambda: None)() or grpc.StatusCode.UNKNOWN
    code = Code[grpc_code.name] if grpc_code.name in Code.__members__ else Code.INTERNAL
    message = getattr(call_error, "details", lambda: None)() or grpc_code.name
    return error_with(code, message, status.details if status is not None else ())


def error_with(code: Code, message: str, details: Iterable[any_pb2.Any]) -> StokerError:
    """The error that was told with these details; those of unknown types are passed over.

    Raises DecodeError where the bytes of a detail are not what its type says.
    """
    reason, metadata, retry_after_s = code.name, {}, None
    fields: tuple[FieldViolation, ...] = ()
    for detail in details:
        info = error_details_pb2.ErrorInfo()
        retry = error_details_pb2.RetryInfo()
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(info):
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
        elif detail.Unpack(bad):
            fields = tuple(FieldViolation(v.field, v.description) for v in bad.field_violations)
    return StokerError(
        message, reason=reason, code=code, retry_after_s=retry_after_s, fields=fields, metadata=metadata
    )


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: StokerError) -> NoReturn:
    """Ends a call with `error` and its details."""
    status = rpc_status.to_status(status_of(error))
    said = context.trailing_metadata() or ()  # by the handler, before it failed
    await context.abort(status.code, status.details, (*said, *status.trailing_metadata))
    raise AssertionError("abort returned")


class _ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns what handlers raise into statuses. Each handler is guarded once, not once a call."""

    def __init__(self) -> None:
        self._guarded: dict[str, tuple[grpc.RpcMethodHandler[Any, Any], grpc.RpcMethodHandler[Any, Any]]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith("/stoker."):
            return handler
        known = self._guarded.get(method)
        if known is None or known[0] is not handler:
            known = self._guarded[method] = (handler, _guarded(handler, method))
        return known[1]


def _guarded(handler: grpc.RpcMethodHandler[Any, Any], method: str) -> grpc.RpcMethodHandler[Any, Any]:
    wrap = _guard_stream if handler.response_streaming else _guard_unary
    kind = ("stream" if handler.request_streaming else "unary") + (
        "_stream" if handler.response_streaming else "_unary"
    )
    factory = getattr(grpc, f"{kind}_rpc_method_handler")
    read = _DecodedEach if handler.request_streaming else _decoded
    return factory(  # type: ignore[no-any-return]
        wrap(getattr(handler, kind), read, method),
        request_deserializer=_lenient(handler.request_deserializer),
        response_serializer=handler.response_serializer,
    )


class _Undecodable:
    """Stands for a message that could not be read: gRPC itself would answer UNKNOWN, and log a stack trace."""


def _lenient(deserializer: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if deserializer is None:
        return None

    def decode(message: bytes) -> Any:
        try:
            return deserializer(message)
        except (DecodeError, ValueError):
            return _Undecodable()

    return decode


def _decoded(request: Any) -> Any:
    if isinstance(request, _Undecodable):
        raise InvalidRequest(
            "the message cannot be decoded: it is not what this method takes; use stubs made from Stoker's protos"
        )
    return request


class _DecodedEach:
    # No generator: a wait for the next message may be cancelled, and another begun.
    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self._requests = requests
        self._iterator: AsyncIterator[Any] | None = None

    def __aiter__(self) -> _DecodedEach:
        return self

    async def __anext__(self) -> Any:
        if self._iterator is None:  # not before: gRPC's own must not be begun and left
            self._iterator = aiter(self._requests)
        return _decoded(await anext(self._iterator))


def _guard_unary(
    inner: Callable[[Any, Any], Awaitable[Any]], read: Callable[[Any], Any], method: str
) -> Callable[[Any, Any], Awaitable[Any]]:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await inner(read(request), context)
        except Exception as error:  # noqa: BLE001 - one bad call must not cost the process
            await _abort_with(context, error, method)

    return guarded


def _guard_stream(
    inner: Callable[[Any, Any], AsyncGenerator[Any]], read: Callable[[Any], Any], method: str
) -> Callable[[Any, Any], AsyncIterator[Any]]:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            # Closed here, not by the garbage collector: a handler's `finally` releases what it holds.
            async with contextlib.aclosing(inner(read(request), context)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:  # noqa: BLE001 - one bad call must not cost the process
            await _abort_with(context, error, method)

    return guarded


async def _abort_with(context: grpc.aio.ServicerContext[Any, Any], error: Exception, method: str) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, grpc.RpcError):  # a call made by the handler failed: pass its status on
        error = error_from(error)
    if not isinstance(error, StokerError):
        incident = secrets.token_hex(4)
        log.error("rpc.internal_error", method=method, incident=incident, exc_info=error)
        error = StokerError(f"internal error; look for incident={incident} in the service's log")
    await abort(context, error)


# --- server ------------------------------------------------------------------------------------------------


@dataclass
class RpcServer:
    """A gRPC server with health (Watch included), reflection and channelz.

    Services are added through `server`; `services` are their full names, for health and reflection.
    It starts as NOT_SERVING; `set_serving` says when it is.
    """

    server: grpc.aio.Server
    health: health_aio.HealthServicer
    services: tuple[str, ...]
    port: int

    @classmethod
    def bind(
        cls,
        listen: str,
        services: Sequence[str],
        *,
        tls: Tls | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        max_concurrent_rpcs: int = 10_000,
        shared: bool = False,
    ) -> RpcServer:
        """Binds `listen` (host:port, port 0 for a free one); in plain text without `tls`.

        `shared`: with other processes of the same service, on the same port.

        Raises StokerError when the port is taken.
        """
        server = grpc.aio.server(
            interceptors=[_ErrorInterceptor(), *interceptors],
            # Two processes on one port must be a choice, not an accident.
            options=[*SERVER_OPTIONS, ("grpc.so_reuseport", int(shared))],
            maximum_concurrent_rpcs=max_concurrent_rpcs,
        )
        health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        channelz.add_channelz_servicer(server)
        names = (*services, "grpc.health.v1.Health", "grpc.channelz.v1.Channelz", reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        try:
            if tls is None:
                port = server.add_insecure_port(listen)
            else:
                port = server.add_secure_port(listen, tls.server_credentials())
        except RuntimeError as error:
            raise StokerError(
                f"cannot listen on {listen}: {error}; choose another address in the configuration",
                reason="ADDRESS_IN_USE",
            ) from error
        return cls(server, health, tuple(services), port)

    async def start(self) -> None:
        """Accepts connections, as NOT_SERVING."""
        await self.set_serving(False)
        await self.server.start()

    async def set_serving(self, serving: bool) -> None:
        """Says whether calls are welcome, for the whole server and each service."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self.services):
            await self.health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, lets running ones finish for `grace_s` seconds, then cancels them."""
        await self.set_serving(False)
        await self.server.stop(grace_s)


async def wait_serving(target: str, timeout_s: float, tls: Tls | None = None) -> bool:
    """True once `target` reports SERVING; False after `timeout_s` seconds without."""
    async with channel(target, tls) as ch:
        stub = health_pb2_grpc.HealthStub(ch)
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=2, wait_for_ready=True)
                        if reply.status == health_pb2.HealthCheckResponse.SERVING:
                            return True
                    except grpc.RpcError:
                        log.debug("rpc.not_serving_yet", target=target)
                    await asyncio.sleep(0.05)
        except TimeoutError:
            return False
