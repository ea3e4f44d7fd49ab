"""Each way into a router is one span with the decision, in its caller's trace, which the engine is told to go on."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client import REGISTRY

from stoker.api.inference.v1 import inference_pb2, inference_pb2_grpc
from stoker.api.router.v1 import router_pb2, router_pb2_grpc
from stoker.common import otel, rpc
from stoker.local.model import cached
from stoker.router.app import RouterApp
from stoker.router.http.port import Ask
from tests.support.collector import CALLER as TRACEPARENT
from tests.support.collector import TRACE
from tests.support.engines import FAST, TINY, running_engine
from tests.support.etcd import free_port
from tests.support.router import replica, running_router, tell, tokenizer_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

CALLER = {"traceparent": TRACEPARENT}
QUIET = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-00"}
PROMPT = "Once upon a time there was a stoker " * 20
ENDPOINTS = [f"listen.{name}=127.0.0.1:0" for name in ("ext_authz", "pick")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RouterApp]:
    folder = tmp_path_factory.mktemp("engine")
    args = (*FAST, "--enable-prompt-tokens-details")
    async with running_engine("sim", folder, args=args) as engine, running_router(*ENDPOINTS) as app:
        sha256, tokenizer = tokenizer_of(cached(TINY))
        app.tokenizers.add(sha256, tokenizer)
        tell(app, replica("tiny-0", engine.url, sha256=sha256))
        app.view.proved(app.view.targets["tiny-0"], "ok")
        app.router.view.told.set()
        yield app


@contextlib.contextmanager
def spans(sample: float = 1.0) -> Any:
    """What is recorded in the block, by name; each name once."""
    memory = InMemorySpanExporter()
    found: dict[str, ReadableSpan] = {}
    with otel.recorded("test", memory, sample):
        yield found
    for span in memory.get_finished_spans():
        assert span.name not in found or span.name == "queue", f"{span.name} twice"
        found[span.name] = span


def body(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, **more}


async def post(port: int, path: str, asked: Any, headers: dict[str, str]) -> tuple[int, dict[str, str]]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://127.0.0.1:{port}{path}", json=asked, headers=headers) as answer,
    ):
        await answer.read()
        return answer.status, {name.lower(): value for name, value in answer.headers.items()}


def check_decision(span: ReadableSpan) -> None:
    said = dict(span.attributes or {})
    assert said[otel.REPLICA] == "tiny-0"
    assert said[otel.REASON]
    assert said[otel.CANDIDATES] == 1
    assert said[otel.MATCHED_BLOCKS] == said[otel.PREDICTED_CACHED_TOKENS] // 32  # type: ignore[operator]


def check_request(span: ReadableSpan, name: str) -> dict[str, Any]:
    """A server's span in the caller's trace."""
    assert span.name == name
    assert span.kind.name == "SERVER"
    assert span.parent is not None
    assert (span.parent.trace_id, span.parent.span_id) == (int(TRACE, 16), 0xB7AD6B7169203331)
    return dict(span.attributes or {})


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_http(router: RouterApp, stream: bool) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    with spans() as found:
        status, _ = await post(router.http_port, "/v1/completions", body(**options), CALLER)
    assert status == 200
    said = check_request(found["POST /v1/completions"], "POST /v1/completions")
    assert said[otel.REQUEST_MODEL] == "tiny"
    assert said[otel.OPERATION_NAME] == "text_completion"
    assert said[otel.RESPONSE_STATUS] == 200
    assert said[otel.USAGE_OUTPUT_TOKENS] == 4
    assert said[otel.USAGE_INPUT_TOKENS] > 32
    check_decision(found["POST /v1/completions"])
    check_decision(found["engine"])
    assert found["engine"].kind.name == "CLIENT"
    assert (found["engine"].attributes or {})[otel.SERVER_ADDRESS] == "127.0.0.1"
    assert [event.name for event in found["engine"].events] == (["first_token"] if stream else [])
    assert found["plan"].parent == found["engine"].parent == found["POST /v1/completions"].context
    assert PROMPT not in str([span.to_json() for span in found.values()])


async def test_what_is_refused_says_why(router: RouterApp) -> None:
    with spans() as found:
        status, _ = await post(router.http_port, "/v1/completions", {"model": "none", "prompt": "x"}, CALLER)
    assert status == 404
    said = check_request(found["POST /v1/completions"], "POST /v1/completions")
    assert said[otel.ERROR_TYPE]
    assert said[otel.RESPONSE_STATUS] == 404
    assert found["POST /v1/completions"].status.status_code is StatusCode.UNSET  # the caller's mistake


async def test_what_is_not_sampled_costs_no_span(router: RouterApp) -> None:
    with spans() as found:
        assert (await post(router.http_port, "/v1/completions", body(), QUIET))[0] == 200
    with spans(sample=0.0) as chance:
        assert (await post(router.http_port, "/v1/completions", body(), {}))[0] == 200
    assert not found
    assert not chance


async def test_grpc(router: RouterApp) -> None:
    name = "stoker.api.inference.v1.InferenceService/Generate"
    request = inference_pb2.GenerateRequest(model="tiny", text=PROMPT, sampling=inference_pb2.Sampling(max_tokens=4))
    async with rpc.channel(f"127.0.0.1:{router.rpc.port}") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with spans() as found:
            said = [each async for each in stub.Generate(request, metadata=tuple(CALLER.items()), timeout=20)]
    assert said[-1].HasField("finished")
    attributes = check_request(found[name], name)
    assert attributes[otel.USAGE_OUTPUT_TOKENS] == said[-1].finished.usage.completion_tokens
    check_decision(found[name])
    assert found["engine"].parent == found[name].context
    assert [event.name for event in found["engine"].events] == ["first_token"]


async def test_envoys_check(router: RouterApp) -> None:
    assert router.envoy is not None
    with spans() as found:
        status, headers = await post(router.envoy.port.number, "/v1/completions", body(), CALLER)
    assert status == 200
    check_request(found["envoy check"], "envoy check")
    check_decision(found["envoy check"])
    context = found["envoy check"].context
    assert context is not None
    assert headers["traceparent"] == f"00-{TRACE}-{context.span_id:016x}-01"  # for the engine
    with spans(sample=0.0):
        _, headers = await post(router.envoy.port.number, "/v1/completions", body(), {})
    assert headers["traceparent"].endswith("-00")
    with spans():
        _, headers = await post(router.envoy.port.number, "/v1/completions", body(), QUIET)
    assert "traceparent" not in headers  # Envoy keeps the client's
    router.envoy.flights.close()


async def test_a_refused_check_says_why(router: RouterApp) -> None:
    assert router.envoy is not None
    with spans() as found:
        ask = Ask("POST", "/v1/completions", CALLER, json.dumps({"model": "none", "prompt": "x"}).encode())
        answer = await router.envoy.port.connections.decide(ask)  # type: ignore[misc]
    assert answer.status == 404
    assert (found["envoy check"].attributes or {})[otel.ERROR_TYPE]


async def test_picks_over_both_transports(router: RouterApp) -> None:
    assert router.pick_http is not None
    with spans() as found:
        status, _ = await post(router.pick_http.number, "/pick", body(), CALLER)
    assert status == 200
    check_request(found["pick"], "pick")
    check_decision(found["pick"])
    request = inference_pb2.GenerateRequest(model="tiny", text=PROMPT, sampling=inference_pb2.Sampling(max_tokens=4))
    async with rpc.channel(f"127.0.0.1:{router.rpc.port}") as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        with spans() as found:
            await stub.Pick(router_pb2.PickRequest(request=request), metadata=tuple(CALLER.items()), timeout=20)
    check_request(found["pick"], "pick")
    assert (found["pick"].attributes or {})[otel.REQUEST_MODEL] == "tiny"
    router.picks.close()


async def test_each_try_is_a_span_and_says_how_it_failed(router: RouterApp) -> None:
    alive = router.view.targets["tiny-0"].record
    nobody = f"http://127.0.0.1:{free_port()}"
    dead = [
        replica(f"dead-{n}", nobody, sha256=alive.engine.tokenizer_sha256) for n in range(2)
    ]  # no more than retries
    memory = InMemorySpanExporter()
    tell(router, alive, *dead)
    try:
        with otel.recorded("test", memory):
            # Of new prompts most have their homes among the dead, until one has been found out.
            for number in range(40):
                asked = {**body(), "prompt": f"{number} {PROMPT}"}
                await post(router.http_port, "/v1/completions", asked, CALLER)
    finally:
        tell(router, alive)
    tries = [span for span in memory.get_finished_spans() if span.name == "engine"]
    failed = [span for span in tries if span.status.status_code is StatusCode.ERROR]
    assert failed
    assert {(span.attributes or {})[otel.ERROR_TYPE] for span in failed} == {"ENGINE_FAILED"}
    first = failed[0]
    again = [span for span in tries if span.parent == first.parent and span is not first]
    assert [(span.attributes or {})[otel.ATTEMPT] for span in (first, *again)] == [*range(1, len(again) + 2)]
    assert (again[-1].attributes or {})[otel.RESPONSE_STATUS] == 200


async def test_a_collector_that_is_down_costs_spans_alone(router: RouterApp) -> None:
    def lost() -> float:
        return REGISTRY.get_sample_value("stoker_trace_spans_total", {"result": "not_sent"}) or 0.0

    before, loop = lost(), asyncio.get_running_loop()
    with otel.traced("test", f"http://127.0.0.1:{free_port()}"):
        for _ in range(5):
            assert (await post(router.http_port, "/v1/completions", body(), CALLER))[0] == 200
        ending = loop.time()
    assert loop.time() - ending < 10
    assert lost() - before >= 15  # three of each request, and a wait here or there
