"""Nodes that die under requests which their callers sent there straight."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from stoker.client import AsyncClient, AsyncStream, Interrupted, Served
from stoker.common.errors import Unavailable
from tests.support.agents import Agent, Service, until
from tests.support.etcd import EtcdServer, free_port
from tests.support.fleet import Fleet, running_fleet
from tests.support.waiting import eventually

pytestmark = [pytest.mark.fault, pytest.mark.asyncio(loop_scope="module")]

LONG = [*range(1000, 3000), *range(1000, 3000)]
"""Prefilled for about three seconds."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole(tmp_path_factory: pytest.TempPathFactory, etcd: EtcdServer) -> AsyncIterator[Fleet]:
    folder: Path = tmp_path_factory.mktemp("fleet")
    keys = folder / "keys"
    keys.write_text(f"one {'0a' * 32}\n")
    with_keys = [f"tickets.keys={keys}", "listen.pick=127.0.0.1:0"]
    async with running_fleet(
        folder, etcd, nodes=2, args=("--sim-speed", "1"), settings=with_keys, agent_settings=with_keys[:1]
    ) as fleet:
        yield fleet


@pytest_asyncio.fixture(loop_scope="module")
async def fleet(whole: Fleet) -> AsyncIterator[Fleet]:
    """Whole before each test, and with nothing held after it."""
    app = whole.router

    async def all_serve() -> bool:
        nodes = [await agent.node() for agent in whole.agents]
        return len(nodes) == 2 and sum(target.ready for target in app.view.targets.values()) == 2

    await until("all replicas ready", all_serve, within_s=60)
    yield whole
    await eventually(lambda: not (app.router.in_flight or len(app.picks)), "every pick is released")
    assert app.view.pools["tiny"].fleet.load.in_flight == 0
    for agent in whole.agents:
        if agent.process is None or agent.process.poll() is not None:
            agent.start()


def client_of(fleet: Fleet) -> AsyncClient:
    return AsyncClient([f"127.0.0.1:{fleet.router.rpc.port}"])


def agent_of(fleet: Fleet, replica_id: str) -> Agent:
    endpoint = fleet.router.view.targets[replica_id].record.agent_endpoint
    return next(agent for agent in fleet.agents if agent.endpoint == endpoint)


async def running_at(fleet: Fleet, replica_id: str) -> bool:
    url = fleet.router.view.targets[replica_id].url
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return any(line.startswith("vllm:num_requests_running") and not line.endswith(" 0.0") for line in lines)


async def where_it_runs(fleet: Fleet) -> str:
    """The replica whose engine has the request under way."""

    async def look() -> str:
        for replica_id in fleet.router.view.targets:
            if await running_at(fleet, replica_id):
                return replica_id
        return ""

    replica_id: str = await eventually(look, "an engine has the request")
    return replica_id


async def chunks(stream: AsyncStream) -> tuple[int, Served]:
    count = 0
    async for _ in stream:
        count += 1
    assert stream.served is not None
    return count, stream.served


async def test_a_node_that_dies_before_the_first_token_is_replaced(fleet: Fleet) -> None:
    async with client_of(fleet) as client:
        task = asyncio.create_task(chunks(client.stream("tiny", LONG, max_tokens=4, ignore_eos=True)))
        first = await where_it_runs(fleet)
        agent_of(fleet, first).kill()
        count, served = await asyncio.wait_for(task, 20)
        assert count >= 1
        assert served.replica_id != first
        assert (served.reason, served.relayed) == ("alternative", False)


async def test_a_node_that_is_gone_already_is_passed_over(fleet: Fleet) -> None:
    async with client_of(fleet) as client:
        before = (await client.generate("tiny", LONG[:640], max_tokens=1)).served.replica_id
        target = fleet.router.view.targets[before]
        await eventually(lambda: target.known_blocks > 0, "the digest of what was served")
        agent_of(fleet, before).kill()
        served = (await client.generate("tiny", LONG[:640], max_tokens=1)).served
        assert served.replica_id != before
        assert not served.relayed
        assert not fleet.router.view.pools["tiny"].fleet.health.ejected(before, fleet.router.router.clock())


async def test_a_node_that_dies_after_the_first_token_leaves_what_it_said(fleet: Fleet) -> None:
    async with client_of(fleet) as client:
        stream = client.stream("tiny", LONG[:64], max_tokens=2_000, ignore_eos=True)
        first = await anext(stream)
        assert stream.served is not None
        agent_of(fleet, stream.served.replica_id).kill()
        with pytest.raises(Interrupted) as broken:
            await stream.rest()
        assert broken.value.text[0].startswith(first.text)
        assert "characters of output" in broken.value.message
        assert broken.value.reason == "UNAVAILABLE"


async def test_a_router_that_is_killed_is_passed_over_and_what_it_picked_goes_on(
    fleet: Fleet, tmp_path: Path
) -> None:
    """With requests under way that the dead router picked."""
    assert fleet.router.pick_http is not None
    ports = {name: free_port() for name in ("grpc", "http", "pick")}
    settings = [f"listen.{name}=127.0.0.1:{port}" for name, port in ports.items()]
    registries = [registry.endpoint for registry in fleet.registries]
    keys = fleet.router.config.tickets.keys
    router = Service("router", tmp_path, [*settings, f"registries={registries}", f"tickets.keys={keys}"])
    router.start()
    try:
        await until("the second router serves", lambda: serves(ports["http"]), within_s=60)
        dying, living = f"http://127.0.0.1:{ports['pick']}", f"http://127.0.0.1:{fleet.router.pick_http.number}"
        async with AsyncClient([dying, living]) as client:
            turns = client._ways.routers.pickers
            turns._current = 0
            stream = client.stream("tiny", LONG[:64], max_tokens=400, ignore_eos=True)
            await anext(stream)
            assert next(iter(turns)) == dying, "it is that one's pick"
            router.kill()
            for _ in range(3):
                assert (await client.generate("tiny", LONG[:64], max_tokens=1)).served.relayed is False
            assert next(iter(turns)) == living
            assert (await stream.rest()).usage.completion_tokens == 400
    finally:
        router.kill()


async def serves(port: int) -> bool:
    with contextlib.suppress(aiohttp.ClientError):
        async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{port}/ready") as answer:
            return answer.status == 200
    return False


async def test_without_any_node_the_router_relays(fleet: Fleet) -> None:
    for agent in fleet.agents:
        agent.kill()
    async with client_of(fleet) as client:
        served = (await client.generate("tiny", LONG[:64], max_tokens=1)).served
        assert served.relayed, "straight to an engine, which outlives its agent"


async def test_without_any_engine_the_error_says_so_in_time(fleet: Fleet) -> None:
    for agent in fleet.agents:
        agent.kill()
        agent.end_engines()
    async with client_of(fleet) as client, asyncio.timeout(60):
        with pytest.raises(Unavailable):
            await client.generate("tiny", LONG[:64], max_tokens=1)
