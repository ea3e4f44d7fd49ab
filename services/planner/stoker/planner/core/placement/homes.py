"""Where deployments that talk to each other shall live together."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stoker.planner.core.placement.state import most_in_one
from stoker.planner.core.placement.values import Domain, Need

if TYPE_CHECKING:
    from stoker.planner.core.placement.greedy import Greedy


def best(greedy: Greedy, group: Sequence[Need]) -> dict[int, int]:
    """A tier and the number of one of its switch domains: the tightest with room for what `group` lacks, those first
    in which the group is; where none is large enough, the roomiest of the lowest tier. Empty without a fabric."""
    state = greedy.state
    lacking = sum(max(0, need.replicas - state.counts[need.deployment]) * need.members * need.gpus for need in group)
    room = _room(greedy, group)
    held: Counter[int | str] = Counter()
    for tier in range(state.ground.tiers):
        for need in group:
            held.update(state.members_by(need.deployment, tier))
        enough = [number for number, free in room[tier].items() if free >= lacking]
        if enough:
            return {tier: min(enough, key=lambda number: (-held[number], room[tier][number], number))}
    if not room or not room[0]:
        return {}
    return {0: max(room[0], key=lambda number: (room[0][number], -number))}


def _room(greedy: Greedy, group: Sequence[Need]) -> list[dict[int, int]]:
    """By tier, the GPUs that `group` might get in each switch domain: free, powered, not too many in a rack."""
    state = greedy.state
    by_rack: defaultdict[tuple[str, tuple[int, ...]], int] = defaultdict(int)
    seen: set[int] = set()
    draws: dict[str, int] = {}
    for need in group:
        for cell in greedy.shelf.fitting(need):
            if cell.number not in seen:
                seen.add(cell.number)
                draws[cell.rack] = state.ground.gpu_draw(need, cell.nodes[0])
                by_rack[cell.rack, cell.path] += sum(state.free[node].bit_count() for node in cell.nodes)
    most = sum(
        (most_in_one(need, need.replicas) if Domain.RACK in need.spread_over else need.replicas)
        * need.members
        * need.gpus
        for need in group
    )
    rooms: list[dict[int, int]] = [defaultdict(int) for _ in range(state.ground.tiers)]
    for (rack, path), free in by_rack.items():
        headroom = state.headroom(rack)
        draw = draws[rack]
        powered = free if headroom is None or not draw else headroom // draw
        for tier, number in enumerate(path):
            rooms[tier][number] += min(free, powered, most)
    return rooms
