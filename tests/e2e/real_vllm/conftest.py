"""One stack on real vLLM, on the CPU, for all tests of this folder: they take less time than its start."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from stoker.bench import routing
from stoker.cli.demo import bench_of
from stoker.cli.fleet import Registries, wait_settled
from stoker.cli.serving import Serving
from stoker.local.deployment import LocalDeployment
from tests.support.stack import serving


@pytest.fixture(scope="package")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    deployment = LocalDeployment("vllm", replicas=2, pressure=True)
    with serving(tmp_path_factory.mktemp("vllm") / "home", deployment) as stack:
        yield stack


@pytest.fixture(scope="module")
def stack(started: Serving) -> Serving:
    """With the replicas that it has now, all of them routed to: the module before may have killed one."""
    return asyncio.run(_settled(started))


async def _settled(started: Serving) -> Serving:
    async with Registries(started.state.endpoints.registry) as registries:
        fleet = await wait_settled(registries, started.deployment.name, timeout_s=150)
    stack = replace(started, fleet=fleet)
    await routing.wait_routed(bench_of(stack, api="http"), lambda _: None)
    return stack
