"""`stoker bench`: measurements that anyone can repeat."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from stoker.bench.stats import RunFigures, over_rounds
from stoker.cli.addresses import Addresses
from stoker.cli.bench_replay import Policy, replay
from stoker.cli.demo import bench_of, cells
from stoker.cli.fleet import Registries, settled
from stoker.cli.loop import run
from stoker.cli.output import Format, FormatOption, Output, or_dash
from stoker.cli.serving import EngineChoice, RouterSettingOption, router_settings, temporary
from stoker.common.errors import Conflict, InvalidRequest, StokerError
from stoker.local.deployment import LocalDeployment, has_gpu
from stoker.local.plan import StackSpec
from stoker.local.state import Home

if TYPE_CHECKING:
    from stoker.bench import latency, routing

app = typer.Typer(help="Measure; each run starts a stack of its own unless told otherwise.", no_args_is_help=True)

app.command(
    "replay", epilog="Example: stoker bench replay decisions.jsonl --set routing.epsilon=0.5 --policy stoker -o json"
)(replay)


class Workload(StrEnum):
    """What is asked."""

    SHARED = "shared"
    CHAT = "chat"
    AGENTIC = "agentic"
    UNIQUE = "unique"


class ApiChoice(StrEnum):
    """How the clients ask."""

    HTTP = "http"
    GRPC = "grpc"
    MIXED = "mixed"


@app.command(
    "routing",
    epilog="Example: stoker bench routing --engine sim --workload chat --policy stoker --policy round_robin -o json",
)
def bench_routing(
    engine: Annotated[EngineChoice, typer.Option("--engine", help="vllm, or sim to simulate it.")] = EngineChoice.SIM,
    replicas: Annotated[int, typer.Option("--replicas", min=1, max=64, help="Replicas of the model.")] = 3,
    workload: Annotated[Workload, typer.Option("--workload", help="What is asked.")] = Workload.SHARED,
    policy: Annotated[
        list[Policy] | None, typer.Option("--policy", help="Once per policy to compare. Default: both.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the workload.")] = 0,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=100, help="Rounds; medians are shown.")] = 1,
    requests: Annotated[int, typer.Option("--requests", min=0, help="Requests a run; 0 for all of them.")] = 0,
    clients: Annotated[int, typer.Option("--clients", min=1, max=1024, help="Clients at once.")] = 6,
    api: Annotated[ApiChoice, typer.Option("--api", help="How the clients ask.")] = ApiChoice.HTTP,
    routers: Annotated[int, typer.Option("--routers", min=1, max=16, help="Routers; clients use all.")] = 1,
    workers: Annotated[int, typer.Option("--workers", min=1, max=64, help="Processes of each router.")] = 1,
    tenants: Annotated[
        bool, typer.Option("--tenants", help="Three tenants ask, one of them half of it; show what each gets.")
    ] = False,
    setting: RouterSettingOption = None,
    model: Annotated[str, typer.Option("--model", help="Model directory or hub id. Default: a tiny one.")] = "",
    stack: Annotated[
        str, typer.Option("--stack", help="Measure on the running local stack: name of the deployment.")
    ] = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Run one workload under several routing policies, interleaved on one stack in one run.

    Each round has a workload of its own (seed, seed + 1 …), and every other round takes the policies in reverse.
    Hit rates are the engines' own prefix-cache counters. No run shares a KV block with another.
    """
    from stoker.bench import pooled, routing  # slow to import: aiohttp

    out = Output(output)
    policies = list(dict.fromkeys(p.value for p in policy or list(Policy)))
    if stack and setting:
        raise InvalidRequest.field("--set", "a running stack has its settings; give them to `stoker up`")
    spec = StackSpec(
        engine.value,
        nodes=replicas,
        routers=routers,
        workers=workers,
        fixed_ports=False,
        policy_header=True,
        router_settings=router_settings(setting),
    )
    deployment = LocalDeployment(engine.value, replicas, model, on_gpu=has_gpu(), pressure=True)

    async def work() -> tuple[routing.Bench, float, dict[str, list[RunFigures]]]:
        with out.progress() as progress:
            say = progress.say
            async with _measured_stack(stack, spec, deployment, say) as found:
                bench = replace(found, clients=clients, api=api.value, requests=requests, tenants=tenants)
                await routing.wait_routed(bench, say)
                say("working out what one pooled cache would hit")
                one_cache = await pooled.pooled_hit_rate(bench, workload.value, seed=seed, rounds=rounds)
                await routing.warm_up(bench, seed=seed, say=say)
                runs = await routing.measure(bench, workload.value, policies, seed=seed, rounds=rounds, say=say)
                return bench, one_cache, runs

    measured, one_cache, runs = run(work())
    about = {
        "engine": "running stack" if stack else engine.value,
        "replicas": len(measured.engines),
        "workload": workload.value,
        "api": api.value,
        "routers": len(measured.routers),
        "clients": clients,
        "seed": seed,
        "settings": setting or [],
        "pooled_lru_hit_rate": one_cache,
    }
    results = [over_rounds(each) for each in runs.values()]
    by_tenant = ("", _tenants_table(results)) if tenants else ()
    out.result(as_json(runs, about), _table(results), *by_tenant)
    out.note(f"[dim]one LRU cache as large as all together would hit {one_cache:.3f}, in order of arrival[/]")
    if rounds > 1:
        out.note(f"[dim]medians of {rounds} rounds; -o json has the figures of each[/]")
    _judge(results, out)


def as_json(runs: dict[str, list[RunFigures]], about: dict[str, Any]) -> list[dict[str, Any]]:
    """One object a policy: medians, how they were measured, and the figures of each round, in their order."""
    return [{**asdict(over_rounds(each)), **about, "rounds": [asdict(f) for f in each]} for each in runs.values()]


def _judge(results: list[RunFigures], out: Output) -> None:
    if any(f.errors for f in results):
        out.note("[yellow]some requests failed; the figures count the others[/]")
    if all(f.errors == f.requests for f in results):
        raise StokerError("no request succeeded", reason="BENCH_FAILED")


@app.command("latency", epilog="Example: stoker bench latency --engine sim --requests 500 -o json")
def bench_latency(
    engine: Annotated[EngineChoice, typer.Option("--engine", help="vllm, or sim to simulate it.")] = EngineChoice.SIM,
    requests: Annotated[int, typer.Option("--requests", min=1, max=100_000, help="Requests on each path.")] = 300,
    prompt_bytes: Annotated[int, typer.Option("--prompt-bytes", min=64, max=20_000, help="Size of a prompt.")] = 2048,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the prompts.")] = 0,
    output: FormatOption = Format.TEXT,
) -> None:
    """Measure what the router adds at one client: the engine directly and through the router, in turns."""
    from stoker.bench import latency, routing

    out = Output(output)
    spec = StackSpec(engine.value, nodes=1, fixed_ports=False)
    # A quick engine: its own time is the noise in which the router's must be seen.
    deployment = LocalDeployment(engine.value, 1, on_gpu=has_gpu(), sim_speed=100.0)

    async def work() -> list[latency.PathFigures]:
        with out.progress() as progress:
            async with temporary(spec, deployment, Home.default().path / "bench", progress.say) as serving:
                bench = bench_of(serving, api="http")
                await routing.wait_routed(bench, progress.say)
                return await latency.measure(
                    bench, requests=requests, prompt_bytes=prompt_bytes, seed=seed, say=progress.say
                )

    results = run(work())
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("path", "p50", "p99", "added (p50)"):
        table.add_column(column, justify="left" if column == "path" else "right")
    for f in results:
        table.add_row(f.path, f"{f.p50_ms:.2f} ms", f"{f.p99_ms:.2f} ms", f"{f.added_p50_ms:.2f} ms")
    out.result([asdict(f) for f in results], table)


def _table(results: list[RunFigures]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("routed by")
    for column in ("hit rate", "TTFT p50", "TTFT p99", "requests/s", "errors"):
        table.add_column(column, justify="right")
    for f in results:
        table.add_row(*cells(f))
    return table


def _tenants_table(results: list[RunFigures]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("routed by")
    table.add_column("tenant")
    for column in ("requests", "TTFT p50", "TTFT p99", "longest"):
        table.add_column(column, justify="right")
    for f in results:
        for tenant, got in f.by_tenant.items():
            times = (got.ttft_p50_ms, got.ttft_p99_ms, got.ttft_longest_ms)
            table.add_row(
                f.policy.replace("_", "-"),
                tenant,
                str(got.requests),
                *(or_dash(value, "{:.0f} ms") for value in times),
            )
    return table


@asynccontextmanager
async def _measured_stack(
    running: str, spec: StackSpec, deployment: LocalDeployment, say: routing.Say
) -> AsyncIterator[routing.Bench]:
    """The running stack, by the name of its deployment, or else one for as long as it is measured."""
    if running:
        yield await _on_running(running)
        return
    async with temporary(spec, deployment, Home.default().path / "bench", say) as serving:
        yield bench_of(serving, api="http")


async def _on_running(name: str) -> routing.Bench:
    from stoker.bench import routing

    addresses = Addresses.find()
    if addresses.local is None:
        raise InvalidRequest.field("--stack", "no local stack runs; start one with `stoker up`, or leave --stack out")
    endpoints = addresses.local.endpoints
    async with Registries(endpoints.registry) as registries:
        fleet = await registries.fleet()
    if not settled(fleet, name):
        raise Conflict(f"deployment {name!r} is not there with all its replicas ready; see `stoker status`")
    urls = tuple(r.engine.http_url for r in fleet.replicas(name))
    deployment = fleet.deployment(name)
    served = (deployment.spec.served_model_name if deployment is not None else "") or name
    return routing.Bench(model=served, routers=endpoints.router, http=endpoints.http, engines=urls)
