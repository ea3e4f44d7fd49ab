"""What Stoker relies on in data-parallel engines, real and simulated: ranks can be named, and tell what they hold."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stoker.node_agent.engine.events import Batch, Stored
from stoker.node_agent.engine.stream import KvEventStream, Received
from tests.support.engines import RunningEngine, running_engine

BLOCKS = 100
PROMPT = "hello world " * 100


@pytest.fixture(params=["sim", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(400)])])
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RunningEngine]:
    args = ["--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", "2048"]
    args += ["--enforce-eager"] if request.param == "vllm" else ["--sim-speed", "10"]
    async with running_engine(request.param, tmp_path, args=args, data_parallel=2, start_s=300) as running:
        yield running


async def ask(engine: RunningEngine, rank: int) -> int:
    """Prompt tokens that a rank found in its cache."""
    body = {"model": engine.model, "prompt": PROMPT, "max_tokens": 2}
    headers = {"x-data-parallel-rank": str(rank)}
    async with engine.session.post(f"{engine.url}/v1/completions", json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        details = (await answer.json())["usage"]["prompt_tokens_details"]
        return int(details["cached_tokens"]) if details else 0


async def first_stored(engine: RunningEngine, rank: int) -> Batch:
    endpoint = engine.engine.kv_endpoints(engine.request)[rank]
    async with KvEventStream(endpoint) as stream:
        async for item in stream:
            batch = item.batch if isinstance(item, Received) else None
            if isinstance(batch, Batch) and any(isinstance(event, Stored) for event in batch.events):
                return batch
    raise AssertionError("the stream ended")


async def test_a_rank_that_is_named_serves_from_its_own_cache_and_says_so(engine: RunningEngine) -> None:
    assert (await engine.client.info()).kv_blocks == 2 * BLOCKS
    assert await ask(engine, 1) == 0
    assert await ask(engine, 1) > 0, "the rank that was named before"
    _, first, second = await engine.client.loads(ranks=2)
    assert (first.prompt_tokens, second.prompt_tokens != 0) == (0, True)
    assert await ask(engine, 0) == 0, "the other one"
    for rank in (1, 0):
        batch = await first_stored(engine, rank)
        assert batch.dp_rank == rank
        assert isinstance(batch.events[0], Stored)
        assert batch.events[0].parent is None, "replayed from the beginning"
