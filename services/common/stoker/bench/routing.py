"""The routing measurement: one workload under several policies, interleaved on one stack in one run.

Every run has a `cache_salt` of its own, so that no run can find KV blocks of another, and starts with
caches full of blocks that are of no use to it: all policies meet the same pressure.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from stoker.api.inference.v1 import inference_pb2, inference_pb2_grpc
from stoker.bench import workloads
from stoker.bench.load import Job, Outcome, Target
from stoker.bench.stats import CacheCounters, RunFigures, figures, order
from stoker.common import rpc
from stoker.common.errors import StokerError, Unavailable

Api = Literal["http", "grpc", "mixed"]
Say = Callable[[str], None]

_WARM_UP = 24
_QUERIES, _HITS = "vllm:prefix_cache_queries", "vllm:prefix_cache_hits"


@dataclass(frozen=True)
class Bench:
    """A stack to measure on, and how."""

    model: str
    routers: tuple[str, ...]
    """gRPC, host:port each."""
    http: tuple[str, ...]
    """Base URLs, one per router."""
    engines: tuple[str, ...]
    """Base URLs of the engines themselves, for their counters."""
    clients: int = 6
    api: Api = "http"
    requests: int = 0
    """Requests of a run; 0 for the workload's own number."""
    sessions: bool = False
    """Whether clients name the conversation in a header."""
    tenants: bool = False
    """Whether three tenants ask, as `workloads.by_tenants` has it."""

    def targets(self) -> list[Target]:
        """What the clients use in turn."""
        http = [Target("http", url) for url in self.http]
        grpc = [Target("grpc", target) for target in self.routers]
        if self.api == "http":
            return http
        if self.api == "grpc":
            return grpc
        return [target for pair in zip(http, grpc, strict=True) for target in pair]


async def measure(
    bench: Bench, workload: str, policies: Sequence[str], *, seed: int, rounds: int, say: Say, first_round: int = 0
) -> dict[str, list[RunFigures]]:
    """Each policy's figures of every round, in the order of `policies`."""
    per_word = await tokens_per_word(bench)
    results: dict[str, list[RunFigures]] = {policy: [] for policy in policies}
    for number in range(first_round, first_round + rounds):
        prompts = prompts_of(bench, workload, seed + number, per_word)
        for policy in order(policies, number):
            label = f"{workload}, {policy}" + (f", round {number - first_round + 1}/{rounds}" if rounds > 1 else "")
            salt = f"{workload}-{policy}-{seed}-{number}"
            results[policy].append(await run_once(bench, prompts, policy, salt, _under(label, say)))
    return results


def _under(label: str, say: Say) -> Say:
    return lambda text: say(f"{label}: {text}")


def prompts_of(bench: Bench, workload: str, seed: int, per_word: float) -> list[workloads.Prompt]:
    """The workload, cut to the number of requests wanted. A cut keeps what later requests follow."""
    prompts = workloads.WORKLOADS[workload](seed, tokens_per_word=per_word)
    if bench.tenants:
        prompts = workloads.by_tenants(prompts)
    return prompts[: bench.requests] if bench.requests else prompts


async def warm_up(bench: Bench, *, seed: int, say: Say) -> None:
    """Fill the caches with what nobody will ask for again, and let every engine run each code path once."""
    per_word = await tokens_per_word(bench)
    prompts = workloads.unique(seed, requests=_WARM_UP, tokens_per_word=per_word)
    await drive(bench, prompts, "round_robin", f"warm-up-{seed}", _under("warming up", say))


async def run_once(bench: Bench, prompts: list[workloads.Prompt], policy: str, salt: str, say: Say) -> RunFigures:
    """One run of one policy."""
    before = await cache_counters(bench.engines)
    outcome = await drive(bench, prompts, policy, salt, say)
    after = await cache_counters(bench.engines)
    return figures(policy, outcome.samples, outcome.wall_s, after.since(before))


async def drive(bench: Bench, prompts: list[workloads.Prompt], policy: str, salt: str, say: Say) -> Outcome:
    """Run the load generator as a process of its own; it ends with us."""
    job = Job(
        prompts,
        bench.targets(),
        bench.model,
        clients=bench.clients,
        policy=policy,
        salt=salt,
        sessions=bench.sessions,
    )
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "stoker.bench.load"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert child.stdin is not None  # noqa: S101 - asked for above
    assert child.stdout is not None  # noqa: S101
    assert child.stderr is not None  # noqa: S101
    errors: list[str] = []

    async def follow(stderr: asyncio.StreamReader) -> None:
        async for line in stderr:
            text = line.decode("utf-8", "replace").strip()
            if text.isdigit():
                say(f"{text} of {len(prompts)} requests")
            else:
                errors.append(text)

    try:
        child.stdin.write(msgspec.json.encode(job))
        child.stdin.close()
        output, _ = await asyncio.gather(child.stdout.read(), follow(child.stderr))
        status = await child.wait()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if status != 0:
        raise StokerError("the load generator failed: " + "\n".join(errors[-5:]), reason="BENCH_FAILED")
    return msgspec.json.decode(output, type=Outcome)


async def tokens_per_word(bench: Bench) -> float:
    """How many tokens a word of the workloads has, by the served model's own tokenizer."""
    text = workloads.sample()
    request = inference_pb2.TokenizeRequest(model=bench.model, text=text)
    async with rpc.channel(bench.routers[0]) as channel:
        answer = await inference_pb2_grpc.InferenceServiceStub(channel).Tokenize(request, timeout=30)
    return len(answer.token_ids) / len(text.split())


async def cache_counters(engines: Sequence[str]) -> CacheCounters:
    """The engines' own prefix-cache counters, summed."""
    timeout = aiohttp.ClientTimeout(total=10)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def scrape(url: str) -> CacheCounters:
            try:
                async with session.get(f"{url}/metrics") as answer:
                    return parse_counters(await answer.text())
            except (aiohttp.ClientError, TimeoutError) as error:
                raise Unavailable(f"cannot read {url}/metrics: {error}", reason="ENGINE_UNREACHABLE") from error

        each = await asyncio.gather(*(scrape(url) for url in engines))
    return CacheCounters(sum(c.queries for c in each), sum(c.hits for c in each))


def parse_counters(text: str) -> CacheCounters:
    """Prefix-cache counters in an engine's metrics. Raises StokerError when they are missing."""
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        if family.name in (_QUERIES, _HITS):
            totals[family.name] = sum(s.value for s in family.samples if s.name.endswith("_total"))
    if len(totals) != 2:
        raise StokerError(
            f"the engine exports no {_QUERIES}_total and {_HITS}_total: start it with prefix caching on",
            reason="NO_CACHE_COUNTERS",
        )
    return CacheCounters(totals[_QUERIES], totals[_HITS])


async def wait_routed(bench: Bench, say: Say, *, timeout_s: float = 60.0) -> None:
    """Wait until every router sees every engine ready. Raises StokerError when one does not in time."""
    request = inference_pb2.ListModelsRequest()

    async def ready(target: str) -> int:
        async with rpc.channel(target) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            models = (await stub.ListModels(request, timeout=10)).models
        return next((m.ready_replicas for m in models if m.id == bench.model), 0)

    try:
        async with asyncio.timeout(timeout_s):
            for target in bench.routers:
                while (seen := await ready(target)) < len(bench.engines):
                    say(f"router {target} sees {seen} of {len(bench.engines)} replicas")
                    await asyncio.sleep(0.2)
    except TimeoutError:
        raise Unavailable(f"a router did not see all replicas within {timeout_s:g} s", reason="NOT_ROUTED") from None
