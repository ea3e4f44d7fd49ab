"""The whole loop on simulated engines: load rises, replicas start, times recover; load falls, victims drain, and no
request is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import aiohttp
import pytest

from stoker.bench import routing
from stoker.cli.demo import bench_of
from stoker.cli.serving import Serving
from stoker.local.deployment import LocalDeployment
from tests.support.stack import Cli, serving
from tests.support.waiting import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

_NODES = 4
_CLIENTS = 12
_WORDS, _TOKENS = 120, 48

POLICY = """
kind: concurrency
concurrency: { target: 3, utilisation: 1.0, stable_s: 8, panic_s: 3 }
bounds: { least: 1, most: 4, idle_s: 6 }
pace: { settle_s: 6, down_cooldown_s: 2, up_factor: 4, margin: 0.0 }
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serving, Cli]]:
    home = tmp_path_factory.mktemp("scaling") / "home"
    deployment = LocalDeployment("sim", replicas=1, sim_speed=1.0)
    with serving(home, deployment, nodes=_NODES) as started:
        asyncio.run(routing.wait_routed(bench_of(started, api="http"), lambda _: None))
        yield started, Cli(home)


@dataclass
class Load:
    """What became of the requests, in order of their ends."""

    lost: list[str] = field(default_factory=list)
    ttfts: list[tuple[float, float]] = field(default_factory=list)
    """(when it ended, seconds to the first byte)"""

    def since(self, began: float) -> list[float]:
        return [ttft for at, ttft in self.ttfts if at >= began]


async def one(session: aiohttp.ClientSession, url: str, prompt: str) -> tuple[str, float]:
    """Status, or what went wrong, and the time to the first byte of the stream."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": _TOKENS, "stream": True, "ignore_eos": True}
    began = time.monotonic()
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        first = 0.0
        text = b""
        async for chunk in answer.content.iter_any():
            first = first or time.monotonic() - began
            text += chunk
    whole = answer.status == 200 and b'"error":' not in text and b"data: [DONE]" in text
    return "200" if whole else f"{answer.status}: {text[-200:]!r}", first


@asynccontextmanager
async def load(url: str, clients: int) -> AsyncIterator[Load]:
    """Closed-loop clients for the length of the block; each ends the request it has begun."""
    seen, over = Load(), asyncio.Event()

    async def client(session: aiohttp.ClientSession, number: int) -> None:
        turn = 0
        while not over.is_set():
            turn += 1
            outcome, ttft = await one(session, url, f"{number} {turn} word " * (_WORDS // 3))
            if outcome == "200":
                seen.ttfts.append((time.monotonic(), ttft))
            else:
                seen.lost.append(outcome)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        tasks = [asyncio.create_task(client(session, number)) for number in range(clients)]
        try:
            yield seen
            over.set()
            await asyncio.wait_for(asyncio.gather(*tasks), 60)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def status(cli: Cli) -> dict[str, Any]:
    value: dict[str, Any] = await asyncio.to_thread(cli.json, "status", "tiny")
    return value


async def ready(cli: Cli) -> int:
    return int((await status(cli))["deployments"][0]["ready"])


async def test_replicas_follow_the_load_and_no_request_is_lost(stack: tuple[Serving, Cli]) -> None:
    started, cli = stack
    url = started.state.endpoints.http[0]
    policy = cli.home.parent / "policy.yaml"
    policy.write_text(POLICY)
    await asyncio.to_thread(cli.run, "scaler", "policy", "tiny", "-f", str(policy))
    # A few requests go on all the time: those that run while replicas leave are the ones that could be lost.
    async with load(url, 1) as low:
        began = time.monotonic()
        async with load(url, _CLIENTS) as high:
            await eventually(lambda: len(high.ttfts) >= 2 * _CLIENTS, "requests are served by one replica", 60)
            alone = median(high.since(began))

            async def all_there() -> bool:
                return await ready(cli) == _NODES

            await eventually(all_there, "13 requests at 3 a replica start all four", 90)
            grown = time.monotonic()
            await eventually(lambda: len(high.since(grown)) >= 6 * _CLIENTS, "requests are served by four", 60)
            recovered = median(high.since(grown)[-3 * _CLIENTS :])
            told = await asyncio.to_thread(cli.json, "scaler", "why", "tiny")
            assert told["standing"]["replicas"] == _NODES, told["standing"]
        assert high.lost == []
        assert recovered < 0.6 * alone, f"from {alone:.3f} s alone to {recovered:.3f} s"

        async def one_left() -> dict[str, Any] | None:
            value = await status(cli)
            return value if len(value["replicas"]) == 1 and value["deployments"][0]["desired"] == 1 else None

        await eventually(one_left, "the others drain and stop", 120)
        served = len(low.ttfts)
        await eventually(lambda: len(low.ttfts) >= served + 2, "the one that is left serves", 60)
    assert low.lost == []
    reasons = [
        because["code"] for because in (await asyncio.to_thread(cli.json, "scaler", "why", "tiny"))["now"]["because"]
    ]
    assert reasons[0] == "CONCURRENCY"
