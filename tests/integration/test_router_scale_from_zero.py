"""Requests for a model that is scaled to zero: every way in holds them, tells of them, and serves them in the end."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from stoker.api.common.v1 import common_pb2, scaling_pb2
from stoker.api.inference.v1 import inference_pb2, inference_pb2_grpc
from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.api.router.v1 import router_pb2, router_pb2_grpc
from stoker.common.errors import StokerError
from stoker.local.model import cached
from stoker.registry.client import FleetWatch, RegistryClient
from stoker.router.app import RouterApp
from stoker.router.envoy.addresses import Addresses
from stoker.router.envoy.check import Checks
from stoker.router.envoy.flights import Ending, Flights
from stoker.router.http.port import Answer, Ask
from tests.support.agents import Agent, Registry, until
from tests.support.deciders import DeciderProcess
from tests.support.engines import FAST, TINY, RunningEngine, running_engine
from tests.support.etcd import EtcdServer
from tests.support.fleet import SPEC_ARGS
from tests.support.router import replica, running_router, tell, tokenizer_of
from tests.support.waiting import eventually

BODY = {"model": "tiny", "prompt": "Feed the fire, stoker.", "max_tokens": 4, "stream": True,
        "stream_options": {"include_usage": True}}  # fmt: skip

_TOPICS = (registry_pb2.TOPIC_REPLICAS, registry_pb2.TOPIC_DESIRED)


def spec(**bounds: int) -> common_pb2.DeploymentSpec:
    policy = scaling_pb2.ScalingPolicy(kind=scaling_pb2.SCALING_KIND_SLO, bounds=scaling_pb2.ScalingBounds(**bounds))
    return common_pb2.DeploymentSpec(
        name="tiny",
        model=str(cached(TINY)),
        engine="sim",
        engine_args=[*SPEC_ARGS, "--sim-speed", "20"],
        scaling=policy,
    )


@dataclass
class Stack:
    """A router without a registry, before one engine that it does not know yet."""

    app: RouterApp
    engine: RunningEngine
    http: aiohttp.ClientSession

    def deploy(self, **bounds: int) -> None:
        deployment = records_pb2.Deployment(spec=spec(**bounds), generation=1)
        self.app.view.records(registry_pb2.Records(deployments=[deployment]), now=0.0, snapshot=True)
        self.app.fleet_changed()

    def start_one(self) -> None:
        sha256, tokenizer = tokenizer_of(cached(TINY))
        self.app.tokenizers.add(sha256, tokenizer)
        tell(self.app, replica("tiny-0", self.engine.url, sha256=sha256))

    def demand(self) -> registry_pb2.Demand:
        return {demand.model: demand for demand in self.app.router.demand.report(True)}["tiny"]

    async def held(self, count: int) -> None:
        await eventually(lambda: self.demand().held == count, f"{count} are held")

    async def post(self, **headers: str) -> tuple[int, dict[str, str], bytes]:
        url = f"http://127.0.0.1:{self.app.http_port}/v1/completions"
        async with self.http.post(url, json=BODY, headers=headers) as answer:
            return answer.status, dict(answer.headers), await answer.read()


@contextlib.asynccontextmanager
async def stack(folder: Path, *settings: str) -> AsyncIterator[Stack]:
    async with (
        running_engine("sim", folder, args=FAST) as engine,
        running_router("grpc_path=engine", *settings) as app,
        aiohttp.ClientSession() as http,
    ):
        running = Stack(app, engine, http)
        running.deploy(least=0)
        yield running


async def test_every_way_in_waits_for_the_first_replica(tmp_path: Path) -> None:
    async with (
        stack(tmp_path) as there,
        grpc.aio.insecure_channel(f"127.0.0.1:{there.app.rpc.port}") as channel,
    ):
        flights = Flights(60.0, time.monotonic, there.app.router.move)
        checks = Checks(there.app.router, flights, there.app.config.limits, Addresses(time.monotonic))
        generating: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        picking: Any = router_pb2_grpc.RouterServiceStub(channel)
        request = inference_pb2.GenerateRequest(
            model="tiny", text="Feed the fire", sampling=inference_pb2.Sampling(max_tokens=4)
        )

        async def generated() -> list[Any]:
            return [response async for response in generating.Generate(request, timeout=20)]

        async def checked() -> Answer:
            asked = checks.decide(Ask("POST", "/v1/completions", {}, json.dumps(BODY).encode()))
            assert inspect.isawaitable(asked)
            return await asked

        async def picked() -> Any:
            return await picking.Pick(router_pb2.PickRequest(request=request), timeout=20)

        ways = [asyncio.create_task(way()) for way in (there.post, generated, checked, picked)]
        await there.held(4)
        assert there.demand().arrivals == 0, "what nobody could read is no arrival yet"
        assert list(there.demand().deployments) == ["tiny"]
        there.start_one()
        (status, _, body), messages, answer, pick = await asyncio.wait_for(asyncio.gather(*ways), 20)
        assert (status, body.endswith(b"data: [DONE]\n\n")) == (200, True)
        assert messages[-1].finished.usage.completion_tokens == 4
        assert (answer.status, answer.headers["x-stoker-replica-1"]) == (200, "tiny-0")
        assert pick.places[0].replica_id == "tiny-0"
        flights.ended(answer.headers["x-stoker-flight"], Ending(200, first_byte_s=0.25, tries=1))
        await picking.ReportPicks(
            router_pb2.ReportPicksRequest(
                reports=[
                    router_pb2.PickReport(pick_id=pick.pick_id, event=event)
                    for event in (router_pb2.PICK_EVENT_FIRST_TOKEN, router_pb2.PICK_EVENT_SERVED)
                ]
            )
        )
        demand = there.demand()
        assert (demand.arrivals, demand.finished, demand.held, demand.in_flight) == (4, 4, 0, 0)
        assert demand.judged == 4
        assert demand.output_tokens == 8, "of two answers the engine's count was seen"
        assert sum(demand.itl.counts) == 2


async def test_a_model_that_sleeps_is_listed(tmp_path: Path) -> None:
    async with (
        stack(tmp_path) as there,
        grpc.aio.insecure_channel(f"127.0.0.1:{there.app.rpc.port}") as channel,
    ):
        url = f"http://127.0.0.1:{there.app.http_port}/v1/models"

        async def cards() -> dict[str, Any]:
            async with there.http.get(url) as answer:
                return {card["id"]: card["max_model_len"] for card in (await answer.json())["data"]}

        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        assert await cards() == {"tiny": None}
        async with there.http.get(f"{url}/tiny") as one:
            assert (one.status, (await one.json())["id"]) == (200, "tiny")
        (model,) = (await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=5)).models
        assert (model.id, model.deployment, model.ready_replicas) == ("tiny", "tiny", 0)
        assert (await stub.GetModel(inference_pb2.GetModelRequest(model="tiny"), timeout=5)).model == model
        there.start_one()
        assert await cards() == {"tiny": 16384}
        there.deploy(least=1)
        there.app.view.records(None, registry_pb2.Removals(replicas=["tiny-0"]), now=0.0)
        assert await cards() == {}


async def test_time_runs_out_with_a_reason_and_a_delay(tmp_path: Path) -> None:
    async with stack(tmp_path, "queue.longest_s=0.3") as there:
        status, headers, body = await there.post()
        assert (status, headers["Retry-After"], json.loads(body)["error"]["code"]) == (503, "5", "not_started")
        status, headers, body = await there.post(**{"x-request-timeout": "0.1"})
        assert (status, json.loads(body)["error"]["code"]) == (504, "deadline_exceeded")
        assert there.demand().refused == 2
        with pytest.raises(StokerError) as held:
            await there.app.picker._hold("tiny", there.app.router.tenants.caller({}), 0.1)
        assert held.value.reason == "HELD"


async def test_without_a_policy_that_starts_one_nobody_is_held(tmp_path: Path) -> None:
    async with stack(tmp_path) as there:
        there.deploy(least=1)
        status, _, body = await there.post()
        assert (status, json.loads(body)["error"]["code"]) == (503, "no_replica")
        assert there.demand().refused == 1
        there.deploy(least=0)
        waiting = asyncio.create_task(there.post())
        await there.held(1)
        there.deploy(least=0, most=0)
        status, _, body = await asyncio.wait_for(waiting, 10)
        assert (status, json.loads(body)["error"]["code"]) == (503, "no_replica")


async def test_a_request_brings_a_model_back_through_the_real_services(tmp_path: Path, etcd: EtcdServer) -> None:
    with contextlib.ExitStack() as held:
        registry = Registry(tmp_path, etcd.endpoint)
        registry.start()
        held.callback(registry.kill)
        endpoints = [registry.endpoint]
        held.enter_context(Agent(tmp_path, "node-a", endpoints).running())
        deciders = [DeciderProcess(role, endpoints, tmp_path) for role in ("scaler", "planner")]
        for decider in deciders:
            decider.start()
            held.callback(decider.kill)
        async with (
            RegistryClient(endpoints) as client,
            running_router(f"registries={endpoints}") as router,
            aiohttp.ClientSession() as http,
            FleetWatch(endpoints, _TOPICS) as watch,
        ):
            await router.watch()
            for decider in deciders:
                await eventually(decider.leading, f"{decider.role} leads", 60, not_yet=(grpc.aio.AioRpcError,))
            policy = spec(least=0, most=1)
            policy.scaling.bounds.idle_s = 3.0
            policy.scaling.slo.window_s = 3.0
            policy.scaling.pace.CopyFrom(scaling_pb2.ScalingPace(down_cooldown_s=0.0, settle_s=3.0))
            policy.replicas = 0
            await client.put_deployment(policy)
            await until("the router knows the deployment", lambda: router.view.deployed.wakes("tiny"))

            async def asked() -> int:
                async with http.post(f"http://127.0.0.1:{router.http_port}/v1/completions", json=BODY) as answer:
                    assert b"[DONE]" in await answer.read()
                    return answer.status

            answers = await asyncio.wait_for(asyncio.gather(*(asked() for _ in range(4))), 60)
            assert answers == [200] * 4
            await until("nobody asks: the replica goes", lambda: not watch.view.replicas, within_s=60)
            assert await asyncio.wait_for(asked(), 60) == 200, "and comes back for the next request"
