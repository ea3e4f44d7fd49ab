"""A model that nobody asks for goes; the next request brings it back and is answered: all services real."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from stoker.api.common.v1 import scaling_pb2
from stoker.bench import routing
from stoker.cli.demo import bench_of
from stoker.cli.serving import Serving
from stoker.local.deployment import LocalDeployment
from stoker.registry.client import RegistryClient
from tests.support.stack import serving
from tests.support.waiting import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

POLICY = scaling_pb2.ScalingPolicy(
    kind=scaling_pb2.SCALING_KIND_SLO,
    slo=scaling_pb2.ScalingSlo(window_s=4.0),
    bounds=scaling_pb2.ScalingBounds(least=0, most=2, idle_s=4.0),
    pace=scaling_pb2.ScalingPace(down_cooldown_s=0.0, settle_s=4.0),
)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    deployment = LocalDeployment("sim", replicas=1, sim_speed=10)
    with serving(tmp_path_factory.mktemp("zero") / "home", deployment) as started:
        asyncio.run(routing.wait_routed(bench_of(started, api="http"), lambda _: None))
        yield started


async def test_it_goes_to_zero_and_comes_back_for_a_request(stack: Serving) -> None:
    endpoints, model = stack.state.endpoints, stack.deployment.name
    async with RegistryClient(endpoints.registry) as client, aiohttp.ClientSession() as http:

        async def replicas() -> int:
            return len((await client.get_fleet()).records.replicas)

        async def none_left() -> bool:
            return await replicas() == 0

        async def ask() -> tuple[int, bytes]:
            body: Any = {"model": model, "prompt": "Feed the fire", "max_tokens": 4}
            async with http.post(f"{endpoints.http[0]}/v1/completions", json=body) as answer:
                return answer.status, await answer.read()

        await client.set_scaling_policy(model, POLICY)
        await eventually(none_left, "nobody asks: the last replica goes", 60)
        answers = await asyncio.wait_for(asyncio.gather(*(ask() for _ in range(8))), 60)
        assert [status for status, _ in answers] == [200] * 8, answers
        assert await replicas() >= 1
        await eventually(none_left, "and goes again", 60)
