"""The three entries: a quick placement, a better one, and what any placement is worth."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.planner.core.placement.values import Placed, Placement, PlacementProblem, Score


def greedy(problem: PlacementProblem) -> Placement:
    """Best fit, at once: every hard limit holds, goals are reached as far as one look ahead shows."""
    raise NotImplementedError(problem)


def place(problem: PlacementProblem, *, time_limit_s: float = 30.0, seed: int = 0, improve: bool = True) -> Placement:
    """The greedy placement, improved for at most `time_limit_s` seconds of two cores.

    Same problem and seed, same placement, as long as the limit is not what ends the search. With `improve` False it
    is `greedy` alone. What stands is not moved (see `PlacementProblem`).
    """
    raise NotImplementedError(problem, time_limit_s, seed, improve)


def scores(problem: PlacementProblem, placed: Sequence[Placed]) -> tuple[Score, ...]:
    """What `placed` is worth, goal by goal, without bounds."""
    raise NotImplementedError(problem, placed)
