"""Ports for engines: free now, and not handed out twice."""

from __future__ import annotations

import random
import socket

from stoker.common.errors import Exhausted

# Below the range from which Linux takes ports for outgoing connections: nothing grabs one between the look
# and the engine's bind.
_FIRST, _LAST = 20_000, 31_999
_TRIES = 500


class Ports:
    """Hands out runs of consecutive ports; `keep` marks those of adopted engines."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._taken: set[int] = set()

    def take(self, count: int = 1) -> int:
        """The first of `count` consecutive free ports. Raises Exhausted when none are found."""
        for _ in range(_TRIES):
            first = self._rng.randint(_FIRST, _LAST - count + 1)
            run = range(first, first + count)
            if self._taken.isdisjoint(run) and all(_is_free(port) for port in run):
                self._taken.update(run)
                return first
        raise Exhausted(
            f"no {count} consecutive free ports between {_FIRST} and {_LAST}; see `ss -ltn` for who holds them",
            reason="NO_FREE_PORT",
        )

    def keep(self, first: int, count: int = 1) -> None:
        """Count these as handed out."""
        self._taken.update(range(first, first + count))

    def give_back(self, first: int, count: int = 1) -> None:
        """Count these as free again."""
        self._taken.difference_update(range(first, first + count))


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
