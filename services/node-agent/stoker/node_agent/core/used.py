"""Which tickets were used: each is good for one request to one replica."""

from __future__ import annotations

from collections import deque


class UsedTickets:
    """Remembers tickets until they have ended, `most` of them; the oldest are forgotten first."""

    def __init__(self, most: int = 262_144) -> None:
        self._most = most
        self._seen: set[bytes] = set()
        self._order: deque[tuple[float, bytes]] = deque()

    def __len__(self) -> int:
        return len(self._seen)

    def use(self, name: bytes, until: float, now: float) -> bool:
        """Note a ticket that is good until `until` as used; False if it was. Times are of one clock, in seconds."""
        order = self._order
        while order and (order[0][0] < now or len(order) >= self._most):
            self._seen.discard(order.popleft()[1])
        if name in self._seen:
            return False
        self._seen.add(name)
        order.append((until, name))
        return True
