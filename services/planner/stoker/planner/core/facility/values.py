"""A facility, flat and resolved: every list is spelled out, every name refers to something that exists.

Made from a facility file, or from what agents report where there is none. Frozen: a plan can be checked against
exactly what it was made for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stoker.planner.core.units import NO_POWER, NO_RATE, Bytes, BytesPerSecond, Watts


@dataclass(frozen=True, slots=True)
class GpuType:
    """One model of accelerator. Rates are dense, by data type ("bf16", "fp8", "fp4"), FLOP per second.

    `scale_up_bandwidth` is that of NVLink (or its like) of one GPU, one direction; 0 where there is none.
    `driver_names` is how drivers name it, where that is known. Of a type that only agents have told of nothing but
    name and memory is known: its `flops` are empty, its other figures 0.
    """

    name: str
    memory: Bytes
    memory_bandwidth: BytesPerSecond
    flops: Mapping[str, float]
    max_power: Watts
    scale_up_bandwidth: BytesPerSecond = NO_RATE
    pcie_bandwidth: BytesPerSecond = NO_RATE
    driver_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeType:
    """One model of host. `max_power` is what a feed must be able to carry, `idle_power` what it draws with all GPUs
    idle; each busy GPU adds an equal part of the difference.

    `gpu` is empty for hosts without any. `fabric_ports` is the number of its ports on the GPU fabric, `port_rate`
    what each carries one way. Of a type that only agents have told of power, height and weight are 0; its racks then
    have no limits that these could break.
    """

    name: str
    height_u: int
    weight_kg: float
    max_power: Watts
    idle_power: Watts
    gpu: str = ""
    gpus: int = 0
    fabric_ports: int = 0
    port_rate: BytesPerSecond = NO_RATE
    cost_per_hour: float = 0.0


@dataclass(frozen=True, slots=True)
class RackType:
    """A rack as it is bought or set up: its limits (see `Rack`), and how many nodes of which type stand in it from
    the start."""

    name: str
    height_u: int = 42
    reserved_u: int = 0
    weight_kg: float | None = None
    cooling: Watts | None = None
    base_power: Watts = NO_POWER
    nodes: Mapping[str, int] = field(default_factory=dict)
    fill: str = ""


@dataclass(frozen=True, slots=True)
class Site:
    """A building. `supply` is the power that may be drawn there, of which `reserved` is kept for storage, fabric and
    service nodes. Sites of one `region` are near each other; `provider` is who owns the racks, and asks `cost_factor`
    times a node type's cost per hour. `fabric_ports` is the number of ports for nodes on the GPU fabric, None where
    its switches say or nobody does."""

    name: str
    region: str = ""
    provider: str = ""
    supply: Watts | None = None
    reserved: Watts = NO_POWER
    cost_per_kwh: float = 0.0
    fabric_ports: int | None = None
    cost_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Feed:
    """A breaker, PDU, busbar or UPS. `capacity` is what it may carry for ever, derating included; None where nobody
    said.

    `parent` is the feed above it, empty at the top. `source` names the top: all feeds of one source fail together.
    """

    name: str
    source: str
    capacity: Watts | None
    parent: str = ""


@dataclass(frozen=True, slots=True)
class Rack:
    """`feeds` are the lowest ones, among which the load is shared equally, as far as they live.

    `survives_loss` asks that every load fits when all feeds of any one source are lost. `cooling` and `weight_kg`
    bound the sum over the nodes; None where nobody said. `reserved_u` are taken by switches and panels, `base_power`
    is what these draw, always. `type` is what it was set up as, if that has a name. `fill` is the node type that its
    room is meant for, "" where nobody said: what a capacity plan fills it with.
    """

    name: str
    site: str
    suite: str = ""
    row: str = ""
    height_u: int = 42
    reserved_u: int = 0
    weight_kg: float | None = None
    cooling: Watts | None = None
    feeds: tuple[str, ...] = ()
    survives_loss: bool = True
    fill: str = ""
    base_power: Watts = NO_POWER
    type: str = ""


@dataclass(frozen=True, slots=True)
class Envelope:
    """Racks that are not listed one by one: as many like `rack` as its site carries, at most `racks` (None: any).

    `rack.name` is the stem of their names and `rack.fill` what they hold. `feeds` are the lowest feeds of each such
    rack, named within it; their `parent`, where they have one, is a feed of the facility.
    """

    rack: Rack
    feeds: tuple[Feed, ...] = ()
    racks: int | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """`index` as the driver counts. GPUs of one `scale_up` domain reach each other by NVLink; it may span nodes.

    `pcie_root`, `numa` and `rail` are -1 where unknown.
    """

    index: int
    scale_up: str = ""
    pcie_root: int = -1
    numa: int = -1
    rail: int = -1


@dataclass(frozen=True, slots=True)
class Node:
    """A host in a rack. `bottom_u` is its lowest unit, counted from 1; 0 where nobody said."""

    name: str
    rack: str
    type: str
    gpus: tuple[Gpu, ...] = ()
    bottom_u: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Switch:
    """`tier` 0 is nearest to the nodes. `radix` is the number of its ports. `rail` is -1 where it serves all."""

    name: str
    tier: int
    radix: int
    rack: str = ""
    rail: int = -1


@dataclass(frozen=True, slots=True)
class Link:
    """`count` cables between two of nodes and switches, each of `rate` one way. `latency_s` is of one passage."""

    lower: str
    upper: str
    rate: BytesPerSecond
    count: int = 1
    latency_s: float = 1e-6
    rail: int = -1


@dataclass(frozen=True, slots=True)
class Distance:
    """Between two regions: latency of one way, and the price of traffic."""

    one: str
    other: str
    latency_s: float
    cost_per_gb: float = 0.0


@dataclass(frozen=True, slots=True)
class Facility:
    """All of it. Keys are the names; names are unique over sites, racks, nodes and switches together."""

    name: str
    gpu_types: Mapping[str, GpuType] = field(default_factory=dict)
    node_types: Mapping[str, NodeType] = field(default_factory=dict)
    rack_types: Mapping[str, RackType] = field(default_factory=dict)
    sites: Mapping[str, Site] = field(default_factory=dict)
    feeds: Mapping[str, Feed] = field(default_factory=dict)
    racks: Mapping[str, Rack] = field(default_factory=dict)
    nodes: Mapping[str, Node] = field(default_factory=dict)
    switches: Mapping[str, Switch] = field(default_factory=dict)
    links: tuple[Link, ...] = ()
    distances: tuple[Distance, ...] = ()
    envelopes: tuple[Envelope, ...] = ()
