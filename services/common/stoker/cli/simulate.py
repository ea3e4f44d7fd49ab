"""`stoker simulate`: what a policy would have done with a trace."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from stoker.cli.output import Format, FormatOption, Output, or_dash
from stoker.common.errors import InvalidRequest

if TYPE_CHECKING:
    from stoker.simulate.figures import Figures, Run
    from stoker.simulate.ledger import Ledger
    from stoker.simulate.settings import Settings
    from stoker.simulate.source import Trace as Read
    from stoker.simulate.source import Wanted
    from stoker.simulate.traffic import Scale

_QUIET_S = 2.0
_POLICIES = ("concurrency", "slo", "forecast")


class Trace(StrEnum):
    """What the file holds."""

    AZURE = "azure"
    MOONCAKE = "mooncake"
    STOKER = "stoker"


class Victims(StrEnum):
    """Who goes when the count falls."""

    WARM = "warm"
    NEWEST = "newest"
    RANDOM = "random"


class Load(StrEnum):
    """Loads that are made, not read."""

    STEADY = "steady"
    STEP = "step"
    RAMP = "ramp"
    BURST = "burst"
    DIURNAL = "diurnal"
    FLAPPING = "flapping"
    DAILY_STEP = "daily_step"
    TENANTS = "tenants"


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(
        epilog="Example: stoker simulate --trace AzureLLMInferenceTrace_code.csv --format azure --load 4 "
        "--policy slo --policy concurrency:target=6 --startup-s 90 --plot out.svg"
    )(simulate)


def simulate(
    trace: Annotated[
        list[Path] | None,
        typer.Option("--trace", help="File to replay; several of a router's recordings, one option each."),
    ] = None,
    form: Annotated[
        Trace | None,
        typer.Option("--format", help="azure: CSV; mooncake: JSON lines; stoker: what `record.path` has written."),
    ] = None,
    generate: Annotated[Load | None, typer.Option("--generate", help="A made load in place of a trace.")] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            help="Once per policy: fixed:N, concurrency, saturation, slo or forecast, with settings as in "
            "concurrency:target=6,pace.settle_s=300. Default: concurrency, slo and forecast.",
        ),
    ] = None,
    replicas: Annotated[
        int, typer.Option("--replicas", min=0, max=10_000, help="Serving when it begins; 0: the least.")
    ] = 0,
    least: Annotated[int, typer.Option("--replicas-min", min=0, max=10_000, help="Never fewer.")] = 1,
    most: Annotated[int, typer.Option("--replicas-max", min=1, max=10_000, help="Never more.")] = 100,
    startup_s: Annotated[
        float,
        typer.Option(
            "--startup-s", min=0.0, max=86_400.0, help="Seconds from a decision to a replica that serves (median)."
        ),
    ] = 90.0,
    startup_spread: Annotated[
        float, typer.Option("--startup-spread", min=0.0, max=2.0, help="Log-normal spread of these; 0: all alike.")
    ] = 0.0,
    slo_ttft_ms: Annotated[
        float, typer.Option("--slo-ttft-ms", min=1.0, max=3.6e6, help="First token within.")
    ] = 2_000.0,
    slo_itl_ms: Annotated[
        float,
        typer.Option("--slo-itl-ms", min=0.0, max=6e4, help="A request's mean time between tokens within; 0: any."),
    ] = 200.0,
    speed: Annotated[float, typer.Option("--speed", min=0.01, max=1_000.0, help="Arrivals so much faster.")] = 1.0,
    load: Annotated[
        float, typer.Option("--load", min=0.01, max=1_000.0, help="So many times as many requests, the same pattern.")
    ] = 1.0,
    hours: Annotated[
        float, typer.Option("--hours", min=0.0, max=10_000.0, help="Repeat the trace until so long; 0: once.")
    ] = 0.0,
    price: Annotated[
        float, typer.Option("--price", min=0.0, max=1e9, help="Of a replica-hour, in any currency.")
    ] = 1.0,
    kv_blocks: Annotated[
        int, typer.Option("--kv-blocks", min=0, max=100_000_000, help="KV blocks each; 0: the hardware's.")
    ] = 0,
    prefill_rate: Annotated[
        float, typer.Option("--prefill-rate", min=0.0, max=1e9, help="Uncached tokens/s each; 0: the hardware's.")
    ] = 0.0,
    model: Annotated[str, typer.Option("--model", help="Recorded model. Default: the only one.")] = "",
    mtbf_hours: Annotated[
        float,
        typer.Option(
            "--mtbf-hours", min=0.0, max=1e6, help="Mean time until a replica dies and starts anew; 0: never."
        ),
    ] = 0.0,
    victims: Annotated[
        Victims,
        typer.Option(
            "--victims",
            help="Who goes: warm, as the scaler chooses (whose cache and work are worth least, successors warmed); "
            "to compare: the newest, or by lot.",
        ),
    ] = Victims.WARM,
    seed: Annotated[int, typer.Option("--seed", help="Seed of what is left to chance.")] = 1,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw demand, replicas and SLO into this SVG.")] = None,
    output: FormatOption = Format.TEXT,
) -> None:
    """Replay a trace over simulated replicas that the real scaler starts and stops and the real router fills.

    Nothing is started and nothing asked. The same trace, settings and seed give the same figures.
    """
    from stoker.simulate import plot as plots  # slow to import
    from stoker.simulate.policies import parsed
    from stoker.simulate.run import simulate as run
    from stoker.simulate.settings import Objective, Settings, Starting
    from stoker.simulate.settings import Victims as Ways
    from stoker.simulate.source import Wanted
    from stoker.simulate.traffic import Scale

    out = Output(output)
    if most < least:
        raise InvalidRequest.field("--replicas-max", f"{most} is below --replicas-min {least}; raise it")
    if plot is not None:
        _refuse_unwritable(plot)
    scale = Scale(speed, load, hours=hours)
    read = _read(trace or [], form, generate, Wanted(model, kv_blocks, prefill_rate), scale, seed)
    objective = Objective(slo_ttft_ms / 1e3, slo_itl_ms / 1e3 or None)
    settings = Settings(
        hardware=read.hardware,
        objective=objective,
        starting=Starting(startup_s, startup_spread),
        least=least,
        most=most,
        initial=min(most, max(replicas or least, least)),
        price_per_hour=price,
        mtbf_s=3_600.0 * mtbf_hours,
        victims=Ways(victims.value),
        seed=seed,
    )
    contenders = [parsed(text, objective) for text in dict.fromkeys(policy or _POLICIES)]
    runs = []
    with out.progress() as progress:
        for contender in contenders:
            said = _progress(progress.say, contender.name)
            runs.append(run(read.jobs, contender, settings, said=said))
    if plot is not None:
        title = f"{read.name}, start-up {startup_s:g} s"
        _write(plot, plots.drawn(title, _objective(settings), runs))
    rows = [asdict(each.figures) | {"changes": _changes(each)} for each in runs]
    out.result({"simulated": _simulated(read, settings), "rows": rows}, *_tables(read, settings, runs))
    if plot is not None:
        out.note(f"drawn into {plot}")


def _read(
    files: Sequence[Path], form: Trace | None, generate: Load | None, wanted: Wanted, scale: Scale, seed: int
) -> Read:
    from stoker.simulate import source

    if (generate is None) == (not files):
        raise InvalidRequest.field("--trace", "name a trace with its --format, or a load with --generate")
    if generate is not None:
        return source.generated(generate.value, wanted, scale, seed)
    if form is None:
        raise InvalidRequest.field("--format", f"say what {files[0]} is: azure, mooncake or stoker")
    return source.read(form.value, files, wanted, scale, seed)


def _progress(say: Callable[[str], None], what: str) -> Callable[[Ledger], None]:
    """Say how far a simulation is, once it has taken a while."""
    began = time.monotonic()

    def said(ledger: Ledger) -> None:
        if time.monotonic() - began > _QUIET_S:
            say(f"{what}: {ledger.arrived:,} requests, {ledger.clock.now / 60:,.0f} minutes of the trace")

    return said


def _refuse_unwritable(path: Path) -> None:
    """Before a simulation that may take long, not after it."""
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidRequest.field("--plot", f"cannot write {path}; name a file in a folder that can be written")


def _write(path: Path, drawing: str) -> None:
    try:
        path.write_text(drawing)
    except OSError as error:
        raise InvalidRequest.field("--plot", f"cannot write {path}: {error.strerror}; name another file") from error


def _changes(run: Run) -> list[dict[str, Any]]:
    return [
        {
            "at_s": round(change.at, 3),
            "from": change.before,
            "to": change.after,
            "because": [{"reason": each.reason.value, **_finite(each.numbers)} for each in change.because],
            "victims": [
                {"replica": name, **_finite({"lost_tokens": c.lost_tokens, "lost_s": c.lost_s, "drain_s": c.drain_s})}
                for name, c in change.costs.items()
            ],
        }
        for change in run.changes
    ]


def _finite(numbers: Any) -> dict[str, float | None]:
    """JSON knows no infinity."""
    return {
        name: round(value, 4) if value is not None and abs(value) < float("inf") else None
        for name, value in numbers.items()
    }


def _simulated(read: Read, settings: Settings) -> dict[str, Any]:
    return {
        "trace": read.name,
        "hardware": asdict(settings.hardware),
        "startup_s": settings.starting.median_s,
        "startup_spread": settings.starting.spread,
        "slo_ttft_ms": round(1e3 * settings.objective.ttft_s, 3),
        "slo_itl_ms": round(1e3 * settings.objective.itl_s, 3) if settings.objective.itl_s else None,
        "replicas_min": settings.least,
        "replicas_max": settings.most,
        "replicas": settings.initial,
        "mtbf_hours": settings.mtbf_s / 3_600.0,
        "victims": settings.victims.value,
        "seed": settings.seed,
    }


def _objective(settings: Settings) -> str:
    itl = settings.objective.itl_s
    return f"TTFT {1e3 * settings.objective.ttft_s:,.0f} ms" + (f" and ITL {1e3 * itl:,.0f} ms" if itl else "")


def _tables(read: Read, settings: Settings, runs: Sequence[Run]) -> list[RenderableType]:
    hardware = settings.hardware
    first = runs[0]
    head = (
        f"{read.name}: {first.figures.requests:,} requests in {first.seconds / 60:,.0f} minutes; "
        f"{_objective(settings)}; start-up {settings.starting.median_s:g} s\n"
        f"simulated: {hardware.kv_blocks:,} blocks of {hardware.block_size} tokens, "
        f"{hardware.prefill_rate:,.0f} prompt tokens/s, {1e3 * hardware.decode_s:.1f} ms a decode step"
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("policy", overflow="fold")
    for column in (
        "within SLO",
        "replica-hours",
        "cost",
        "mean",
        "most",
        "scalings",
        "moved back",
        "hit rate",
        "after fewer",
        "TTFT p50",
        "p95",
        "p99",
        "ITL p50",
        "refused",
    ):
        table.add_column(column, justify="right")
    for run in runs:
        table.add_row(*_cells(run.figures))
    return [head, table]


def _cells(row: Figures) -> list[str | Text]:
    return [
        row.policy,
        or_dash(row.attainment, "{:.2%}"),
        f"{row.replica_hours:,.2f}",
        f"{row.cost:,.2f}",
        f"{row.replicas_mean:.1f}",
        str(row.replicas_most),
        f"+{row.scale_ups} −{row.scale_downs}",
        str(row.thrashing),
        or_dash(row.hit_rate, "{:.3f}"),
        or_dash(row.hit_rate_after, "{:.3f}"),
        or_dash(row.ttft_p50_ms, "{:,.0f} ms"),
        or_dash(row.ttft_p95_ms, "{:,.0f} ms"),
        or_dash(row.ttft_p99_ms, "{:,.0f} ms"),
        or_dash(row.itl_p50_ms, "{:,.0f} ms"),
        Text(f"{row.refused:,}", style="red" if row.refused else ""),
    ]
