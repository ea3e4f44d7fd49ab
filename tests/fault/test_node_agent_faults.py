"""Agents killed, replaced and doubled; gangs that lose a member. Everything is a real process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from stoker.api.inference.v1 import inference_pb2
from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.common import service
from stoker.common.errors import StokerError
from stoker.local.model import cached
from stoker.node_agent.process import start_time
from stoker.registry.client import DigestChanged, FleetWatch
from tests.support.agents import (
    Agent,
    Planner,
    Registry,
    inference,
    member,
    planning,
    reaches,
    registry_running,
    until,
)
from tests.support.etcd import EtcdServer, free_port

pytestmark = pytest.mark.fault
READY, BACKOFF = records_pb2.STATE_READY, records_pb2.STATE_BACKOFF


@pytest.fixture(scope="module")
def model() -> str:
    return str(cached())


@pytest.fixture(scope="module")
def registry(etcd: EtcdServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with registry_running(tmp_path_factory.mktemp("registry"), etcd.endpoint) as process:
        yield process


@pytest.fixture
async def planner(registry: Registry, model: str) -> AsyncIterator[Planner]:
    async with planning(registry, model) as planner:
        yield planner


@contextlib.contextmanager
def agents(directory: Path, registry: Registry, count: int) -> Iterator[list[Agent]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(Agent(directory, f"{directory.name[-8:]}-n{i}", [registry.endpoint]).running())
            for i in range(count)
        ]


async def generate(agent: Agent, model: str, text: str, tokens: int = 1) -> list[inference_pb2.GenerateResponse]:
    request = inference_pb2.GenerateRequest(
        model=model, text=text, sampling=inference_pb2.Sampling(max_tokens=tokens)
    )
    async with inference(agent) as stub:
        return [response async for response in stub.Generate(request, timeout=30)]


async def test_a_killed_agent_takes_its_engine_over_again_with_its_blocks(
    tmp_path: Path, registry: Registry, planner: Planner
) -> None:
    with agents(tmp_path, registry, 1) as (agent,):
        await planner.assign("keep-0", agent.node_id)
        first = await reaches(agent, "keep-0", READY)
        held = await _held_after(planner, agent, "keep", "tell me of caches " * 80)
        assert held
        agent.kill()
        assert agent.engine_pids() == [first.pid]
        agent.start()
        second = await reaches(agent, "keep-0", READY)
        assert (second.pid, second.attempt, second.epoch) == (first.pid, first.attempt, first.epoch)
        assert second.incarnation > first.incarnation
        again = await _held_after(planner, agent, "keep", "tell me of caches " * 80)
        assert again == held
        responses = await generate(agent, "keep", "tell me of caches " * 80)
        assert responses[-1].finished.usage.cached_prompt_tokens > 0


async def test_an_engine_that_died_without_an_agent_is_started_once(
    tmp_path: Path, registry: Registry, planner: Planner
) -> None:
    with agents(tmp_path, registry, 1) as (agent,):
        await planner.assign("alone-0", agent.node_id)
        first = await reaches(agent, "alone-0", READY)
        agent.kill()
        os.kill(first.pid, signal.SIGKILL)
        agent.start()
        second = await reaches(agent, "alone-0", READY)
        assert second.pid != first.pid
        assert second.attempt == first.attempt + 1
        assert second.epoch > first.epoch


async def test_an_adopted_engine_that_dies_is_noticed(tmp_path: Path, registry: Registry, planner: Planner) -> None:
    with agents(tmp_path, registry, 1) as (agent,):
        await planner.assign("noticed-0", agent.node_id)
        first = await reaches(agent, "noticed-0", READY)
        agent.kill()
        agent.start()
        await reaches(agent, "noticed-0", READY)
        os.kill(first.pid, signal.SIGKILL)

        async def again() -> bool:
            found = await member(agent, "noticed-0")
            return found is not None and (found.state, found.attempt) == (READY, 2)

        await until("it is started anew", again)


async def test_an_orphan_whose_assignment_went_away_is_stopped(
    tmp_path: Path, registry: Registry, planner: Planner
) -> None:
    with agents(tmp_path, registry, 1) as (agent,):
        await planner.assign("orphan-0", agent.node_id)
        first = await reaches(agent, "orphan-0", READY)
        agent.kill()
        await planner.remove("orphan-0")
        agent.start()
        await until("the engine is gone", lambda: not Path(f"/proc/{first.pid}").exists())


async def test_a_stopped_agent_leaves_its_engine_and_the_next_adopts_it(
    tmp_path: Path, registry: Registry, planner: Planner
) -> None:
    with agents(tmp_path, registry, 1) as (agent,):
        await planner.assign("upgrade-0", agent.node_id)
        first = await reaches(agent, "upgrade-0", READY)
        assert agent.terminate() == 0
        assert agent.engine_pids() == [first.pid]
        agent.start()
        assert (await reaches(agent, "upgrade-0", READY)).pid == first.pid


async def test_a_newer_agent_of_the_same_node_wins(tmp_path: Path, registry: Registry, planner: Planner) -> None:
    older = Agent(tmp_path, "double", [registry.endpoint])
    newer = Agent(tmp_path / "newer", "double", [registry.endpoint])
    (tmp_path / "newer").mkdir()
    with older.running():
        await planner.assign("double-0", "double")
        await reaches(older, "double-0", READY)
        with newer.running():
            assert older.process is not None
            assert await asyncio.to_thread(older.process.wait, 20) == service.EXIT_STAY_DOWN
            assert "SUPERSEDED" in older.tail()
            assert len(older.engine_pids()) == 1


async def test_two_agents_on_one_state_dir_do_not_fight(tmp_path: Path, registry: Registry) -> None:
    with agents(tmp_path, registry, 1) as (agent,):
        await agent.node()
        rival = Agent(tmp_path, agent.node_id, [])
        rival.start()
        assert rival.process is not None
        assert await asyncio.to_thread(rival.process.wait, 20) == 1
        assert "STATE_DIR_IN_USE" in rival.tail()


@pytest.mark.parametrize("size", [2, 3])
async def test_a_gang_starts_and_fails_as_one(
    tmp_path: Path, registry: Registry, planner: Planner, size: int
) -> None:
    with agents(tmp_path, registry, size) as gang:
        await planner.assign("gang-0", *(agent.node_id for agent in gang))
        first = await asyncio.gather(*(reaches(agent, "gang-0", READY) for agent in gang))
        assert {status.attempt for status in first} == {1}
        assert (await generate(gang[0], "gang", "hello"))[-1].finished.usage.completion_tokens == 1

        os.kill(first[-1].pid, signal.SIGKILL)
        second = await asyncio.gather(*(_attempt(agent, "gang-0", 2) for agent in gang))
        assert all(old.pid != new.pid for old, new in zip(first, second, strict=True))
        assert "failed at attempt 1" in second[0].last_error

        # A member's agent restarts: the gang runs on.
        gang[-1].kill()
        gang[-1].start()
        third = await asyncio.gather(*(_attempt(agent, "gang-0", 2) for agent in gang))
        assert [status.pid for status in third] == [status.pid for status in second]


async def test_a_gang_whose_port_is_taken_says_so_and_starts_when_it_is_free(
    tmp_path: Path, registry: Registry, planner: Planner
) -> None:
    with agents(tmp_path, registry, 2) as gang:
        with socket.socket() as other:
            other.bind(("127.0.0.1", free_port()))
            other.listen()
            port = other.getsockname()[1]
            await planner.assign("meet-0", *(agent.node_id for agent in gang), rendezvous_port=port)
            failed = await reaches(gang[0], "meet-0", BACKOFF)
            assert f"port {port}, at which the gang of meet-0 meets, is held by another process" in failed.last_error
        await asyncio.gather(*(reaches(agent, "meet-0", READY) for agent in gang))


async def test_a_gang_drains_and_stops_as_one(tmp_path: Path, registry: Registry, planner: Planner) -> None:
    with agents(tmp_path, registry, 2) as gang:
        assignment = await planner.assign("leave-0", *(agent.node_id for agent in gang))
        await asyncio.gather(*(reaches(agent, "leave-0", READY) for agent in gang))
        assignment.wanted = records_pb2.WANTED_DRAIN
        await planner.change(assignment)
        await asyncio.gather(*(reaches(agent, "leave-0", records_pb2.STATE_STOPPED) for agent in gang))


async def _attempt(agent: Agent, replica_id: str, attempt: int) -> records_pb2.MemberStatus:
    async def look() -> records_pb2.MemberStatus | None:
        status = await member(agent, replica_id)
        ready = status is not None and (status.state, status.attempt) == (READY, attempt)
        return status if ready else None

    try:
        return await until(f"{replica_id} ready at attempt {attempt}", look)  # type: ignore[no-any-return]
    except AssertionError as error:
        raise AssertionError(f"{error}\n{await member(agent, replica_id)}\n{agent.tail(15)}") from error


async def _held_after(planner: Planner, agent: Agent, model: str, prompt: str) -> tuple[int, int]:
    """XOR and count of the replica's digest as a watcher has it, once `prompt` was generated from."""
    latest: dict[str, tuple[int, int]] = {}
    async with FleetWatch(planner.client._endpoints, [registry_pb2.TOPIC_DIGESTS], watcher="test") as watch:

        async def follow() -> None:
            async for event in watch.events():
                if isinstance(event, DigestChanged):
                    latest[event.update.replica_id] = (event.update.xor_digest, event.update.count)

        following = asyncio.create_task(follow())
        try:
            await generate(agent, model, prompt)
            found = await until("a digest with blocks", lambda: latest.get(f"{model}-0", (0, 0))[1] and latest)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
    assert not isinstance(found, StokerError)
    return latest[f"{model}-0"]


async def test_an_agent_told_to_drain_stops_its_engines_and_leaves(
    tmp_path: Path, registry: Registry, planner: Planner
) -> None:
    agent = Agent(tmp_path, "leaver", [registry.endpoint], "on_stop=drain")
    with agent.running():
        await planner.assign("leaver-0", "leaver", args=["--sim-step-ms", "20"])
        first = await reaches(agent, "leaver-0", READY)
        running = asyncio.create_task(generate(agent, "leaver", "a long answer", 50))
        await until("it runs", lambda: _relayed(planner, "leaver-0"))
        assert await asyncio.to_thread(agent.terminate) == 0
        assert (await running)[-1].finished.usage.completion_tokens == 50
        assert start_time(first.pid) is None

        async def left() -> bool:
            nodes = (await planner.client.get_fleet()).records.nodes
            return all(node.node_id != "leaver" for node in nodes)

        await until("the node has left", left, within_s=2.0)


async def _relayed(planner: Planner, replica_id: str) -> bool:
    loads = (await planner.client.get_fleet()).loads
    return any(load.replica_id == replica_id and load.relayed for load in loads)


async def test_an_engine_whose_pid_was_never_written_down_is_found(
    tmp_path: Path, registry: Registry, planner: Planner
) -> None:
    with agents(tmp_path, registry, 1) as (agent,):
        await planner.assign("token-0", agent.node_id)
        first = await reaches(agent, "token-0", READY)
        agent.kill()
        # As an agent leaves it that is killed between starting the engine and writing its pid down.
        path = agent.state_dir / "members" / "token-0.0.json"
        record = json.loads(await asyncio.to_thread(path.read_text))
        record |= {"pid": 0, "started": 0, "state": "STARTING", "startup_s": None}
        await asyncio.to_thread(path.write_text, json.dumps(record))
        agent.start()
        second = await reaches(agent, "token-0", READY)
        assert (second.pid, second.attempt) == (first.pid, 1)


async def test_an_assignment_this_host_cannot_obey_says_why(
    tmp_path: Path, registry: Registry, planner: Planner
) -> None:
    agent = Agent(tmp_path, "picky", [registry.endpoint], "engines=[vllm]")
    with agent.running():
        await planner.assign("picky-0", "picky")
        status = await reaches(agent, "picky-0", BACKOFF)
        assert "'sim' is not among those of this host (vllm)" in status.last_error
        await planner.remove("picky-0")
        await until("it is forgotten", lambda: _absent(agent, "picky-0"))


async def _absent(agent: Agent, replica_id: str) -> bool:
    return await member(agent, replica_id) is None
