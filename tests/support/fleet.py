"""A small fleet without a planner: etcd, registries, agents with simulated engines, a router in process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import records_pb2
from stoker.local.model import cached
from stoker.registry.client import RegistryClient
from stoker.router.app import RouterApp
from tests.support.agents import Agent, Registry, until
from tests.support.engines import TINY
from tests.support.etcd import EtcdServer
from tests.support.router import running_router

SPEC_ARGS = ("--num-gpu-blocks-override", "300", "--enable-prompt-tokens-details")


@dataclass
class Fleet:
    """What runs."""

    etcd: EtcdServer
    registries: list[Registry]
    agents: list[Agent]
    router: RouterApp
    replicas: int

    @property
    def agent(self) -> Agent:
        """The first, mostly the only one."""
        return self.agents[0]


async def assign(client: RegistryClient, nodes: Sequence[str], replicas: int, engine_args: Sequence[str]) -> None:
    """Place replicas tiny-0 … on nodes in turn, as a planner would."""
    spec = common_pb2.DeploymentSpec(
        name="tiny", model=str(cached(TINY)), engine="sim", replicas=replicas, engine_args=engine_args
    )
    deployment = await client.put_deployment(spec)
    leader = await client.acquire_leadership("planner", "test", 30)
    await client.apply_assignments(
        leader.fence,
        [
            records_pb2.Assignment(
                replica_id=f"tiny-{ordinal}",
                deployment="tiny",
                spec=deployment.spec,
                generation=deployment.generation,
                members=[records_pb2.GangMember(rank=0, node_id=nodes[ordinal % len(nodes)])],
                wanted=records_pb2.WANTED_RUN,
            )
            for ordinal in range(replicas)
        ],
    )


def pid_on_port(fleet: Fleet, port: int) -> int:
    """The engine that serves HTTP there."""
    for pid in fleet.agent.engine_pids():
        if str(port) in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
            return pid
    raise AssertionError(f"no engine on port {port}")


def all_ready(app: RouterApp, replicas: int) -> bool:
    """All replicas are ready, proven alike, and have told what they hold."""
    targets = app.view.targets.values()
    told = {target.record.replica_id for target in targets}
    return len(told) == replicas and all(target.ready and target.parity == "ok" for target in targets)


@contextlib.asynccontextmanager
async def running_fleet(
    folder: Path,
    etcd: EtcdServer,
    *,
    replicas: int = 2,
    registries: int = 1,
    nodes: int = 1,
    args: Sequence[str] = ("--sim-speed", "20"),
    settings: Sequence[str] = (),
    agent_settings: Sequence[str] = (),
) -> AsyncIterator[Fleet]:
    """Everything up, and down again at the end."""
    with contextlib.ExitStack() as held:
        told = [Registry(folder, etcd.endpoint) for _ in range(registries)]
        for registry in told:
            registry.start()
            held.callback(registry.kill)
        endpoints = [registry.endpoint for registry in told]
        names = [f"node-{chr(ord('a') + number)}" for number in range(nodes)]
        agents = [held.enter_context(Agent(folder, name, endpoints, *agent_settings).running()) for name in names]
        async with RegistryClient(endpoints) as client:

            async def nodes_known() -> bool:
                return {node.node_id for node in (await client.get_fleet()).records.nodes} >= set(names)

            await until("the agents are known", nodes_known)
            await assign(client, names, replicas, [*SPEC_ARGS, *args])
        async with running_router(f"registries={endpoints}", *settings) as router:
            await router.watch()
            await until("all replicas ready and alike", lambda: all_ready(router, replicas), within_s=60)
            yield Fleet(etcd, told, agents, router, replicas)
