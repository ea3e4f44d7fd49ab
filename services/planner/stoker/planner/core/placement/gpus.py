"""Which GPUs of one node: tensor-parallel groups inside one NVLink domain, on one PCIe root or NUMA node where that
can be had, and what is left kept as whole as can be."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from stoker.planner.core.facility.values import Gpu

Layout = tuple[tuple[int, int, int, int], ...]
"""Of each GPU of a node, by position: NVLink domain (numbered within the node), PCIe root, NUMA node, rail."""


def layout(gpus: Sequence[Gpu]) -> Layout:
    """What matters for a choice among `gpus`: the same for nodes of the same make."""
    domains = {name: number for number, name in enumerate(dict.fromkeys(gpu.scale_up for gpu in gpus))}
    return tuple((domains[gpu.scale_up], gpu.pcie_root, gpu.numa, gpu.rail) for gpu in gpus)


@lru_cache(maxsize=65_536)
def choose(
    layout: Layout, free: int, count: int, group: int, rails: tuple[int, ...] = ()
) -> tuple[tuple[int, ...], int] | None:
    """Positions of `count` of the GPUs in the bit set `free`, in groups of `group` in order, and how badly the groups
    lie: 1 for each over several PCIe roots, 2 for each over several NUMA nodes. None where no choice has every group
    inside one NVLink domain.

    Among equally good choices those with `rails`, then those that leave the fuller roots whole.
    """
    size = min(group, count)
    chosen: list[int] = []
    badness = 0
    for _ in range(count // size):
        left = [position for position in range(len(layout)) if free >> position & 1]
        found = _group(layout, left, size, rails[len(chosen) : len(chosen) + size])
        if found is None:
            return None
        positions, bad = found
        chosen += positions
        badness += bad
        for position in positions:
            free &= ~(1 << position)
    return tuple(chosen), badness


def badness(layout: Layout, positions: Sequence[int], group: int) -> int:
    """How badly the groups of a made choice lie, as `choose` counts."""
    size = min(group, len(positions)) or 1
    total = 0
    for start in range(0, len(positions), size):
        own = [layout[position] for position in positions[start : start + size]]
        if len({numa for _, _, numa, _ in own}) > 1:
            total += 2
        elif len({root for _, root, _, _ in own}) > 1:
            total += 1
    return total


def _group(layout: Layout, left: list[int], size: int, rails: tuple[int, ...]) -> tuple[list[int], int] | None:
    """One group of the tightest kind that is there: on a root, on a NUMA node, in an NVLink domain."""
    for bad, fields in enumerate((3, 2, 1)):
        # A place is known by its NVLink domain, NUMA node and root, as many of them as still have to agree.
        places: dict[tuple[object, ...], list[int]] = {}
        for position in left:
            scale_up, root, numa, _ = layout[position]
            places.setdefault((scale_up, numa, root)[:fields], []).append(position)
        fitting = [own for own in places.values() if len(own) >= size]
        if fitting:
            return min((_pick(layout, own, size, rails) for own in fitting), key=lambda pick: pick[:-1])[-1], bad
    return None


def _pick(layout: Layout, own: list[int], size: int, rails: tuple[int, ...]) -> tuple[int, int, list[int], list[int]]:
    """`size` of the GPUs of one place, before it what makes this place worse than another."""
    by_root: dict[tuple[int, int], list[int]] = {}
    for position in own:
        by_root.setdefault(layout[position][2:0:-1], []).append(position)
    if rails:
        wanted = {rail: place for place, rail in enumerate(rails)}
        order = sorted(own, key=lambda position: (wanted.get(layout[position][3], size), position))
    else:
        order = [position for root in sorted(by_root.values(), key=lambda r: (-len(r), r)) for position in root]
        if len(by_root) > 1:
            # Whole roots first; the last piece from the smallest root that has it, so that larger ones stay whole.
            order = _fewest_roots(list(by_root.values()), size)
    taken = order[:size]
    off = sum(layout[p][3] != rail for p, rail in zip(taken, rails, strict=False)) if rails else 0
    return off, len(own), taken, taken


def _fewest_roots(roots: list[list[int]], size: int) -> list[int]:
    taken: list[int] = []
    rest = sorted(roots, key=lambda root: (-len(root), root))
    while len(taken) < size:
        missing = size - len(taken)
        enough = [root for root in rest if len(root) >= missing]
        root = min(enough, key=lambda root: (len(root), root)) if enough else rest[0]
        rest.remove(root)
        taken += root[:missing]
    return sorted(taken)
