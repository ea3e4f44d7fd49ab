"""`stoker plan validate | schema | catalogue | import | drift`: the facility file, and what it is made from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from stoker.cli.output import Format, FormatOption, Output, or_dash
from stoker.common.errors import NotFound
from stoker.planner import catalogue as types
from stoker.planner import facility_file
from stoker.planner.core.facility.values import Facility
from stoker.planner.facility_schema import NodeTypeEntry, RackTypeEntry, Source

FacilityArgument = Annotated[
    Path, typer.Argument(metavar="FACILITY", help="Facility file; see examples/facilities/.")
]


def add_to(app: typer.Typer) -> None:
    """Register the verbs."""
    app.command(epilog="Example: stoker plan validate examples/facilities/two-rows.yaml")(validate)
    app.command(epilog="Example: stoker plan schema > facility.schema.json")(schema)
    app.command(epilog="Example: stoker plan catalogue h100")(catalogue)


def validate(facility: FacilityArgument, output: FormatOption = Format.TEXT) -> None:
    """Read a facility file and say what is in it, or every mistake with its line."""
    out = Output(output)
    value = _counts(facility_file.read(facility))
    out.result(value, f"{facility} is a facility.", _pairs(value))


def schema() -> None:
    """Write the JSON schema of facility files, for editors that check while one types."""
    Output(Format.JSON).result(facility_file.schema())


def catalogue(
    only: Annotated[str, typer.Argument(help="Only types with this in their name.", show_default=False)] = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Show GPU, node and rack types that facility files can name, with the source of their figures."""
    out = Output(output)
    known, file = types.load(), types.file()
    gpus = [
        {
            "gpu": name,
            "memory_gb": gpu.memory / 1e9,
            "memory_gb_per_s": gpu.memory_bandwidth / 1e9,
            "tflops": {kind: rate / 1e12 for kind, rate in gpu.flops.items()},
            "scale_up_gb_per_s": gpu.scale_up_bandwidth / 1e9,
            "max_w": gpu.max_power,
            **_source(file.gpu_types[name].source, file.sources),
        }
        for name, gpu in known.gpu_types.items()
        if only in name
    ]
    nodes = [
        {
            "node_type": name,
            "gpus": node.gpus,
            "gpu": node.gpu,
            "height_u": node.height_u,
            "weight_kg": node.weight_kg,
            "max_kw": node.max_power / 1e3,
            "fabric_ports": node.fabric_ports,
            "port_gbit_per_s": node.port_rate * 8 / 1e9,
            **_source(_entry(file.node_types, name).source, file.sources),
        }
        for name, node in known.node_types.items()
        if only in name
    ]
    racks = [
        {
            "rack_type": name,
            "nodes": dict(rack.nodes),
            "height_u": rack.height_u,
            "base_kw": rack.base_power / 1e3,
            **_source(_entry(file.rack_types, name).source, file.sources),
        }
        for name, rack in known.rack_types.items()
        if only in name
    ]
    value = {"gpu_types": gpus, "node_types": nodes, "rack_types": racks}
    if not (gpus or nodes or racks):
        raise NotFound(f"no type has {only!r} in its name; `stoker plan catalogue` shows all")
    out.result(value, *(_table(rows) for rows in (gpus, nodes, racks) if rows))


def _counts(facility: Facility) -> dict[str, Any]:
    supplies = [site.supply for site in facility.sites.values()]
    return {
        "facility": facility.name,
        "sites": len(facility.sites),
        "regions": len({site.region for site in facility.sites.values() if site.region}),
        "racks": len(facility.racks),
        "nodes": len(facility.nodes),
        "gpus": sum(len(node.gpus) for node in facility.nodes.values()),
        "scale_up_domains": len({g.scale_up for n in facility.nodes.values() for g in n.gpus if g.scale_up}),
        "feeds": len(facility.feeds),
        "switches": len(facility.switches),
        "cables": sum(link.count for link in facility.links),
        "supply_kw": None if not supplies or None in supplies else sum(s or 0 for s in supplies) / 1e3,
        "nodes_max_kw": sum(facility.node_types[node.type].max_power for node in facility.nodes.values()) / 1e3,
    }


def _entry(entries: Mapping[str, Any], name: str) -> NodeTypeEntry | RackTypeEntry:
    found: NodeTypeEntry | RackTypeEntry = entries[name]
    return found


def _source(key: str, sources: Mapping[str, Source]) -> dict[str, str | None]:
    source = sources.get(key)
    return {"source": source.title if source else None, "source_date": source.date if source else None}


def _pairs(value: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for key, each in value.items():
        table.add_row(key, or_dash(each))
    return table


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in rows[0]:
        table.add_column(
            column, overflow="fold", justify="right" if isinstance(rows[0][column], int | float) else "left"
        )
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key} {each:g}" for key, each in value.items())
    return f"{value:g}" if isinstance(value, float) else or_dash(value)
