"""What would have to move, and in which order: replacements, drains, and proposals against fragmentation.

Nothing here decides: whoever asks gets steps, and may take them one by one. The planner does not ask: its rounds
replace and drain (`core/plan.py`), and `core/moving.py` proposes its moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from stoker.planner.core.ordering import natural
from stoker.planner.core.placement.conflicts import why_one
from stoker.planner.core.placement.greedy import Greedy, filled
from stoker.planner.core.placement.ground import Ground
from stoker.planner.core.placement.ground import ground as survey
from stoker.planner.core.placement.state import State
from stoker.planner.core.placement.values import Member, Placed, PlacementProblem, Unplaced
from stoker.planner.core.placement.worth import stays


@dataclass(frozen=True, slots=True)
class Step:
    """One replica goes from `before` to `after`. With `overlap` its successor starts before it stops; without, there
    is room only once it has stopped, or it has gone already."""

    replica: str
    deployment: str
    before: tuple[Member, ...]
    after: tuple[Member, ...]
    overlap: bool


@dataclass(frozen=True, slots=True)
class Drain:
    """Steps in order, each to be finished before the next. `stuck` are replicas that cannot leave, and why."""

    steps: tuple[Step, ...]
    stuck: tuple[Unplaced, ...] = ()


@dataclass(frozen=True, slots=True)
class Proposal:
    """Steps after which `node` is free as a whole. They cost `cost_s` seconds of prefill: the time to compute again
    what the movers' caches hold. `whole` are the GPUs that were free in pieces and then are not."""

    node: str
    whole: int
    cost_s: float
    steps: tuple[Step, ...]


def replacements(problem: PlacementProblem, *, ground: Ground | None = None) -> tuple[Step, ...]:
    """New places, under their names, for standing replicas whose nodes or GPUs are gone; as far as there is room."""
    state = filled(ground or survey(problem.facility), problem)
    return tuple(
        Step(old.replica, old.deployment, old.members, state.placed[old.replica].members, overlap=False)
        for old in sorted(problem.standing, key=lambda old: natural(old.replica))
        if old.replica in state.placed and state.placed[old.replica].members != old.members
    )


def drain(
    problem: PlacementProblem,
    nodes: Iterable[str],
    *,
    least: Mapping[str, int] | None = None,
    ground: Ground | None = None,
) -> Drain:
    """How `nodes` come free while each deployment keeps at least `least` replicas at every moment (by default as many
    as it has)."""
    leaving = frozenset(nodes)
    closed = replace(problem, closed=problem.closed | leaving)
    state = _standing(ground or survey(problem.facility), closed)
    greedy = Greedy(state)
    floor = dict(state.counts) | dict(least or {})
    waiting = sorted(
        (old for old in state.placed.values() if any(member.node in leaving for member in old.members)),
        key=lambda old: (-len(old.members) * len(old.members[0].gpus), natural(old.replica)),
    )
    steps: list[Step] = []
    # What could not go may find room once others have gone.
    while waiting:
        left = [old for old in waiting if not _step(greedy, old, floor, steps)]
        if len(left) == len(waiting):
            break
        waiting = left
    stuck = tuple(why_one(state, state.needs[old.deployment]) for old in waiting if old.deployment in state.needs)
    return Drain(tuple(steps), stuck)


def _step(greedy: Greedy, old: Placed, floor: Mapping[str, int], steps: list[Step]) -> bool:
    """Move one replica, its successor first where there is room for both."""
    state = greedy.state
    need = state.needs.get(old.deployment)
    if need is None:
        return False
    members = greedy.find(need)
    overlap = members is not None
    touched = [member.node for member in old.members]
    if not overlap and state.counts[old.deployment] <= floor.get(old.deployment, 0):
        return False
    state.release(old.replica)
    greedy.look_again(touched)
    members = members or greedy.find(need)
    if members is None:
        state.take(old)
        greedy.look_again(touched)
        return False
    state.take(Placed(old.replica, old.deployment, members))
    greedy.look_again(member.node for member in members)
    steps.append(Step(old.replica, old.deployment, old.members, members, overlap))
    return True


def defragmented(
    problem: PlacementProblem,
    *,
    warm_tokens: Mapping[str, int],
    prefill_s_per_token: float,
    most: int = 8,
    tries: int = 64,
    ground: Ground | None = None,
) -> tuple[Proposal, ...]:
    """Up to `most` nodes that could be freed by moving their replicas into gaps elsewhere, each on top of those
    before it, the cheapest per GPU first. `warm_tokens` is what each replica's cache holds; one that is not in it is
    taken for cold. At most `tries` nodes are looked at."""
    ground = ground or survey(problem.facility)
    state = _standing(ground, problem)
    found: list[Proposal] = []
    for node in _candidates(state, warm_tokens)[:tries]:
        if len(found) == most:
            break
        proposal = _freed(state, node, warm_tokens, prefill_s_per_token)
        if proposal is not None:
            found.append(proposal)
            for step in proposal.steps:
                state.release(step.replica)
                state.take(Placed(step.replica, step.deployment, step.after))
    return tuple(found)


def _standing(ground: Ground, problem: PlacementProblem) -> State:
    state = State(ground, problem)
    for old in problem.standing:
        if old.deployment not in state.needs or stays(state, old):
            state.take(old)
    return state


def _on(state: State, node: str) -> list[Placed]:
    return [placed for placed in state.placed.values() if any(member.node == node for member in placed.members)]


def _candidates(state: State, warm_tokens: Mapping[str, int]) -> list[str]:
    """Partly free nodes with only single replicas of known deployments, the cheapest per free GPU first."""
    shut = state.problem.closed | state.problem.lost
    ranked = []
    for node, layout in state.ground.layouts.items():
        taken = len(layout) - state.free[node].bit_count()
        if not layout or not taken or taken == len(layout) or node in shut:
            continue
        own = _on(state, node)
        if all(len(placed.members) == 1 and placed.deployment in state.needs for placed in own):
            warm = sum(warm_tokens.get(placed.replica, 0) for placed in own)
            ranked.append((warm / (len(layout) - taken), taken, state.ground.order[node], node))
    return [node for *_, node in sorted(ranked)]


def _freed(state: State, node: str, warm_tokens: Mapping[str, int], prefill_s_per_token: float) -> Proposal | None:
    """The steps that free `node`, all into nodes that are in use already."""
    layouts = state.ground.layouts
    untouched = {name for name, layout in layouts.items() if state.free[name].bit_count() == len(layout)}
    whole = state.free[node].bit_count()
    if not whole or whole == len(layouts[node]):
        return None
    trial = State(state.ground, replace(state.problem, closed=state.problem.closed | untouched | {node}))
    own = sorted(_on(state, node), key=lambda placed: (-len(placed.members[0].gpus), natural(placed.replica)))
    movers = {placed.replica for placed in own}
    for placed in state.placed.values():
        if placed.replica not in movers:
            trial.take(placed)
    greedy = Greedy(trial)
    steps = []
    for placed in own:
        members = greedy.find(trial.needs[placed.deployment])
        if members is None:
            return None
        trial.take(Placed(placed.replica, placed.deployment, members))
        greedy.look_again(member.node for member in members)
        steps.append(Step(placed.replica, placed.deployment, placed.members, members, overlap=True))
    cost_s = prefill_s_per_token * sum(warm_tokens.get(placed.replica, 0) for placed in own)
    return Proposal(node, whole, cost_s, tuple(steps))
