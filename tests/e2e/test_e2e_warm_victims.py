"""What real routers ask for and real agents hold decides who goes: all services real, engines simulated."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from stoker.bench import routing
from stoker.cli.demo import bench_of
from stoker.cli.serving import Serving
from stoker.local.deployment import LocalDeployment
from stoker.registry.client import RegistryClient
from tests.support.stack import serving
from tests.support.waiting import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

PROMPTS = 24
TOKENS = 640


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    deployment = LocalDeployment("sim", replicas=3, sim_speed=10)
    with serving(tmp_path_factory.mktemp("warm") / "home", deployment) as started:
        asyncio.run(routing.wait_routed(bench_of(started, api="http"), lambda _: None))
        yield started


def prompt(number: int) -> list[int]:
    return [100 + (7 * number + at * (number + 1)) % 900 for at in range(TOKENS)]


async def test_whose_prompts_nobody_asks_for_goes_first(stack: Serving) -> None:
    endpoints, model = stack.state.endpoints, stack.deployment.name
    async with RegistryClient(endpoints.registry) as client, aiohttp.ClientSession() as http:

        async def ask(number: int) -> str:
            body: Any = {"model": model, "prompt": prompt(number), "max_tokens": 1}
            async with http.post(f"{endpoints.http[0]}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.read()
                return answer.headers["x-stoker-replica"]

        async def decided() -> Any:
            (desired,) = (await client.get_fleet()).records.desired
            return desired

        homes: dict[str, list[int]] = {}
        for number in range(PROMPTS):
            homes.setdefault(await ask(number), []).append(number)
        assert len(homes) == 3, homes
        over = min(homes)  # of equals the highest ordinal would go
        live = [number for home, numbers in homes.items() if home != over for number in numbers]
        for number in range(PROMPTS):
            await ask(number)
        for number in itertools.islice(itertools.cycle(live), 12 * len(live)):
            await ask(number)
        await client.scale_deployment(model, 1)
        asking = asyncio.create_task(_again_and_again(ask, live))

        async def has_victims() -> bool:
            return bool((await decided()).victims)

        await eventually(has_victims, "victims are named", 60)
        asking.cancel()
        desired = await decided()
        costs = {each.text.split()[0]: each.numbers for each in desired.because if each.code == "VICTIM"}
        first, second = desired.victims
        assert first == over, desired
        assert costs[second]["lost_tokens"] > TOKENS / 4, costs
        assert costs[first]["lost_tokens"] < costs[second]["lost_tokens"] / 2, costs


async def _again_and_again(ask: Any, numbers: list[int]) -> None:
    for number in itertools.cycle(numbers):
        await ask(number)
