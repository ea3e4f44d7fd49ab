"""A caller that does not read costs its own call: the engine is freed, the buffer is bounded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from stoker.api.inference.v1 import inference_pb2, inference_pb2_grpc
from stoker.api.registry.v1 import records_pb2
from stoker.common import rpc
from stoker.local.model import cached
from stoker.registry.client import RegistryClient
from tests.support.agents import Agent, Planner, Registry, reaches, registry_running, until
from tests.support.etcd import EtcdServer


@pytest.fixture
def registry(etcd: EtcdServer, tmp_path: Path) -> Iterator[Registry]:
    with registry_running(tmp_path, etcd.endpoint) as process:
        yield process


async def test_a_reader_who_stands_still_is_cut_off(registry: Registry, tmp_path: Path) -> None:
    settings = ("relay.reader_timeout_s=1", "relay.buffer_bytes=4096")
    agent = Agent(tmp_path, "slow", [registry.endpoint], *settings)
    with agent.running():
        async with RegistryClient([registry.endpoint]) as client:
            planner = Planner(client, str(cached()))
            await planner.lead()
            await planner.assign("slow-0", "slow", args=["--sim-step-ms", "1", "--sim-decode-sequence-ms", "0.1"])
            status = await reaches(agent, "slow-0", records_pb2.STATE_READY)

        async def running() -> float:
            url = f"{status.engine.http_url}/metrics"
            async with aiohttp.ClientSession() as session, session.get(url) as response:
                lines = (await response.text()).splitlines()
            return sum(float(x.rpartition(" ")[2]) for x in lines if x.startswith("vllm:num_requests_running{"))

        async def idle() -> bool:
            return await running() == 0

        # A small window, so that a test's worth of tokens fills it.
        window = [("grpc.http2.lookahead_bytes", 16_384), ("grpc.http2.bdp_probe", 0)]
        async with grpc.aio.insecure_channel(agent.endpoint, options=window) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            request = inference_pb2.GenerateRequest(
                model="slow", text="on", sampling=inference_pb2.Sampling(max_tokens=16_000, logprobs=20)
            )
            call: Any = stub.Generate(request, timeout=60)
            assert (await call.read()).started.replica_id == "slow-0"
            assert await running() == 1
            await until("the engine is free though the caller reads nothing", idle, within_s=60)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _exhaust(call)
            assert rpc.error_from(caught.value).reason == "SLOW_READER"


async def _exhaust(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass
