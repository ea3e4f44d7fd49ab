"""Which GPUs each replica gets: hard limits, goals in order of their weight, a quick answer and a better one."""

from stoker.planner.core.placement.placing import greedy, place, scores
from stoker.planner.core.placement.values import (
    Clock,
    Conflict,
    Domain,
    Goal,
    Look,
    Member,
    Need,
    Pair,
    Placed,
    Placement,
    PlacementProblem,
    Score,
    Stopping,
    Unplaced,
    unwatched,
)

__all__ = [
    "Clock",
    "Conflict",
    "Domain",
    "Goal",
    "Look",
    "Member",
    "Need",
    "Pair",
    "Placed",
    "Placement",
    "PlacementProblem",
    "Score",
    "Stopping",
    "Unplaced",
    "greedy",
    "place",
    "scores",
    "unwatched",
]
