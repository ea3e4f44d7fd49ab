"""What the router adds to a request: one client, the same engine directly and through the router, in turns."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random

import aiohttp
import msgspec

from stoker.api.inference.v1 import inference_pb2, inference_pb2_grpc
from stoker.bench import workloads
from stoker.bench.routing import Bench, Say
from stoker.bench.stats import quantile
from stoker.common import rpc
from stoker.common.errors import StokerError

_DISCARDED = 20
"""First requests of each path: connections, caches and lazy imports."""


@dataclass(frozen=True)
class PathFigures:
    """Latency of one path to the engine, whole answers of one token."""

    path: str
    p50_ms: float
    p99_ms: float
    added_p50_ms: float
    """Over the engine called directly, in the same run."""
    requests: int


async def measure(bench: Bench, *, requests: int, prompt_bytes: int, seed: int, say: Say) -> list[PathFigures]:
    """Ask in turns over each path: `requests` times, with prompts that share all but their last word.

    What is left of the engine's own time is the same on every path, and small. Needs one engine.
    """
    if len(bench.engines) != 1:
        raise StokerError("latency is compared on one engine; start one replica", reason="BENCH_FAILED")
    rng = Random(seed)  # noqa: S311 - a workload
    stem = workloads.sample(seed, prompt_bytes)[: prompt_bytes - 8]
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session,
        rpc.channel(bench.routers[0]) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def post(base: str, prompt: str) -> None:
            body = msgspec.json.encode({"model": bench.model, "prompt": prompt, "max_tokens": 1, "temperature": 0})
            headers = {"content-type": "application/json"}
            async with session.post(f"{base}/v1/completions", data=body, headers=headers) as answer:
                await answer.read()
                if answer.status != 200:
                    raise StokerError(f"{base} answered HTTP {answer.status}", reason="BENCH_FAILED")

        async def generate(prompt: str) -> None:
            sampling = inference_pb2.Sampling(max_tokens=1, temperature=0)
            request = inference_pb2.GenerateRequest(model=bench.model, text=prompt, sampling=sampling)
            async for _ in stub.Generate(request, timeout=30):
                pass

        paths: dict[str, Callable[[str], Awaitable[None]]] = {
            "engine": lambda prompt: post(bench.engines[0], prompt),
            "router HTTP": lambda prompt: post(bench.http[0], prompt),
            "router gRPC": generate,
        }
        times: dict[str, list[float]] = {path: [] for path in paths}
        for number in range(requests + _DISCARDED):
            for path in rng.sample(list(paths), len(paths)):
                began = time.perf_counter()
                await paths[path](f"{stem} {number:07d}")
                times[path].append((time.perf_counter() - began) * 1000)
            if number % 20 == 0:
                say(f"latency: {number} of {requests} rounds")
    return _figures({path: values[_DISCARDED:] for path, values in times.items()})


def _figures(times: dict[str, list[float]]) -> list[PathFigures]:
    direct = quantile(times["engine"], 0.5) or 0.0
    return [
        PathFigures(
            path=path,
            p50_ms=(p50 := quantile(values, 0.5) or 0.0),
            p99_ms=quantile(values, 0.99) or 0.0,
            added_p50_ms=p50 - direct,
            requests=len(values),
        )
        for path, values in times.items()
    ]
