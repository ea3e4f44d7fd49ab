"""The example of a client that streams straight from the nodes, against a whole stack with two routers."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.bench import routing
from stoker.cli.demo import bench_of
from stoker.client import AsyncClient, Chunk, ClientSettings
from stoker.local.deployment import LocalDeployment
from tests.support.stack import serving

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[2]
TALK = "Why is a warm KV cache worth keeping, and a cold one not? " * 20


async def ask(routers: tuple[str, ...], *, direct: bool) -> tuple[list[Chunk], str, bool]:
    async with AsyncClient(routers, ClientSettings(direct=direct)) as client:
        stream = client.stream("tiny", TALK, max_tokens=12, ignore_eos=True, timeout_s=60)
        chunks = [chunk async for chunk in stream]
        assert stream.served is not None
        assert stream.usage is not None
        assert stream.usage.completion_tokens == 12
        return chunks, stream.served.replica_id, stream.served.relayed


def test_a_client_streams_straight_from_the_nodes_of_a_stack(tmp_path: Path) -> None:
    with serving(tmp_path / "home", LocalDeployment("sim", replicas=2, sim_speed=10), routers=2) as stack:
        asyncio.run(routing.wait_routed(bench_of(stack, api="http"), lambda _: None))
        routers = stack.state.endpoints.router
        example = subprocess.run(
            [sys.executable, str(ROOT / "examples/look_aside.py"), *routers],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=os.environ,
        )
        assert example.returncode == 0, example.stderr
        assert "straight from its node" in example.stdout
        chunks, home, relayed = asyncio.run(ask(routers, direct=True))
        assert chunks
        assert not relayed
        _, again, relayed = asyncio.run(ask(routers, direct=False))
        assert (again, relayed) == (home, True), "both ways are one decision"
