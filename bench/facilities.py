"""Facilities and needs to place on them: regular ones as they are built, random ones as they grow. All seeded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from stoker.planner.core.facility.values import (
    Facility,
    Feed,
    Gpu,
    GpuType,
    Link,
    Node,
    NodeType,
    Rack,
    Site,
    Switch,
)
from stoker.planner.core.placement import Need, Pair
from stoker.planner.core.units import Bytes, BytesPerSecond, link_rate, watts

H100 = GpuType("h100-sxm", Bytes(80 * 10**9), BytesPerSecond(3_350 * 10**9), {"bf16": 989e12}, watts(0.7))
DGX = NodeType("dgx-h100", 8, 130.0, watts(10.2), watts(2.0), "h100-sxm", 8, 8, link_rate(400), cost_per_hour=24.0)
GB200 = GpuType("gb200", Bytes(186 * 10**9), BytesPerSecond(8_000 * 10**9), {"bf16": 2_500e12}, watts(1.2))
TRAY = NodeType("nvl72-tray", 1, 30.0, watts(6.6), watts(1.6), "gb200", 4, 4, link_rate(400), cost_per_hour=24.0)
RATES = (0, 2, 5, 10, 20)
"""GB/s that members of a gang, or a pair, may exchange."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A facility of nodes alike: `pod` racks share the leaves of eight rails, whose uplinks are `oversubscription`
    times too narrow. Each rack hangs on feeds of sources A and B, each of which carries `power_share` of the
    rack's full draw."""

    nodes: int
    per_rack: int = 4
    pod: int = 8
    oversubscription: float = 2.0
    power_share: float = 1.0
    rows_of: int = 16
    node_type: NodeType = DGX
    survives_loss: bool = True


def gpus_of(kind: NodeType, node: str, rack: str) -> tuple[Gpu, ...]:
    """As in a DGX: two GPUs on each PCIe root, half of them on each socket, a rail each. Trays share their rack's."""
    scale_up = f"{rack}-nvl" if kind is TRAY else f"{node}-nvl"
    half = max(1, kind.gpus // 2)
    return tuple(Gpu(index, scale_up, index // 2, index // half, index) for index in range(kind.gpus))


def regular(shape: Shape, name: str = "regular") -> Facility:
    """Racks in rows, pods of racks under rails of leaves, one tier of spines above; feeds under two sources."""
    kind = shape.node_type
    racks: dict[str, Rack] = {}
    nodes: dict[str, Node] = {}
    count = -(-shape.nodes // shape.per_rack)
    draw = shape.per_rack * kind.max_power * shape.power_share
    feeds = {side: Feed(side, side, watts(1e9)) for side in "AB"}
    for number in range(count):
        rack, row = f"r{number}", f"row{number // shape.rows_of}"
        for side in "AB":
            trunk, leaf = f"{side}-{row}", f"{side}-{rack}"
            feeds.setdefault(trunk, Feed(trunk, side, watts(draw * shape.rows_of / 1_000), side))
            feeds[leaf] = Feed(leaf, side, watts(draw / 1_000), trunk)
        racks[rack] = Rack(
            rack, "s1", "hall", row, feeds=(f"A-{rack}", f"B-{rack}"), survives_loss=shape.survives_loss
        )
        for slot in range(min(shape.per_rack, shape.nodes - number * shape.per_rack)):
            node = f"n{number * shape.per_rack + slot}"
            nodes[node] = Node(node, rack, kind.name, gpus_of(kind, node, rack))
    switches, links = _rails(shape, racks, nodes)
    return Facility(
        name,
        {H100.name: H100, GB200.name: GB200},
        {kind.name: kind},
        sites={"s1": Site("s1", "eu", "own")},
        feeds=feeds,
        racks=racks,
        nodes=nodes,
        switches=switches,
        links=links,
    )


def _rails(
    shape: Shape, racks: dict[str, Rack], nodes: dict[str, Node]
) -> tuple[dict[str, Switch], tuple[Link, ...]]:
    kind, order = shape.node_type, list(racks)
    per_pod = shape.pod * shape.per_rack
    ports = kind.fabric_ports
    up = max(1, round(per_pod / shape.oversubscription))
    pods = -(-len(racks) // shape.pod)
    switches = {"spine": Switch("spine", 1, max(64, up * ports * pods))}
    links = []
    for pod in range(pods):
        for rail in range(ports):
            leaf = f"leaf{pod}-{rail}"
            switches[leaf] = Switch(leaf, 0, per_pod + up, rail=rail)
            links.append(Link(leaf, "spine", kind.port_rate, up))
    for node in nodes.values():
        pod = order.index(node.rack) // shape.pod
        links += [Link(node.name, f"leaf{pod}-{rail}", kind.port_rate, rail=rail) for rail in range(ports)]
    return switches, tuple(links)


def random_facility(seed: int, racks: tuple[int, int] = (6, 24)) -> Facility:
    """Of uneven racks, some short of power, some on one feed or without care for its loss, under narrow uplinks."""
    rng = Random(seed)
    shape = Shape(
        nodes=4 * rng.randint(*racks),
        pod=rng.choice((2, 3, 4)),
        oversubscription=rng.choice((1.5, 2.0, 4.0)),
        power_share=rng.choice((0.7, 0.85, 1.0)),
        rows_of=rng.choice((4, 8)),
    )
    facility = regular(shape, f"random{seed}")
    nodes = {
        name: replace(node, labels={"pool": rng.choice("ab")})
        for name, node in facility.nodes.items()
        if rng.random() < 0.92
    }
    changed = {
        name: replace(
            rack,
            feeds=rack.feeds if rng.random() < 0.9 else rack.feeds[:1],
            survives_loss=rng.random() < 0.9,
            cooling=None if rng.random() < 0.7 else watts(rng.uniform(20.0, 42.0)),
        )
        for name, rack in facility.racks.items()
    }
    feeds = {
        name: replace(feed, capacity=watts((feed.capacity or 0) / 1_000 * rng.uniform(0.8, 1.0)))
        for name, feed in facility.feeds.items()
    }
    links = tuple(link for link in facility.links if link.lower in nodes or link.lower in facility.switches)
    return replace(facility, nodes=nodes, racks=changed, feeds=feeds, links=links)


def needs(
    facility: Facility, seed: int, fill: float = 0.75, largest: int = 6, count: int = 0, gangs: float = 0.2
) -> tuple[Need, ...]:
    """Deployments of up to `largest` replicas that ask for about `fill` of the GPUs: gangs with a chance of `gangs`,
    half of the rest single ones, half prefill with decode. No more than `count` replicas, where that is given."""
    rng = Random(seed)
    free = fill * sum(len(node.gpus) for node in facility.nodes.values())
    made: list[Need] = []
    replicas = 0
    while free > 0 and (not count or replicas < count):
        group = _group(rng, f"d{len(made)}", largest, gangs)
        size = sum(need.replicas * need.members * need.gpus for need in group)
        if not count and size > free and len(made) > 2:
            break
        made += group
        free -= size
        replicas += sum(need.replicas for need in group)
    return tuple(made)


def _group(rng: Random, name: str, largest: int, gangs: float) -> Sequence[Need]:
    replicas = rng.randint(1, largest)
    kind = rng.random()
    if kind < (1 - gangs) * 0.6:
        gpus = rng.choice((1, 2, 4, 4, 8))
        return [Need(name, replicas, gpus, tensor_parallel=gpus)]
    rate = BytesPerSecond(rng.choice(RATES) * 10**9)
    if kind < (1 - gangs) * 0.6 + gangs:
        members = rng.choice((2, 2, 4))
        return [Need(name, max(1, replicas // 2), 8, members, tensor_parallel=8, peer_rate=rate)]
    gpus = rng.choice((2, 4, 8))
    decode = Need(f"{name}-decode", max(2, replicas), gpus, tensor_parallel=gpus)
    prefill = Need(
        f"{name}-prefill", max(2, replicas // 2), gpus, tensor_parallel=gpus, pair=Pair(decode.deployment, rate)
    )
    return [prefill, decode]
