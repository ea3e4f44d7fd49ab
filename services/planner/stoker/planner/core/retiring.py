"""How a replica leaves whose prompts shall be found elsewhere: it retires, then drains; until then it can return."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from stoker.planner.core import rollout
from stoker.planner.core.rollout import Runner
from stoker.planner.core.values import Assignment, Condition, Deployment, Desired, Problem, Wanted, Warming

_MOST = 1_024
"""Prefixes of one retirement: what a record of bounded size holds."""


def due(runner: Runner, want: Desired, heirs: Collection[str]) -> tuple[Warming, ...]:
    """What is to be computed on `heirs`, replicas that stay and serve, before this one drains; nothing where it must
    not wait, or has nothing to give."""
    if not runner.ready or runner.late or runner.lost or runner.doubled:
        return ()
    named = want.warmings.get(runner.id, ())
    return tuple(warming for warming in named if warming.successor in heirs)[:_MOST]


def recallable(problem: Problem, deployment: Deployment, assignments: Sequence[Assignment]) -> list[Assignment]:
    """Those of a deployment's `assignments` that retire and could as well run on, the lowest ordinal first."""
    present = {node.id for node in problem.nodes if not node.draining}
    back = [
        assignment
        for assignment in assignments
        if assignment.wanted is Wanted.RETIRE
        and assignment.spec == deployment.spec
        and problem.conditions.get(assignment.replica) is Condition.READY
        and all(member.node in present for member in assignment.members)
    ]
    return sorted(back, key=lambda assignment: rollout.ordinal(assignment.replica))


def why_drain(problem: Problem, assignment: Assignment, deployments: Collection[str]) -> str:
    """Why a replica that retires drains now; empty while it does not."""
    if assignment.deployment not in deployments:
        return "its deployment was deleted"
    if problem.conditions.get(assignment.replica) is not Condition.READY:
        return "it serves no more"
    return "retired" if assignment.replica in problem.retired else ""


def since(before: Mapping[str, float], retiring: Collection[str], now: float) -> dict[str, float]:
    """Since when replicas retire, as seen so far: an agent that never says that it is done must not keep one."""
    return {replica: before.get(replica, now) for replica in retiring}
