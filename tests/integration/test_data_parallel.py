"""A data-parallel replica: each rank has a cache of its own, and requests go to the rank that holds their prefix."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from stoker.api.inference.v1 import inference_pb2, inference_pb2_grpc
from stoker.common import rpc
from tests.support.etcd import EtcdServer
from tests.support.fleet import Fleet, running_fleet
from tests.support.waiting import eventually

RANKS = ("tiny-0@0", "tiny-0@1")


@pytest.fixture
async def fleet(tmp_path: Path, etcd: EtcdServer) -> AsyncIterator[Fleet]:
    async with running_fleet(tmp_path, etcd, replicas=1, args=("--data-parallel-size", "2")) as fleet:
        yield fleet


def held(fleet: Fleet, rank: str) -> int:
    return fleet.router.view.targets[rank].known_blocks


async def ask(fleet: Fleet, prompt: str) -> tuple[str, int]:
    """Who served it, and how many prompt tokens were found in the cache."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"http://127.0.0.1:{fleet.router.http_port}/v1/completions", json=body) as answer,
    ):
        assert answer.status == 200, await answer.text()
        usage = (await answer.json())["usage"]
        return answer.headers["x-stoker-replica"], usage["prompt_tokens_details"]["cached_tokens"]


async def test_each_rank_is_routed_to_by_what_it_holds(fleet: Fleet) -> None:
    assert fleet.router.view.targets.keys() == set(RANKS)
    homes: dict[str, str] = {}
    for number in itertools.count():
        prompt = f"story {number}: " + " ".join(f"w{number}-{i}" for i in range(60))
        home, _ = await ask(fleet, prompt)
        if home not in homes.values():
            homes[prompt] = home
        if len(homes) == 2:
            break
        assert number < 32, "the ring gives both ranks prefixes"
    await eventually(lambda: all(held(fleet, rank) for rank in RANKS))
    loads = [fleet.router.view.targets[rank] for rank in RANKS]
    await eventually(lambda: all(target.load_tokens is not None for target in loads))
    for _ in range(2):
        for prompt, home in homes.items():
            again, cached = await ask(fleet, prompt)
            assert (again, cached >= 32) == (home, True)


async def test_over_grpc_the_agent_hands_the_rank_to_the_engine(fleet: Fleet) -> None:
    prompt = "a tale: " + " ".join(f"g{i}" for i in range(60))
    request = inference_pb2.GenerateRequest(model="tiny", text=prompt, sampling=inference_pb2.Sampling(max_tokens=2))
    async with rpc.channel(f"127.0.0.1:{fleet.router.rpc.port}") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        answers = [message async for message in stub.Generate(request)]
    home = answers[0].started.replica_id
    assert home in RANKS
    await eventually(lambda: held(fleet, home))
    (other,) = set(RANKS) - {home}
    assert held(fleet, other) == 0
