"""The three entries: a quick placement, a better one, and what any placement is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from stoker.planner.core.ordering import natural
from stoker.planner.core.placement.conflicts import unplaced
from stoker.planner.core.placement.exact import improved
from stoker.planner.core.placement.floors import floors
from stoker.planner.core.placement.greedy import filled
from stoker.planner.core.placement.ground import Ground
from stoker.planner.core.placement.ground import ground as survey
from stoker.planner.core.placement.state import State
from stoker.planner.core.placement.values import (
    Clock,
    Goal,
    Look,
    Placed,
    Placement,
    PlacementProblem,
    Score,
    Stopping,
    unwatched,
)
from stoker.planner.core.placement.worth import worth


def greedy(problem: PlacementProblem, *, ground: Ground | None = None, look: Look = unwatched) -> Placement:
    """Best fit, at once: every hard limit holds, goals are reached as far as one look ahead shows.

    `ground` is what `ground.ground` made of the problem's facility, for who plans it again and again. `look` is
    called before each replica; what it raises ends the search.
    """
    state = filled(ground or survey(problem.facility), problem, look)
    eased = _eased(state)
    return _told(filled(state.ground, eased, look) if eased else state, {}, look)


def place(
    problem: PlacementProblem,
    *,
    time_limit_s: float = 30.0,
    seed: int = 0,
    ground: Ground | None = None,
    clock: Clock | None = None,
    look: Look = unwatched,
    stopping: Stopping | None = None,
) -> Placement:
    """The greedy placement, improved for at most `time_limit_s` seconds of two cores.

    Same problem and seed, same placement, as long as the limit is not what ends the search. What stands is not
    moved (see `PlacementProblem`).

    `clock` gives monotonic seconds, for who needs the limit kept to the second on a large facility. Without it only
    the solver's time is measured, and the rest is estimated. `look` is called before each replica that gets its first
    place; what it raises ends all. `stopping` is for who may want to end the solver before its time; the clock has to
    say then that the time is over.
    """
    state = filled(ground or survey(problem.facility), problem, look)
    # What a first look leaves without a place, a search may find one for.
    state, bounds = improved(state, time_limit_s / 2 if _eased(state) else time_limit_s, seed, clock, stopping)
    if eased := _eased(state):
        state, bounds = improved(filled(state.ground, eased, look), time_limit_s / 2, seed, clock, stopping)
    for goal, floor in floors(state).items():
        bounds[goal] = max(floor, bounds.get(goal, 0.0))
    return _told(state, bounds, look)


def scores(problem: PlacementProblem, placed: Sequence[Placed], *, ground: Ground | None = None) -> tuple[Score, ...]:
    """What `placed` is worth, goal by goal, without bounds."""
    state = State(ground or survey(problem.facility), problem)
    for one in placed:
        state.take(one)
    return tuple(Score(goal, value) for goal, value in worth(state).items())


def _eased(state: State) -> PlacementProblem | None:
    """The problem with the shares that count for needs which are short; None where none of these has another."""
    needs = tuple(
        replace(need, largest_share=need.largest_share_if_short, largest_share_if_short=None)
        if need.largest_share_if_short is not None and state.counts[need.deployment] < need.replicas
        else need
        for need in state.problem.needs
    )
    return None if needs == state.problem.needs else replace(state.problem, needs=needs)


def _told(state: State, bounds: Mapping[Goal, float], look: Look) -> Placement:
    stood = {old.replica: old for old in state.problem.standing}
    placed = tuple(sorted(state.placed.values(), key=lambda p: natural(p.replica)))
    return Placement(
        placed=placed,
        unplaced=unplaced(state, look),
        moved=frozenset(p.replica for p in placed if p.replica in stood and stood[p.replica].members != p.members),
        fresh=frozenset(p.replica for p in placed if p.replica not in stood),
        scores=tuple(Score(goal, value, bounds.get(goal) if value else 0.0) for goal, value in worth(state).items()),
    )
