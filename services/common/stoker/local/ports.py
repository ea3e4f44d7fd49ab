"""Free TCP ports on the loopback."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable

from stoker.common.errors import StokerError

# Below the range from which Linux takes ports for outgoing connections: nothing grabs one between our look
# and the service's bind. Above those that agents give to engines and the planner to gangs.
_RANGE = range(29_700, 32_700)


class PortPicker:
    """Hands out ports that are free now, none twice."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()  # noqa: S311 - no secret
        self._given: set[int] = set()

    def pick(self, preferred: int | None = None) -> int:
        """`preferred` if it is free, any free one otherwise. Raises StokerError when none is found."""
        tries: Iterable[int] = (self._rng.choice(_RANGE) for _ in range(200))
        for port in [preferred, *tries] if preferred is not None else tries:
            if port not in self._given and is_free(port):
                self._given.add(port)
                return port
        raise StokerError(
            f"found no free port from {_RANGE.start} to {_RANGE.stop - 1}; stop what holds them (see `ss -ltnp`)",
            reason="NO_FREE_PORT",
        )


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen on this port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
