"""Moves of what stands that would leave a fleet better placed, in an order in which each can be made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from stoker.planner.core import placement, siting
from stoker.planner.core.ordering import natural
from stoker.planner.core.placement import (
    Clock,
    Goal,
    Look,
    Member,
    Placed,
    PlacementProblem,
    Score,
    Stopping,
    unwatched,
)
from stoker.planner.core.placement.ground import Ground
from stoker.planner.core.values import Condition, Problem, Wanted


@dataclass(frozen=True, slots=True)
class Move:
    """One replica from where it is to where it would be."""

    replica: str
    here: tuple[Member, ...]
    there: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Proposal:
    """`moves` in an order in which each finds its place free. `before` and `after` are what the placement is worth;
    `placed_more` replicas that have no place would get one."""

    moves: tuple[Move, ...] = ()
    before: tuple[Score, ...] = ()
    after: tuple[Score, ...] = ()
    placed_more: int = 0


def propose(
    problem: Problem,
    surface: Ground,
    *,
    counts: Mapping[str, int],
    time_limit_s: float,
    most: int,
    clock: Clock | None = None,
    look: Look = unwatched,
    stopping: Stopping | None = None,
) -> Proposal:
    """Moves worth making, at most `most`; none where they gain nothing. A replica moves only if it serves, and its
    deployment has as many ready ones as are desired: its successor is placed before it leaves.

    `look` is called before each replica that is placed; what it raises ends the search. `stopping` as in `place`.
    """
    asked = siting.whole(problem, surface, counts)
    now = placement.greedy(asked, ground=surface, look=look)
    free = replace(asked, movable=_movable(problem, counts))
    better = placement.place(
        free, time_limit_s=time_limit_s, ground=surface, clock=clock, look=look, stopping=stopping
    )
    if not _gains(now.scores, better.scores):
        return Proposal(before=now.scores, after=now.scores)
    moves = _in_order(asked, {each.replica: each for each in better.placed}, better.moved, most)
    kept = {move.replica: move.there for move in moves}
    after = placement.greedy(_after(asked, kept), ground=surface, look=look)
    if not moves or not _gains(now.scores, after.scores):
        return Proposal(before=now.scores, after=now.scores)
    short = _short(now.scores) - _short(after.scores)
    return Proposal(moves, now.scores, after.scores, max(0, round(short)))


def _movable(problem: Problem, counts: Mapping[str, int]) -> frozenset[str]:
    ready: dict[str, list[str]] = {}
    for assignment in problem.assignments:
        if assignment.wanted is Wanted.RUN and problem.conditions.get(assignment.replica) is Condition.READY:
            ready.setdefault(assignment.deployment, []).append(assignment.replica)
    enough = (names for deployment, names in ready.items() if len(names) >= counts.get(deployment, 1))
    return frozenset(name for names in enough for name in names)


def _gains(before: tuple[Score, ...], after: tuple[Score, ...]) -> bool:
    """Whether the first goal that differs is better, that of moves left out."""
    for one, other in zip(before, after, strict=True):
        if one.goal is not Goal.MOVES and abs(one.value - other.value) > 1e-9:
            return other.value < one.value
    return False


def _short(scores: tuple[Score, ...]) -> float:
    return next((score.value for score in scores if score.goal is Goal.SHORTFALL), 0.0)


def _in_order(
    asked: PlacementProblem, wanted: Mapping[str, Placed], moved: frozenset[str], most: int
) -> tuple[Move, ...]:
    """Of the moves the first `most` that find their GPUs free one after the other; what only a swap could do is left
    out."""
    here = {each.replica: each for each in asked.standing}
    taken = {unit: each.replica for each in asked.standing for unit in _units(each.members)}
    waiting = sorted((name for name in moved if name in here), key=natural)
    moves: list[Move] = []
    while len(moves) < most:
        name = next((n for n in waiting if not any(u in taken for u in _units(wanted[n].members))), None)
        if name is None:
            break
        waiting.remove(name)
        for unit in _units(here[name].members):
            taken.pop(unit, None)
        taken.update(dict.fromkeys(_units(wanted[name].members), name))
        moves.append(Move(name, here[name].members, wanted[name].members))
    return tuple(moves)


def _units(members: tuple[Member, ...]) -> list[tuple[str, int]]:
    return [(member.node, gpu) for member in members for gpu in member.gpus]


def _after(asked: PlacementProblem, moved: Mapping[str, tuple[Member, ...]]) -> PlacementProblem:
    standing = (replace(each, members=moved.get(each.replica, each.members)) for each in asked.standing)
    return replace(asked, standing=tuple(standing))
