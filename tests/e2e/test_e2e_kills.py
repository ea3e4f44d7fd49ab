"""kill -9 of every kind of process in turn, under load: no request hangs, everything recovers by itself."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

from stoker.bench import routing
from stoker.cli.demo import bench_of
from stoker.cli.fleet import Fleet, Registries, settled
from stoker.cli.serving import Serving
from stoker.local.deployment import LocalDeployment
from stoker.local.state import Home, ServiceState
from tests.support.stack import serving
from tests.support.waiting import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.timeout(240)]

LONGEST_S = 20.0
"""No request may take longer, whatever dies; undisturbed they take about 0.2 s."""
_BACK_S = 45.0
"""Longest time in which what was killed must be back."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    deployment = LocalDeployment("sim", replicas=2, sim_speed=10)
    with serving(tmp_path_factory.mktemp("kills") / "home", deployment) as started:
        asyncio.run(routing.wait_routed(bench_of(started, api="http"), lambda _: None))
        yield started


@dataclass
class Load:
    """What became of the requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0


@asynccontextmanager
async def load(url: str, clients: int = 4) -> AsyncIterator[Load]:
    """Closed-loop clients for the length of the block."""
    seen = Load()
    over = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def client(session: aiohttp.ClientSession, number: int) -> None:
        turn = 0
        while not over.is_set():
            turn += 1
            body = {
                "model": "tiny",
                "prompt": f"{number} {turn} word " * 20,
                "max_tokens": 16,
                "stream": turn % 2 == 0,
            }
            began = loop.time()
            lost = False
            try:
                async with session.post(f"{url}/v1/completions", json=body) as answer:
                    text = await answer.text()
                    broken = answer.status == 200 and '"error":' in text
                    seen.outcomes["broken stream" if broken else str(answer.status)] += 1
            except aiohttp.ClientError as error:
                seen.outcomes[type(error).__name__] += 1
                lost = True
            seen.slowest_s = max(seen.slowest_s, loop.time() - began)
            if lost:
                await eventually(lambda: accepts(url), "the router listens again", _BACK_S, not_yet=(OSError,))

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LONGEST_S)) as session:
        tasks = [asyncio.create_task(client(session, n)) for n in range(clients)]
        try:
            await eventually(
                lambda: seen.outcomes["200"] >= 2 * clients, "requests succeed before anything is killed", _BACK_S
            )
            yield seen
            good = seen.outcomes["200"]
            await eventually(lambda: seen.outcomes["200"] >= good + 2 * clients, "requests succeed again", _BACK_S)
            over.set()
            await asyncio.wait_for(asyncio.gather(*tasks), LONGEST_S + 5)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    assert seen.slowest_s < LONGEST_S


async def accepts(url: str) -> bool:
    """Whether somebody listens there; OSError if not."""
    parts = urlsplit(url)
    _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.close()
    return True


def service(stack: Serving, name: str) -> ServiceState:
    home = Path(stack.state.services[0].log).parent.parent
    state = Home(home).read_state()
    assert state is not None
    return next(s for s in state.services if s.name == name)


async def kill_and_see_it_back(stack: Serving, name: str) -> None:
    before = service(stack, name)
    assert before.process is not None
    assert before.process.signal(signal.SIGKILL)
    await eventually(lambda: service(stack, name).restarts > before.restarts, f"{name} is missed", _BACK_S)
    await eventually(lambda: service(stack, name).status == "ready", f"{name} is ready again", _BACK_S)


async def fleet_when_settled(stack: Serving, within_s: float = 60.0) -> Fleet:
    async with Registries(stack.state.endpoints.registry) as registries:

        async def fleet_if_settled() -> Fleet | None:
            fleet = await registries.fleet()
            led = {leader.role for leader in fleet.records.leaders} == {"scaler", "planner"}
            return fleet if settled(fleet, "tiny") and led else None

        fleet: Fleet = await eventually(fleet_if_settled, "the fleet is settled", within_s)
        return fleet


def pids(fleet: Fleet) -> dict[str, int]:
    return {r.replica_id: r.members[0].pid for r in fleet.replicas("tiny")}


@pytest.mark.parametrize("victim", ["scaler", "planner", "registry", "etcd", "node-1"])
async def test_no_request_notices_the_death_of_the_control_plane(stack: Serving, victim: str) -> None:
    before = pids(await fleet_when_settled(stack))
    async with load(stack.state.endpoints.http[0]) as seen:
        await kill_and_see_it_back(stack, victim)
    assert set(seen.outcomes) == {"200"}, seen.outcomes
    # Not one engine was restarted: an agent adopts what it finds running.
    assert pids(await fleet_when_settled(stack)) == before


async def test_a_router_comes_back_alone(stack: Serving) -> None:
    async with load(stack.state.endpoints.http[0]) as seen:
        await kill_and_see_it_back(stack, "router")
    allowed = {"200", "503", "ServerDisconnectedError", "ClientPayloadError", "ClientConnectorError", "ClientOSError"}
    assert set(seen.outcomes) <= allowed, seen.outcomes


async def test_an_engine_fails_only_its_own_streams_and_comes_back(stack: Serving) -> None:
    before = pids(await fleet_when_settled(stack))
    async with load(stack.state.endpoints.http[0], clients=6) as seen:
        os.kill(before["tiny-0"], signal.SIGKILL)

        async def pids_if_changed() -> dict[str, int] | None:
            found = pids(await fleet_when_settled(stack))
            return found if found != before else None

        after = await eventually(pids_if_changed, "the killed engine is replaced", 60.0)
    assert after["tiny-0"] != before["tiny-0"]
    assert after["tiny-1"] == before["tiny-1"]
    # At most what ran on it at that moment: the streams that had begun.
    failed = sum(seen.outcomes.values()) - seen.outcomes["200"]
    assert failed <= 6, seen.outcomes
    assert set(seen.outcomes) <= {"200", "broken stream", "ClientPayloadError", "502", "503"}, seen.outcomes
