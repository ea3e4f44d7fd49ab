"""Telling a lost node from a late one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from stoker.planner.core.values import Limits


@dataclass(frozen=True, slots=True)
class Presence:
    """What one leader has seen of nodes' comings and goings. Times are monotonic seconds.

    A leader begins with nothing: each absence counts from its own first look.
    """

    absent_since: Mapping[str, float] = field(default_factory=dict)
    """Nodes that have assignments and are missing."""
    lost: frozenset[str] = frozenset()
    """Those of them that were given up."""
    settling_until: Mapping[str, float] = field(default_factory=dict)
    """Nodes that were given up and came back: they may still be stopping what was placed elsewhere meanwhile."""

    @property
    def settling(self) -> frozenset[str]:
        """Nodes that take nothing new yet."""
        return frozenset(self.settling_until)


def look(
    before: Presence, present: Collection[str], assigned: Collection[str], now: float, limits: Limits
) -> Presence:
    """The presence at `now`, when `present` nodes are there and `assigned` ones have assignments.

    A node is given up when absent for `grace_s`, or for `mass_grace_s` while more than `mass_share` are absent:
    many nodes that vanish together are more often a lost network or a returning store than lost machines, and
    giving them all up would start the whole fleet cold. One node is never a mass, however small the fleet.
    """
    absent_since = {node: before.absent_since.get(node, now) for node in assigned if node not in present}
    mass = len(absent_since) > max(1.0, limits.mass_share * len(assigned))
    grace_s = max(limits.grace_s, limits.mass_grace_s) if mass else limits.grace_s
    lost = frozenset(node for node, since in absent_since.items() if now - since >= grace_s)
    # What was given up stays so while absent, also once nothing is assigned there any more.
    given_up = lost | frozenset(node for node in before.lost if node not in present)
    returned = {node: now + limits.settle_s for node in before.lost if node in present}
    settling = {node: until for node, until in before.settling_until.items() if until > now}
    return Presence(absent_since, given_up, {**settling, **returned})
