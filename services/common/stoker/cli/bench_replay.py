"""`stoker bench replay`: recorded decisions under other settings, in simulated time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table

from stoker.cli.output import Format, FormatOption, Output, or_dash
from stoker.common.config import load
from stoker.common.errors import InvalidRequest

if TYPE_CHECKING:
    from stoker.bench.recordings import Figures, Recording
    from stoker.router.core import RoutingConfig

_QUIET_S = 2.0
_ROUTING = "routing."


class Trace(StrEnum):
    """What the files hold."""

    RECORD = "record"
    MOONCAKE = "mooncake"


class Policy(StrEnum):
    """Who routes."""

    STOKER = "stoker"
    ROUND_ROBIN = "round_robin"


def replay(
    files: Annotated[list[Path], typer.Argument(help="Files that `record.path` has written, rotated ones as well.")],
    form: Annotated[
        Trace, typer.Option("--format", help="record: decisions of a router; mooncake: a trace of requests.")
    ] = Trace.RECORD,
    policy: Annotated[
        list[Policy] | None, typer.Option("--policy", help="Once per policy to replay. Default: both.")
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="routing.KEY=VALUE, another setting of the router; shown beside the defaults."),
    ] = None,
    model: Annotated[str, typer.Option("--model", help="Recorded model. Default: the only one.")] = "",
    replicas: Annotated[int, typer.Option("--replicas", min=0, max=10_000, help="Replicas; 0: as recorded.")] = 0,
    kv_blocks: Annotated[int, typer.Option("--kv-blocks", min=0, help="KV blocks each; 0: as recorded.")] = 0,
    prefill_rate: Annotated[
        float, typer.Option("--prefill-rate", min=0.0, help="Uncached tokens/s each; 0: as recorded.")
    ] = 0.0,
    speed: Annotated[float, typer.Option("--speed", min=0.01, max=100.0, help="Arrivals so much faster.")] = 1.0,
    requests: Annotated[int, typer.Option("--requests", min=0, help="The first so many; 0 for all.")] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of what is left to chance.")] = 1,
    output: FormatOption = Format.TEXT,
) -> None:
    """Replay recorded decisions through the router's own core over simulated replicas with empty caches.

    Nothing is started and nothing asked. The same files, settings and seed give the same figures.
    """
    from stoker.bench.recordings import Replays, Wanted, mooncake, recorded  # slow to import

    out = Output(output)
    settings = tuple(setting or ())
    changed = _changed(settings)
    wanted = Wanted(replicas, kv_blocks, prefill_rate or None, speed, requests)
    recording = mooncake(files, wanted) if form is Trace.MOONCAKE else recorded(files, model, wanted)
    replays = Replays(recording, seed)
    runs = [(p.value, recording.config, "") for p in dict.fromkeys(policy or list(Policy))]
    if changed:
        runs.append((Policy.STOKER.value, replace(recording.config, **changed), " ".join(settings)))
    rows = [recording.told] if recording.told is not None else []
    with out.progress() as progress:
        for name, config, said in runs:
            sent = _progress(progress.say, f"{name} {said}".strip(), len(recording.jobs))
            rows.append(replays.run(name, config, said, sent=sent))
    pooled = round(replays.pooled_hit_rate, 4)
    value = {"simulated": _simulated(recording, seed), "pooled_hit_rate": pooled, "rows": [asdict(r) for r in rows]}
    out.result(value, *_tables(recording, rows, pooled))


def _changed(settings: Sequence[str]) -> dict[str, Any]:
    """The routing settings that were named, checked as the router would."""
    from stoker.router.config import RouterConfig

    for each in settings:
        if not each.startswith(_ROUTING):
            raise InvalidRequest.field("--set", f"{each}: only routing.… plays a part here")
    routing: RoutingConfig = load(RouterConfig, None, settings).routing
    names = [each.removeprefix(_ROUTING).partition("=")[0].strip() for each in settings]
    return {name: getattr(routing, name) for name in names}


def _progress(say: Callable[[str], None], what: str, total: int) -> Callable[[int], None]:
    """Say how far a replay is, once it has taken a while."""
    began = time.monotonic()

    def sent(count: int) -> None:
        if count % 64 == 0 and time.monotonic() - began > _QUIET_S:
            say(f"{what}: {count} of {total} requests")

    return sent


def _simulated(recording: Recording, seed: int) -> dict[str, object]:
    hardware = recording.hardware
    return {
        "replicas": list(recording.replicas),
        "block_size": hardware.block_size,
        "kv_blocks": hardware.kv_blocks,
        "prefill_rate": hardware.prefill_rate,
        "decode_ms": round(1e3 * hardware.decode_s, 3),
        "seed": seed,
    }


def _tables(recording: Recording, rows: Sequence[Figures], pooled: float) -> list[RenderableType]:
    hardware = recording.hardware
    head = (
        f"simulated: {len(recording.replicas)} × {hardware.kv_blocks} blocks of {hardware.block_size} tokens, "
        f"{hardware.prefill_rate:,.0f} prompt tokens/s, "
        + (f"{1e3 * hardware.decode_s:.1f} ms a decode step" if hardware.decode_s else "no decoding")
        + f"; one pooled LRU cache would hit {pooled:.3f}"
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("routed by")
    for column in ("hit rate", "TTFT p50", "TTFT p99", "requests/s", "moved", "over bound", "requests"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row.policy} {row.settings}".strip(),
            or_dash(row.hit_rate, "{:.3f}"),
            or_dash(row.ttft_p50_ms, "{:,.0f} ms"),
            or_dash(row.ttft_p99_ms, "{:,.0f} ms"),
            f"{row.requests_per_s:.2f}",
            or_dash(row.moved),
            or_dash(row.over_bound),
            str(row.requests),
        )
    return [head, table]
