"""Bounds that need no search: what no placement of all replicas can be below."""

from __future__ import annotations

from collections import defaultdict

from stoker.planner.core.placement.state import State
from stoker.planner.core.placement.values import Goal
from stoker.planner.core.placement.worth import usable


def floors(state: State) -> dict[Goal, float]:
    """Bounds on some goals, given that every replica has a place; none where one has not."""
    if any(state.counts[need.deployment] < need.replicas for need in state.problem.needs):
        return {}
    facility = state.ground.facility
    racks = {node.rack for node in facility.nodes.values()}
    found = {Goal.SPREAD: float(sum(-(-need.replicas // len(racks)) for need in state.problem.needs))}
    if len({state.ground.gpu_cost(node) for node in facility.nodes}) == 1:
        found[Goal.COST] = sum(
            len(member.gpus) * state.ground.gpu_cost(member.node)
            for placed in state.placed.values()
            for member in placed.members
            if member.node in facility.nodes
        )
    nodes = list(usable(state))
    kinds = {(state.largest_member(node), state.ground.gpu_draw(None, node)) for node in nodes}
    if len(kinds) == 1 and _powered(state):
        size, draw = kinds.pop()
        # Wherever the rest is, it is not a multiple of whole members.
        rest = sum(state.free[node].bit_count() for node in nodes)
        found[Goal.STRANDED] = rest % size * draw / state.ground.quanta
    return found


def _powered(state: State) -> bool:
    """Whether every limit holds with all GPUs busy."""
    if any(need.busy_power is not None for need in state.problem.needs):
        return False
    full: defaultdict[str, int] = defaultdict(int)
    for name, node in state.ground.facility.nodes.items():
        full[node.rack] += len(node.gpus) * state.ground.gpu_draw(None, name)
    return all(
        sum(weight * full[rack] for rack, weight in limit.weights.items()) <= state.ground.slack[number]
        for number, limit in enumerate(state.ground.limits)
    )
