"""Ports for engines: free now, and not handed out twice."""

from __future__ import annotations

import random
import socket

from stoker.common.errors import Exhausted

# Below the range from which Linux takes ports for outgoing connections: nothing grabs one between the look
# and the engine's bind. Below the planner's rendezvous ports too (29,500 and up): a gang's port is promised
# long before its head binds it, and an engine that took it would keep the gang from ever starting.
_FIRST, _LAST = 20_000, 29_499
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
            if self._taken.isdisjoint(run) and all(can_be_bound(port) for port in run):
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


def can_be_bound(port: int) -> bool:
    """Whether a server that sets SO_REUSEADDR could listen on this port of every address now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
