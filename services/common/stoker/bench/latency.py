"""What the router adds to a request: one client, the same engine directly and through the router, in turns."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from statistics import median

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
    first_p50_ms: float
    """Until the first output: over gRPC the rest of a stream follows it."""
    added_first_p50_ms: float
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

        async def post(base: str, prompt: str) -> float:
            body = msgspec.json.encode({"model": bench.model, "prompt": prompt, "max_tokens": 1, "temperature": 0})
            headers = {"content-type": "application/json"}
            async with session.post(f"{base}/v1/completions", data=body, headers=headers) as answer:
                await answer.content.readany()
                first = time.perf_counter()
                await answer.read()
                if answer.status != 200:
                    raise StokerError(f"{base} answered HTTP {answer.status}", reason="BENCH_FAILED")
                return first

        async def generate(prompt: str) -> float:
            sampling = inference_pb2.Sampling(max_tokens=1, temperature=0)
            request = inference_pb2.GenerateRequest(model=bench.model, text=prompt, sampling=sampling)
            first = 0.0
            async for response in stub.Generate(request, timeout=30):
                if not first and response.HasField("delta"):
                    first = time.perf_counter()
            return first

        # Each tells when the first output came.
        paths: dict[str, Callable[[str], Awaitable[float]]] = {
            "engine": lambda prompt: post(bench.engines[0], prompt),
            "router HTTP": lambda prompt: post(bench.http[0], prompt),
            "router gRPC": generate,
        }
        times: dict[str, list[float]] = {path: [] for path in paths}
        firsts: dict[str, list[float]] = {path: [] for path in paths}
        for number in range(requests + _DISCARDED):
            for place, path in enumerate(rng.sample(list(paths), len(paths))):
                # No prompt twice: the router remembers the tokens of those that it has seen.
                prompt = f"{stem} {number * len(paths) + place:07d}"
                began = time.perf_counter()
                first = await paths[path](prompt)
                firsts[path].append((first - began) * 1000)
                times[path].append((time.perf_counter() - began) * 1000)
            if number % 20 == 0:
                say(f"latency: {number} of {requests} rounds")
    return [_figures(path, times, firsts) for path in paths]


def _figures(path: str, times: dict[str, list[float]], firsts: dict[str, list[float]]) -> PathFigures:
    whole, first = times[path][_DISCARDED:], firsts[path][_DISCARDED:]
    return PathFigures(
        path=path,
        p50_ms=median(whole),
        p99_ms=quantile(whole, 0.99) or 0.0,
        added_p50_ms=median(whole) - median(times["engine"][_DISCARDED:]),
        first_p50_ms=median(first),
        added_first_p50_ms=median(first) - median(firsts["engine"][_DISCARDED:]),
        requests=len(whole),
    )
