"""Three replicas become two under load, by real services and simulated engines: nothing is lost, and what only the
victim held is found on its successors. The scaler's plan is written by hand.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import records_pb2
from stoker.common.blocks import block_keys, root_key, sampled
from stoker.local.model import cached
from stoker.registry.client import RegistryClient
from tests.support.agents import Agent, Registry, Service, until
from tests.support.deciders import DeciderProcess, Scaler
from tests.support.etcd import EtcdServer, free_port
from tests.support.waiting import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.timeout(240)]

BLOCKS = 12
PROMPTS = 24
WARM_S = 60.0  # all of them, also on a machine that computes a few hundred tokens/s beside other work


@dataclass
class Stack:
    """A fleet of one deployment, `chat`."""

    registry: Registry
    planner: DeciderProcess
    agents: list[Agent]
    http: str
    session: aiohttp.ClientSession
    client: RegistryClient
    scaler: Scaler
    size: int = 0
    """Tokens a block."""
    outcomes: Counter[str] = field(default_factory=Counter)

    async def replicas(self) -> dict[str, records_pb2.Replica]:
        return {each.replica_id: each for each in (await self.client.get_fleet()).records.replicas}

    async def settled(self, count: int) -> dict[str, records_pb2.Replica]:
        """The replicas, once there are so many, all ready and known to the router."""

        async def look() -> dict[str, records_pb2.Replica] | None:
            found = await self.replicas()
            ready = [each for each in found.values() if each.state == records_pb2.STATE_READY]
            if len(ready) != count or len(found) != count:
                return None
            async with self.session.get("/ready") as answer:
                return found if answer.status == 200 else None

        found: dict[str, records_pb2.Replica] = await until(f"{count} replicas", look, 60.0)
        self.size = next(iter(found.values())).engine.block_size
        return found

    async def ask(self, tokens: Sequence[int], max_tokens: int = 1) -> tuple[str, Any]:
        """The replica that answered, and the usage; whatever goes wrong is counted."""
        body = {"model": "chat", "prompt": list(tokens), "max_tokens": max_tokens, "ignore_eos": True}
        async with self.session.post("/v1/completions", json=body) as answer:
            told = await answer.json()
            self.outcomes[str(answer.status)] += 1
            assert answer.status == 200, told
            assert told["usage"]["completion_tokens"] == max_tokens
            return answer.headers["x-stoker-replica"], told["usage"]

    def prompts(self, family: int, blocks: int = BLOCKS) -> list[list[int]]:
        # Below the size of the tiny vocabulary, and different from the first block on.
        return [
            [100 + (7 * number + 31 * family + at * (number + 1)) % 900 for at in range(blocks * self.size)]
            for number in range(PROMPTS)
        ]

    def leaf(self, prompt: Sequence[int]) -> int:
        return block_keys(prompt, self.size, root_key("chat"))[-1]

    @asynccontextmanager
    async def load(self, clients: int = 3) -> AsyncIterator[None]:
        """Requests that share nothing with what is measured, for the length of the block; none may fail."""
        over = asyncio.Event()

        async def client(number: int) -> None:
            turn = 0
            while not over.is_set():
                turn += 1
                await self.ask([1_000 + (number * 97 + turn * 13 + at) % 900 for at in range(40)], 8)

        tasks = [asyncio.create_task(client(number)) for number in range(clients)]
        try:
            yield
        finally:
            over.set()
            await asyncio.gather(*tasks)


@pytest.fixture
def processes(etcd_alone: EtcdServer, tmp_path: Path) -> Iterator[tuple[Registry, DeciderProcess, list[Agent], str]]:
    registry = Registry(tmp_path, etcd_alone.endpoint)
    planner = DeciderProcess("planner", [registry.endpoint], tmp_path)
    http = f"127.0.0.1:{free_port()}"
    router = Service(
        "router",
        tmp_path,
        [f"listen.grpc=127.0.0.1:{free_port()}", f"listen.http={http}", f"registries=[{registry.endpoint}]"],
    )
    agents = [Agent(tmp_path, f"n{number}", [registry.endpoint], "cpu_slots=1") for number in range(3)]
    with ExitStack() as stack:
        for service in (registry, planner, router):
            service.start()
            stack.callback(service.kill)
        for agent in agents:
            stack.enter_context(agent.running())
        yield registry, planner, agents, http


@pytest.fixture
async def stack(processes: tuple[Registry, DeciderProcess, list[Agent], str]) -> AsyncIterator[Stack]:
    registry, planner, agents, http = processes
    timeout = aiohttp.ClientTimeout(total=30)
    async with (
        RegistryClient([registry.endpoint]) as client,
        aiohttp.ClientSession(f"http://{http}", timeout=timeout) as session,
    ):
        scaler = Scaler(client)
        await until("the registry serves", client.get_fleet)
        spec = common_pb2.DeploymentSpec(
            name="chat",
            model=str(cached()),
            engine="sim",
            replicas=3,
            drain_timeout_s=20,
            engine_args=["--sim-step-ms", "10"],
        )
        await client.put_deployment(spec)
        yield Stack(registry, planner, agents, http, session, client, scaler)


async def _fill(stack: Stack, family: int) -> tuple[str, list[list[int]]]:
    """Computes prompts on three replicas; returns the one that holds most of them, and those."""
    placed: dict[str, list[list[int]]] = {}
    for prompt in stack.prompts(family):
        replica, usage = await stack.ask(prompt)
        assert not usage["prompt_tokens_details"]["cached_tokens"]
        placed.setdefault(replica, []).append(prompt)
    victim = max(placed, key=lambda name: len(placed[name]))
    assert len(placed[victim]) >= PROMPTS // 4
    return victim, placed[victim]


async def _hit_rate(stack: Stack, prompts: list[list[int]]) -> float:
    usages = [(await stack.ask(prompt))[1] for prompt in prompts]
    hit = sum((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0 for usage in usages)
    return float(hit / sum(usage["prompt_tokens"] for usage in usages))


async def _begin(stack: Stack) -> None:
    await stack.scaler.lead()
    await stack.scaler.want("chat", 3)


async def _scale_down(stack: Stack, family: int, *, warm: bool) -> float:
    """From three replicas to two under load; the hit rate of what the victim held, afterwards."""
    before = await stack.settled(3)
    victim, held = await _fill(stack, family)
    heirs = sorted(before.keys() - {victim})
    warmings = [
        records_pb2.Warming(
            leaf=stack.leaf(prompt), from_replica=victim, to_replica=heirs[at % 2], tokens=len(prompt)
        )
        for at, prompt in enumerate(held)
    ]
    async with stack.load():
        # A long answer of the victim goes on while it retires and drains.
        long = asyncio.create_task(stack.ask(held[0], 200))
        await stack.scaler.want("chat", 2, [victim], warmings if warm else ())
        await stack.settled(2)
        served_by, _ = await long
        assert served_by in before
        rate = await _hit_rate(stack, held)
    assert set(stack.outcomes) == {"200"}
    return rate


async def test_what_a_victim_held_is_found_on_its_successors_and_nothing_is_lost(stack: Stack) -> None:
    await _begin(stack)
    warmed = await _scale_down(stack, 1, warm=True)
    await stack.scaler.want("chat", 3)
    cold = await _scale_down(stack, 2, warm=False)
    # The last block of a prompt that ends with it is always computed: for the logits of its last token.
    assert warmed == pytest.approx((BLOCKS - 1) / BLOCKS)
    assert cold < 0.1


async def test_what_a_real_scaler_names_is_found_on_the_successors(stack: Stack, tmp_path: Path) -> None:
    blocks = 40
    scaler = DeciderProcess("scaler", [stack.registry.endpoint], tmp_path, warm_s=WARM_S)
    scaler.start()
    try:
        await stack.settled(3)
        prompts = stack.prompts(1, blocks)
        for _ in range(6):  # who is asked for again and again is worth warming
            placed = [(await stack.ask(prompt))[0] for prompt in prompts]
        await stack.client.scale_deployment("chat", 2)
        left = await stack.settled(2)
        lost = [prompt for prompt, replica in zip(prompts, placed, strict=True) if replica not in left]
        # The scaler knows of no prompt none of whose blocks is among those that it follows.
        known = [prompt for prompt in lost if sampled(block_keys(prompt, stack.size, root_key("chat")))]
        assert known
        assert await _hit_rate(stack, known) == pytest.approx((blocks - 1) / blocks)
    finally:
        scaler.kill()


async def test_what_a_drained_nodes_replica_held_is_found_where_it_moves(stack: Stack, tmp_path: Path) -> None:
    blocks = 40
    scaler = DeciderProcess("scaler", [stack.registry.endpoint], tmp_path, warm_s=WARM_S)
    scaler.start()
    try:
        await stack.settled(3)
        await stack.client.scale_deployment("chat", 2)  # which leaves a node free
        before = await stack.settled(2)
        prompts = stack.prompts(4, blocks)
        for _ in range(6):
            placed = [(await stack.ask(prompt))[0] for prompt in prompts]
        mover = max(before, key=placed.count)
        held = [prompt for prompt, replica in zip(prompts, placed, strict=True) if replica == mover]
        known = [prompt for prompt in held if sampled(block_keys(prompt, stack.size, root_key("chat")))]
        assert known
        async with stack.load():
            await stack.client.drain_node(before[mover].node_id)
            await eventually(lambda: _gone(stack, mover), "it has moved", 60.0, not_yet=(Exception,))
            after = await stack.settled(2)
        assert mover not in after
        assert set(stack.outcomes) == {"200"}
        assert await _hit_rate(stack, known) == pytest.approx((blocks - 1) / blocks)
    finally:
        scaler.kill()


@pytest.mark.parametrize("who", ["agent", "heir", "planner", "registry"])
async def test_a_retirement_ends_whoever_is_killed(stack: Stack, who: str) -> None:
    await _begin(stack)
    before = await stack.settled(3)
    victim, held = await _fill(stack, 3)
    (heir, *_) = sorted(before.keys() - {victim})
    warmings = [
        records_pb2.Warming(leaf=stack.leaf(prompt), from_replica=victim, to_replica=heir, tokens=len(prompt))
        for prompt in held
    ]
    at = {each.node_id: each for each in stack.agents}
    everybody: dict[str, Service | DeciderProcess] = {
        "agent": at[before[victim].node_id],
        "heir": at[before[heir].node_id],
        "planner": stack.planner,
        "registry": stack.registry,
    }
    killed = everybody[who]
    async with stack.load():
        await stack.scaler.want("chat", 2, [victim], warmings)
        killed.kill()
        killed.start()
        await eventually(lambda: _gone(stack, victim), "the victim is gone", 60.0, not_yet=(Exception,))
        await stack.settled(2)
    assert set(stack.outcomes) == {"200"}


async def _gone(stack: Stack, replica: str) -> bool:
    return replica not in await stack.replicas()
