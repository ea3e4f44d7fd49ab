"""How far each replica gets along the keys of a prompt, all replicas at once.

Replicas are bits of a mask. Lookups run in C, a chunk of keys at a time: along a prefix the same mask recurs, so
most chunks are settled by one comparison, and keys are looked at one by one only where somebody falls behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from stoker.router.core.seats import Ints, bits_of, members

Runs = list[tuple[int, int]]
"""(depth, mask), depths rising and masks shrinking: who is in a mask holds at least the first `depth` keys."""

Lookup = Callable[[Sequence[int], int], list[int | None]]
"""Masks of those who hold each key of a chunk, None for nobody; only who is in the given mask matters."""

_CHUNK = 64
_FEW = 12  # of so few bits, a loop is faster than unpacking a column
_TRANSLATED_LIMIT = 65_536


def walk(keys: Sequence[int], alive: int, held: Lookup, known: Runs | None = None) -> Runs:
    """Return the runs of `alive` along `keys`; `known` ones hold that far whatever the lookup says."""
    found: Runs = []
    start = 0
    for end, sure in (*(known or ()), (len(keys), 0)):
        for depth, left in _falls(keys, start, end, alive & ~sure, held):
            if depth:
                found.append((depth, alive))
            alive = left | (alive & sure)
            if not alive:
                return found
        start = end
    if alive and keys:
        found.append((len(keys), alive))
    return found


def _falls(keys: Sequence[int], start: int, end: int, alive: int, held: Lookup) -> Iterator[tuple[int, int]]:
    """Yield each position between `start` and `end` that not all of `alive` hold, and who is left then."""
    while alive and start < end:
        masks = held(keys[start : min(start + _CHUNK, end)], alive)
        # Where a mask comes again it takes nobody away.
        for mask in masks[:1] if masks.count(masks[0]) == len(masks) else dict.fromkeys(masks):
            left = alive & (mask or 0)
            if left != alive:
                alive = left
                yield start + masks.index(mask), alive
        start += len(masks)


def among(runs: Runs, mask: int) -> Runs:
    """Return the runs of those who are in `mask`."""
    return [(depth, alive & mask) for depth, alive in runs if alive & mask]


def ends(runs: Runs) -> Iterator[tuple[int, int]]:
    """Yield each depth with those who get so far and no further."""
    for (depth, alive), (_, further) in pairwise([*runs, (0, 0)]):
        if alive != further:
            yield depth, alive ^ further


def depth_column(runs: Runs, width: int) -> Ints:
    """Return each seat's depth, 0 where it holds nothing; the masks of `runs` are of seats."""
    column = np.zeros(width, np.int64)
    for depth, mask in ends(runs):
        if mask.bit_count() <= _FEW:
            for bit in bits_of(mask):
                column[bit.bit_length() - 1] = depth
        else:
            np.copyto(column, depth, where=members(mask, width))
    return column


def runs_of(depths: Iterable[tuple[int, int]]) -> Runs:
    """Return the runs of pairs of a depth and those who get so far."""
    found: Runs = []
    alive = 0
    for depth, mask in sorted(depths, reverse=True):
        alive |= mask
        found.append((depth, alive))
    return found[::-1]


class Translation(dict[int, int]):
    """Masks of one numbering of replicas in another; the same few recur. Clear it when `bits` changes."""

    def __init__(self, bits: Mapping[int, int]) -> None:
        super().__init__()
        self._bits = bits

    def __missing__(self, mask: int) -> int:
        if len(self) >= _TRANSLATED_LIMIT:
            self.clear()
        get = self._bits.get
        found = 0
        for bit in bits_of(mask):
            found |= get(bit, 0)
        self[mask] = found
        return found

    def runs(self, runs: Runs) -> Runs:
        """Return runs in the other numbering, without those that it does not know."""
        return [(depth, mask) for depth, alive in runs if (mask := self[alive])]
