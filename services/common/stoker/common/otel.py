"""Traces: the names, and spans that cost nothing unless an OTLP endpoint is configured.

Names follow OpenTelemetry's conventions for generative AI, HTTP and RPC. Prompts and outputs are never recorded.
"""

from __future__ import annotations

import contextlib
import random
import re
import sys
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from stoker.common.errors import StokerError

# OpenTelemetry's attributes.
OPERATION_NAME = "gen_ai.operation.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
USAGE_CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"
REQUEST_METHOD = "http.request.method"
ROUTE = "http.route"
RESPONSE_STATUS = "http.response.status_code"
RPC_SYSTEM = "rpc.system"
RPC_METHOD = "rpc.method"
ERROR_TYPE = "error.type"
# Ours.
REQUEST_ID = "stoker.request_id"
REPLICA = "stoker.replica"
REASON = "stoker.reason"
MATCHED_BLOCKS = "stoker.matched_blocks"
PREDICTED_CACHED_TOKENS = "stoker.predicted_cached_tokens"
CANDIDATES = "stoker.candidates"
ATTEMPT = "stoker.attempt"
WAITED_S = "stoker.waited_s"
KEYS_SOURCE = "stoker.keys_source"

CONTEXT_HEADERS = ("traceparent", "tracestate")
"""W3C trace context, in HTTP headers and gRPC metadata."""

_MOST_WAITING = 4096
"""Spans: a few megabytes."""
_BATCH = 512
_EXPORT_S = 3.0
_QUIET = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f][02468ace]")
"""A caller whose trace is not sampled."""


class Span:
    """A piece of work. This one is not recorded, and says nothing; `begin` gives those that are.

    As a context manager it ends with its block, and failed with what that raises.
    """

    __slots__ = ("headers",)

    recording = False

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.headers = headers
        """Trace context for whoever is called for this work; empty: the caller's own goes on as it came."""

    def set(self, name: str, value: str | float | bool | None) -> None:
        """Set an attribute; None is none."""

    def named(self, name: str) -> None:
        """Name it anew."""

    def event(self, name: str, at_ns: int | None = None) -> None:
        """Something happened, at nanoseconds of the epoch; None: now."""

    def child(self, name: str, *, calls: bool = False, since_ns: int | None = None) -> Span:
        """A part of the work, begun at nanoseconds of the epoch (None: now). `calls`: another service does it."""
        return self

    def failed(self, error: BaseException) -> None:
        """It ended with this error."""

    def end(self) -> None:
        """It is over. Harmless when repeated."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.failed(error)
        self.end()


class _Recorded(Span):
    __slots__ = ("_span",)

    recording = True

    def __init__(self, span: Any) -> None:
        self._span = span
        context = span.get_span_context()
        headers = {"traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"}
        if context.trace_state:
            headers["tracestate"] = context.trace_state.to_header()
        super().__init__(headers)

    def set(self, name: str, value: str | float | bool | None) -> None:
        if value is not None:
            self._span.set_attribute(name, value)

    def named(self, name: str) -> None:
        self._span.update_name(name)

    def event(self, name: str, at_ns: int | None = None) -> None:
        self._span.add_event(name, timestamp=at_ns)

    def child(self, name: str, *, calls: bool = False, since_ns: int | None = None) -> Span:
        from opentelemetry.trace import SpanKind, set_span_in_context

        tracer = _Tracing.tracer
        if tracer is None:  # the process is ending
            return Span(self.headers)
        kind = SpanKind.CLIENT if calls else SpanKind.INTERNAL
        return _Recorded(tracer.start_span(name, set_span_in_context(self._span), kind, start_time=since_ns))

    def failed(self, error: BaseException) -> None:
        from opentelemetry.trace import Status, StatusCode

        reason = error.reason if isinstance(error, StokerError) else type(error).__name__
        self._span.set_attribute(ERROR_TYPE, reason)
        # A caller's mistake is no failure of ours; nor is that it went away.
        if error.code.value >= 500 if isinstance(error, StokerError) else isinstance(error, Exception):
            self._span.set_status(Status(StatusCode.ERROR))

    def end(self) -> None:
        self._span.end()


NOT_TRACED = Span({})
"""Of a process that traces nothing, or a request whose caller decided that it is not traced."""


class _Tracing:
    """The process's tracer, once there is one."""

    tracer: Any = None
    provider: Any = None
    sample = 1.0


def on() -> bool:
    """Whether this process traces at all."""
    return _Tracing.tracer is not None


def begin(name: str, carrier: Mapping[str, str]) -> Span:
    """A span for a request, in the trace that `carrier` names, if any: headers, by names in lower case or any case.

    Whether it is recorded its caller has decided, or else chance.
    """
    if _Tracing.tracer is None:
        return NOT_TRACED
    parent = carrier.get("traceparent")
    if parent is not None and _QUIET.fullmatch(parent):
        return NOT_TRACED
    if parent is None and _Tracing.sample < 1.0 and random.random() >= _Tracing.sample:  # noqa: S311 - no secret
        # Said to whoever is called, or it would begin a trace of its own.
        return Span({"traceparent": f"00-{random.getrandbits(128):032x}-{random.getrandbits(64):016x}-00"})
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    held = {header: value for header in CONTEXT_HEADERS if (value := carrier.get(header)) is not None}
    context = TraceContextTextMapPropagator().extract(held)
    return _Recorded(_Tracing.tracer.start_span(name, context, SpanKind.SERVER))


def carried(headers: Mapping[str, str], span: Span) -> dict[str, str]:
    """A request's headers as they go on with the work of `span`."""
    if not span.headers:
        return {**headers}
    return {
        **{name: value for name, value in headers.items() if name.lower() not in CONTEXT_HEADERS},
        **span.headers,
    }


def current() -> dict[str, str]:
    """Trace context of the span that is current in this program, where that has any by OpenTelemetry's API."""
    headers: dict[str, str] = {}
    if "opentelemetry.trace" in sys.modules:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        TraceContextTextMapPropagator().inject(headers)
    return headers


@contextlib.contextmanager
def traced(service: str, endpoint: str, sample: float = 1.0) -> Iterator[None]:
    """Sends spans to the OTLP gRPC `endpoint` (http://host:port) while the block runs; none where it is empty.

    `sample` is the share of requests that are traced of those whose callers bring no trace context. An endpoint that
    is down costs spans, nothing else; what waits at the end is tried for `_EXPORT_S` seconds, twice at most.
    """
    if not endpoint:
        yield
        return
    # Imported here: a process without traces need not load them.
    import logging

    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # counted, and logged once, here
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"), timeout=_EXPORT_S)
    with recorded(service, exporter, sample):
        yield


@contextlib.contextmanager
def recorded(
    service: str, exporter: Any, sample: float = 1.0, *, most_waiting: int = _MOST_WAITING
) -> Iterator[None]:
    """The same, to any exporter of the SDK."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON

    from stoker.common.otel_export import Outgoing

    outgoing = Outgoing(exporter, most_waiting, _BATCH)
    provider = TracerProvider(sampler=ALWAYS_ON, resource=Resource.create({"service.name": service}))
    provider.add_span_processor(outgoing)
    _Tracing.tracer, _Tracing.sample = provider.get_tracer(service), sample
    try:
        yield
    finally:
        _Tracing.tracer = None
        provider.shutdown()
