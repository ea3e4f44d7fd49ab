"""`stoker plan validate | schema | catalogue | import | drift`: the facility file, and what it is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from stoker.cli.addresses import Addresses, RegistryOption, secured
from stoker.cli.fleet import Fleet, Registries
from stoker.cli.loop import run
from stoker.cli.output import Format, FormatOption, Output, Verbatim, or_dash
from stoker.common import yaml_file
from stoker.common.errors import InvalidRequest, NotFound

if TYPE_CHECKING:
    from stoker.planner.core.facility.observed import ObservedNode
    from stoker.planner.core.facility.values import Facility
    from stoker.planner.facility_schema import Published, RackTypeEntry, Source
    from stoker.planner.importers.nvidia_topo import Matrix

FacilityArgument = Annotated[
    Path, typer.Argument(metavar="FACILITY", help="Facility file; see examples/facilities/.")
]


class Form(StrEnum):
    """What the file is."""

    TOPOGRAPH = "topograph"
    SLURM = "slurm"
    NETBOX = "netbox"
    NVIDIA_TOPO = "nvidia-topo"
    LLDP = "lldp"


def add_to(app: typer.Typer) -> None:
    """Register the verbs."""
    app.command(epilog="Example: stoker plan validate examples/facilities/two-rows.yaml")(validate)
    app.command(epilog="Example: stoker plan schema > facility.schema.json")(schema)
    app.command(epilog="Example: stoker plan catalogue h100")(catalogue)
    app.command("import", epilog="Example: stoker plan import --format slurm /etc/slurm/topology.conf > fabric.yaml")(
        import_
    )
    app.command(epilog="Example: stoker plan drift facility.yaml --registry reg-1:7310 -o json")(drift)


def validate(
    facility: FacilityArgument,
    whole: Annotated[
        bool, typer.Option("--whole", help="Write it as one file, with all that it includes put in.")
    ] = False,
    output: FormatOption = Format.TEXT,
) -> None:
    """Read a facility file and say what is in it and what is doubtful, or every mistake with its line."""
    from stoker.planner import facility_file  # slow to import, as all that reads files
    from stoker.planner.core.doubts import doubts

    out = Output(output)
    if whole:
        text = facility_file.whole(facility)
        out.result({"text": text}, Verbatim(text.rstrip("\n")))
        return
    read = facility_file.read(facility)
    counts, doubtful = _counts(read), doubts(read)
    shown = [Text(f"doubtful: {each}", style="yellow") for each in doubtful]
    out.result(counts | {"doubts": doubtful}, f"{facility} is a facility.", _pairs(counts), *shown)


def schema() -> None:
    """Write the JSON schema of facility files, for editors that check while one types."""
    from stoker.planner import facility_file

    Output(Format.JSON).result(facility_file.schema())


def catalogue(
    only: Annotated[str, typer.Argument(help="Only types with this in their name.", show_default=False)] = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Show GPU, node and rack types that facility files can name, with the source of their figures."""
    from stoker.planner import catalogue as types

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
            **_published(file.gpu_types[name], file.sources),
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
            **_published(file.node_types[name], file.sources),
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
            **_published(file.rack_types[name], file.sources),
        }
        for name, rack in known.rack_types.items()
        if only in name
    ]
    value = {"gpu_types": gpus, "node_types": nodes, "rack_types": racks}
    if not (gpus or nodes or racks):
        raise NotFound(f"no type has {only!r} in its name; `stoker plan catalogue` shows all")
    shown = [[{key: row[key] for key in row if key != "source_of"} for row in rows] for rows in value.values()]
    out.result(value, *(_table(rows) for rows in shown if rows))


def import_(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="What the other tool has written; of lldp, a file for each host."),
    ],
    form: Annotated[
        Form,
        typer.Option(
            "--format",
            help="topograph: its graph; slurm: topology.conf; netbox: racks and devices, JSON or CSV; "
            "nvidia-topo: nvidia-smi topo -m; lldp: lldpctl -f json.",
        ),
    ],
    node_type: Annotated[
        list[str] | None,
        typer.Option("--node-type", help="Type of all nodes; NAME=TYPE: of those called NAME there. Repeatable."),
    ] = None,
    gbit_per_s: Annotated[
        float, typer.Option("--gbit-per-s", min=0.001, max=1e6, help="Rate of a cable, where the file says none.")
    ] = 400.0,
    oversubscription: Annotated[
        float, typer.Option("--oversubscription", min=1.0, max=1000.0, help="Rate down to rate up, in a tree.")
    ] = 1.0,
    node: Annotated[
        str, typer.Option("--node", help="The host that the file is about (lldp, nvidia-topo). Default: its name.")
    ] = "",
    interfaces: Annotated[str, typer.Option("--interfaces", help="Only interfaces like this (lldp): ens*.")] = "*",
    output: FormatOption = Format.TEXT,
) -> None:
    """Write what another tool knows as a part of a facility file, which `include` there takes in.

    What the format does not say and was assumed is told on stderr.
    """
    from stoker.planner import facility_file, importers
    from stoker.planner.importers.part import Open

    out = Output(output)
    pairs = [text.rpartition("=") for text in node_type or ()]
    kinds = {name.strip(): kind.strip() for name, _, kind in pairs}
    left_open = Open(gbit_per_s, oversubscription, kinds, node, interfaces)
    if node and len(files) > 1:
        raise InvalidRequest.field("--node", "of several files each is about the host that it is named after")
    imported = importers.read(form.value, files, left_open)
    for note in imported.notes:
        out.note(f"note: {note}")
    out.result(msgspec.to_builtins(imported.part), Verbatim(facility_file.written(imported.part).rstrip("\n")))


def drift(
    facility: FacilityArgument,
    topo: Annotated[
        list[str] | None,
        typer.Option("--topo", help="NODE=FILE: what nvidia-smi topo -m wrote there, compared as well. Repeatable."),
    ] = None,
    registry: RegistryOption = "",
    output: FormatOption = Format.TEXT,
) -> None:
    """Compare a facility file with what agents report. Exit status 1 where they differ."""
    from stoker.planner import facility_file
    from stoker.planner.core.facility import drift as differences
    from stoker.planner.reported import observed

    out = Output(output)
    known = facility_file.read(facility)
    looked = dict(_looked(text) for text in topo or ())
    endpoints = Addresses.find(registry).require_registries()

    async def work() -> Fleet:
        async with Registries(endpoints, secured(registry)) as registries:
            return await registries.fleet()

    nodes = [_with_links(observed(node), looked) for node in run(work()).records.nodes]
    found = differences.drift(known, nodes)
    rows = [{"node": d.node, "kind": d.kind.value, "file": d.said, "agent": d.seen} for d in found]
    value = {"facility": known.name, "nodes_in_file": len(known.nodes), "nodes_reported": len(nodes), "drift": rows}
    same = f"{known.name}: what {len(nodes)} agents report is what the file says"
    out.result(value, _table(rows) if rows else same)
    if rows:
        raise typer.Exit(1)


def _looked(text: str) -> tuple[str, Matrix]:
    from stoker.planner.facility_file import MOST_BYTES
    from stoker.planner.importers import nvidia_topo

    node, equals, path = text.partition("=")
    if not equals:
        raise InvalidRequest.field("--topo", f"{text!r}: write it as NODE=FILE")
    return node, nvidia_topo.matrix(yaml_file.text(Path(path), MOST_BYTES), path)


def _with_links(node: ObservedNode, looked: Mapping[str, Matrix]) -> ObservedNode:
    matrix = looked.get(node.name)
    if matrix is None:
        return node
    return replace(node, scale_up_groups=matrix.scale_up, pcie_groups=matrix.pcie)


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


def _published(entry: Published | RackTypeEntry, sources: Mapping[str, Source]) -> dict[str, Any]:
    """Where its figures come from, and by name those that come from elsewhere."""
    others = {figure: _source(key, sources) for figure, key in entry.source_of.items()}
    return {**_source(entry.source, sources), "source_of": others}


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
