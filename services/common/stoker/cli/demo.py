"""`stoker demo`: the main job in one command, start to finish, nothing left behind."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from stoker.bench.stats import RunFigures, over_rounds
from stoker.cli.loop import run
from stoker.cli.output import Format, FormatOption, Output, or_dash, own_name
from stoker.cli.serving import EngineChoice, Serving, temporary
from stoker.common.errors import StokerError
from stoker.local.deployment import LocalDeployment, has_gpu
from stoker.local.plan import StackSpec
from stoker.local.state import Home

if TYPE_CHECKING:
    from stoker.bench import routing

POLICIES = ("stoker", "round_robin")
# Simulated engines are quicker than the tiny model, and are asked less: the whole demo takes under a minute.
_DEMO_SIM_SPEED, _DEMO_SIM_REQUESTS = 5.0, 100
_TAKES = {EngineChoice.SIM: "about a minute", EngineChoice.VLLM: "on two cores, about 15 minutes"}
WORKLOADS = {"shared": "shared prefixes", "chat": "multi-turn chat"}


def demo(
    engine: Annotated[
        EngineChoice, typer.Option("--engine", help="vllm, or sim to simulate it.")
    ] = EngineChoice.VLLM,
    replicas: Annotated[int, typer.Option("--replicas", min=1, max=16, help="Replicas of the model.")] = 3,
    model: Annotated[str, typer.Option("--model", help="Model directory or hub id. Default: a tiny one.")] = "",
    requests: Annotated[int, typer.Option("--requests", min=0, help="Requests a run; 0 for the workload's own.")] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the workloads.")] = 0,
    output: FormatOption = Format.TEXT,
) -> None:
    """Start a stack, drive two workloads through it by Stoker's routing and by round-robin, stop everything.

    Half of the clients speak gRPC, half the OpenAI HTTP API. Hit rates are the engines' own counters.
    """
    out = Output(output)
    spec = StackSpec(engine.value, nodes=replicas, fixed_ports=False, policy_header=True)
    deployment = LocalDeployment(
        engine.value, replicas, model, on_gpu=has_gpu(), pressure=True, sim_speed=_DEMO_SIM_SPEED
    )

    few = _DEMO_SIM_REQUESTS if engine is EngineChoice.SIM else 0

    async def work() -> dict[str, list[RunFigures]]:
        with out.progress() as progress:
            async with temporary(spec, deployment, Home.default().path / "demo", progress.say) as serving:
                bench = bench_of(serving, api="mixed", requests=requests or few)
                results = await _drive(bench, seed, progress.say)
                progress.say("stopping everything")
        return results

    out.note(
        f"A whole stack with {replicas} replicas ({engine.value}), two workloads, each routed by Stoker and by "
        f"round-robin: {_TAKES[engine]}. Ctrl-C stops it all."
    )
    began = time.monotonic()
    results = run(work())
    value = {name: [asdict(f) for f in figures] for name, figures in results.items()}
    out.result(value, "", table(results), "", *(reading(n, f) for n, f in results.items()))
    took_s = time.monotonic() - began
    out.note(f"[dim]{engine.value}, {replicas} replicas, {took_s:.0f} s in all; nothing is left running[/]")
    if failed := sum(f.errors for figures in results.values() for f in figures):
        raise StokerError(
            f"{failed} requests failed; run again, or look into it with `stoker up` and `bench routing --stack`",
            reason="REQUESTS_FAILED",
        )
    stay = (
        f"make up ENGINE={engine.value}" if "MAKELEVEL" in os.environ else f"{own_name()} up --engine {engine.value}"
    )
    out.note(f"next: `{stay}` leaves such a stack running and says how to ask it")


def bench_of(serving: Serving, *, api: routing.Api, requests: int = 0, clients: int = 6) -> routing.Bench:
    """A bench on a stack that was just started."""
    from stoker.bench import routing  # slow to import: aiohttp

    return routing.Bench(
        model=serving.deployment.name,
        routers=serving.state.endpoints.router,
        http=serving.state.endpoints.http,
        engines=serving.engine_urls(),
        clients=clients,
        api=api,
        requests=requests,
    )


async def _drive(bench: routing.Bench, seed: int, say: routing.Say) -> dict[str, list[RunFigures]]:
    from stoker.bench import routing

    await routing.wait_routed(bench, say)
    await routing.warm_up(bench, seed=seed, say=say)
    results: dict[str, list[RunFigures]] = {}
    for number, workload in enumerate(WORKLOADS):
        runs = await routing.measure(bench, workload, POLICIES, seed=seed, rounds=1, say=say, first_round=number)
        results[workload] = [over_rounds(rounds) for rounds in runs.values()]
    return results


def table(results: dict[str, list[RunFigures]]) -> Table:
    """All figures."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("workload")
    shown.add_column("routed by")
    for column in ("hit rate", "TTFT p50", "TTFT p99", "requests/s", "errors"):
        shown.add_column(column, justify="right")
    for workload, figures in results.items():
        for place, f in enumerate(figures):
            style = "bold green" if f.policy == "stoker" else ""
            shown.add_row(WORKLOADS.get(workload, workload) if place == 0 else "", *cells(f), style=style)
    return shown


def cells(f: RunFigures) -> list[str]:
    """One row of figures."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in f.errors_by_kind.items())
    return [
        f.policy.replace("_", "-"),
        or_dash(f.hit_rate, "{:.2f}"),
        or_dash(f.ttft_p50_ms, "{:.0f} ms"),
        or_dash(f.ttft_p99_ms, "{:.0f} ms"),
        f"{f.requests_per_s:.2f}",
        kinds or "0",
    ]


def reading(workload: str, figures: list[RunFigures]) -> str:
    """What the figures say, in a sentence."""
    by_policy = {f.policy: f for f in figures}
    ours, base = by_policy.get("stoker"), by_policy.get("round_robin")
    if ours is None or base is None or not base.requests_per_s or not ours.ttft_p50_ms or not base.ttft_p50_ms:
        return f"{WORKLOADS.get(workload, workload)}: not enough answers to compare"
    # What failed was never waited for, and would flatter one side.
    if failed := sum(count for f in (ours, base) for count in f.errors_by_kind.values()):
        return f"{WORKLOADS.get(workload, workload)}: {failed} requests failed, so these runs are not compared"
    if ours.hit_rate is None or base.hit_rate is None:
        return f"{WORKLOADS.get(workload, workload)}: the engines counted no cache lookups"
    speed = ours.requests_per_s / base.requests_per_s
    wait = 1 - ours.ttft_p50_ms / base.ttft_p50_ms
    waited = f"{abs(wait):.0%} {'less' if wait >= 0 else 'more'}"
    return (
        f"{WORKLOADS.get(workload, workload)}: routed by Stoker, {ours.hit_rate:.0%} of prompt tokens were still in "
        f"a KV cache (round-robin: {base.hit_rate:.0%}); {speed:.2f} × its requests/s, {waited} wait for the "
        "first token."
    )
