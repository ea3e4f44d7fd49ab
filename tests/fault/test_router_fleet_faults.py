"""The control plane dies piece by piece; requests go on."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from stoker.api.inference.v1 import inference_pb2, inference_pb2_grpc
from stoker.common import rpc
from tests.support.agents import until
from tests.support.etcd import EtcdServer
from tests.support.fleet import Fleet, pid_on_port, running_fleet
from tests.support.waiting import eventually

pytestmark = pytest.mark.fault


def text(content: str, tokens: int = 2) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        model="tiny", text=content, sampling=inference_pb2.Sampling(max_tokens=tokens, ignore_eos=True)
    )


async def by_http(fleet: Fleet, content: str) -> tuple[int, str]:
    url = f"http://127.0.0.1:{fleet.router.http_port}/v1/completions"
    body = {"model": "tiny", "prompt": content, "max_tokens": 2}
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as answer:
        await answer.read()
        return answer.status, answer.headers.get("x-stoker-replica", "")


async def by_grpc(fleet: Fleet, request: inference_pb2.GenerateRequest) -> list[inference_pb2.GenerateResponse]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{fleet.router.rpc.port}") as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        return [response async for response in stub.Generate(request, timeout=30)]


async def to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_requests_go_on_with_etcd_and_registry_dead_and_the_view_heals_after(
    tmp_path: Path, etcd_alone: EtcdServer
) -> None:
    async with running_fleet(tmp_path, etcd_alone) as fleet:
        fleet.registries[0].kill()
        etcd_alone.kill()
        view = fleet.router.view
        await eventually(lambda: not any(source.connected for source in view.sources.values()), "it knows")
        for number in range(6):
            assert (await by_http(fleet, f"{number} " * 50))[0] == 200
            assert (await by_grpc(fleet, text(f"{number} " * 50)))[-1].HasField("finished")
        # Only this router itself can now find out that an engine died.
        target = view.targets["tiny-0"]
        os.killpg(pid_on_port(fleet, int(target.url.rsplit(":", 1)[1])), signal.SIGKILL)
        await eventually(lambda: not target.reachable, "its own checks find it")
        for number in range(6):
            assert await by_http(fleet, f"{number} " * 50) == (200, "tiny-1")
        etcd_alone.start()
        fleet.registries[0].start()
        await eventually(lambda: any(source.connected for source in view.sources.values()), "it hears again", 60)
        await until("the restarted engine serves", lambda: target.ready and target.parity == "ok", within_s=60)


async def test_an_agent_killed_under_streams_from_the_engine_costs_none(
    tmp_path: Path, etcd_alone: EtcdServer
) -> None:
    async with running_fleet(tmp_path, etcd_alone, args=("--sim-step-ms", "20")) as fleet:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{fleet.router.rpc.port}") as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            call = stub.Generate(text("x", tokens=100), timeout=60)
            said = []
            async for response in call:
                said.append(response)
                if len(said) == 2:
                    assert said[0].HasField("started")
                    fleet.agent.kill()
        assert said[-1].finished.usage.completion_tokens == 100
        await eventually(lambda: fleet.router.router.in_flight == 0, "all is released")


async def test_an_agent_killed_under_streams_costs_those_streams_alone(
    tmp_path: Path, etcd_alone: EtcdServer
) -> None:
    slow = ("--sim-step-ms", "50")
    async with running_fleet(tmp_path, etcd_alone, args=slow, settings=("grpc_path=agent",)) as fleet:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{fleet.router.rpc.port}") as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            call = stub.Generate(text("x", tokens=2000), timeout=60)
            assert (await call.read()).HasField("started")
            await call.read()
            fleet.agent.kill()
            with pytest.raises(grpc.aio.AioRpcError) as broken:
                await asyncio.wait_for(to_the_end(call), 10)
            assert rpc.error_from(broken.value).code.name == "UNAVAILABLE"
        assert fleet.router.view.pools["tiny"].fleet.load.in_flight == 0
        # HTTP goes to the engines directly: it never notices.
        for number in range(4):
            assert (await by_http(fleet, f"{number} " * 50))[0] == 200
        before = {target.id: target.record.engine.http_url for target in fleet.router.view.targets.values()}
        fleet.agent.start()

        async def served() -> bool:
            return (await by_grpc(fleet, text("after")))[-1].HasField("finished")

        await until("gRPC serves again", served, within_s=60)
        after = {target.id: target.record.engine.http_url for target in fleet.router.view.targets.values()}
        assert after == before, "the agent adopted its engines"


async def test_digests_still_steer_after_the_registry_was_killed(tmp_path: Path, etcd_alone: EtcdServer) -> None:
    async with running_fleet(tmp_path, etcd_alone) as fleet:
        prompt = "The boiler wants coal. " * 60
        served = await by_grpc(fleet, text(prompt))
        home = served[0].started.replica_id
        target = fleet.router.view.targets[home]
        await eventually(lambda: target.known_blocks > 0, "the digest is told")
        fleet.registries[0].kill()
        fleet.registries[0].start()
        view = fleet.router.view
        await eventually(lambda: not any(source.connected for source in view.sources.values()), "it was lost", 60)
        assert target.known_blocks > 0, "nothing is cleared and then refilled"
        await eventually(lambda: any(source.connected for source in view.sources.values()), "it is back", 60)
        pool = view.pools["tiny"]

        async def exact() -> bool:
            again = await by_grpc(fleet, text(prompt + "And water."))
            return again[0].started.replica_id == home and again[0].started.reason == "exact"

        await until("the digest steers again", exact, within_s=60)
        assert pool.fleet.index.trust(home, fleet.router.router.clock()) == 1.0


async def test_a_generation_that_waits_at_a_frozen_engine_moves_to_another(
    tmp_path: Path, etcd_alone: EtcdServer
) -> None:
    settings = ("checks.timeout_s=0.3", "health.failures=2", "health.pause_s=30")
    async with running_fleet(tmp_path, etcd_alone, settings=settings) as fleet:
        frozen = fleet.router.view.targets["tiny-0"]
        pid = pid_on_port(fleet, int(frozen.url.rsplit(":", 1)[1]))
        os.kill(pid, signal.SIGSTOP)
        try:
            asked = [asyncio.create_task(by_grpc(fleet, text(f"{number} " * 60))) for number in range(10)]
            await eventually(lambda: frozen.in_flight > 0, "somebody waits at the frozen engine")
            async with asyncio.timeout(25):
                answers = await asyncio.gather(*asked)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert {answer[0].started.replica_id for answer in answers} == {"tiny-1"}
        assert all(answer[-1].HasField("finished") for answer in answers)
        assert not frozen.waiting
