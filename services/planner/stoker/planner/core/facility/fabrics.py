"""The usual fabrics, spelled out: leaves, spines and where one layer does not do a core, with the cables between.

Non-blocking Clos networks and their radix: Clos 1953; fat trees of equal switches in pods: Al-Fares, Loukissas,
Vahdat 2008 (section 3).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from stoker.planner.core.facility.values import Link, Switch
from stoker.planner.core.units import BytesPerSecond


class Unbuildable(ValueError):
    """No such fabric from such switches; the message says why, and what to change."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf switch to be: its nodes, and the cables to each of them."""

    name: str
    nodes: tuple[str, ...]
    cables: int = 1
    rail: int = -1


@dataclass(frozen=True, slots=True)
class Fabric:
    """What is asked for. `spines` is their number (in each pod, with three tiers), None: as few as carry it."""

    name: str
    radix: int
    rate: BytesPerSecond
    uplink_rate: BytesPerSecond
    oversubscription: float = 1.0
    spines: int | None = None
    latency_s: float = 1e-6


def rails(fabric: str, nodes: Sequence[str], per_unit: int, rails: int) -> list[Leaf]:
    """Leaves of a rail-optimised fabric: one for each rail of each scalable unit, a port of every node at it."""
    units = [tuple(nodes[start : start + per_unit]) for start in range(0, len(nodes), per_unit)]
    return [
        Leaf(f"{fabric}-su{unit}-leaf{rail}", members, rail=rail)
        for unit, members in enumerate(units)
        for rail in range(rails)
    ]


def clos(fabric: str, nodes: Sequence[str], per_leaf: int, ports: int) -> list[Leaf]:
    """Leaves of a Clos network: every port of a node at the same one."""
    groups = [tuple(nodes[start : start + per_leaf]) for start in range(0, len(nodes), per_leaf)]
    return [Leaf(f"{fabric}-leaf{number}", members, ports) for number, members in enumerate(groups)]


def built(fabric: Fabric, leaves: Sequence[Leaf]) -> tuple[list[Switch], list[Link]]:
    """Switches and cables of a fabric over such leaves. Raises Unbuildable.

    A single leaf stands alone. Up to `radix` leaves are joined by one tier of spines; more are put into pods of
    radix / 2 leaves, each with its own spines, and these are joined by a core.
    """
    switches = [Switch(leaf.name, 0, fabric.radix, rail=leaf.rail) for leaf in leaves]
    links = [
        Link(node, leaf.name, fabric.rate, leaf.cables, fabric.latency_s, leaf.rail)
        for leaf in leaves
        for node in leaf.nodes
    ]
    up = [_uplinks(fabric, leaf) for leaf in leaves]
    if len(leaves) == 1:
        return switches, links
    if len(leaves) <= fabric.radix:
        spines = _spines(fabric, sum(up), min(up), fabric.radix, "")
        return switches + spines, links + _joined(fabric, leaves, up, spines)
    return _three_tiers(fabric, leaves, up, switches, links)


def _three_tiers(
    fabric: Fabric, leaves: Sequence[Leaf], up: Sequence[int], switches: list[Switch], links: list[Link]
) -> tuple[list[Switch], list[Link]]:
    """Pods of leaves and spines, and a core above, with as many cables up from each spine as come from below."""
    half = fabric.radix // 2
    pods = range(0, len(leaves), half)
    if len(pods) > fabric.radix:
        raise Unbuildable(f"{fabric.name}: {len(leaves)} leaves are too many for three tiers; use larger switches")
    every_spine: list[Switch] = []
    below: Counter[str] = Counter()
    for pod, start in enumerate(pods):
        cables = up[start : start + half]
        spines = _spines(fabric, sum(cables), min(cables), half, f"-pod{pod}")
        joined = _joined(fabric, leaves[start : start + half], cables, spines)
        for link in joined:
            below[link.upper] += link.count
        links += joined
        every_spine += spines
    over = [below[spine.name] for spine in every_spine]
    needed = math.ceil(sum(over) / fabric.radix)
    core = [Switch(f"{fabric.name}-core{number}", 2, fabric.radix) for number in range(needed)]
    links += _dealt(fabric, [spine.name for spine in every_spine], over, core)
    return switches + every_spine + core, links


def _uplinks(fabric: Fabric, leaf: Leaf) -> int:
    """Cables up from a leaf: as much rate as down, divided by the oversubscription."""
    down = len(leaf.nodes) * leaf.cables
    up = max(1, math.ceil(down * fabric.rate / fabric.uplink_rate / fabric.oversubscription - 1e-9))
    if down + up > fabric.radix:
        raise Unbuildable(
            f"{fabric.name}: leaf {leaf.name} needs {down} ports down and {up} up, a switch has {fabric.radix}; "
            "put fewer nodes at a leaf, allow more oversubscription, or use switches of more ports"
        )
    return up


def _spines(fabric: Fabric, cables: int, fewest_of_one: int, ports: int, pod: str) -> list[Switch]:
    """Spines with `ports` for `cables` from below."""
    needed = math.ceil(cables / ports)
    count = needed if fabric.spines is None else fabric.spines
    if count < needed:
        raise Unbuildable(
            f"{fabric.name}: {count} spines have {count * ports} ports for {cables} uplinks; it takes {needed}"
        )
    if count > fewest_of_one:
        # With no fewer is there a port for each cable.
        fewer = "fewer spines" if needed <= fewest_of_one else "a greater radix, leaves with as many nodes each"
        raise Unbuildable(
            f"{fabric.name}: {count} spines, but some leaf has {fewest_of_one} uplinks and must reach them all; "
            f"ask for {fewer}, or less oversubscription"
        )
    return [Switch(f"{fabric.name}{pod}-spine{number}", 1, fabric.radix) for number in range(count)]


def _joined(fabric: Fabric, leaves: Sequence[Leaf], up: Sequence[int], spines: Sequence[Switch]) -> list[Link]:
    return _dealt(fabric, [leaf.name for leaf in leaves], up, spines)


def _dealt(fabric: Fabric, lower: Sequence[str], up: Sequence[int], upper: Sequence[Switch]) -> list[Link]:
    """The cables of each lower switch dealt out evenly; where one starts the last one stopped, so that the upper ones
    get alike as well."""
    links: list[Link] = []
    start = 0
    for name, cables in zip(lower, up, strict=True):
        each, rest = divmod(cables, len(upper))
        for at in range(len(upper)):
            count = each + (1 if (at - start) % len(upper) < rest else 0)
            if count:
                links.append(Link(name, upper[at].name, fabric.uplink_rate, count, fabric.latency_s))
        start = (start + rest) % len(upper)
    return links
