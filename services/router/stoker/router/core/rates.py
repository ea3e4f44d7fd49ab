"""How fast replicas compute prompts, as decisions see it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping

import numpy as np

from stoker.router.core.seats import Floats, Seats, widened

ASSUMED_RATE = 10_000.0
"""Tokens/s while no replica of the pool was measured."""
_NOISE = 2.0  # the factor by which measured rates of equal machines may differ


class Rates(Mapping[str, float]):
    """Each replica's prefill rate in tokens per second, by id.

    Rates are measured under load: between equal machines they differ by chance, and following that
    chance sends prefixes away from their blocks. So within a factor of the median all are equal, and one
    that was not measured yet counts as the median.
    """

    def __init__(self, seats: Seats) -> None:
        self._seats = seats
        self._measured: dict[str, float | None] = {}
        self._sorted: list[float] = []
        self._middle = ASSUMED_RATE
        self._by_seat: Floats = np.zeros(seats.width)  # 0 where it was not measured
        self._column: Floats | None = None
        self._seen: dict[str, float] = {}  # by id, those that were asked for since the last change

    def put(self, replica: str, measured: float | None) -> None:
        """Take what was measured of a replica, None for nothing."""
        before = self._measured.get(replica)
        if replica in self._measured and before == measured:
            return
        self._change(replica, before, measured)
        self._measured[replica] = measured

    def remove(self, replica: str) -> None:
        """Forget a replica."""
        self._change(replica, self._measured.pop(replica, None), None)

    def _change(self, replica: str, before: float | None, after: float | None) -> None:
        if before is not None:
            del self._sorted[bisect_left(self._sorted, before)]
        if after is not None:
            insort(self._sorted, after)
        count = len(self._sorted)
        self._middle = (self._sorted[(count - 1) // 2] + self._sorted[count // 2]) / 2 if count else ASSUMED_RATE
        seat = self._seats.number(replica)
        self._by_seat = widened(self._by_seat, self._seats.width, 0.0)
        self._by_seat[seat] = after or 0.0
        self._column = None
        self._seen.clear()

    @property
    def column(self) -> Floats:
        """All rates, by seat."""
        if self._column is None:
            middle = self._middle
            rates = np.where(self._by_seat > 0.0, self._by_seat, middle)
            self._column = np.minimum(np.maximum(middle, rates / _NOISE), rates * _NOISE)
        return self._column

    def __getitem__(self, replica: str) -> float:
        seen = self._seen.get(replica)
        if seen is None:
            middle = self._middle
            rate = self._measured[replica] or middle
            seen = self._seen[replica] = min(max(middle, rate / _NOISE), rate * _NOISE)
        return seen

    def __iter__(self) -> Iterator[str]:
        return iter(self._measured)

    def __len__(self) -> int:
        return len(self._measured)
