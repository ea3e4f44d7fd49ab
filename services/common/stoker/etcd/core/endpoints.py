"""Which endpoint to use: stay with one that works, leave one that does not."""

from __future__ import annotations


class Endpoints:
    """Health of `count` endpoints, by index. All times are monotonic seconds.

    Sticky, because a client that stays on one member sees its own writes in order and keeps one
    connection warm. Starts at `first`, so that clients given the same list spread over it.
    """

    def __init__(self, count: int, first: int = 0) -> None:
        self._avoid_until = [float("-inf")] * count
        self._failures = [0] * count
        self._current = first % count

    def pick(self, now: float) -> int:
        """The current endpoint while it is good, else the next good one, else the one soonest good again."""
        n = len(self._avoid_until)
        order = [(self._current + step) % n for step in range(n)]
        good = (i for i in order if self._avoid_until[i] <= now)
        self._current = next(good, min(order, key=self._avoid_until.__getitem__))
        return self._current

    def has_good(self, now: float) -> bool:
        """Whether any endpoint is not being avoided."""
        return any(until <= now for until in self._avoid_until)

    def failures(self, index: int) -> int:
        """Failures of this endpoint in a row."""
        return self._failures[index]

    def failed(self, index: int, avoid_until: float) -> None:
        """Count a failure and avoid the endpoint until then, unless nothing better is left."""
        self._failures[index] += 1
        self._avoid_until[index] = avoid_until

    def succeeded(self, index: int) -> None:
        """Forget the endpoint's failures."""
        self._failures[index] = 0
        self._avoid_until[index] = float("-inf")
