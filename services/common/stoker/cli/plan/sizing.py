"""`stoker plan size`: from a model and a load to GPUs and replicas."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from stoker.cli import errors
from stoker.cli.output import Format, FormatOption, Output
from stoker.common.errors import InvalidRequest


class Objective(StrEnum):
    """What is made small."""

    GPUS = "gpus"
    COST = "cost"
    ENERGY = "energy"


class Split(StrEnum):
    """Whether prefill and decode may be apart."""

    ANY = "any"
    NEVER = "never"


_EXAMPLE = (
    "Example: stoker plan size --model examples/models/llama-3.1-8b.json --gpu h100-sxm --isl 4000 --osl 500 "
    "--rps 20 --slo-ttft-ms 500 --slo-itl-ms 40 -o json"
)


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(epilog=_EXAMPLE)(size)


def size(
    model: Annotated[Path, typer.Option("--model", help="A model's config.json, or the directory that has it.")],
    gpu: Annotated[
        list[str], typer.Option("--gpu", help="GPU or node type of the catalogue; several: the best of them.")
    ],
    isl: Annotated[float, typer.Option("--isl", min=1, max=1e7, help="Prompt tokens of a request, mean.")],
    osl: Annotated[float, typer.Option("--osl", min=1, max=1e7, help="Generated tokens of a request, mean.")],
    rps: Annotated[float, typer.Option("--rps", min=1e-6, max=1e6, help="Requests per second.")],
    slo_ttft_ms: Annotated[
        float, typer.Option("--slo-ttft-ms", min=1, max=3.6e6, help="First token within.")
    ] = 1_000,
    slo_itl_ms: Annotated[
        float,
        typer.Option("--slo-itl-ms", min=0, max=6e4, help="A request's mean time between tokens within; 0: any."),
    ] = 50,
    percentile: Annotated[
        float, typer.Option("--percentile", min=50, max=99.99, help="Percent of requests within both.")
    ] = 95,
    isl_cv: Annotated[
        float, typer.Option("--isl-cv", min=0, max=10, help="Standard deviation of prompt tokens over their mean.")
    ] = 0.5,
    osl_cv: Annotated[float, typer.Option("--osl-cv", min=0, max=10, help="The same of generated tokens.")] = 0.5,
    arrival_cv: Annotated[
        float, typer.Option("--arrival-cv", min=0, max=10, help="The same of times between arrivals; 1: Poisson.")
    ] = 1.0,
    hit_rate: Annotated[
        float, typer.Option("--hit-rate", min=0, max=0.999, help="Share of prompt tokens found in a prefix cache.")
    ] = 0.0,
    objective: Annotated[Objective, typer.Option("--objective", help="What is made small.")] = Objective.GPUS,
    split: Annotated[
        Split, typer.Option("--split", help="Prefill and decode apart, where that is better?")
    ] = Split.ANY,
    tp: Annotated[int, typer.Option("--tp", min=0, max=1_024, help="Only this tensor parallelism; 0: any.")] = 0,
    pp: Annotated[int, typer.Option("--pp", min=0, max=256, help="Only this pipeline parallelism; 0: any.")] = 0,
    dp: Annotated[int, typer.Option("--dp", min=0, max=1_024, help="Only so many data-parallel ranks; 0: any.")] = 0,
    max_gpus: Annotated[int, typer.Option("--max-gpus", min=1, max=1_024, help="GPUs of one replica at most.")] = 16,
    kv_dtype: Annotated[
        str, typer.Option("--kv-dtype", help="vLLM's --kv-cache-dtype: auto, fp8, bfloat16.")
    ] = "auto",
    utilization: Annotated[
        float, typer.Option("--gpu-memory-utilization", min=0.1, max=0.99, help="As vLLM's.")
    ] = 0.9,
    batched_tokens: Annotated[
        int, typer.Option("--max-num-batched-tokens", min=0, max=1_000_000, help="As vLLM's; 0: its default.")
    ] = 0,
    max_seqs: Annotated[
        int, typer.Option("--max-num-seqs", min=0, max=100_000, help="As vLLM's; 0: its default.")
    ] = 0,
    hybrid: Annotated[
        bool, typer.Option("--hybrid-kv/--no-hybrid-kv", help="vLLM's hybrid KV cache manager, for sliding windows.")
    ] = True,
    facility: Annotated[
        Path | None,
        typer.Option("--facility", help="Facility file; --gpu may name its types too, with their own prices."),
    ] = None,
    profile: Annotated[
        list[Path] | None,
        typer.Option("--profile", help="CSV of measurements that correct the rates; docs/sizing.md has its columns."),
    ] = None,
    deployment: Annotated[
        str, typer.Option("--deployment", help="Correct the rates by what agents measure of this one now.")
    ] = "",
    registry: Annotated[
        str, typer.Option("--registry", help="With --deployment: host:port of a registry; several by commas.")
    ] = "",
    check: Annotated[
        bool, typer.Option("--check", help="Replay a made load in simulated time, with as many and with fewer.")
    ] = False,
    output: FormatOption = Format.TEXT,
) -> None:
    """How many GPUs and replicas a model needs for a load within an SLO, in which layout, and what binds.

    From the model's config.json alone: memory by terms, prefill and decode rates by roofline, replicas by queueing.
    docs/sizing.md has every formula and the errors of its predictions beside published benchmarks.
    """
    from stoker.cli.plan import measuring, sizing_report
    from stoker.planner import catalogue, checking, facility_file, machines, model_config, profiles
    from stoker.planner.core.sizing import search, workload
    from stoker.planner.core.sizing.memory import Engine

    out = Output(output)
    known = facility_file.read(facility) if facility else catalogue.load()
    hosts = tuple(machines.machine_of(known, name) for name in dict.fromkeys(gpu))
    if objective is Objective.COST and not all(host.cost_per_hour for host in hosts):
        raise InvalidRequest.field(
            "--objective",
            "no price of these is known; name a --facility whose types have cost_per_hour, or choose gpus or energy",
        )
    read = model_config.read(model, kv_dtype=kv_dtype)
    settings: dict[str, Any] = {"utilization": utilization, "hybrid": hybrid}
    settings |= {"batched_tokens": batched_tokens} if batched_tokens else {}
    settings |= {"max_seqs": max_seqs} if max_seqs else {}
    question = search.Sizing(
        read,
        hosts,
        workload.Workload(rps, isl, osl, isl_cv**2, osl_cv**2, arrival_cv**2, hit_rate),
        workload.Slo(slo_ttft_ms / 1e3, slo_itl_ms / 1e3 or None, percentile / 100.0),
        search.Limits(max_gpus, split is Split.ANY, tp or None, pp or None, dp or None),
        search.Objective(objective.value),
        engines={host.gpu.name: replace(Engine.on(host.gpu), **settings) for host in hosts},
    )
    with out.progress() as progress:
        measured = [each for path in profile or [] for each in profiles.read(path)]
        if deployment:
            measured += measuring.of_deployment(deployment, registry, known, progress.say)
        question, used = profiles.corrected(question, measured) if measured else (question, {})
        answer = question.answer()
        checked = checking.check(answer.best, said=progress.say) if check and answer.best else None
    report = sizing_report.Report(question, answer, used, checked)
    out.result(report.value(), *report.shown())
    if answer.best is None:
        raise typer.Exit(errors.FAILED)
