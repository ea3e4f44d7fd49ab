"""Scalers and planners for tests: in this process, or as processes to kill and freeze; and agents that obey."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from stoker.api.common.v1 import common_pb2
from stoker.api.planner.v1 import planner_pb2, planner_pb2_grpc
from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.api.scaler.v1 import scaler_pb2, scaler_pb2_grpc
from stoker.common import rpc
from stoker.registry.client import RegistryClient
from tests.support.etcd import free_port
from tests.support.registry import Agent, status

C = TypeVar("C")

TTL_S = 3.0
"""Time to live of leaders in these tests, seconds."""


@asynccontextmanager
async def running(serve: Callable[[C, asyncio.Event], Awaitable[None]], config: C) -> AsyncIterator[None]:
    """A service in this process, stopped as SIGTERM stops it."""
    stop = asyncio.Event()
    task = asyncio.ensure_future(serve(config, stop))
    try:
        yield
    finally:
        stop.set()
        async with asyncio.timeout(60):
            await task


async def scaler_status(endpoint: str) -> scaler_pb2.GetScalerStatusResponse:
    async with rpc.channel(endpoint) as channel:
        stub: scaler_pb2_grpc.ScalerServiceAsyncStub = scaler_pb2_grpc.ScalerServiceStub(channel)
        return await stub.GetScalerStatus(scaler_pb2.GetScalerStatusRequest(), timeout=5)


async def planner_status(endpoint: str) -> planner_pb2.GetPlannerStatusResponse:
    async with rpc.channel(endpoint) as channel:
        stub: planner_pb2_grpc.PlannerServiceAsyncStub = planner_pb2_grpc.PlannerServiceStub(channel)
        return await stub.GetPlannerStatus(planner_pb2.GetPlannerStatusRequest(), timeout=5)


class DeciderProcess:
    """A scaler or planner as a process of its own."""

    def __init__(
        self, role: str, registries: list[str], directory: Path, *, prelude: str = "", **settings: object
    ) -> None:
        """`prelude` is code that runs in it before the service does."""
        self.role = role
        self._prelude = prelude
        self._settings = settings
        self.endpoint = f"127.0.0.1:{free_port()}"
        self.candidate = f"{role}-{self.endpoint.rpartition(':')[2]}"
        self._registries = registries
        self._log = directory / f"{self.candidate}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        settings = {
            "listen": self.endpoint,
            "registries": f"[{','.join(self._registries)}]",
            "loop.candidate": self.candidate,
            "loop.leader_ttl_s": TTL_S,
            "loop.tick_s": 0.1,
            "loop.stale_after_s": 3.0,
            **self._settings,
        }
        program = f"{self._prelude}\nfrom stoker.{self.role}.app import main; main()"
        arguments = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, *arguments],
                stdout=log,
                stderr=log,
            )

    async def serving(self) -> None:
        assert await rpc.wait_serving(self.endpoint, 20), self.log()

    async def leading(self) -> bool:
        fetch = scaler_status if self.role == "scaler" else planner_status
        return (await fetch(self.endpoint)).leading

    def log(self) -> str:
        return self._log.read_text()

    def send(self, signum: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(signum)

    def terminate(self) -> int:
        """SIGTERM; the exit status."""
        self.send(signal.SIGTERM)
        assert self._process is not None
        return self._process.wait(20)

    def kill(self) -> None:
        """SIGKILL, frozen or not."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None


class ObedientAgent(Agent):
    """Runs what it is assigned, ready at once; stops what shall drain at once, or when told to finish."""

    finish_draining = True
    retired = False
    """Whether what shall retire has done so."""

    def _obey(self, assignments: registry_pb2.NodeAssignments) -> None:
        self.assignments = assignments
        for each in assignments.assignments:
            for member in each.members:
                if member.node_id != self.session.node.node_id:
                    continue
                state = records_pb2.STATE_READY
                if each.wanted == records_pb2.WANTED_DRAIN:
                    state = records_pb2.STATE_STOPPED if self.finish_draining else records_pb2.STATE_DRAINING
                told = status(self.session.node, each, state, rank=member.rank)
                told.retired = self.retired and each.wanted == records_pb2.WANTED_RETIRE
                self.session.publish_member(told)

    def retire(self) -> None:
        """What retires has done so now."""
        self.retired = True
        if self.assignments is not None:
            self._obey(self.assignments)

    def finish(self) -> None:
        """What drains stops now."""
        self.finish_draining = True
        if self.assignments is not None:
            self._obey(self.assignments)


class Scaler:
    """Writes desired counts as the leading scaler would."""

    def __init__(self, client: RegistryClient) -> None:
        self._client = client
        self._fence: common_pb2.Fence | None = None

    async def lead(self) -> None:
        self._fence = (await self._client.acquire_leadership("scaler", f"test-{free_port()}", 60.0)).fence

    async def want(
        self,
        deployment: str,
        replicas: int,
        victims: Sequence[str] = (),
        warmings: Iterable[records_pb2.Warming] = (),
    ) -> None:
        assert self._fence is not None
        desired = records_pb2.Desired(
            deployment=deployment, replicas=replicas, victims=victims, warmings=warmings, reason="TEST"
        )
        await self._client.set_desired(self._fence, [desired])
