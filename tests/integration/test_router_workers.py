"""A router of several processes: how its workers share ports, come back, and stop."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stoker.router.workers.parent import _folder as workers_folder
from tests.integration.test_router_process import refusal, start
from tests.support.etcd import free_port
from tests.support.waiting import eventually

WORKERS = 3


@dataclass
class Workers:
    """A parent, and what it and its workers said."""

    parent: asyncio.subprocess.Process
    said: list[dict[str, Any]] = field(default_factory=list)

    def heard(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.said if line["event"] == event]

    @property
    def http_port(self) -> int:
        return int(self.heard("router.listening")[0]["http_port"])

    async def listen(self) -> None:
        assert self.parent.stderr is not None
        async for line in self.parent.stderr:
            with contextlib.suppress(ValueError):
                self.said.append(json.loads(line))

    def pids(self) -> list[int]:
        """Its workers' processes."""
        tasks = Path(f"/proc/{self.parent.pid}/task")
        return [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]


@contextlib.asynccontextmanager
async def running(*settings: str) -> AsyncIterator[Workers]:
    parent = await start(
        f"workers={WORKERS}",
        "listen.grpc=127.0.0.1:0",
        "listen.http=127.0.0.1:0",
        f"registries=[127.0.0.1:{free_port()}]",
        *settings,
    )
    found = Workers(parent)
    listening = asyncio.create_task(found.listen())
    try:
        await eventually(lambda: len(found.heard("router.listening")) == WORKERS, "all workers listen", 60)
        yield found
    except AssertionError as error:
        raise AssertionError(f"{error}: {found.said}") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            parent.terminate()
        await asyncio.wait_for(parent.wait(), 30)
        await listening


async def served(port: int) -> bool:
    """Whether a new connection is served."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
        try:
            async with http.get(f"http://127.0.0.1:{port}/health") as answer:
                return answer.status == 200
        except aiohttp.ClientConnectionError:
            return False


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def test_workers_share_the_ports_and_stop_with_their_parent() -> None:
    async with running() as workers:
        lines = workers.heard("router.listening")
        assert {line["worker"] for line in lines} == set(range(WORKERS))
        assert len({line["http_port"] for line in lines}) == len({line["grpc_port"] for line in lines}) == 1
        pids = workers.pids()
        assert len(pids) == WORKERS
        assert all([await served(workers.http_port) for _ in range(20)])
        workers.parent.terminate()
        assert await asyncio.wait_for(workers.parent.wait(), 30) == 0
        assert all(map(gone, pids))


async def test_a_worker_that_is_killed_comes_back_while_the_others_serve() -> None:
    async with running() as workers:
        before = workers.pids()
        os.kill(before[0], signal.SIGKILL)
        await eventually(lambda: len(workers.heard("router.listening")) == WORKERS + 1, "it listens again", 60)
        assert len(workers.pids()) == WORKERS
        assert set(before[1:]) < set(workers.pids())
        assert workers.heard("router.worker_ended")[0]["status"] == -signal.SIGKILL
        assert all([await served(workers.http_port) for _ in range(20)])


async def test_a_worker_that_stands_still_is_replaced() -> None:
    async with running() as workers:
        before = workers.pids()
        os.kill(before[0], signal.SIGSTOP)
        await eventually(lambda: workers.heard("router.worker_frozen"), "it is found out", 60)
        assert workers.heard("router.worker_frozen")[0]["pid"] == before[0]
        await eventually(lambda: len(workers.heard("router.listening")) == WORKERS + 1, "another one listens", 60)
        assert gone(before[0])
        assert set(before[1:]) < set(workers.pids())
        assert all([await served(workers.http_port) for _ in range(20)])


async def test_a_worker_that_stands_still_does_not_keep_the_router_from_stopping() -> None:
    async with running("drain_s=100") as workers:
        os.kill(workers.pids()[0], signal.SIGSTOP)
        workers.parent.terminate()
        assert await asyncio.wait_for(workers.parent.wait(), 60) == 0


async def test_workers_end_when_their_parent_is_killed() -> None:
    async with running("drain_s=1") as workers:
        pids = workers.pids()
        workers.parent.kill()
        await eventually(lambda: all(map(gone, pids)), "all workers are gone", 60)


def test_the_workers_folder_is_locked_against_those_who_sweep_old_files() -> None:
    with workers_folder() as folder:
        sweeper = os.open(folder, os.O_RDONLY)
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(sweeper, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(sweeper)
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


async def test_each_worker_has_metrics_of_its_own() -> None:
    with contextlib.ExitStack() as held:
        probe = held.enter_context(socket.socket())
        probe.bind(("127.0.0.1", 0))
        first = probe.getsockname()[1]
    if first > 65_000:
        first -= 1000
    async with running(f"metrics_listen=127.0.0.1:{first}"), aiohttp.ClientSession() as http:
        for number in range(WORKERS):
            async with http.get(f"http://127.0.0.1:{first + number}/metrics") as answer:
                assert "stoker_router_requests_in_flight" in await answer.text()


async def test_somebody_elses_port_is_not_shared() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        assert "listen.http" in await refusal("workers=2", "listen.grpc=127.0.0.1:0", f"listen.http={taken}")
