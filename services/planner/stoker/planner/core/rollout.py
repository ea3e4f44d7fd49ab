"""Which replicas of a deployment leave, and when: capacity goes first where there is room for it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stoker.planner.core.values import Assignment, Condition, Problem, Wanted

_ORDINAL = re.compile(r"-(\d+)$")


def ordinal(replica: str) -> int:
    """The number at the end of a replica's id; 0 without one."""
    found = _ORDINAL.search(replica)
    return int(found[1]) if found else 0


@dataclass(frozen=True, slots=True)
class Runner:
    """A replica that is meant to run, and what speaks against it where it is."""

    assignment: Assignment
    ready: bool
    outdated: bool
    """Runs another specification than the deployment's."""
    displaced: bool
    """Has a member on a draining node, or is moved by an operator."""
    lost: bool
    """Has a member on a lost node."""
    late: bool
    """Has a member on an absent node that may return."""
    moved: bool
    """Is moved by an operator."""
    doubled: bool
    """Has a GPU that another replica has the better claim to."""

    @property
    def stays(self) -> bool:
        """True where it is fine as it is."""
        return not (self.outdated or self.displaced or self.lost or self.doubled)

    @property
    def id(self) -> str:
        """Its replica id."""
        return self.assignment.replica


def doubly_booked(problem: Problem) -> frozenset[str]:
    """Replicas meant to run on a GPU that another one meant to run has too, but for the one with the best claim.

    No plan books a GPU twice. A restored store, or a copy of a write that etcd held back, can.
    """
    claims = sorted(
        (assignment for assignment in problem.assignments if assignment.wanted is Wanted.RUN),
        key=lambda a: (problem.conditions.get(a.replica) is not Condition.READY, a.replica),
    )
    taken: set[tuple[str, int]] = set()
    doubled = set()
    for assignment in claims:
        gpus = {(member.node, gpu) for member in assignment.members for gpu in member.gpus}
        if gpus & taken:
            doubled.add(assignment.replica)
        else:
            taken |= gpus
    return frozenset(doubled)


def runners(
    problem: Problem, assignments: Iterable[Assignment], spec: str, doubled: frozenset[str] = frozenset()
) -> list[Runner]:
    """Those of `assignments` that are meant to run, seen against the deployment's `spec`."""
    present = {node.id for node in problem.nodes}
    draining = {node.id for node in problem.nodes if node.draining}
    found = []
    for assignment in assignments:
        if assignment.wanted is not Wanted.RUN:
            continue
        nodes = {member.node for member in assignment.members}
        found.append(
            Runner(
                assignment,
                ready=problem.conditions.get(assignment.replica) is Condition.READY,
                outdated=assignment.spec != spec,
                displaced=bool(nodes & draining) or assignment.replica in problem.moves,
                lost=bool(nodes & problem.lost),
                late=bool(nodes - present - problem.lost),
                moved=assignment.replica in problem.moves,
                doubled=assignment.replica in doubled,
            )
        )
    return found


@dataclass(slots=True)
class _Tally:
    """What is left of a deployment's runners while some are told to leave."""

    count: int
    ready: int
    displaced: int
    outdated: int
    """Of those that are not displaced."""

    @classmethod
    def of(cls, running: Sequence[Runner]) -> _Tally:
        return cls(
            count=len(running),
            ready=sum(runner.ready for runner in running),
            displaced=sum(runner.displaced for runner in running),
            outdated=sum(runner.outdated and not runner.displaced for runner in running),
        )

    @property
    def surge(self) -> int:
        return self.displaced + min(1, self.outdated)

    def remove(self, runner: Runner) -> None:
        self.count -= 1
        self.ready -= runner.ready
        self.displaced -= runner.displaced
        self.outdated -= runner.outdated and not runner.displaced


def surge(running: Sequence[Runner]) -> int:
    """Replicas allowed beyond the desired count: one for each that must move, and one for a new specification."""
    return _Tally.of(running).surge


def renewable(running: Sequence[Runner]) -> list[Runner]:
    """Those that only a new specification moves, and that have all their nodes."""
    return [runner for runner in running if runner.outdated and not (runner.displaced or runner.lost or runner.late)]


def next_outdated(running: Sequence[Runner]) -> list[Runner]:
    """The one that leaves first for a new specification, once its successor serves: its place need not be counted."""
    return sorted(renewable(running), key=lambda runner: (runner.ready, -ordinal(runner.id)))[:1]


def leavers(running: Sequence[Runner], want: int, victims: Sequence[str]) -> list[tuple[Runner, str]]:
    """Those that leave now, each with a reason. Of ready ones never so many that fewer than `want` stay ready,
    unless there are more replicas than the count and its surge allow.
    """
    rank = {victim: place for place, victim in enumerate(victims)}
    queue = sorted(
        running,
        key=lambda r: (not r.lost, r.stays, rank.get(r.id, len(rank)), r.ready, not r.displaced, -ordinal(r.id)),
    )
    left = _Tally.of(running)
    leaving: list[tuple[Runner, str]] = []
    for runner in queue:
        reason = _reason_to_leave(runner, left, want)
        if reason is not None:
            leaving.append((runner, reason))
            left.remove(runner)
    return leaving


def _reason_to_leave(runner: Runner, left: _Tally, want: int) -> str | None:
    excess = left.count - want
    if excess > 0 and (runner.lost or excess > left.surge):
        return "scaled down"
    if runner.doubled:
        return "its GPUs are booked twice"
    if runner.stays or runner.lost or runner.late:
        return None
    spare = left.ready - runner.ready >= want
    if runner.outdated and (not runner.ready or (excess > 0 and spare)):
        return "replaced by the new specification"
    if runner.displaced and excess > 0 and (not runner.ready or spare):
        return "moved as asked" if runner.moved else "its node drains"
    return None
