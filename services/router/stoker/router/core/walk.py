"""How far each replica gets along the keys of a prompt, all replicas at once.

Replicas are bits of a mask. Along a prefix the same mask recurs, so the keys are grouped by it, which runs in C;
Python is needed only where the mask changes. Caches let go of a prefix from its end: whoever holds the last of many
keys is taken to hold all of them, so that a long prompt costs what happens along it, and not its length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from operator import length_hint
from typing import NamedTuple

import numpy as np

from stoker.router.core.seats import Floats, bits_of, members

Runs = list[tuple[int, int]]
"""(depth, mask), depths rising and masks shrinking: who is in a mask holds at least the first `depth` keys."""

_CHUNK = 64  # so many keys are passed over by their last; a run is looked at to its end, not further than this
_FEW = 12  # of so few bits, a loop is faster than unpacking a column
_TRANSLATED_LIMIT = 65_536


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
        found: Runs = []
        before = mask = 0
        for depth, alive in runs:
            lost = before ^ alive
            # Whichever is smaller: a long way on which one after the other falls behind must not cost its square.
            mask = self[alive] if alive.bit_count() <= lost.bit_count() else mask & ~self[lost]
            if not mask:
                break
            found.append((depth, mask))
            before = alive
        return found


class Source(NamedTuple):
    """Tells who holds a key: a mask, None for nobody; `translation` brings it to the numbering of the walk."""

    get: Callable[[int], int | None]
    translation: Translation | None = None

    def seen(self, mask: int | None) -> int:
        """Return what was got, in the numbering of the walk."""
        if not mask or self.translation is None:
            return mask or 0
        return self.translation[mask]


def walk(keys: Sequence[int], alive: int, sources: Sequence[Source], known: Runs | None = None) -> Runs:
    """Return the runs of `alive` along `keys`.

    A key is held where any source says so; later sources are asked only about those whom the earlier ones lack.
    The runs of `known` hold that far whatever the sources say.
    """
    if not isinstance(keys, list):
        keys = list(keys)  # whose iterators can tell where they are
    falls = _falls_of_one if len(sources) == 1 and sources[0].translation is None else _falls
    found: Runs = []
    start = 0
    for end, sure in (*(known or ()), (len(keys), 0)):
        doubtful = alive & ~sure
        if doubtful and start < end:
            for depth, left in falls(keys, start, end, doubtful, sources):
                if depth:
                    found.append((depth, alive))
                alive = left | (alive & sure)
                if not alive:
                    return found
        start = end
    if alive and keys:
        found.append((len(keys), alive))
    return found


def _falls(keys: list[int], start: int, end: int, alive: int, sources: Sequence[Source]) -> Iterator[tuple[int, int]]:
    """Yield each position between `start` and `end` that not all of `alive` hold, and who is left then."""
    source, *others = sources
    while alive and start < end:
        if source.translation is None:  # mostly it is enough to ask one, and that costs a tenth
            start = passed(keys, start, end, alive, source.get)
        start = passed(keys, start, end, alive, lambda key: _held(sources, key))
        stop = min(start + _CHUNK, end)
        coming = iter(keys[start:stop])  # a run's first key has been taken from it when the run comes
        for mask, run in groupby(map(source.get, coming)):
            lacking = alive & ~source.seen(mask)
            if not lacking:
                continue
            begin = stop - length_hint(coming) - 1
            gone = lacking & ~_held(others, keys[begin])
            if gone:
                alive ^= gone
                yield begin, alive
                if not alive:
                    return
            if gone != lacking:
                rest = alive & ~lacking
                for position, left in _falls(keys, begin, begin + len(list(run)), lacking ^ gone, others):
                    alive = rest | left
                    yield position, alive
                if not alive:
                    return
        start = stop


def _falls_of_one(
    keys: list[int], start: int, end: int, alive: int, sources: Sequence[Source]
) -> Iterator[tuple[int, int]]:
    """The same for a single source, which needs no looking back: what nearly every walk comes to."""
    get = sources[0].get
    while start < end:
        start = passed(keys, start, end, alive, get)
        stop = min(start + _CHUNK, end)
        coming = iter(keys[start:stop])
        for mask, _ in groupby(map(get, coming)):
            left = alive & mask if mask else 0
            if left != alive:
                alive = left
                yield stop - length_hint(coming) - 1, alive
                if not alive:
                    return
        start = stop


def passed(keys: Sequence[int], start: int, end: int, alive: int, held: Callable[[int], int | None]) -> int:
    """Return where the first keys begin of which not all of `alive` hold the last, or that are few."""
    while end - start >= _CHUNK and not alive & ~(held(keys[start + _CHUNK - 1]) or 0):
        start += _CHUNK
    return start


def _held(sources: Sequence[Source], key: int) -> int:
    """Return who holds a key by any of some sources."""
    held = 0
    for source in sources:
        held |= source.seen(source.get(key))
    return held


def among(runs: Runs, mask: int) -> Runs:
    """Return the runs of those who are in `mask`."""
    return [(depth, alive & mask) for depth, alive in runs if alive & mask]


def ends(runs: Runs) -> Iterator[tuple[int, int]]:
    """Yield each depth with those who get so far and no further."""
    for (depth, alive), (_, further) in pairwise([*runs, (0, 0)]):
        if alive != further:
            yield depth, alive ^ further


def depth_column(runs: Runs, width: int) -> Floats:
    """Return each seat's depth, 0 where it holds nothing; the masks of `runs` are of seats."""
    column = np.zeros(width)
    if not runs:
        return column
    # The first run is of all who hold anything, the same ones every time; few of them get further.
    (depth, alive), *further = runs
    np.putmask(column, members(alive, width), depth)
    for depth, mask in ends(further):
        if mask.bit_count() <= _FEW:
            for bit in bits_of(mask):
                column[bit.bit_length() - 1] = depth
        else:
            np.putmask(column, members(mask, width), depth)
    return column


def runs_of(depths: Iterable[tuple[int, int]]) -> Runs:
    """Return the runs of pairs of a depth and those who get so far."""
    found: Runs = []
    alive = 0
    for depth, mask in sorted(depths, reverse=True):
        alive |= mask
        found.append((depth, alive))
    return found[::-1]
