"""`stoker plan capacity`: what a facility can power, cool, hold and connect."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table

from stoker.cli.output import Format, FormatOption, Output, counted, or_dash
from stoker.cli.plan import drawings
from stoker.cli.plan.drawings import HtmlOption, SvgOption

if TYPE_CHECKING:
    from stoker.planner.core.envelope import Capacity
    from stoker.planner.core.facility.values import Facility
    from stoker.planner.core.limits import Limit
    from stoker.planner.core.sizing.workload import Slo, Workload
    from stoker.planner.drawing.scene import Scene

_RPS = 100.0
"""Load by which types are compared: enough for many replicas, so that none is half empty."""


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(epilog="Example: stoker plan capacity examples/facilities/rack-15kw.yaml --html racks.html")(capacity)


def capacity(
    facility: Annotated[Path, typer.Argument(metavar="FACILITY", help="Facility file.", show_default=False)],
    fill: Annotated[
        str,
        typer.Option(
            "--fill", help="Node or rack type to fill it with, in place of what the file says.", show_default=False
        ),
    ] = "",
    model: Annotated[
        Path | None,
        typer.Option(
            "--model", help="A model's config.json: tokens that each type would generate.", show_default=False
        ),
    ] = None,
    isl: Annotated[float, typer.Option("--isl", min=1, max=1e7, help="With --model: prompt tokens, mean.")] = 4_000,
    osl: Annotated[float, typer.Option("--osl", min=1, max=1e7, help="With --model: generated tokens.")] = 500,
    slo_ttft_ms: Annotated[
        float, typer.Option("--slo-ttft-ms", min=1, max=3.6e6, help="With --model: first token within.")
    ] = 1_000,
    slo_itl_ms: Annotated[
        float, typer.Option("--slo-itl-ms", min=0, max=6e4, help="With --model: time between tokens; 0: any.")
    ] = 50,
    svg: SvgOption = None,
    html: HtmlOption = None,
    output: FormatOption = Format.TEXT,
) -> None:
    """Fill a facility from its envelope down: racks, nodes and GPUs, what binds, and every node type side by side.

    Counts what stands there and what its `fill` and its envelopes have room for, after the loss of a feed where the
    racks shall survive that.
    """
    from stoker.planner import facility_file
    from stoker.planner.core import envelope
    from stoker.planner.core.sizing.workload import Slo, Workload

    out = Output(output)
    given = facility_file.read(facility)
    found = envelope.capacity(given, fill)
    rates: Mapping[str, float] = {}
    if model is not None:
        with out.progress() as progress:
            if sys.stderr.isatty():
                progress.say("finding what each GPU type makes of this model")
            slo = Slo(slo_ttft_ms / 1e3, slo_itl_ms / 1e3 or None, 0.95)
            rates = _rates(given, found, model, Workload(_RPS, isl, osl, 0.25, 0.25), slo)
    tried = [envelope.capacity(envelope.instead(given), name) for name in envelope.candidates(given)]
    drawings.write(out, lambda: _scene(given, found), svg, html)
    value = _json(given, found, rates) | {"what_if": [_row(each, rates) for each in tried]}
    out.result(value, *_shown(given, found, tried, rates))


def _scene(facility: Facility, found: Capacity) -> Scene:
    from stoker.planner.core.envelope import in_words
    from stoker.planner.drawing.scene import Scene

    notes = [_headline(facility, found).removeprefix(f"{facility.name}: ")]
    if found.binding is not None:
        notes.append(f"binds: {in_words(found.binding, found.fill)}")
    return Scene.of_capacity(found, facility, tuple(notes))


def _rates(facility: Facility, found: Capacity, model: Path, workload: Workload, slo: Slo) -> Mapping[str, float]:
    """Tokens per second of one GPU of each type that is told of."""
    from stoker.planner import model_config
    from stoker.planner.core import envelope
    from stoker.planner.yields import yields

    names = dict.fromkeys(node.type for node in found.facility.nodes.values())
    for name in envelope.candidates(facility):
        whole = facility.rack_types.get(name)
        names |= dict.fromkeys(whole.nodes if whole is not None else (name,))
    return yields(facility, names, model_config.read(model), workload, slo)


def _json(facility: Facility, found: Capacity, rates: Mapping[str, float]) -> dict[str, Any]:
    return {"facility": facility.name, **_row(found, rates), "limits": [_limit(limit) for limit in found.limits]}


def _row(found: Capacity, rates: Mapping[str, float]) -> dict[str, Any]:
    from stoker.planner.core.envelope import in_words

    bound = found.binding
    types = found.facility.node_types
    memory = [
        node_type.gpus * found.facility.gpu_types[node_type.gpu].memory / 1e9
        for node in found.facility.nodes.values()
        if (node_type := types[node.type]).gpu in found.facility.gpu_types
    ]
    return {
        "fill": found.fill or None,
        "racks": found.racks,
        "rack_kw_total": found.power / 1e3,
        "nodes": found.nodes,
        "nodes_added": found.added,
        "gpus": found.gpus,
        "gpu_memory_gb": round(sum(memory), 3),
        "nodes_per_rack": found.nodes_per_rack,
        "gpus_per_rack": found.gpus_per_rack,
        "u_used": found.u_used,
        "binding": bound.kind.value if bound else None,
        "binding_scope": bound.scope.value if bound else None,
        "binding_at": bound.at if bound else None,
        "why": in_words(bound, found.fill) if bound else None,
        "cost_per_hour": _rounded(found.cost_per_hour),
        "energy_per_hour": _rounded(found.energy_per_hour),
        "tokens_per_s": _rounded(found.tokens_per_s(rates)),
        "tokens_per_joule": _rounded(found.tokens_per_joule(rates)),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _limit(limit: Limit) -> dict[str, Any]:
    from stoker.planner.core.limits import UNITS

    unit, scale = (UNITS[limit.kind], 1) if UNITS[limit.kind] != "W" else ("kW", 1e3)
    return {
        "limit": limit.kind.value,
        "scope": limit.scope.value,
        "at": limit.at,
        "unit": unit,
        "available": round(limit.available / scale, 4),
        "used": round(limit.used / scale, 4),
        "left": round(limit.left / scale, 4),
        "after_loss_of": limit.lost or None,
        "room_for": limit.allows if limit.each > 0 else None,
    }


def _shown(
    facility: Facility, found: Capacity, tried: Sequence[Capacity], rates: Mapping[str, float]
) -> list[RenderableType]:
    from stoker.planner.core.envelope import amount

    bound = _row(found, rates)
    limits = _table("limit", "of", "has", "used", "left", "room for")
    for limit in found.limits:
        after = f" after the loss of {limit.lost}" if limit.lost else ""
        figures = (limit.available, limit.used, limit.left)
        room = f"{limit.allows:,} more" if limit.each > 0 else None
        limits.add_row(
            f"{limit.kind.value}{after}",
            f"{limit.scope.value} {limit.at}",
            *(amount(limit.kind, figure) for figure in figures),
            or_dash(room),
        )
    compared = _compared([(each.fill, _row(each, rates)) for each in tried])
    return [_headline(facility, found), *([f"binds: {bound['why']}"] if bound["why"] else []), limits, "", compared]


def _compared(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> Table:
    """Types side by side: those that come to the same share a line, and what is known of none has no column."""
    columns = {
        "racks": ("racks", "{:,}"),
        "nodes": ("nodes", "{:,}"),
        "nodes_per_rack": ("a rack", "{:,}"),
        "gpus": ("GPUs", "{:,}"),
        "gpu_memory_gb": ("GPU memory", "{:,.0f} GB"),
        "rack_kw_total": ("power", "{:,.1f} kW"),
        "cost_per_hour": ("cost/h", "{:,.2f}"),
        "energy_per_hour": ("energy/h", "{:,.2f}"),
        "tokens_per_s": ("tokens/s", "{:,.0f}"),
        "tokens_per_joule": ("tokens/J", "{:.3f}"),
    }
    known = {key: told for key, told in columns.items() if any(row[key] is not None for _, row in rows)}
    lines: dict[tuple[str, ...], list[str]] = {}
    for name, row in rows:
        binds = f"{row['binding']} of the {row['binding_scope']}" if row["binding"] else "–"
        cells = tuple(or_dash(row[key], form) for key, (_, form) in known.items())
        lines.setdefault((*cells, binds), []).append(name)
    table = _table("filled with", *(head for head, _ in known.values()), "binds")
    for cells, names in lines.items():
        table.add_row(", ".join(names), *cells)
    return table


def _headline(facility: Facility, found: Capacity) -> str:
    return (
        f"{facility.name}: {counted(found.racks, 'rack')} with {counted(found.nodes, 'node')} and "
        f"{counted(found.gpus, 'GPU')}; {found.power / 1e3:,.6g} kW at the most"
        + (f"; {counted(found.added, 'node')} not there yet (filled with {found.fill})" if found.added else "")
    )


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first)
    for column in others:
        table.add_column(column, justify="left" if column in ("of", "binds") else "right")
    return table
