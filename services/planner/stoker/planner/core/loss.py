"""Telling a lost node from a late one."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from stoker.planner.core.values import Limits


def note_absent(
    absent_since: Mapping[str, float], present: Collection[str], assigned: Collection[str], now: float
) -> dict[str, float]:
    """Since when (monotonic seconds) each node that has assignments is missing, brought up to `now`.

    A planner that has just begun to lead starts from nothing: each absence counts from its own first look.
    """
    return {node: absent_since.get(node, now) for node in assigned if node not in present}


def lost(absent_since: Mapping[str, float], assigned: Collection[str], now: float, limits: Limits) -> frozenset[str]:
    """Nodes to give up: absent for `grace_s`, or for `mass_grace_s` while more than `mass_share` are absent.

    Many nodes that vanish together are more often a lost network or returning store than lost machines, and
    giving them all up would start the whole fleet cold. One node is never a mass, however small the fleet.
    """
    mass = len(absent_since) > max(1.0, limits.mass_share * len(assigned))
    grace_s = max(limits.grace_s, limits.mass_grace_s) if mass else limits.grace_s
    return frozenset(node for node, since in absent_since.items() if now - since >= grace_s)
