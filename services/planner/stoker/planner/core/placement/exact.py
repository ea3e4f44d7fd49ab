"""Better placements by CP-SAT: goal after goal, each as good as can be without harm to those before.

A facility small enough is solved as one. Of a larger one a part at a time is opened, the rest kept: switch domain by
switch domain, those first where the most is wrong.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from stoker.planner.core.placement.cells import Shelf
from stoker.planner.core.placement.floors import floors
from stoker.planner.core.placement.greedy import Greedy
from stoker.planner.core.placement.model import Model, TooManyMixes
from stoker.planner.core.placement.objectives import objectives
from stoker.planner.core.placement.prune import prune, sound
from stoker.planner.core.placement.realize import realize
from stoker.planner.core.placement.state import State
from stoker.planner.core.placement.values import Clock, Goal, Placed, Stopping
from stoker.planner.core.placement.worth import stays, uplink_flows, worth

WHOLE = 12_000
"""Choices (replica kinds times cells) up to which a problem is solved as one."""

WORKERS = 2
_CELLS = 32
_PART_S, _LEAST_S, _SHARE = 3.0, 0.5, 0.6
_VARIABLE_S, _NODE_S = 60e-6, 300e-6
"""Seconds that writing a model down and reading it off take, about: what is counted where there is no clock."""


class Budget:
    """What is left of the time. Without a clock, the solver's own and an estimate of the rest are counted."""

    def __init__(self, limit_s: float, seed: int, clock: Clock | None, stopping: Stopping | None) -> None:
        self._left_s, self._seed, self._clock, self._stopping = limit_s, seed, clock, stopping
        self._ends = clock() + limit_s if clock else 0.0

    @property
    def left_s(self) -> float:
        """Seconds."""
        return self._ends - self._clock() if self._clock else self._left_s

    def solver(self, allowed_s: float) -> Any:
        """A solver that may take so many seconds. The same work ends at the same point, whoever else runs: its own
        count of work ends the search, unless the clock does first."""
        from ortools.sat.python import cp_model

        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = allowed_s
        solver.parameters.max_deterministic_time = allowed_s
        solver.parameters.num_workers = WORKERS
        solver.parameters.interleave_search = True
        solver.parameters.random_seed = self._seed
        if self._stopping is not None:
            self._stopping(solver.stop_search)
        return solver

    def charge(self, seconds: float) -> None:
        """Take away what was spent."""
        self._left_s -= seconds


def improved(
    state: State, time_limit_s: float, seed: int, clock: Clock | None = None, stopping: Stopping | None = None
) -> tuple[State, dict[Goal, float]]:
    """A state at least as good as `state`, and what is proven about each goal."""
    budget = Budget(time_limit_s, seed, clock, stopping)
    cells = [cell.number for cell in Shelf(state).cells]
    loose = _loose(state)
    if not loose and not +_missing(state):
        # Nothing to choose: each goal is as good as it can be.
        return state, worth(state)
    if len(cells) * _kinds(state, loose) <= WHOLE:
        return _solved(state, loose, cells, budget, 1.0)
    for part in _parts(state):
        if budget.left_s < _LEAST_S or _at_its_best(state):
            break
        inside = _within(state, _loose(state), part)
        state, _ = _solved(state, inside, part, budget, min(1.0, _PART_S / budget.left_s))
    return state, {}


def _at_its_best(state: State) -> bool:
    least = floors(state)
    return all(value <= least.get(goal, 0.0) + 1e-6 for goal, value in worth(state).items())


def _loose(state: State) -> list[Placed]:
    """Replicas that may be placed elsewhere: new ones, and those that may move."""
    stood = {old.replica for old in state.problem.standing if stays(state, old)} - state.problem.movable
    shut = state.problem.closed | state.problem.lost
    return [
        placed
        for placed in state.placed.values()
        if placed.replica not in stood
        and placed.deployment in state.needs
        and not any(member.node in shut or member.node not in state.free for member in placed.members)
    ]


def _missing(state: State) -> Counter[str]:
    return Counter({n.deployment: n.replicas - state.counts[n.deployment] for n in state.problem.needs})


def _kinds(state: State, loose: Sequence[Placed]) -> int:
    """How many things are placed that a model tells apart."""
    wanted = Counter(placed.deployment for placed in loose) + +_missing(state)
    return sum(number if state.needs[name].members > 1 else 1 for name, number in wanted.items())


def _within(state: State, loose: Sequence[Placed], part: Sequence[int]) -> list[Placed]:
    cells = Shelf(state).cells
    inside = {node for number in part for node in cells[number].nodes}
    return [placed for placed in loose if all(member.node in inside for member in placed.members)]


def _parts(state: State) -> Iterator[list[int]]:
    """Cells of two switch domains at a time, those first over whose uplinks most goes."""
    by_domain: defaultdict[object, list[int]] = defaultdict(list)
    for cell in Shelf(state).cells:
        by_domain[cell.path[0] if cell.path else None].append(cell.number)
    busy: defaultdict[object, float] = defaultdict(float)
    for number, rate in uplink_flows(state):
        busy[number] += float(rate)
    order = sorted(by_domain, key=lambda domain: (-busy[domain], by_domain[domain]))
    pieces = [
        by_domain[domain][at : at + _CELLS] for domain in order for at in range(0, len(by_domain[domain]), _CELLS)
    ]
    for stride in range(1, len(pieces)):
        for number in range(0, len(pieces), 2 if stride == 1 else 1):
            yield sorted(pieces[number] + pieces[(number + stride) % len(pieces)])


def _solved(
    state: State, loose: Sequence[Placed], cells: Sequence[int], budget: Budget, share: float
) -> tuple[State, dict[Goal, float]]:
    """What becomes of `state` where `loose` may go anywhere in `cells`; itself where nothing better is found."""
    base = State(state.ground, state.problem)
    names = {placed.replica for placed in loose}
    for placed in state.placed.values():
        if placed.replica not in names:
            base.take(placed)
    try:
        model = Model(base, cells, loose, +_missing(state))
    except TooManyMixes:
        return state, {}
    now = worth(state)
    limit_s = share * budget.left_s
    budget.charge(_VARIABLE_S * len(model.cp.proto.variables) + _NODE_S * len(state.free))
    solution, gaps = _solve(model, now, budget, limit_s)
    if solution is None:
        return state, {}
    placed_anew = realize(model, lambda variable: solution[variable.index])
    found = None if placed_anew is None else _assembled(base, placed_anew)
    if found is None:
        return state, {}
    then = worth(found)
    if tuple(then.values()) > tuple(now.values()):
        # What stands against a limit, or with other GPUs than are asked for now, is not in the model: what holds
        # there proves nothing of this.
        return state, {}
    better = found if tuple(then.values()) < tuple(now.values()) else state
    return better, {goal: max(0.0, then[goal] - gap) for goal, gap in gaps.items()}


def _solve(
    model: Model, now: dict[Goal, float], budget: Budget, limit_s: float
) -> tuple[list[int] | None, dict[Goal, float]]:
    """Goal after goal; the values of all variables, and by how much each goal might still be better."""
    solution: list[int] | None = None
    left_s, changed = limit_s, False
    every = list(objectives(model))
    todo = [objective for objective in every if not isinstance(objective.value, int)]
    gaps = {objective.goal: 0.0 for objective in every if isinstance(objective.value, int)}
    for place, objective in enumerate(todo):
        if not now[objective.goal] and not changed:
            # Nothing is below 0, and what there is attains it, unless an earlier goal has led elsewhere.
            model.cp.add(objective.value <= 0)
            continue
        model.cp.minimize(objective.value)
        share = max(_LEAST_S / 10, left_s * (_SHARE if place + 1 < len(todo) else 1.0))
        solver = budget.solver(share)
        status = solver.solve(model.cp)
        left_s -= solver.wall_time
        budget.charge(solver.wall_time)
        if solver.status_name(status) not in ("OPTIMAL", "FEASIBLE"):
            break
        solution = list(solver.response_proto.solution)
        reached = round(solver.objective_value)
        changed = changed or objective.unit * reached < now[objective.goal] - 1e-6
        if objective.exact:
            gaps[objective.goal] = objective.unit * max(0.0, reached - solver.best_objective_bound)
        model.cp.add(objective.value <= reached)
        model.cp.clear_hints()  # type: ignore[no-untyped-call]
        for index, number in enumerate(solution):
            model.cp.add_hint(model.cp.get_int_var_from_proto_index(index), number)
        if left_s <= 0 or budget.left_s <= 0:
            break
    return solution, gaps


def _assembled(base: State, placed: Sequence[Placed]) -> State | None:
    """`base` with these replicas, and more if there is room; None where a limit does not hold after all."""
    state = State(base.ground, base.problem)
    for one in [*base.placed.values(), *placed]:
        state.take(one)
    if not sound(base, state) or prune(state):
        return None
    Greedy(state).run()
    return None if prune(state) else state
