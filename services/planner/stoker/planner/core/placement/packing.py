"""What fits together on one node: every mix of members, tried GPU by GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from stoker.planner.core.placement.gpus import Layout, choose

Shape = tuple[int, int]
"""A member's GPUs, and its tensor-parallel group within the node; (0, 1) is a slot."""

MOST = 120
"""Mixes per kind of node, beyond which a search in cells is not worth its while."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Members on one node, the largest first; how badly their groups lie beyond need, and how many GPUs are left."""

    shapes: tuple[Shape, ...]
    straddling: int
    left: int

    @property
    def counts(self) -> Counter[Shape]:
        """How many of each shape."""
        return Counter(self.shapes)


@lru_cache(maxsize=4_096)
def mixes(layout: Layout, free: int, shapes: tuple[Shape, ...]) -> tuple[Mix, ...]:
    """All mixes of `shapes` for which the GPUs in the bit set `free` have room, the empty one first."""
    return tuple(_mixes(layout, free, tuple(sorted(shapes, reverse=True)), (), 0))


def _mixes(
    layout: Layout, free: int, shapes: Sequence[Shape], chosen: tuple[Shape, ...], straddling: int
) -> Iterator[Mix]:
    yield Mix(chosen, straddling, free.bit_count())
    for number, shape in enumerate(shapes):
        found = settle(layout, free, shape)
        if found is not None:
            positions, bad = found
            rest = free
            for position in positions:
                rest &= ~(1 << position)
            yield from _mixes(layout, rest, shapes[number:], (*chosen, shape), straddling + bad)


@lru_cache(maxsize=1_024)
def halves(layout: Layout, shapes: tuple[Shape, ...], unit: int) -> bool:
    """Whether on free nodes members pack like halves of halves: each size divides the next, all divide `unit`, it
    divides the node, and whatever adds up to the node fits, no group worse than need be. Then sums say it all."""
    sizes = sorted({max(1, gpus) for gpus, _ in shapes} | {unit, len(layout)})
    if any(larger % smaller for smaller, larger in pairwise(sizes)) or max(g for g, _ in shapes) > unit:
        return False
    found = mixes(layout, (1 << len(layout)) - 1, shapes)
    return all(not mix.straddling for mix in found) and len(found) == _sums(tuple(sorted(shapes)), len(layout))


def _sums(shapes: tuple[Shape, ...], room: int) -> int:
    """How many multisets of `shapes` have at most `room` GPUs."""
    if not shapes:
        return 1
    (gpus, _), rest = shapes[0], shapes[1:]
    return sum(_sums(rest, room - taken) for taken in range(0, room + 1, max(1, gpus)))


def stack(shapes: Counter[Shape], nodes: int, room: int) -> list[tuple[Shape, ...]]:
    """`shapes` on `nodes` nodes of `room` GPUs, the largest first, each on the first with room."""
    filled: list[list[Shape]] = [[] for _ in range(nodes)]
    left = [room] * nodes
    start = 0
    for shape in sorted(shapes.elements(), reverse=True):
        size = max(1, shape[0])
        while left[start] == 0:
            start += 1
        at = next(number for number in range(start, nodes) if left[number] >= size)
        filled[at].append(shape)
        left[at] -= size
    return [tuple(own) for own in filled]


def settle(layout: Layout, free: int, shape: Shape) -> tuple[tuple[int, ...], int] | None:
    """As `gpus.choose`, for a member or a slot; the badness is what a free node would have spared."""
    gpus, group = shape
    if not gpus:
        return (((free & -free).bit_length() - 1,), 0) if free else None
    found = choose(layout, free, gpus, group)
    if found is None:
        return None
    best = choose(layout, (1 << len(layout)) - 1, gpus, group)
    return found[0], found[1] - (best[1] if best else 0)
