"""Real registries and node agents as processes, for tests: started, killed, frozen and asked."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc

from stoker.api.common.v1 import common_pb2
from stoker.api.inference.v1 import inference_pb2_grpc
from stoker.api.node.v1 import node_pb2, node_pb2_grpc
from stoker.api.registry.v1 import records_pb2
from stoker.common import rpc
from stoker.common.errors import StokerError
from stoker.registry.client import RegistryClient
from tests.support.etcd import free_port
from tests.support.waiting import eventually

BIN = Path(sys.executable).parent


class Service:
    """One service process with its log."""

    def __init__(self, name: str, directory: Path, settings: Sequence[str]) -> None:
        self.name = name
        self.log = directory / f"{name}-{free_port()}.log"
        self._settings = list(settings)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        args = [str(BIN / f"stoker-{self.name}"), *(a for s in self._settings for a in ("--set", s))]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(args, stdout=log, stderr=log)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        """kill -9, and reap."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)

    def terminate(self, within_s: float = 60.0) -> int:
        """SIGTERM, and wait for the end; returns the exit status."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(within_s)

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class Registry(Service):
    """A registry on a real etcd."""

    def __init__(self, directory: Path, etcd_endpoint: str, *settings: str) -> None:
        self.endpoint = f"127.0.0.1:{free_port()}"
        super().__init__(
            "registry",
            directory,
            [f"listen={self.endpoint}", f"etcd.endpoints=[{etcd_endpoint!r}]", "membership.lease_ttl_s=3", *settings],
        )


FAST = (
    "lifecycle.probe_interval_s=0.2",
    "lifecycle.drain_settle_s=0.3",
    "lifecycle.backoff_first_s=0.5",
    "lifecycle.terminate_timeout_s=3",
    "report.load_interval_s=0.2",
    "stop_grace_s=0.5",
)


class Agent(Service):
    """A node agent; its engines outlive it, so `end_engines` belongs in every teardown."""

    def __init__(self, directory: Path, node_id: str, registries: Sequence[str], *settings: str) -> None:
        self.node_id = node_id
        self.endpoint = f"127.0.0.1:{free_port()}"
        self.state_dir = directory / node_id
        super().__init__(
            "node-agent",
            directory,
            [
                f"node_id={node_id}",
                f"listen={self.endpoint}",
                f"registries={json.dumps(list(registries))}",
                f"state_dir={self.state_dir}",
                "engines=[vllm,sim]",
                "cpu_slots=4",
                *FAST,
                *settings,
            ],
        )

    def engine_pids(self) -> list[int]:
        """Pids in the records on disk that are alive."""
        pids = []
        for path in (self.state_dir / "members").glob("*.json"):
            with contextlib.suppress(ValueError, OSError):
                record = json.loads(path.read_text())
                if record["pid"] and Path(f"/proc/{record['pid']}").exists():
                    pids.append(record["pid"])
        return pids

    def end_engines(self) -> None:
        for pid in self.engine_pids():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    @contextlib.contextmanager
    def running(self) -> Iterator[Agent]:
        """Started, and at the end gone with all it started."""
        self.start()
        try:
            yield self
        finally:
            self.kill()
            self.end_engines()

    async def node(self) -> node_pb2.GetNodeResponse:
        async with rpc.channel(self.endpoint) as channel:
            stub = node_pb2_grpc.NodeServiceStub(channel)
            return await stub.GetNode(node_pb2.GetNodeRequest(), timeout=5, wait_for_ready=True)


@contextlib.asynccontextmanager
async def inference(agent: Agent):  # type: ignore[no-untyped-def]
    async with rpc.channel(agent.endpoint) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


async def until(what: str, look: Callable[[], object], within_s: float = 60.0) -> Any:
    """`eventually` for what a process is asked: one that does not answer, or refuses, is not ready yet."""
    return await eventually(look, what, within_s, not_yet=(grpc.RpcError, StokerError, OSError))


class Planner:
    """Writes assignments as the leading planner would."""

    def __init__(self, client: RegistryClient, model: str) -> None:
        self.client = client
        self.model = model
        self._fence: common_pb2.Fence | None = None

    async def lead(self) -> None:
        lease = await until(
            "leadership", lambda: self.client.acquire_leadership("planner", f"test-{free_port()}", 60.0)
        )
        self._fence, self._lease = lease.fence, lease.lease_id

    async def resign(self) -> None:
        assert self._fence is not None
        await self.client.resign_leadership(self._fence, self._lease)

    async def assign(
        self,
        replica_id: str,
        *nodes: str,
        args: Sequence[str] = (),
        wanted: records_pb2.Wanted.ValueType = records_pb2.WANTED_RUN,
        rendezvous_port: int | None = None,
        **spec: Any,
    ) -> records_pb2.Assignment:
        """The replica on these nodes; several are a gang that meets at `rendezvous_port`, by default a free one."""
        deployment = replica_id.rpartition("-")[0]
        assignment = records_pb2.Assignment(
            replica_id=replica_id,
            deployment=deployment,
            spec=common_pb2.DeploymentSpec(
                **{
                    "name": deployment,
                    "model": self.model,
                    "engine": "sim",
                    "engine_args": args,
                    "replicas": 1,
                    "gang_size": len(nodes),
                    **spec,
                }
            ),
            generation=1,
            members=[records_pb2.GangMember(rank=rank, node_id=node) for rank, node in enumerate(nodes)],
            wanted=wanted,
            rendezvous_port=rendezvous_port or (free_port() if len(nodes) > 1 else 0),
        )
        assert self._fence is not None
        await self.client.apply_assignments(self._fence, [assignment])
        return assignment

    async def change(self, assignment: records_pb2.Assignment) -> None:
        assert self._fence is not None
        await self.client.apply_assignments(self._fence, [assignment])

    async def remove(self, *replica_ids: str) -> None:
        assert self._fence is not None
        await self.client.apply_assignments(self._fence, [], list(replica_ids))


@contextlib.contextmanager
def registry_running(directory: Path, etcd_endpoint: str) -> Iterator[Registry]:
    """A registry, killed at the end."""
    process = Registry(directory, etcd_endpoint)
    process.start()
    try:
        yield process
    finally:
        process.kill()


@contextlib.asynccontextmanager
async def planning(registry: Registry, model: str) -> AsyncIterator[Planner]:
    """A planner that leads, and at the end leaves no assignment behind."""
    async with RegistryClient([registry.endpoint]) as client:
        planner = Planner(client, model)
        await planner.lead()
        yield planner
        assignments = (await client.get_fleet()).records.assignments
        if assignments:
            await planner.remove(*(a.replica_id for a in assignments))
        await planner.resign()


async def member(agent: Agent, replica_id: str) -> records_pb2.MemberStatus | None:
    """What an agent says of its member of a replica."""
    return next((m for m in (await agent.node()).members if m.replica_id == replica_id), None)


async def reaches(
    agent: Agent, replica_id: str, state: records_pb2.State.ValueType, within_s: float = 60.0
) -> records_pb2.MemberStatus:
    """The member's status once it is in `state`."""

    async def look() -> records_pb2.MemberStatus | None:
        found = await member(agent, replica_id)
        return found if found is not None and found.state == state else None

    try:
        return await until(f"{replica_id} {records_pb2.State.Name(state)}", look, within_s)  # type: ignore[no-any-return]
    except AssertionError as error:
        raise AssertionError(f"{error}\n{await member(agent, replica_id)}\n{agent.tail()}") from error
