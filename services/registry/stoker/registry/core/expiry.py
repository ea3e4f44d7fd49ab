"""When many nodes vanish at once, doubt the news before the nodes.

After an outage of etcd, or a partition between registries and agents, leases end by the hundred although the
engines serve. Dropping all of them empties the routers; so only a share goes at once, and the rest is held.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass
class ExpiryGuard:
    """Which lost nodes leave the view now, and which are held.

    At most `share` of the fleet (at least one node) is dropped within any `grace_s` seconds. A held node that
    comes back was never gone. One that is still away after `grace_s` goes, one each `pace_s` seconds.
    """

    share: float = 0.2
    grace_s: float = 30.0
    pace_s: float = 1.0
    _dropped: deque[float] = field(default_factory=deque)
    _held: dict[str, float] = field(default_factory=dict)
    _released_at: float = float("-inf")

    def lost(self, node_id: str, fleet: int, now: float) -> bool:
        """Whether to drop a node whose lease ended; `fleet` counts the nodes in view, this one included."""
        while self._dropped and self._dropped[0] <= now - self.grace_s:
            self._dropped.popleft()
        if len(self._dropped) < max(1, int(self.share * (fleet + len(self._dropped)))):
            self._dropped.append(now)
            return True
        self._held.setdefault(node_id, now)
        return False

    def returned(self, node_id: str) -> None:
        """The node is back, or known to be gone on purpose."""
        self._held.pop(node_id, None)

    def due(self, now: float) -> str | None:
        """A held node to drop now, if any; call again at any time."""
        if now < self._released_at + self.pace_s:
            return None
        for node_id, lost_at in self._held.items():
            if now >= lost_at + self.grace_s:
                del self._held[node_id]
                self._released_at = now
                return node_id
        return None

    @property
    def held(self) -> frozenset[str]:
        """Nodes that are shown although their lease ended."""
        return frozenset(self._held)
