"""What counters that only grow have grown by, and over which time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

_SHORTEST_S = 0.2
"""Readings closer than this tell no rate."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters of one source at `at` (monotonic seconds). A counter that is absent is unknown."""

    at: float
    life: int
    """Another one means that all of them began anew."""
    counts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Growth:
    """What was counted in `seconds`."""

    seconds: float
    counts: Mapping[str, float]

    def rate(self, name: str) -> float | None:
        """Per second; None where it is unknown."""
        grown = self.counts.get(name)
        return None if grown is None else grown / self.seconds


class Meter:
    """One source's counters, read whenever they come and asked for their growth at other times.

    What was counted before the first reading of a life is not known to have been counted lately: it never shows.
    """

    def __init__(self) -> None:
        self._taken: Reading | None = None
        self._newest: Reading | None = None

    def read(self, reading: Reading) -> None:
        """Take a reading; one that is older than what is held changes nothing."""
        newest = self._newest
        if newest is not None and reading.life == newest.life and reading.at < newest.at:
            return
        if newest is None or reading.life != newest.life or _fell(newest, reading):
            self._taken = reading
        self._newest = reading

    def still(self, at: float) -> None:
        """Nothing has changed up to `at`."""
        if self._newest is not None and at > self._newest.at:
            self._newest = replace(self._newest, at=at)

    def grown(self) -> Growth | None:
        """The growth since the last time one was returned; None where nothing was read since."""
        before, after = self._taken, self._newest
        if before is None or after is None or after.at - before.at < _SHORTEST_S:
            return None
        self._taken = after
        known = before.counts.keys() & after.counts.keys()
        return Growth(after.at - before.at, {name: after.counts[name] - before.counts[name] for name in known})


def _fell(before: Reading, after: Reading) -> bool:
    return any(value < before.counts.get(name, 0.0) for name, value in after.counts.items())
