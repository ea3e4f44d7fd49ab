"""One trace from router to node agent to engine, as a collector gets it from three processes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from stoker.api.inference.v1 import inference_pb2, inference_pb2_grpc
from stoker.common import otel, rpc
from tests.support.etcd import EtcdServer
from tests.support.fleet import running_fleet
from tests.support.waiting import eventually

pytestmark = pytest.mark.e2e

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = f"00-{TRACE}-b7ad6b7169203331-01"
GENERATE = "stoker.api.inference.v1.InferenceService/Generate"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the spans of one trace, by service and name."""

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
                        self.spans[named["service.name"], span.name] = span
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


async def test_one_trace_from_router_to_engine(tmp_path: Path, etcd: EtcdServer) -> None:
    async with collecting() as (endpoint, collector):
        args = ("--sim-speed", "20", "--otlp-traces-endpoint", endpoint)
        fleet = running_fleet(
            tmp_path,
            etcd,
            replicas=1,
            args=args,
            settings=["grpc_path=agent"],
            agent_settings=[f"otlp_endpoint={endpoint}"],
        )
        async with fleet as running:
            request = inference_pb2.GenerateRequest(
                model="tiny", text="Once upon a time", sampling=inference_pb2.Sampling(max_tokens=4)
            )
            with otel.traced("stoker-router", endpoint):
                async with rpc.channel(f"127.0.0.1:{running.router.rpc.port}") as channel:
                    stub = inference_pb2_grpc.InferenceServiceStub(channel)
                    async for _ in stub.Generate(request, metadata=[("traceparent", CALLER)], timeout=30):
                        pass
                chain = [
                    ("stoker-router", GENERATE),
                    ("stoker-router", "engine"),
                    ("stoker-node-agent", GENERATE),
                    ("vllm", "llm_request"),
                ]
                await eventually(lambda: all(each in collector.spans for each in chain), "all spans collected", 20)
                parent = bytes.fromhex(CALLER.split("-")[2])
                for each in chain:
                    assert collector.spans[each].parent_span_id == parent, each
                    parent = collector.spans[each].span_id
                # Over HTTP the router asks the engine itself.
                collector.spans.clear()
                url = f"http://127.0.0.1:{running.router.http_port}/v1/completions"
                body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 4}
                async with (
                    aiohttp.ClientSession() as session,
                    session.post(url, json=body, headers={"Traceparent": CALLER}) as answer,
                ):
                    assert answer.status == 200
                await eventually(lambda: len(collector.spans) == 4, "all spans of the HTTP request", 20)
                assert (
                    collector.spans["vllm", "llm_request"].parent_span_id
                    == collector.spans["stoker-router", "engine"].span_id
                )
