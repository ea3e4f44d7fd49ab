"""One trace from router to node agent to engine, as a collector gets it from three processes."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from stoker.api.inference.v1 import inference_pb2, inference_pb2_grpc
from stoker.common import otel, rpc
from tests.support.collector import CALLER, collecting
from tests.support.etcd import EtcdServer
from tests.support.fleet import running_fleet
from tests.support.waiting import eventually

pytestmark = pytest.mark.e2e

GENERATE = "stoker.api.inference.v1.InferenceService/Generate"
TOKENIZE = "stoker.api.inference.v1.InferenceService/Tokenize"


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
                    caller = [("traceparent", CALLER)]
                    async for _ in stub.Generate(request, metadata=caller, timeout=30):
                        pass
                    tokenize = inference_pb2.TokenizeRequest(model="tiny", text="x")
                    await stub.Tokenize(tokenize, metadata=caller, timeout=30)
                chain = [
                    ("stoker-router", GENERATE),
                    ("stoker-router", "engine"),
                    ("stoker-node-agent", GENERATE),
                    ("vllm", "llm_request"),
                ]
                await eventually(lambda: all(each in collector.spans for each in chain), "all spans collected", 60)
                parent = bytes.fromhex(CALLER.split("-")[2])
                for each in chain:
                    assert collector.spans[each].parent_span_id == parent, each
                    parent = collector.spans[each].span_id
                asked = ("stoker-router", TOKENIZE)
                await eventually(lambda: asked in collector.spans, "the tokenizing, too", 60)
                await eventually(lambda: ("stoker-node-agent", TOKENIZE) in collector.spans, "at the agent", 60)
                # Over HTTP the router asks the engine itself.
                collector.spans.clear()
                url = f"http://127.0.0.1:{running.router.http_port}/v1/completions"
                body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 4}
                async with (
                    aiohttp.ClientSession() as session,
                    session.post(url, json=body, headers={"Traceparent": CALLER}) as answer,
                ):
                    assert answer.status == 200
                await eventually(lambda: len(collector.spans) == 4, "all spans of the HTTP request", 60)
                assert (
                    collector.spans["vllm", "llm_request"].parent_span_id
                    == collector.spans["stoker-router", "engine"].span_id
                )
