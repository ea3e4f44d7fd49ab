"""What may stand in a facility file. Units are in the names: kW, GB (10⁹ bytes), Gbit/s.

The descriptions are what `stoker plan schema` exports and docs/facility.md lists. A field that is None says nothing:
the type's value holds, or the default named.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct


def _said(description: str) -> Meta:
    return Meta(description=description)


def _bounded(description: str, most: float, least: float = 0) -> Meta:
    return Meta(description=description, ge=least, le=most)


_FROM = _said("where the figures come from, a key of `sources`")
_ELSEWHERE = _said("figures that come from elsewhere, by their name")


class _Entry(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A mapping in the file; an unknown key is a mistake."""


class Published(_Entry, kw_only=True):
    """Where a type's figures come from: keys of `sources`."""

    source: Annotated[str, _FROM] = ""
    source_of: Annotated[dict[str, str], _ELSEWHERE] = {}


class Source(_Entry, kw_only=True):
    """A document with figures."""

    title: Annotated[str, _said("what it is called")]
    url: Annotated[str, _said("where it is found")] = ""
    date: Annotated[str, _said("its date or that of reading it, YYYY-MM or YYYY-MM-DD")] = ""


class GpuTypeEntry(Published, kw_only=True):
    """One model of GPU."""

    memory_gb: Annotated[float, _bounded("memory, GB (10⁹ bytes)", 100_000)]
    memory_mib: (
        Annotated[float, _bounded("memory as the driver tells it, MiB; holds before memory_gb", 1e8)] | None
    ) = None
    memory_gb_per_s: Annotated[float, _bounded("memory bandwidth, GB/s", 1e6)]
    tflops: Annotated[
        dict[str, Annotated[float, Meta(gt=0, le=1e6)]], _said("dense rates by data type: bf16, fp8, fp4; TFLOP/s")
    ] = {}
    max_w: Annotated[int, _bounded("power limit, W", 100_000)]
    scale_up_gb_per_s: Annotated[float, _bounded("NVLink or its like, one direction, GB/s; 0: none", 1e6)] = 0.0
    pcie_gb_per_s: Annotated[float, _bounded("PCIe, one direction, GB/s", 1e5)] = 0.0
    driver_names: Annotated[list[str], _said("how drivers name it")] = []


class NodeTypeEntry(Published, kw_only=True):
    """One model of host."""

    like: Annotated[str, _said("another node type, whose values hold where none is given here")] = ""
    height_u: Annotated[int, _bounded("height, U; given, or by `like`", 100, 1)] | None = None
    weight_kg: Annotated[float, _bounded("weight, kg; given, or by `like`", 100_000)] | None = None
    max_kw: Annotated[float, _bounded("most power drawn, kW; given, or by `like`", 10_000)] | None = None
    idle_kw: Annotated[float, _bounded("drawn with all GPUs idle, kW; default 30 % of max_kw", 10_000)] | None = None
    gpu: Annotated[str | None, _said("GPU type; none for hosts without GPUs")] = None
    gpus: Annotated[int, _bounded("number of GPUs", 1_000)] | None = None
    fabric_ports: Annotated[int, _bounded("ports on the GPU fabric", 1_000)] | None = None
    port_gbit_per_s: Annotated[float, _bounded("rate of each such port, one way, Gbit/s", 100_000)] | None = None
    cost_per_hour: Annotated[float, _bounded("price of an hour, any currency", 1e9)] | None = None
    scale_up: Annotated[
        Literal["node", "rack", "none"] | list[list[int]] | None,
        _said("GPUs that reach each other by NVLink: all of the node, of the rack, none, or groups of indices"),
    ] = None
    numa: Annotated[list[int] | None, _said("NUMA node of each GPU, in the driver's order")] = None
    pcie_roots: Annotated[list[int] | None, _said("PCIe root of each GPU, any numbers")] = None
    rails: Annotated[
        list[int] | None, _said("rail of each GPU; default its index, where there are as many ports as GPUs")
    ] = None


class FeedEntry(_Entry, kw_only=True):
    """A breaker, PDU, busbar or UPS; its rating by `kw`, by `volts` and `amps`, or `usable_kw`."""

    parent: Annotated[str, _said("feed above it; none at the top")] = ""
    source: Annotated[str, _said("at the top: what fails together, default its own name")] = ""
    kw: Annotated[float, _bounded("rating, kW", 1e6)] | None = None
    volts: Annotated[float, _bounded("voltage; line to line where it has three phases", 1e6)] | None = None
    amps: Annotated[float, _bounded("rating, A per phase", 1e6)] | None = None
    phases: Annotated[Literal["1", "3"], _said("phases, with volts and amps")] = "3"
    derating: Annotated[float, Meta(description="share of the rating that may be drawn for ever", gt=0, le=1)] = 0.8
    usable_kw: Annotated[float, _bounded("what may be drawn for ever, kW; no derating", 1e6)] | None = None


class NodeEntry(_Entry, kw_only=True):
    """A host, or several alike."""

    type: Annotated[str, _said("node type")]
    bottom_u: Annotated[int, _bounded("lowest unit, from 1; further ones stand above it; 0: anywhere", 100)] = 0
    labels: Annotated[dict[str, str], _said("free words on it, as its agent tells them")] = {}


class RackSettings(_Entry, kw_only=True):
    """What a rack and a rack type may say."""

    height_u: Annotated[int, _bounded("height, U; default 42", 100, 1)] | None = None
    reserved_u: Annotated[int, _bounded("taken by switches and panels, U", 100)] | None = None
    weight_kg: Annotated[float, _bounded("most weight of its nodes, kg", 1e6)] | None = None
    cooling_kw: Annotated[float, _bounded("most heat taken away, kW", 1e5)] | None = None
    base_kw: Annotated[float, _bounded("drawn by what is no node: switches, fans; kW", 1e5)] | None = None
    survives_loss: Annotated[bool | None, _said("all must fit when any one source is lost; default true")] = None
    feeds: Annotated[
        dict[str, FeedEntry] | list[str] | None,
        _said("its lowest feeds, or their names; load is shared equally"),
    ] = None
    nodes: Annotated[dict[str, str | NodeEntry], _said("hosts by name or range: a node type, or more")] = {}
    fill: Annotated[str | None, _said("node type that its free room is meant for")] = None


class RackTypeEntry(RackSettings, kw_only=True):
    """A rack as it is bought or set up."""

    source: Annotated[str, _FROM] = ""
    source_of: Annotated[dict[str, str], _ELSEWHERE] = {}


class RackEntry(RackSettings, kw_only=True):
    """A rack, or several alike; what it says itself holds before what its type says."""

    type: Annotated[str, _said("rack type")] = ""


class EnvelopeEntry(RackEntry, kw_only=True):
    """Racks that are not listed: as many as the site carries."""

    racks: Annotated[int, _bounded("at most so many", 100_000)] | None = None


class RowEntry(_Entry, kw_only=True):
    """A row of racks."""

    feeds: Annotated[dict[str, FeedEntry], _said("feeds of the row")] = {}
    racks: Annotated[dict[str, str | RackEntry], _said("racks by name or range: a rack type, or more")] = {}


class SuiteEntry(RowEntry, kw_only=True):
    """A suite or hall: rows, or racks without rows."""

    rows: Annotated[dict[str, RowEntry], _said("rows by name or range")] = {}


class SiteEntry(SuiteEntry, kw_only=True):
    """A building: suites, or rows or racks without suites."""

    region: Annotated[str, _said("where it is; sites of a region are near each other")] = ""
    provider: Annotated[str, _said("who owns the racks")] = ""
    supply_kw: Annotated[float, _bounded("power that may be drawn there, kW", 1e7)] | None = None
    reserved_kw: Annotated[float, _bounded("of that kept for storage, fabric and service nodes, kW", 1e7)] = 0.0
    cost_per_kwh: Annotated[float, _bounded("price of a kWh", 1e6)] = 0.0
    cost_factor: Annotated[float, _bounded("this provider's price of a node, times its type's", 1e6)] = 1.0
    fabric_ports: Annotated[int, _bounded("ports for nodes, where no switches say", 1_000_000)] | None = None
    suites: Annotated[dict[str, SuiteEntry], _said("suites by name or range")] = {}
    envelopes: Annotated[dict[str, str | EnvelopeEntry], _said("racks not listed, by the stem of their names")] = {}


class SwitchEntry(_Entry, kw_only=True):
    """A switch, or several alike."""

    tier: Annotated[int, _bounded("0: nearest to the nodes", 10)] = 0
    radix: Annotated[int, _bounded("number of ports", 100_000, 1)]
    rack: Annotated[str, _said("rack it stands in")] = ""
    rail: Annotated[int, _bounded("rail it serves; -1: all", 1_000, -1)] = -1


class LinkEntry(_Entry, kw_only=True):
    """Cables: of every `lower` to every `upper`."""

    lower: Annotated[str, _said("nodes or switches, name or range")]
    upper: Annotated[str, _said("switches, name or range")]
    gbit_per_s: Annotated[float, Meta(description="rate of one cable, one way, Gbit/s", gt=0, le=1e6)]
    count: Annotated[int, _bounded("cables between each two", 10_000, 1)] = 1
    latency_us: Annotated[float, _bounded("one passage, µs", 1e6)] = 1.0
    rail: Annotated[int, _bounded("rail they belong to; -1: none", 1_000, -1)] = -1


class FabricEntry(_Entry, kw_only=True):
    """Switches and cables by their rule."""

    kind: Annotated[
        Literal["rail-optimised", "clos"],
        _said("rail-optimised: port r of each node at leaf r of its unit; clos: all ports of a node at one leaf"),
    ]
    nodes: Annotated[str | list[str], _said("nodes, name or range")]
    nodes_per_leaf: Annotated[int, _bounded("nodes of one scalable unit, or at one leaf of a clos", 10_000, 1)] = 32
    ports_per_node: Annotated[int, _bounded("ports of each node used; default all", 1_000, 1)] | None = None
    radix: Annotated[int, _bounded("ports of a switch", 100_000, 2)] = 64
    oversubscription: Annotated[float, _bounded("rate down to rate up, of a leaf", 1_000, 1)] = 1.0
    spines: (
        Annotated[int, _bounded("spines (of a pod, with three tiers); default as few as will do", 10_000, 1)] | None
    ) = None
    gbit_per_s: Annotated[float, _bounded("rate at the nodes, Gbit/s; default their type's", 100_000)] | None = None
    uplink_gbit_per_s: (
        Annotated[float, _bounded("rate between switches, Gbit/s; default the same", 100_000)] | None
    ) = None
    latency_us: Annotated[float, _bounded("one passage, µs", 1e6)] = 1.0


class DistanceEntry(_Entry, kw_only=True):
    """Between two regions."""

    between: Annotated[list[str], _said("the two regions")]
    latency_ms: Annotated[float, _bounded("one way, ms", 1e5)]
    cost_per_gb: Annotated[float, _bounded("price of traffic, per GB", 1e6)] = 0.0


class FacilityFile(_Entry, kw_only=True):
    """A whole file, or what a file may include."""

    name: Annotated[str, _said("name of the facility")] = ""
    include: Annotated[list[str], _said("files with more of it; what stands here holds before theirs")] = []
    sources: Annotated[dict[str, Source], _said("documents that figures come from")] = {}
    gpu_types: Annotated[dict[str, GpuTypeEntry], _said("GPU types beside the catalogue's")] = {}
    node_types: Annotated[dict[str, NodeTypeEntry], _said("node types beside the catalogue's")] = {}
    rack_types: Annotated[dict[str, RackTypeEntry], _said("rack types beside the catalogue's")] = {}
    sites: Annotated[dict[str, SiteEntry], _said("buildings")] = {}
    switches: Annotated[dict[str, SwitchEntry], _said("switches by name or range")] = {}
    links: Annotated[list[LinkEntry], _said("cables")] = []
    fabrics: Annotated[dict[str, FabricEntry], _said("usual fabrics, spelled out into switches and cables")] = {}
    scale_up_domains: Annotated[dict[str, str | list[str]], _said("nodes whose GPUs form one NVLink domain")] = {}
    distances: Annotated[list[DistanceEntry], _said("latency and price between regions")] = []
