"""The cold start of a new replica: it takes part by degrees."""

from __future__ import annotations

import numpy as np

from stoker.router.core.seats import Floats, Ints, Seats, widened

_LONG_AGO = float("-inf")


class Ramp:
    """How warm each replica is, from `start` when it becomes ready to 1 after `ramp_s` seconds.

    An empty replica has no load, so whatever nobody holds goes there first; and its first requests are its slowest,
    before its kernels are compiled and its rate was measured. Its part of the bound grows with its warmth.
    """

    def __init__(self, seats: Seats, start: float, ramp_s: float) -> None:
        self._seats = seats
        self._start = start
        self._ramp_s = ramp_s
        self._ready_at: Floats = np.full(seats.width, _LONG_AGO)  # by seat
        self._latest = _LONG_AGO

    def put(self, replica: str, ready_at: float | None) -> None:
        """Take when a replica became ready (own monotonic seconds), None for long ago."""
        seat = self._seats.number(replica)
        self._ready_at = widened(self._ready_at, self._seats.width, _LONG_AGO)
        self._ready_at[seat] = _LONG_AGO if ready_at is None else ready_at
        self._latest = max(self._latest, float(self._ready_at[seat]))

    def remove(self, replica: str) -> None:
        """Forget a replica."""
        self.put(replica, None)

    def warms(self, now: float) -> bool:
        """Return whether any replica may still be warming up."""
        return now - self._latest < self._ramp_s

    def warmth(self, seats: Ints, now: float) -> Floats | None:
        """Return how warm those on some seats are beside the warmest of them; None where all are alike.

        Where all begin together, none is spared.
        """
        if not self.warms(now):
            return None
        part = np.maximum(0.0, np.minimum(1.0, (now - self._ready_at[seats]) / self._ramp_s))
        column: Floats = self._start + (1.0 - self._start) * part
        return None if column.min() == column.max() else column / column.max()
