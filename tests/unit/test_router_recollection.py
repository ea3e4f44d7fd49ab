"""A past decision is found whichever worker took it; nobody waits long for a worker that is gone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stoker.api.router.v1 import router_pb2
from stoker.router.decisions import recollection
from stoker.router.decisions.decided import Recent, Remembered
from stoker.router.decisions.recollection import Recollection
from stoker.router.workers.siblings import Siblings
from tests.unit.test_router_decisions import decided, view_of


def told(remembered: Remembered) -> router_pb2.ExplainResponse:
    return router_pb2.ExplainResponse(
        decision=router_pb2.Decision(replica_id=remembered.decision.replica), attempt=remembered.attempt
    )


async def test_any_worker_finds_what_another_decided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recollection, "_PATIENCE_S", 30.0)
    workers = [Siblings(tmp_path, number, 3) for number in range(3)]
    recents = [Recent() for _ in workers]
    memories = [Recollection(recent, worker, told) for recent, worker in zip(recents, workers, strict=True)]
    for worker in workers:
        await worker.start()
    try:
        recents[1].note("there", decided(view_of("a")))
        async with asyncio.timeout(20):
            for memory in memories:
                found = await memory.of("there")
                assert found is not None
                assert found.decision.replica_id == "a"
            assert await memories[0].of("nowhere") is None, "all have said so: no need to wait"
    finally:
        for worker in workers:
            await worker.close()


async def test_a_worker_that_is_gone_is_not_waited_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recollection, "_PATIENCE_S", 0.05)
    worker = Siblings(tmp_path, 0, 2)
    await worker.start()
    try:
        memory = Recollection(Recent(), worker, told)
        assert await asyncio.wait_for(memory.of("nowhere"), 10) is None
    finally:
        await worker.close()


async def test_alone_it_asks_nobody() -> None:
    recent = Recent()
    memory = Recollection(recent, Siblings.alone(), told)
    assert await memory.of("one") is None
    recent.note("one", decided(view_of("a")))
    found = await memory.of("one")
    assert found is not None
    assert found.attempt == 1
