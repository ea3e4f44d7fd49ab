"""An OpenTelemetry collector that keeps the spans of one trace."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = f"00-{TRACE}-b7ad6b7169203331-01"
"""A `traceparent` of that trace."""


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the spans of one trace, by service and name: the first of each that comes."""

    def __init__(self) -> None:
        self.spans: dict[tuple[str, str], trace_pb2.Span] = {}

    async def Export(
        self,
        request: trace_service_pb2.ExportTraceServiceRequest,
        context: grpc.aio.ServicerContext[
            trace_service_pb2.ExportTraceServiceRequest, trace_service_pb2.ExportTraceServiceResponse
        ],
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            named = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    if span.trace_id.hex() == TRACE:
                        self.spans.setdefault((named["service.name"], span.name), span)
        return trace_service_pb2.ExportTraceServiceResponse()


@contextlib.asynccontextmanager
async def collecting() -> AsyncIterator[tuple[str, Collector]]:
    collector = Collector()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"http://127.0.0.1:{port}", collector
    finally:
        await server.stop(0)
