"""Places for replicas of several nodes: as few switch domains and racks as can be, the tightest that fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.planner.core.placement.cells import Cell
from stoker.planner.core.placement.gpus import choose
from stoker.planner.core.placement.values import Member, Need

if TYPE_CHECKING:
    from stoker.planner.core.placement.greedy import Greedy


@dataclass(frozen=True, slots=True)
class _Spot:
    """A node that could take a member: how badly its groups would lie, GPUs that would be left, and its cell."""

    bad: int
    left: int
    order: int
    node: str
    cell: Cell


def find(greedy: Greedy, need: Need) -> tuple[Member, ...] | None:
    """The members of one more replica of `need`, or None; books nothing."""
    spots = list(_spots(greedy, need))
    for scope in _scopes(greedy, need, spots):
        members = _assemble(greedy, need, scope)
        if members is not None:
            return members
    return None


def block(need: Need) -> int:
    """How many members in a row have to be in one NVLink domain."""
    return max(1, need.tensor_parallel // need.gpus) if need.gpus else 1


def _spots(greedy: Greedy, need: Need) -> Iterator[_Spot]:
    for cell in greedy.shelf.fitting(need):
        if not greedy.open(cell.nodes[0], need) or (
            block(need) > 1 and not cell.scale_up and "scale_up" not in greedy.free_of
        ):
            continue
        layout = greedy.state.ground.layouts[cell.nodes[0]]
        for free, nodes in greedy.shelf.classes(cell):
            found = choose(layout, free, need.gpus, need.tensor_parallel) if need.gpus else ((), 0)
            if found is None:
                continue
            for order, node in nodes:
                if greedy.carries(node, need):
                    yield _Spot(found[1], free.bit_count() - need.gpus, order, node, cell)


def _scopes(greedy: Greedy, need: Need, spots: Sequence[_Spot]) -> list[list[_Spot]]:
    """Sets of nodes in which the replica might live, the best first: an NVLink domain, a rack, a switch domain …"""
    state = greedy.state
    by_scope: defaultdict[tuple[int, str | int], list[_Spot]] = defaultdict(list)
    for spot in spots:
        if spot.cell.scale_up:
            by_scope[0, spot.cell.scale_up].append(spot)
        by_scope[1, spot.cell.rack].append(spot)
        for tier, number in enumerate(spot.cell.path):
            by_scope[2 + tier, number].append(spot)
        by_scope[99, state.ground.fabric.whole[spot.node]].append(spot)
    touched = state.touched[need.deployment]
    away = {spot.cell.number: greedy.is_away(spot.node) for spot in spots}
    ranked = []
    for (level, _), inside in by_scope.items():
        if _blocks(need, inside) * block(need) < need.members:
            continue
        afar = min(away[spot.cell.number] for spot in inside)
        held = min(touched["rack", spot.cell.rack] for spot in inside)
        bad = sorted(spot.bad for spot in inside)[need.members - 1]
        ranked.append(((max(0, level - 1), afar, bad, held, level, len(inside), inside[0].order), inside))
    return [inside for _, inside in sorted(ranked, key=lambda entry: entry[0])]


def _blocks(need: Need, spots: Sequence[_Spot]) -> int:
    """How many runs of members that share an NVLink domain fit into `spots`."""
    if block(need) == 1:
        return len(spots)
    counts: defaultdict[str, int] = defaultdict(int)
    for spot in spots:
        counts[spot.cell.scale_up] += 1
    return sum(number // block(need) for number in counts.values())


def _assemble(greedy: Greedy, need: Need, scope: Sequence[_Spot]) -> tuple[Member, ...] | None:
    """Take members from few racks, and give them ranks and GPUs; None where power or traffic does not allow."""
    state = greedy.state
    chosen = _with_power(greedy, need, scope)
    if len(chosen) < need.members:
        return None
    chosen.sort(key=lambda spot: (spot.cell.path[::-1], spot.cell.scale_up, spot.cell.rack, spot.order))
    nodes = [spot.node for spot in chosen]
    if "bandwidth" not in greedy.free_of and state.chokes(need, nodes):
        return None
    members: list[Member] = []
    rails: tuple[int, ...] = ()
    for node in nodes:
        found = state.member(node, need, rails)
        if found is None:
            return None
        members.append(found[0])
        rails = rails or state.rails(found[0])
    return tuple(members)


def _with_power(greedy: Greedy, need: Need, scope: Sequence[_Spot]) -> list[_Spot]:
    """Up to as many spots as there are members, from the racks that take most of what is still missing."""
    by_place: defaultdict[str, list[_Spot]] = defaultdict(list)
    for spot in sorted(scope, key=lambda spot: (spot.bad, spot.left, spot.order)):
        by_place[spot.cell.scale_up if block(need) > 1 else spot.cell.rack].append(spot)
    chosen: list[_Spot] = []
    try:
        while by_place and len(chosen) < need.members:
            missing = need.members - len(chosen)
            enough = [place for place, own in by_place.items() if len(own) >= missing]
            place = (
                min(enough, key=lambda p: (len(by_place[p]), by_place[p][0].order))
                if enough
                else max(by_place, key=lambda p: (len(by_place[p]), -by_place[p][0].order))
            )
            taken: list[_Spot] = []
            for spot in by_place.pop(place):
                if len(taken) < missing and greedy.open(spot.node, need):
                    _draw(greedy, need, spot, 1)
                    taken.append(spot)
            whole = len(taken) - len(taken) % block(need)
            for spot in taken[whole:]:
                _draw(greedy, need, spot, -1)
            chosen += taken[:whole]
    finally:
        for spot in chosen:
            _draw(greedy, need, spot, -1)
    return chosen


def _draw(greedy: Greedy, need: Need, spot: _Spot, sign: int) -> None:
    greedy.state.add_draw(spot.node, sign * greedy.state.draw_of(need, spot.node))
