"""One number for each replica of a pool: its place in every column and its bit in every mask."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_FIRST_WIDTH = 64


class Seats:
    """Gives replicas the smallest numbers that are free. `width` is how long a column for all of them is."""

    def __init__(self) -> None:
        self.width = _FIRST_WIDTH
        self.names: dict[int, str] = {}
        self._numbers: dict[str, int] = {}
        self._free: list[int] = []

    def number(self, replica: str) -> int:
        """Return a replica's seat; one that has none takes a free one."""
        seat = self._numbers.get(replica)
        if seat is None:
            seat = self._free.pop() if self._free else len(self._numbers)
            self._numbers[replica] = seat
            self.names[seat] = replica
            if seat >= self.width:
                self.width *= 2
        return seat

    def free(self, replica: str) -> None:
        """Give a replica's seat to whoever comes next; nothing may remember it there by then."""
        seat = self._numbers.pop(replica, None)
        if seat is not None:
            del self.names[seat]
            self._free.append(seat)


def bits_of(mask: int) -> Iterator[int]:
    """Yield the bits of a mask, each as a mask of its own, lowest first."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit


@lru_cache(4096)
def members(mask: int, width: int) -> Bools:
    """Return a mask as a read-only column of `width` (a multiple of 8): whether each seat is in it."""
    packed = np.frombuffer(mask.to_bytes(width // 8, "little"), np.uint8)
    column = np.unpackbits(packed, bitorder="little").view(np.bool_)
    column.setflags(write=False)
    return column


def mask_of(column: Bools) -> int:
    """Return a column of truth values as a mask of seats."""
    return int.from_bytes(np.packbits(column, bitorder="little").tobytes(), "little")


def widened(column: Floats, width: int, fill: float) -> Floats:
    """Return a column that is at least `width` long, with `fill` where it is new."""
    if len(column) >= width:
        return column
    return np.concatenate([column, np.full(width - len(column), fill)])
