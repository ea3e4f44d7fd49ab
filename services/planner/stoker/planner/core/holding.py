"""What stands, held against the facility: how much of each limit it uses, and what no longer holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from stoker.planner.core.placement.ground import Ground
from stoker.planner.core.placement.state import State, most_in_one
from stoker.planner.core.placement.values import Domain, Need, PlacementProblem
from stoker.planner.core.siting import placement_problem
from stoker.planner.core.values import Problem

MOST_NAMED = 100
"""Replicas named with one violation."""
_HALF_A_WATT = 0.5
"""Whole watts may come from fractions of several feeds."""


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that stands against a limit. `limit` is node, gpus, power, cooling or spread."""

    limit: str
    subject: str
    words: str
    replicas: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """How much of a limit on draw is used, in watts. `racks` hang on it."""

    kind: str
    name: str
    used_w: float
    capacity_w: float
    racks: frozenset[str] = field(default_factory=frozenset)

    @property
    def share(self) -> float:
        """Of the capacity, the part in use; infinite where there is none."""
        return self.used_w / self.capacity_w if self.capacity_w else float("inf")


def booked(problem: Problem, surface: Ground) -> State:
    """All that stands, taken on the ground."""
    asked = placement_problem(problem, surface, {}, problem.assignments)
    return booked_all(asked, surface)


def booked_all(asked: PlacementProblem, surface: Ground) -> State:
    """What stands of a placement's problem, taken on the ground."""
    state = State(surface, asked)
    for placed in asked.standing:
        state.take(placed)
    return state


def loads(state: State) -> list[Load]:
    """Every limit on the draw of racks, the tightest first."""
    surface = state.ground
    found = []
    for number, limit in enumerate(surface.limits):
        quanta = limit.scale * surface.quanta
        used = limit.capacity - state.slack[number] / quanta
        found.append(Load(limit.kind, limit.name, used, limit.capacity, frozenset(limit.weights)))
    return sorted(found, key=lambda load: (-load.share, load.name))


def violations(problem: Problem, surface: Ground, state: State | None = None) -> tuple[Violation, ...]:
    """What stands and would not be placed so now. Nothing is to be stopped for it; nothing is added to it either."""
    state = state or booked(problem, surface)
    return (*_unlisted(problem), *_missing_gpus(problem, surface), *_overdrawn(state), *_crowded(state))


def _unlisted(problem: Problem) -> Iterator[Violation]:
    on: defaultdict[str, set[str]] = defaultdict(set)
    for assignment in problem.assignments:
        for member in assignment.members:
            on[member.node].add(assignment.replica)
    for node in sorted(problem.unlisted):
        there = tuple(sorted(on[node]))
        runs = f"; it runs {_named(there)}" if there else ""
        words = f"node {node} is not in the facility: it gets nothing new{runs}"
        yield Violation("node", node, words, there[:MOST_NAMED])


def _missing_gpus(problem: Problem, surface: Ground) -> Iterator[Violation]:
    present = {node.id for node in problem.nodes}
    for assignment in sorted(problem.assignments, key=lambda a: a.replica):
        for member in assignment.members:
            node = surface.facility.nodes.get(member.node)
            gone = set(member.gpus) - {gpu.index for gpu in node.gpus} if node and member.node in present else set()
            if gone:
                words = f"{assignment.replica} has GPUs {sorted(gone)} of node {member.node}, which are not there"
                yield Violation("gpus", member.node, words, (assignment.replica,))


def _overdrawn(state: State) -> Iterator[Violation]:
    nodes = state.ground.facility.nodes
    over = [load for load in loads(state) if load.used_w > load.capacity_w + _HALF_A_WATT]
    on: defaultdict[str, set[str]] = defaultdict(set)
    for placed in state.placed.values() if over else ():
        for member in placed.members:
            if member.node in nodes:
                on[nodes[member.node].rack].add(placed.replica)
    for load in over:
        there = sorted({replica for rack in load.racks for replica in on[rack]})
        words = f"{load.name}: {load.used_w / 1e3:.4g} kW at the most of {load.capacity_w / 1e3:.4g} kW"
        yield Violation(load.kind, load.name, words, tuple(there[:MOST_NAMED]))


def _crowded(state: State) -> Iterator[Violation]:
    for need in state.problem.needs:
        eased = replace(need, largest_share=need.largest_share_if_short or need.largest_share)
        for key, number, have, most in _crowds(state, eased):
            there = sorted(
                placed.replica
                for placed in state.placed.values()
                if placed.deployment == need.deployment and key in state.keys(m.node for m in placed.members)
            )
            words = f"{number} of {have} replicas of {need.deployment} are in {_domain(key)}; at most {most} may be"
            yield Violation("spread", need.deployment, words, tuple(there[:MOST_NAMED]))


def eased(state: State, deployment: str) -> Iterator[str]:
    """In words, the failure domains that hold more than half of `deployment`, where that is allowed for want of room
    elsewhere."""
    need = state.needs.get(deployment)
    if need is not None and need.largest_share_if_short is not None:
        for key, number, have, most in _crowds(state, need):
            if number <= most_in_one(replace(need, largest_share=need.largest_share_if_short), have):
                yield (
                    f"{number} of {have} replicas of {deployment} are in {_domain(key)}: there was no room to have "
                    f"at most {most} in each, so less than half would outlive it"
                )


def _crowds(state: State, need: Need) -> Iterator[tuple[tuple[str, str], int, int, int]]:
    """Failure domains with more replicas than may be: how many, of how many, and how many may."""
    have = state.counts[need.deployment]
    most, kinds = most_in_one(need, have), {kind.value for kind in need.spread_over}
    for key, number in sorted(state.touched[need.deployment].items()) if have > 1 else ():
        if key[0] in kinds and number > most:
            yield key, number, have, most


def _domain(key: tuple[str, str]) -> str:
    return f"power source {key[1]}" if key[0] == Domain.SOURCE.value else f"{key[0]} {key[1]}"


def _named(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
