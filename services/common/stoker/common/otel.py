"""Traces: the names, and spans that cost nothing unless an OTLP endpoint is configured.

Names follow OpenTelemetry's conventions for generative AI. Prompts and outputs are never recorded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

# Attribute names.
OPERATION_NAME = "gen_ai.operation.name"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_ID = "gen_ai.response.id"
USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
RESPONSE_STATUS = "http.response.status_code"
REPLICA = "stoker.replica"
REASON = "stoker.reason"
PREDICTED_CACHED_TOKENS = "stoker.predicted_cached_tokens"

# Metric names.
TIME_TO_FIRST_TOKEN = "gen_ai.server.time_to_first_token"  # noqa: S105
TIME_PER_OUTPUT_TOKEN = "gen_ai.server.time_per_output_token"  # noqa: S105
REQUEST_DURATION = "gen_ai.server.request.duration"


class Span(Protocol):
    """What may be said of a piece of work."""

    def set(self, name: str, value: Any) -> None:
        """Set an attribute."""
        ...


class _NoSpan:
    def set(self, name: str, value: Any) -> None:
        """Nothing listens."""


class _RealSpan:
    def __init__(self, span: Any) -> None:
        self._span = span

    def set(self, name: str, value: Any) -> None:
        """Set an attribute."""
        self._span.set_attribute(name, value)


class _Tracing:
    """The process's tracer, once there is one."""

    tracer: Any = None
    provider: Any = None


_NO_SPAN = _NoSpan()


def setup(service: str, endpoint: str) -> None:
    """Send spans to the OTLP gRPC `endpoint` (http://host:port); does nothing where it is empty."""
    if not endpoint:
        return
    # Imported here: a process without traces need not load them.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    _Tracing.provider, _Tracing.tracer = provider, provider.get_tracer(service)


def shutdown() -> None:
    """Send what is left; bounded by the exporter's own timeout."""
    if _Tracing.provider is not None:
        _Tracing.provider.shutdown()
        _Tracing.provider = _Tracing.tracer = None


@contextlib.contextmanager
def span(name: str, carrier: Mapping[str, str] | None = None) -> Iterator[Span]:
    """A span around the block, a child of the trace that `carrier` (request headers) names, if any."""
    if _Tracing.tracer is None:
        yield _NO_SPAN
        return
    from opentelemetry.propagate import extract
    from opentelemetry.trace import SpanKind

    parent = extract({key.lower(): value for key, value in carrier.items()}) if carrier else None
    with _Tracing.tracer.start_as_current_span(name, context=parent, kind=SpanKind.SERVER) as current:
        yield _RealSpan(current)
