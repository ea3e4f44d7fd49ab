"""The router's gRPC APIs before a real registry and a real agent with simulated engines."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
import pytest_asyncio
from google.protobuf import json_format, struct_pb2
from prometheus_client import REGISTRY

from stoker.api.inference.v1 import inference_pb2, inference_pb2_grpc
from stoker.api.router.v1 import router_pb2, router_pb2_grpc
from stoker.common import rpc
from tests.integration.test_router_openai_http import DECISION
from tests.support.agents import until
from tests.support.etcd import EtcdServer
from tests.support.fleet import Fleet, all_ready, running_fleet
from tests.support.router import running_router
from tests.support.waiting import eventually

Responses = list[inference_pb2.GenerateResponse]


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory, etcd: EtcdServer) -> AsyncIterator[Fleet]:
    async with running_fleet(tmp_path_factory.mktemp("fleet"), etcd) as running:
        yield running


def text(content: str, **more: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        model="tiny", text=content, sampling=inference_pb2.Sampling(max_tokens=4, ignore_eos=True), **more
    )


def counted(what: str) -> float:
    return REGISTRY.get_sample_value(f"stoker_router_{what}_tokens_total", {"model": "tiny"}) or 0.0


def chat(content: str) -> inference_pb2.Chat:
    part = inference_pb2.ContentPart(text=content)
    return inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content=[part])])


def not_a_number() -> inference_pb2.Chat:
    asked = chat("x")
    asked.template_kwargs.update({"x": float("nan")})
    return asked


async def generate(stub: Any, request: inference_pb2.GenerateRequest, **kwargs: Any) -> Responses:
    return [response async for response in stub.Generate(request, timeout=20, **kwargs)]


async def test_generate_streams_and_says_who_serves_why_and_what_was_cached(fleet: Fleet) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{fleet.router.rpc.port}") as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        prompt = "The boiler wants coal. " * 60
        first = await generate(stub, text(prompt, request_id="first"))
        assert [response.WhichOneof("event") for response in first[:1] + first[-1:]] == ["started", "finished"]
        started = first[0].started
        assert started.request_id == "first"
        assert started.reason == "ring"
        assert started.predicted_cached_tokens == 0
        assert sum(len(r.delta.text) > 0 for r in first if r.HasField("delta")) >= 1
        assert first[-1].finished.usage.completion_tokens == 4
        home = started.replica_id

        target = fleet.router.view.targets[home]
        await eventually(lambda: target.known_blocks > 0, "the agent's digest of what was served")
        before = counted("actual_cached")
        again = await generate(stub, text(prompt + "And water.", request_id="again"))
        assert again[0].started.replica_id == home
        assert again[0].started.reason == "exact"
        cached = again[-1].finished.usage.cached_prompt_tokens
        assert cached > 0
        assert again[0].started.predicted_cached_tokens == cached, "what is predicted is what the engine finds"
        assert counted("actual_cached") - before == cached, "and that is counted, as over HTTP"
        await eventually(lambda: fleet.router.router.in_flight == 0, "all is released")
        assert fleet.router.view.pools["tiny"].fleet.load.in_flight == 0


async def test_one_prompt_has_the_same_keys_over_both_apis(fleet: Fleet) -> None:
    async with (
        grpc.aio.insecure_channel(f"127.0.0.1:{fleet.router.rpc.port}") as channel,
        aiohttp.ClientSession() as http,
    ):
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        content = "How much coal does a boiler take? " * 20
        request = inference_pb2.GenerateRequest(
            model="tiny", chat=chat(content), sampling=inference_pb2.Sampling(max_tokens=2), request_id="grpc"
        )
        responses = await generate(stub, request)
        body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 2}
        url = f"http://127.0.0.1:{fleet.router.http_port}/v1/chat/completions"
        async with http.post(url, json=body, headers={"x-request-id": "http"}) as answer:
            assert answer.status == 200
        by_grpc, by_http = fleet.router.router.recent.of("grpc"), fleet.router.router.recent.of("http")
        assert by_grpc is not None
        assert by_http is not None
        assert (by_grpc.blocks, by_grpc.last_key) == (by_http.blocks, by_http.last_key)
        assert by_grpc.tokens == responses[-1].finished.usage.prompt_tokens


async def test_tools_structure_logprobs_and_choices(fleet: Fleet) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{fleet.router.rpc.port}") as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        schema = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}
        parameters = json_format.ParseDict(schema, struct_pb2.Struct())
        talk = chat("Read gauge 7.")
        talk.tools.append(inference_pb2.Tool(name="read_gauge", parameters=parameters))
        talk.tool_choice = "read_gauge"
        called = await generate(
            stub,
            inference_pb2.GenerateRequest(model="tiny", chat=talk, sampling=inference_pb2.Sampling(max_tokens=64)),
        )
        calls = [call for r in called if r.HasField("delta") for call in r.delta.tool_calls]
        assert calls[0].name == "read_gauge"
        assert "id" in json.loads("".join(call.arguments for call in calls))

        shaped = await generate(
            stub,
            inference_pb2.GenerateRequest(
                model="tiny",
                chat=chat("How hot?"),
                sampling=inference_pb2.Sampling(max_tokens=64),
                structured_output=inference_pb2.StructuredOutput(json_schema=json.dumps(schema)),
            ),
        )
        assert "id" in json.loads("".join(r.delta.text for r in shaped if r.HasField("delta")))

        several = text("x")
        several.sampling.n, several.sampling.logprobs, several.sampling.temperature = 2, 2, 1.0
        responses = await generate(stub, several)
        deltas = [r.delta for r in responses if r.HasField("delta")]
        assert {delta.index for delta in deltas} == {0, 1}
        assert any(delta.logprobs for delta in deltas)


@pytest.mark.parametrize(
    ("request_", "code", "field"),
    [
        (inference_pb2.GenerateRequest(text="x"), grpc.StatusCode.INVALID_ARGUMENT, "model"),
        (inference_pb2.GenerateRequest(model="tiny"), grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
        (
            inference_pb2.GenerateRequest(model="tiny", chat=not_a_number()),
            grpc.StatusCode.INVALID_ARGUMENT,
            "chat.template_kwargs",
        ),
        (inference_pb2.GenerateRequest(model="nope", text="x"), grpc.StatusCode.NOT_FOUND, None),
        (
            inference_pb2.GenerateRequest(
                model="tiny", text="x", sampling=inference_pb2.Sampling(max_tokens=1_000_000)
            ),
            grpc.StatusCode.INVALID_ARGUMENT,
            "sampling.max_tokens",
        ),
        (
            inference_pb2.GenerateRequest(model="tiny", text="ab " * 30_000),
            grpc.StatusCode.INVALID_ARGUMENT,
            "input_tokens",
        ),
    ],
)  # fmt: skip
async def test_bad_requests_name_the_field(
    fleet: Fleet, request_: inference_pb2.GenerateRequest, code: grpc.StatusCode, field: str | None
) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{fleet.router.rpc.port}") as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await generate(stub, request_)
        assert refused.value.code() is code
        error = rpc.error_from(refused.value)
        assert [violation.field for violation in error.fields] == ([field] if field else [])


async def test_cancelling_a_call_frees_the_engine_within_a_second(tmp_path: Path, etcd_alone: EtcdServer) -> None:
    async with (
        running_fleet(tmp_path, etcd_alone, replicas=1, args=("--sim-step-ms", "50")) as fleet,
        grpc.aio.insecure_channel(f"127.0.0.1:{fleet.router.rpc.port}") as channel,
        aiohttp.ClientSession() as http,
    ):
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        request = text("x")
        request.sampling.max_tokens = 5000
        call = stub.Generate(request, timeout=60)
        assert (await call.read()).HasField("started")
        url = fleet.router.view.targets["tiny-0"].url

        async def running() -> float:
            async with http.get(f"{url}/metrics") as answer:
                lines = (await answer.text()).splitlines()
            return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))

        assert await running() == 1
        call.cancel()

        async def stopped() -> bool:
            return await running() == 0

        await until("the engine stops", stopped, within_s=10.0)
        await eventually(lambda: fleet.router.view.targets["tiny-0"].in_flight == 0, "flight released")


async def test_models_embeddings_and_tokens(fleet: Fleet) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{fleet.router.rpc.port}") as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        listed = await stub.ListModels(inference_pb2.ListModelsRequest())
        assert [(m.id, m.deployment, m.ready_replicas) for m in listed.models] == [("tiny", "tiny", 2)]
        described = await stub.GetModel(inference_pb2.GetModelRequest(model="tiny"))
        assert described.model.block_size > 0
        embedded = await stub.Embed(inference_pb2.EmbedRequest(model="tiny", texts=["a", "b"]))
        assert len(embedded.embeddings) == 2
        tokens = await stub.Tokenize(inference_pb2.TokenizeRequest(model="tiny", text="Feed the fire"))
        assert tokens.token_ids


async def test_explain_shows_every_candidate_and_routes_nothing(fleet: Fleet) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{fleet.router.rpc.port}") as channel:
        inference: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)
        request = text("The stoker wants tea. " * 60)
        explained = await stub.Explain(router_pb2.ExplainRequest(request=request))
        assert {candidate.replica_id for candidate in explained.decision.candidates} == {"tiny-0", "tiny-1"}
        assert explained.prompt_tokens > 0
        assert explained.blocks > 0
        assert explained.policy == "stoker"
        assert fleet.router.view.pools["tiny"].fleet.load.in_flight == 0
        served = await generate(inference, text("The stoker wants tea. " * 60, request_id="this"))
        recalled = await stub.Explain(router_pb2.ExplainRequest(request_id="this"))
        assert recalled.decision.replica_id == served[0].started.replica_id == explained.decision.replica_id
        assert all(candidate.bound_tokens > 0 for candidate in recalled.decision.candidates)
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await stub.Explain(router_pb2.ExplainRequest(request_id="never"))
        assert rpc.error_from(unknown.value).reason == "DECISION_FORGOTTEN"


async def test_trailing_metadata_carry_the_decision_of_streams_and_of_errors(fleet: Fleet) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{fleet.router.rpc.port}") as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(text("Rake the ashes. " * 60), timeout=20)
        responses = [response async for response in call]
        started = responses[0].started
        said = dict(await call.trailing_metadata())
        assert said["x-stoker-replica"] == started.replica_id
        assert re.fullmatch(DECISION, said["x-stoker-decision"])
        assert said["x-stoker-decision"].startswith(f"{started.reason};hit=")

        bad = text("x")
        bad.sampling.temperature = -1.0
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await generate(stub, bad)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        said = dict(refused.value.trailing_metadata())
        assert re.fullmatch(DECISION, said["x-stoker-decision"]), "the engine refused, after the decision"
        assert said["x-stoker-replica"] in fleet.router.view.targets

        embedding = stub.Embed(inference_pb2.EmbedRequest(model="tiny", texts=["a"]))
        await embedding
        assert re.fullmatch(DECISION, dict(await embedding.trailing_metadata())["x-stoker-decision"])
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await generate(stub, inference_pb2.GenerateRequest(model="nope", text="x"))
        assert "x-stoker-decision" not in dict(unknown.value.trailing_metadata()), "nothing was decided"


async def test_the_view_is_shown(fleet: Fleet) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{fleet.router.rpc.port}") as channel:
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)
        view = await stub.GetView(router_pb2.GetViewRequest())
        assert not view.static_view
        assert set(view.registry_age_ms) == {fleet.registries[0].endpoint}
        for replica in view.replicas:
            assert (replica.health, replica.parity, replica.in_flight) == ("healthy", "ok", 0)
            assert replica.digest_credit == 1.0


async def test_two_routers_that_share_nothing_agree(fleet: Fleet) -> None:
    endpoints = [registry.endpoint for registry in fleet.registries]
    async with running_router(f"registries={endpoints}") as other:
        await other.watch()
        await until("the other router is ready", lambda: all_ready(other, fleet.replicas))
        for family in range(12):
            request = text(f"family {family} " * 60)
            homes = set()
            for app in (fleet.router, other):
                async with grpc.aio.insecure_channel(f"127.0.0.1:{app.rpc.port}") as channel:
                    stub: Any = router_pb2_grpc.RouterServiceStub(channel)
                    explained = await stub.Explain(router_pb2.ExplainRequest(request=request))
                    homes.add(explained.decision.replica_id)
            assert len(homes) == 1, f"family {family}: {homes}"


async def test_a_router_that_starts_late_knows_what_is_resident(fleet: Fleet) -> None:
    """It was told nothing of what others sent: the digests alone have it."""
    request = text("Who comes late finds the fire lit. " * 60)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{fleet.router.rpc.port}") as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        home = (await generate(stub, request))[0].started.replica_id
    target = fleet.router.view.targets[home]
    await eventually(lambda: target.known_blocks > 0, "the digest of what was served")
    endpoints = [registry.endpoint for registry in fleet.registries]
    async with running_router(f"registries={endpoints}") as late:
        await late.watch()
        await until("the late router is ready", lambda: all_ready(late, fleet.replicas))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{late.rpc.port}") as channel:
            explainer: Any = router_pb2_grpc.RouterServiceStub(channel)

            async def found() -> bool:
                explained = await explainer.Explain(router_pb2.ExplainRequest(request=request))
                return (explained.decision.replica_id, explained.decision.reason) == (home, "exact")

            await until("it knows where the prompt lies", found, within_s=60.0)


async def test_what_one_router_sent_another_knows_before_it_is_computed(
    tmp_path: Path, etcd_alone: EtcdServer
) -> None:
    slow = ("--sim-prefill-tokens-per-s", "100", "--max-num-batched-tokens", "64")
    async with running_fleet(tmp_path, etcd_alone, args=slow) as fleet:
        endpoints = [registry.endpoint for registry in fleet.registries]
        async with running_router(f"registries={endpoints}") as other:
            await other.watch()
            await until("the other router is ready", lambda: all_ready(other, fleet.replicas))
            request = text("The boiler wants coal, and it wants it now. " * 40)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{fleet.router.rpc.port}") as channel:
                stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
                call = stub.Generate(request, timeout=60)
                targets = fleet.router.view.targets
                await eventually(lambda: any(target.in_flight for target in targets.values()), "it is on its way")
                home = next(target.id for target in targets.values() if target.in_flight)
                async with grpc.aio.insecure_channel(f"127.0.0.1:{other.rpc.port}") as beside:
                    explainer: Any = router_pb2_grpc.RouterServiceStub(beside)

                    async def believed() -> bool:
                        explained = await explainer.Explain(router_pb2.ExplainRequest(request=request))
                        decision = explained.decision
                        return (decision.replica_id, decision.reason) == (home, "speculative")

                    await until("the other router has heard of it", believed, within_s=60.0)
                call.cancel()
