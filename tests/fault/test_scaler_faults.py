"""The leading scaler dies or freezes between deciding and writing: exactly one decision takes effect."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stoker.registry.client import RegistryClient
from tests.integration.test_scaler_policies import CONCURRENCY
from tests.support.deciders import TTL_S, DeciderProcess
from tests.support.demand import DemandingRouter, LoadedAgent
from tests.support.etcd import EtcdServer
from tests.support.registry import RegistryProcess, Watcher, node, spec
from tests.support.waiting import eventually

pytestmark = pytest.mark.fault

STOPS = """
import os, pathlib, signal
from stoker.registry.client import RegistryClient
right = RegistryClient.{call}

async def stopping(self, fence, records, removed=()):
    mark = pathlib.Path({mark!r})
    if mark.exists() and mark.read_text() == "stop":
        mark.write_text("stopped")
        os.kill(os.getpid(), signal.SIGSTOP)
    return await right(self, fence, records, removed)

RegistryClient.{call} = stopping
"""
"""Freezes the process as soon as it would make a call, once the file says so."""


class Stage:
    """Two scalers, of which the first leads and will freeze at a call; one replica runs, and 8 requests wait."""

    def __init__(self, watcher: Watcher, router: DemandingRouter, agent: LoadedAgent, mark: Path) -> None:
        self.watcher = watcher
        self.view = watcher.watch.view
        self.router = router
        self.agent = agent
        self.mark = mark
        self.first: DeciderProcess
        self.second: DeciderProcess

    def counts(self) -> list[int]:
        return [d.replicas for change in self.watcher.changes() for d in change.upserts.desired]

    async def frozen(self) -> None:
        """The first scaler has decided on what waits, and stands before its call."""
        self.mark.write_text("stop")
        self.router.queued = 8
        await eventually(lambda: self.mark.read_text() == "stopped", "it comes to its call", 60)


@asynccontextmanager
async def staged(etcd: EtcdServer, directory: Path, call: str) -> AsyncIterator[Stage]:
    registry = RegistryProcess(etcd.endpoint, directory)
    mark = directory / "mark"
    mark.write_text("run")
    settings: dict[str, Any] = {"sample_s": 0.5, "history_s": 10}
    started: list[DeciderProcess] = []
    try:
        registry.start()
        await registry.serving()
        endpoints = [registry.endpoint]
        prelude = STOPS.format(call=call, mark=str(mark))
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(RegistryClient(endpoints))
            watcher = await stack.enter_async_context(Watcher(endpoints))
            agent = LoadedAgent(endpoints, node("n1"))
            await stack.enter_async_context(agent)
            router = await stack.enter_async_context(DemandingRouter(endpoints, "r1", "chat"))
            stage = Stage(watcher, router, agent, mark)
            stage.first = DeciderProcess("scaler", endpoints, directory, prelude=prelude, **settings)
            stage.second = DeciderProcess("scaler", endpoints, directory, **settings)
            planner = DeciderProcess("planner", endpoints, directory)
            for each in (stage.first, planner, stage.second):
                started.append(each)
                each.start()
                await each.serving()
            await eventually(lambda: "scaler" in stage.view.leaders, within_s=60)
            assert stage.view.leaders["scaler"].candidate == stage.first.candidate
            await client.put_deployment(spec("chat", scaling=CONCURRENCY))
            await eventually(lambda: "chat-0" in stage.view.replicas, within_s=60)
            await eventually(lambda: "chat" in stage.view.scaling, within_s=60)
            yield stage
    finally:
        for each in started:
            each.kill()
        registry.kill()


def rises(counts: list[int]) -> bool:
    """Each count was written once, and none undid another: what waits asks for more and more."""
    return all(a < b for a, b in pairwise(counts))


async def test_killed_before_its_write_another_decides_and_only_that_takes_effect(
    etcd_alone: EtcdServer, tmp_path: Path
) -> None:
    async with staged(etcd_alone, tmp_path, "set_desired") as stage:
        await stage.frozen()
        assert stage.counts() == [1], "nothing is written yet"
        stage.first.kill()
        await eventually(lambda: stage.view.desired["chat"].replicas == 4, "8 requests at 2 a replica", TTL_S + 30)
        assert rises(stage.counts())
        assert stage.view.leaders["scaler"].candidate == stage.second.candidate
        assert stage.view.desired["chat"].fence.revision == stage.view.leaders["scaler"].revision


async def test_frozen_before_its_write_it_writes_nothing_when_it_wakes(
    etcd_alone: EtcdServer, tmp_path: Path
) -> None:
    async with staged(etcd_alone, tmp_path, "set_desired") as stage:
        await stage.frozen()
        await eventually(lambda: stage.view.desired["chat"].replicas == 4, "8 requests at 2 a replica", TTL_S + 30)
        stage.router.queued = 12
        await eventually(lambda: stage.view.desired["chat"].replicas == 6, "12 requests", 60)
        before = stage.view.desired["chat"]
        stage.first.send(signal.SIGCONT)

        async def stands_back() -> bool:
            return not await stage.first.leading() and "FENCED" in stage.first.log()

        await eventually(stands_back, "its late write is refused", 60)
        assert stage.view.desired["chat"] == before
        assert rises(stage.counts())


async def test_killed_after_its_write_the_next_one_does_not_write_it_again(
    etcd_alone: EtcdServer, tmp_path: Path
) -> None:
    """The count is written, the history of it is not: the count itself tells when it changed."""
    async with staged(etcd_alone, tmp_path, "set_scaling_history") as stage:
        await stage.frozen()
        stage.first.kill()
        assert len(stage.counts()) == 2, "it has written the count that it decided"
        kept = stage.view.scaling["chat"]
        await eventually(
            lambda: stage.view.scaling["chat"].fence != kept.fence, "the next one keeps the history", TTL_S + 30
        )
        assert rises(stage.counts())
        changed_at = stage.view.scaling["chat"].changed_at.ToNanoseconds()
        assert abs(changed_at - stage.view.desired["chat"].decided_at.ToNanoseconds()) < 2e9
