"""Computations beside the planner's loop: one at a time, bounded, ended with their callers."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from pathlib import Path

import pytest

from stoker.api.planner.v1 import planner_pb2
from stoker.common.errors import StokerError
from stoker.planner import answers, facility_file
from stoker.planner.computing import Abandoned, Computing, Task
from stoker.planner.sizing_answer import size
from tests.support.waiting import eventually

MODELS = Path(__file__).resolve().parents[2] / "examples" / "models"


def waited_for() -> Task:
    return Task(60.0, threading.Event())


async def refused(call: object) -> str:
    with pytest.raises(StokerError) as error:
        await call  # type: ignore[misc]
    return error.value.reason


async def test_a_second_one_is_turned_away_until_the_first_has_ended() -> None:
    computing, ready, go = Computing(60.0), threading.Event(), threading.Event()

    def work(_: Task) -> int:
        ready.set()
        assert go.wait(10)
        return 7

    first = asyncio.ensure_future(computing.run(work, left_s=None))
    await eventually(ready.is_set)
    assert await refused(computing.run(lambda _: 1, left_s=None)) == "PLANNER_BUSY"
    go.set()
    assert await first == 7
    assert await computing.run(lambda _: 1, left_s=None) == 1


async def test_a_caller_that_goes_away_ends_it() -> None:
    computing, seen = Computing(60.0), []

    def work(task: Task) -> None:
        assert task.stop.wait(10)
        seen.append(task.clock())

    running = asyncio.ensure_future(computing.run(work, left_s=None))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await eventually(lambda: seen == [math.inf])

    async def free() -> bool:
        try:
            return await computing.run(lambda _: True, left_s=None)
        except StokerError:
            return False

    await eventually(free)


async def test_what_looks_at_nothing_is_ended_too_however_late_it_says_how() -> None:
    """A solver heeds what ends it only while it solves."""
    computing, ready, go, ended = Computing(60.0), threading.Event(), threading.Event(), threading.Event()

    def work(task: Task) -> None:
        ready.set()
        assert go.wait(10)
        solving: list[bool] = []
        task.stopping(lambda: ended.set() if solving else None)
        solving.append(True)
        assert ended.wait(10)

    running = asyncio.ensure_future(computing.run(work, left_s=None))
    await eventually(ready.is_set)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    go.set()
    await eventually(ended.is_set)


async def test_a_deadline_bounds_the_search_and_ends_the_wait() -> None:
    computing, limits = Computing(60.0), []
    await computing.run(lambda task: limits.append(task.limit_s), left_s=None)
    await computing.run(lambda task: limits.append(task.limit_s), left_s=None, limit_s=5.0)
    await computing.run(lambda task: limits.append(task.limit_s), left_s=3.0, limit_s=5.0)
    assert limits == [60.0, 5.0, 2.75]
    assert await refused(computing.run(lambda _: 1, left_s=0.1)) == "DEADLINE_EXCEEDED"
    assert await refused(computing.run(lambda task: task.stop.wait(10), left_s=0.4)) == "DEADLINE_EXCEEDED"


async def test_what_fails_is_told_and_costs_one_call() -> None:
    computing = Computing(60.0)

    def work(_: Task) -> int:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await computing.run(work, left_s=None)
    assert await computing.run(lambda _: 2, left_s=None) == 2


def request(**fields: object) -> planner_pb2.SizeRequest:
    config = (MODELS / "llama-3.1-8b.json").read_bytes()
    asked = {"model_config": config, "gpus": ["h100-sxm"], "input_tokens": 4000, "output_tokens": 500}
    asked |= {"requests_per_s": 20, "ttft_s": 0.5, "itl_s": 0.04}
    return planner_pb2.SizeRequest(**{**asked, **fields})  # type: ignore[arg-type]


def test_a_size_has_its_pools_memory_and_what_binds() -> None:
    answer = size(request(), waited_for())
    assert answer.kv_bytes_per_token == 131_072
    assert answer.gpus == sum(pool.gpus for pool in answer.pools) > 0
    for pool in answer.pools:
        assert pool.binding
        assert pool.replicas * pool.tensor_parallel * pool.pipeline_parallel * pool.data_parallel == pool.gpus
        assert pool.memory_bytes["weights_attention"] > 1e9
        assert sum(pool.memory_bytes.values()) == pytest.approx(85.5e9, rel=0.05), "what an H100 has"
    assert size(request(), waited_for()) == answer


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_config": b"{"}, "model_config"),
        ({"model_config": b"[" * 100_000}, "model_config"),
        ({"model_config": json.dumps([1]).encode()}, "model_config"),
        ({"model_config": bytes(2**20 + 1)}, "model_config"),
        ({"model_config": b"{}"}, "model_config"),
        ({"gpus": []}, "gpus"),
        ({"gpus": ["h100-sxmm"]}, "^gpus: .* did you mean h100-sxm"),
        ({"requests_per_s": 0.0}, "requests_per_s"),
        ({"ttft_s": math.nan}, "ttft_s"),
        ({"cached_share": 1.0}, "cached_share"),
        ({"most_gpus": 100_000}, "most_gpus"),
    ],
)
def test_what_cannot_be_sized_is_named(fields: dict[str, object], named: str) -> None:
    with pytest.raises(StokerError, match=named):
        size(request(**fields), waited_for())


def test_sizing_and_capacity_end_once_nobody_waits() -> None:
    """They may take seconds, in which the planner would turn others away for an answer that nobody reads."""
    left = Task(60.0, threading.Event())
    left.stop.set()
    with pytest.raises(Abandoned):
        size(request(), left)
    text = (MODELS.parent / "facilities" / "dgx-rack.yaml").read_text()
    with pytest.raises(Abandoned):
        answers.capacity(facility_file.parse(text, "facility"), planner_pb2.CapacityRequest(), left)


def test_sizing_looks_up_before_each_layout() -> None:
    looks = []

    class Counted(Task):
        def look(self) -> None:
            looks.append(1)

    few = size(request(most_gpus=1), Counted(60.0, threading.Event()))
    assert few.gpus
    one = len(looks)
    size(request(most_gpus=16), Counted(60.0, threading.Event()))
    assert len(looks) - one > one >= 1
