"""A replica retires: real agents, registry and etcd, simulated engines; the plan is written by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from stoker.api.common.v1 import common_pb2
from stoker.api.inference.v1 import inference_pb2
from stoker.api.registry.v1 import records_pb2
from stoker.common.blocks import block_keys, root_key
from stoker.common.tickets import HEADER, Ticket, parse
from stoker.local.model import cached
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
from tests.support.etcd import EtcdServer

READY = records_pb2.STATE_READY
PROMPT = [100 + number % 200 for number in range(640)]
KEY_LINE = "k " + "ab" * 32
# Of an engine that still computes a long prompt when something else happens.
SLOW = ("--sim-step-ms", "400", "--max-num-batched-tokens", "64")


@pytest.fixture(scope="module")
def registry(etcd: EtcdServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with registry_running(tmp_path_factory.mktemp("registry"), etcd.endpoint) as process:
        yield process


@pytest.fixture
async def planner(registry: Registry) -> AsyncIterator[Planner]:
    async with planning(registry, str(cached())) as planner:
        yield planner


@pytest.fixture
def tickets(tmp_path: Path) -> Path:
    path = tmp_path / "ticket-keys"
    path.write_text(KEY_LINE + "\n")
    return path


@pytest.fixture
def victim(registry: Registry, tmp_path: Path, tickets: Path) -> Iterator[Agent]:
    with Agent(tmp_path, "victim", [registry.endpoint], f"tickets.keys={tickets}").running() as agent:
        yield agent


@pytest.fixture
def heir(registry: Registry, tmp_path: Path, tickets: Path) -> Iterator[Agent]:
    with Agent(tmp_path, "heir", [registry.endpoint], f"tickets.keys={tickets}").running() as agent:
        yield agent


async def ask(agent: Agent, tokens: list[int], max_tokens: int = 1, **fields: object) -> common_pb2.Usage:
    ticket = parse("keys", "file", KEY_LINE).sign(Ticket(b"0" * 12, 4e9))
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=tokens),
        sampling=inference_pb2.Sampling(max_tokens=max_tokens),
        **fields,  # type: ignore[arg-type]
    )
    async with inference(agent) as stub:
        call = stub.Generate(request, timeout=30, metadata=[(HEADER, ticket)])
        responses = [response async for response in call]
    usage: common_pb2.Usage = responses[-1].finished.usage
    return usage


def leaf(status: records_pb2.MemberStatus, tokens: list[int], blocks: int) -> int:
    size = status.engine.block_size
    return block_keys(tokens[: blocks * size], size, root_key(status.deployment))[-1]


async def both_ready(
    victim: Agent, heir: Agent, planner: Planner, *heir_args: str
) -> tuple[records_pb2.Assignment, records_pb2.MemberStatus]:
    """Both replicas ready, and `PROMPT` computed by the victim: its assignment and status."""
    assignment = await planner.assign("warm-0", victim.node_id)
    await planner.assign("warm-1", heir.node_id, args=heir_args)
    status = await reaches(victim, "warm-0", READY)
    await reaches(heir, "warm-1", READY)
    await ask(victim, PROMPT, model="warm")
    return assignment, status


async def retire(
    planner: Planner,
    assignment: records_pb2.Assignment,
    heir: Agent,
    *leaves: int,
    tokens: int = 1_000,
    timeout_s: float = 20.0,
    to: str = "warm-1",
) -> None:
    assignment.wanted = records_pb2.WANTED_RETIRE
    assignment.retirement.CopyFrom(
        records_pb2.Retirement(
            prefixes=[records_pb2.Prefix(leaf=each, successor=0, tokens=tokens) for each in leaves],
            successors=[records_pb2.Successor(replica_id=to, agent_endpoint=heir.endpoint)],
            timeout_s=timeout_s,
        )
    )
    await planner.change(assignment)


async def retired(agent: Agent, replica_id: str, within_s: float = 60.0) -> records_pb2.MemberStatus:
    async def look() -> records_pb2.MemberStatus | None:
        found = await member(agent, replica_id)
        return found if found is not None and found.retired else None

    status: records_pb2.MemberStatus = await until(f"{replica_id} has retired", look, within_s)
    return status


@pytest.mark.parametrize("engine", ["sim", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(400)])])
async def test_a_prompt_of_a_retiring_replica_is_found_on_its_successor(
    victim: Agent, heir: Agent, planner: Planner, engine: str
) -> None:
    args = ["--max-model-len", "2048", "--num-gpu-blocks-override", "128"]
    args += ["--enforce-eager"] if engine == "vllm" else []
    assignment = await planner.assign("warm-0", victim.node_id, args=args, engine=engine)
    # Where priorities count, what only warms goes last; an engine without them would refuse it.
    await planner.assign("warm-1", heir.node_id, args=[*args, "--scheduling-policy", "priority"], engine=engine)
    status = await reaches(victim, "warm-0", READY, within_s=200)
    await reaches(heir, "warm-1", READY, within_s=200)
    await ask(victim, PROMPT, model="warm")
    size = status.engine.block_size
    # A prefix of what it holds, one that it never had, and one beyond the budget.
    await retire(planner, assignment, heir, leaf(status, PROMPT, 15), 12345, leaf(status, PROMPT, 20), tokens=1)
    done = await retired(victim, "warm-0")
    assert done.state == READY, "it serves on until it is told to drain"
    assert done.warmed_tokens == 15 * size
    assert (await ask(heir, PROMPT, model="warm")).cached_prompt_tokens == 15 * size
    assert (await ask(victim, PROMPT, model="warm")).cached_prompt_tokens > 15 * size
    assignment.wanted = records_pb2.WANTED_DRAIN
    await planner.change(assignment)
    assert not (await reaches(victim, "warm-0", records_pb2.STATE_STOPPED)).retired


async def test_called_back_it_stops_at_once_and_can_retire_again(
    victim: Agent, heir: Agent, planner: Planner
) -> None:
    assignment, status = await both_ready(victim, heir, planner, *SLOW)
    await retire(planner, assignment, heir, leaf(status, PROMPT, 20))
    await until("the successor computes", lambda: running(heir))
    assignment.wanted = records_pb2.WANTED_RUN
    assignment.ClearField("retirement")
    await planner.change(assignment)
    await until("the successor is free", lambda: idle(heir))
    found = await member(victim, "warm-0")
    assert found is not None
    assert (found.state, found.retired) == (READY, False)
    await retire(planner, assignment, heir, leaf(status, PROMPT, 2))
    await retired(victim, "warm-0")


async def test_a_busy_successor_is_left_alone_until_the_time_is_over(
    victim: Agent, heir: Agent, planner: Planner
) -> None:
    assignment, status = await both_ready(victim, heir, planner, "--sim-step-ms", "50", "--max-num-seqs", "1")
    busy = [asyncio.create_task(ask(heir, [number] * 32, 60, model="warm")) for number in (1, 2)]
    await until("one waits", lambda: waiting(heir))
    await retire(planner, assignment, heir, leaf(status, PROMPT, 20), timeout_s=1.0)
    done = await retired(victim, "warm-0")
    assert done.warmed_tokens == 0
    usages = await asyncio.gather(*busy)
    assert [usage.completion_tokens for usage in usages] == [60, 60]


async def test_a_successor_that_is_killed_costs_only_its_share(victim: Agent, heir: Agent, planner: Planner) -> None:
    assignment, status = await both_ready(victim, heir, planner)
    heir.kill()
    await retire(planner, assignment, heir, leaf(status, PROMPT, 20), timeout_s=300.0)
    done = await retired(victim, "warm-0", within_s=60.0)
    assert done.warmed_tokens == 0
    assert (await ask(victim, PROMPT, model="warm")).cached_prompt_tokens > 0


async def test_an_agent_that_is_killed_while_its_replica_retires_comes_back_and_has_retired(
    victim: Agent, heir: Agent, planner: Planner
) -> None:
    assignment, status = await both_ready(victim, heir, planner, *SLOW)
    await retire(planner, assignment, heir, leaf(status, PROMPT, 20))
    await until("the successor computes", lambda: running(heir))
    victim.kill()
    victim.start()
    # What its blocks were computed from died with the agent: nothing can be warmed, and nothing is waited for.
    done = await retired(victim, "warm-0")
    assert (done.state, done.pid) == (READY, status.pid)
    await until("the successor is free", lambda: idle(heir), within_s=60.0)


async def running(agent: Agent) -> bool:
    return await _gauge(agent, "running") > 0


async def waiting(agent: Agent) -> bool:
    return await _gauge(agent, "waiting") > 0


async def idle(agent: Agent) -> bool:
    return await _gauge(agent, "running") == 0 == await _gauge(agent, "waiting")


async def _gauge(agent: Agent, what: str) -> float:
    status = await member(agent, "warm-1")
    assert status is not None
    async with aiohttp.ClientSession() as session, session.get(f"{status.engine.http_url}/metrics") as response:
        text = await response.text()
    lines = [line for line in text.splitlines() if line.startswith(f"vllm:num_requests_{what}")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)
