"""Registries in this process, and agents that speak to them as the node agent does."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.common import rpc
from stoker.common.blocks import pack_keys, unpack_keys, xor_digest
from stoker.registry import app
from stoker.registry.client import (
    AgentEvent,
    AssignmentsChanged,
    DigestChanged,
    FleetEvent,
    FleetWatch,
    LoadChanged,
    RecordsChanged,
    ReportSession,
    ResyncWanted,
)
from stoker.registry.config import EtcdConfig, MembershipConfig, RegistryConfig, WatchConfig
from tests.support.etcd import free_port

LEASE_TTL_S = 4
"""Of agents, in the registries of tests. Seconds."""
ALL_TOPICS = tuple(t for t in registry_pb2.Topic.values() if t != registry_pb2.TOPIC_UNSPECIFIED)


def config(etcd: str | list[str], **membership: Any) -> RegistryConfig:
    """Settings for tests."""
    endpoints = (etcd,) if isinstance(etcd, str) else tuple(etcd)
    defaults = MembershipConfig(lease_ttl_s=LEASE_TTL_S, welcome_patience_s=0.5)
    return RegistryConfig(
        listen="127.0.0.1:0",
        drain_s=0.2,
        etcd=EtcdConfig(endpoints=endpoints, call_timeout_s=2.0),
        membership=dataclasses.replace(defaults, **membership),
        watch=WatchConfig(freshness_s=0.2, stall_s=1.0),
    )


class RegistryUnderTest:
    """A registry on a port of its own, to stop and start again there."""

    def __init__(self, settings: RegistryConfig) -> None:
        self.settings = settings
        self._stack = contextlib.AsyncExitStack()
        self.registry: app.Registry | None = None
        self.endpoint = ""

    async def start(self) -> RegistryUnderTest:
        listen = self.endpoint or self.settings.listen
        self.settings = dataclasses.replace(self.settings, listen=listen)
        self.registry = await self._stack.enter_async_context(app.running(self.settings))
        self.endpoint = f"127.0.0.1:{self.registry.port}"
        async with asyncio.timeout(60):
            await self.registry.hub.synced.wait()
        return self

    async def stop(self) -> None:
        await self._stack.aclose()
        self.registry = None

    async def __aenter__(self) -> RegistryUnderTest:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


class RegistryProcess:
    """A registry as a process of its own, to kill and to freeze."""

    def __init__(self, etcd: str, directory: Path) -> None:
        self.endpoint = f"127.0.0.1:{free_port()}"
        self._etcd = etcd
        self._log = directory / f"registry-{self.endpoint.rpartition(':')[2]}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        settings = {
            "listen": self.endpoint,
            "etcd.endpoints": f"[{self._etcd}]",
            "membership.lease_ttl_s": LEASE_TTL_S,
            "watch.freshness_s": 0.2,
        }
        arguments = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "stoker.registry.app", *arguments], stdout=log, stderr=log
            )

    async def serving(self) -> None:
        assert await rpc.wait_serving(self.endpoint, 20), self._log.read_text()[-2000:]

    def kill(self) -> None:
        """SIGKILL, frozen or not."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def terminate(self) -> int:
        """SIGTERM; the exit status."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(20)


def node(node_id: str, incarnation: int = 1, **fields: object) -> common_pb2.Node:
    return common_pb2.Node(
        node_id=node_id,
        incarnation=incarnation,
        grpc_endpoint="127.0.0.1:7330",
        host="127.0.0.1",
        cpu_slots=4,
        engines=["sim"],
        **fields,  # type: ignore[arg-type]
    )


def spec(name: str, **fields: object) -> common_pb2.DeploymentSpec:
    return common_pb2.DeploymentSpec(**{"name": name, "model": "m", "engine": "sim", "replicas": 1, **fields})  # type: ignore[arg-type]


def assignment(replica_id: str, *nodes: str) -> records_pb2.Assignment:
    deployment = replica_id.rpartition("-")[0]
    return records_pb2.Assignment(
        replica_id=replica_id,
        deployment=deployment,
        spec=spec(deployment, gang_size=len(nodes)),
        generation=1,
        members=[records_pb2.GangMember(rank=rank, node_id=n) for rank, n in enumerate(nodes)],
        wanted=records_pb2.WANTED_RUN,
    )


def status(
    session_node: common_pb2.Node,
    of: records_pb2.Assignment,
    state: records_pb2.State.ValueType = records_pb2.STATE_READY,
    rank: int = 0,
    epoch: int = 1,
) -> records_pb2.MemberStatus:
    return records_pb2.MemberStatus(
        replica_id=of.replica_id,
        deployment=of.deployment,
        rank=rank,
        node_id=session_node.node_id,
        incarnation=session_node.incarnation,
        assignment_revision=of.created_revision,
        state=state,
        attempt=1,
        epoch=epoch,
        engine=records_pb2.EngineInfo(http_url="http://127.0.0.1:8000", model_names=["m"], block_size=16)
        if rank == 0
        else None,
    )


def snapshot(replica_id: str, keys: set[int], sequence: int, epoch: int = 1) -> registry_pb2.DigestUpdate:
    return registry_pb2.DigestUpdate(
        replica_id=replica_id,
        epoch=epoch,
        sequence=sequence,
        tier=common_pb2.TIER_GPU,
        snapshot=True,
        added=pack_keys(sorted(keys)),
        xor_digest=xor_digest(keys),
        count=len(keys),
    )


def delta(
    replica_id: str,
    after: set[int],
    sequence: int,
    added: set[int],
    removed: frozenset[int] | set[int] = frozenset(),
    epoch: int = 1,
) -> registry_pb2.DigestUpdate:
    return registry_pb2.DigestUpdate(
        replica_id=replica_id,
        epoch=epoch,
        sequence=sequence,
        tier=common_pb2.TIER_GPU,
        added=pack_keys(sorted(added)),
        removed=pack_keys(sorted(removed)),
        xor_digest=xor_digest(after),
        count=len(after),
    )


class Agent:
    """A report session that runs whatever it is assigned, ready at once, and keeps one digest a replica."""

    def __init__(self, endpoints: list[str], of: common_pb2.Node, lease_id: int = 0) -> None:
        self.session = ReportSession(endpoints, of, lease_id=lease_id)
        self.assignments: registry_pb2.NodeAssignments | None = None
        self.blocks: dict[str, set[int]] = {}
        self.sequences: dict[str, int] = {}
        self.events: list[AgentEvent] = []
        self.failure: Exception | None = None
        self.run_assigned = True
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Agent:
        await self.session.start()
        self._task = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def load(self, replica_id: str, sequence: int, running: int, epoch: int = 1) -> None:
        self.session.publish_load(
            [registry_pb2.ReplicaLoad(replica_id=replica_id, epoch=epoch, sequence=sequence, running=running)]
        )

    def store(self, replica_id: str, *keys: int) -> None:
        """The engine stored blocks."""
        held = self.blocks.setdefault(replica_id, set())
        held.update(keys)
        self.sequences[replica_id] = self.sequences.get(replica_id, 0) + 1
        self.session.publish_digest(delta(replica_id, held, self.sequences[replica_id], set(keys)))

    async def _follow(self) -> None:
        try:
            async for event in self.session.events():
                self.events.append(event)
                match event:
                    case AssignmentsChanged(assignments):
                        self._obey(assignments)
                    case ResyncWanted(replica_id):
                        keys = self.blocks.setdefault(replica_id, set())
                        self.session.publish_digest(snapshot(replica_id, keys, self.sequences.get(replica_id, 0)))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.failure = error

    def _obey(self, assignments: registry_pb2.NodeAssignments) -> None:
        self.assignments = assignments
        if not self.run_assigned:
            return
        for each in assignments.assignments:
            for member in each.members:
                if member.node_id == self.session.node.node_id:
                    self.session.publish_member(status(self.session.node, each, rank=member.rank))


class Watcher:
    """A fleet watch with everything it ever told, and digests put together from what it told."""

    def __init__(self, endpoints: list[str], *deployments: str) -> None:
        self.watch = FleetWatch(endpoints, ALL_TOPICS, deployments, watcher="test")
        self.events: list[FleetEvent] = []
        self.blocks: dict[str, set[int]] = {}
        self.loads: dict[str, registry_pb2.ReplicaLoad] = {}
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Watcher:
        await self.watch.start()
        self._task = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.watch.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def changes(self) -> list[RecordsChanged]:
        return [event for event in self.events if isinstance(event, RecordsChanged)]

    def removed(self) -> set[str]:
        """Every node and replica that this watcher was ever told is gone."""
        return {name for c in self.changes() for name in (*c.removals.nodes, *c.removals.replicas)}

    def states(self, replica_id: str) -> list[records_pb2.State.ValueType]:
        """Every state this watcher was told of a replica, in order."""
        return [r.state for c in self.changes() for r in c.upserts.replicas if r.replica_id == replica_id]

    def ready(self, *replica_ids: str) -> Callable[[], bool]:
        def all_ready() -> bool:
            replicas = self.watch.view.replicas
            return all(r in replicas and replicas[r].state == records_pb2.STATE_READY for r in replica_ids)

        return all_ready

    async def _follow(self) -> None:
        async for event in self.watch.events():
            self.events.append(event)
            match event:
                case DigestChanged(update):
                    self._digest(update)
                case LoadChanged(loads):
                    self.loads.update({load.replica_id: load for load in loads})

    def _digest(self, update: registry_pb2.DigestUpdate) -> None:
        keys = set(unpack_keys(update.added))
        held = set() if update.snapshot else self.blocks[update.replica_id]
        self.blocks[update.replica_id] = (held | keys) - set(unpack_keys(update.removed))
        assert xor_digest(self.blocks[update.replica_id]) == update.xor_digest
        assert len(self.blocks[update.replica_id]) == update.count


@contextlib.asynccontextmanager
async def two_registries(etcd: str | list[str]) -> AsyncIterator[tuple[RegistryUnderTest, RegistryUnderTest]]:
    async with RegistryUnderTest(config(etcd)) as a, RegistryUnderTest(config(etcd)) as b:
        yield a, b
