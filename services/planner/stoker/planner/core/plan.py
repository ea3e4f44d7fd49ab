"""One round of planning: from desired counts and what is assigned to the next changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import chain, count

from stoker.planner.core import placing, retiring, rollout
from stoker.planner.core.capacity import Capacity
from stoker.planner.core.rollout import Runner
from stoker.planner.core.values import (
    Assignment,
    Condition,
    Deployment,
    Desired,
    Limits,
    Node,
    Plan,
    Problem,
    Unplaced,
    Wanted,
)

_DEFAULTS = Limits()


def plan(problem: Problem, limits: Limits = _DEFAULTS) -> Plan:
    """The changes that bring the assignments nearer to what is desired.

    What ended is deleted; then each deployment's surplus leaves; then what is missing is placed, the largest
    replicas first; then, where room is left, replacements for replicas that must move or be renewed. What has
    a place keeps it. Applied and run again with nothing else changed it comes to rest.

    What leaves drains; before that it retires, where the scaler named what is to be computed on others first. What
    retires is called back when it is wanted again, what drains is not.

    A deployment without a desired count is not touched: unknown is not zero.
    """
    return _Round(problem, limits).run()


class _Round:
    """The plan as it is drawn up."""

    def __init__(self, problem: Problem, limits: Limits) -> None:
        self._problem = problem
        self._ports = limits.rendezvous_ports
        self._nodes = placing.in_order(problem.nodes)
        self._standing = {assignment.replica: assignment for assignment in problem.assignments}
        self._by_deployment: defaultdict[str, list[Assignment]] = defaultdict(list)
        for assignment in problem.assignments:
            self._by_deployment[assignment.deployment].append(assignment)
        self._puts: dict[str, Assignment] = {}
        self._deletes: list[str] = []
        self._unplaced: list[Unplaced] = []
        self._why: dict[str, str] = {}
        self._freed: set[str] = set()
        self._unmet: set[str] = set()
        self._doubled = rollout.doubly_booked(problem)

    def run(self) -> Plan:
        self._delete_ended()
        self._capacity = Capacity(
            self._nodes, [a for a in self._problem.assignments if a.replica not in self._deletes]
        )
        known = {deployment.name for deployment in self._problem.deployments}
        for name in sorted(self._by_deployment.keys() - known):
            self._leave_all(self._by_deployment[name])
        decided = [
            (deployment, self._problem.desired[deployment.name])
            for deployment in sorted(self._problem.deployments, key=_largest_first)
            if deployment.name in self._problem.desired
        ]
        remaining = [(d, want, self._let_leave(d, want)) for d, want in decided]
        for deployment, want, running in remaining:
            self._fill(deployment, want.replicas, running)
        for deployment, want, running in remaining:
            self._renew(deployment, want.replicas, running)
        self._drain_retired(known)
        return Plan(
            puts=tuple(self._puts.values()),
            deletes=tuple(self._deletes),
            unplaced=tuple(self._unplaced),
            replacing=self._replacing(),
            why=self._why,
        )

    def _delete_ended(self) -> None:
        """Leaving replicas whose last member has stopped. One on an absent node may still be finishing."""
        present = {node.id for node in self._problem.nodes}
        for assignment in self._problem.assignments:
            if assignment.wanted is Wanted.RUN:
                continue
            nodes = {member.node for member in assignment.members}
            gone = self._problem.conditions.get(assignment.replica, Condition.GONE) is Condition.GONE
            if nodes & self._problem.lost:
                self._delete(assignment, "drained on a node that is lost")
            elif gone and nodes <= present:
                self._delete(assignment, "drained")

    def _leave_all(self, assignments: Iterable[Assignment]) -> None:
        for runner in rollout.runners(self._problem, assignments, spec=""):
            self._leave(runner, "its deployment was deleted")

    def _let_leave(self, deployment: Deployment, want: Desired) -> list[Runner]:
        """Removes what leaves now; returns what goes on running."""
        mine = self._by_deployment[deployment.name]
        running = rollout.runners(self._problem, mine, deployment.spec, self._doubled)
        leaving = rollout.leavers(running, want.replicas, want.victims)
        gone = {runner.id for runner, _ in leaving}
        staying = [runner for runner in running if runner.id not in gone]
        heirs = {runner.id for runner in staying if runner.ready}
        for runner, reason in leaving:
            warmings = retiring.due(runner, want, heirs)
            if warmings:
                self._put(replace(runner.assignment, wanted=Wanted.RETIRE, warmings=warmings), reason)
            else:
                self._leave(runner, reason)
        return staying

    def _recall(self, deployment: Deployment, wanted: int) -> int:
        """Calls back up to `wanted` replicas that have not begun to drain; returns how many."""
        mine = self._by_deployment[deployment.name]
        back = retiring.recallable(self._problem, deployment, mine)[:wanted]
        for assignment in back:
            self._put(replace(assignment, wanted=Wanted.RUN), "wanted again")
        return len(back)

    def _drain_retired(self, deployments: Collection[str]) -> None:
        for assignment in self._problem.assignments:
            if assignment.wanted is not Wanted.RETIRE or assignment.replica in self._why:
                continue
            why = retiring.why_drain(self._problem, assignment, deployments)
            if why:
                self._put(_draining(assignment), why)

    def _fill(self, deployment: Deployment, want: int, running: list[Runner]) -> None:
        """Places what is missing, and frees the ids of lost replicas for which there is room elsewhere.

        A lost replica is placed anew in the next round, under the same id: its successor must be another record
        than it, or a node that returns could take itself for the owner.
        """
        missing = max(0, want - len(running))
        missing -= self._recall(deployment, missing)
        placed = self._place(deployment, missing, "wanted")
        if placed < missing:
            self._unmet.add(deployment.name)
            self._note_unplaced(deployment, missing - placed, self._leaving_hint(deployment))
        stranded = 0
        for runner in running:
            if not runner.lost:
                continue
            self._capacity.release(runner.assignment)
            successor = self._find(deployment, runner.id)
            self._capacity.take(successor or runner.assignment)
            if successor is None:
                stranded += 1
            else:
                self._freed.add(runner.id)
                self._delete(runner.assignment, "its node is lost; a replacement follows")
        if stranded:
            self._note_unplaced(deployment, stranded, " Their nodes are lost, and they stay assigned there.")

    def _renew(self, deployment: Deployment, want: int, running: list[Runner]) -> None:
        """Places replacements first; where there is no room, renews in place, one replica at a time."""
        excess = max(0, len(running) - want)
        short = rollout.surge(running) - excess
        if len(running) < want or short <= 0:
            return
        short -= self._place(deployment, short, "replaces one that leaves")
        if short <= 0:
            return
        moving = sum(runner.displaced for runner in running) - excess
        if moving > 0:
            hint = (
                " They run on draining nodes and stay there until there is room; drain them singly to stop them now."
            )
            self._note_unplaced(deployment, min(short, moving), hint)
        if any(runner.outdated and not runner.displaced for runner in running):
            self._renew_in_place(deployment, want, running)

    def _renew_in_place(self, deployment: Deployment, want: int, running: list[Runner]) -> None:
        candidates = [r for r in running if r.outdated and not r.displaced and not r.late and not r.lost]
        if self._leaving(deployment) or sum(r.ready for r in running) < want or not candidates:
            return
        first = min(candidates, key=lambda runner: rollout.ordinal(runner.id))
        self._capacity.release(first.assignment)
        successor = self._find(deployment, first.id)
        self._capacity.take(first.assignment)
        if successor is None:
            self._note_unplaced(deployment, 1, " The replicas with the earlier specification run on.")
            return
        self._leave(first, "makes room for its successor with the new specification")

    # --- placing and noting ---

    def _place(self, deployment: Deployment, wanted: int, why: str) -> int:
        """Places up to `wanted` replicas; returns how many found a place."""
        candidates = self._candidates(deployment) if wanted else []
        ids = self._free_ids(deployment.name)
        for placed in range(wanted):
            found = placing.first_fit(next(ids), deployment, candidates, self._capacity, self._ports)
            if found is None:
                return placed
            self._capacity.take(found)
            self._put(found, why)
            # The first candidates fill up first: without this, each replica would walk past all that are full.
            while candidates and not self._capacity.fits(candidates[0], deployment):
                candidates.pop(0)
        return wanted

    def _find(self, deployment: Deployment, replica: str) -> Assignment | None:
        return placing.first_fit(replica, deployment, self._candidates(deployment), self._capacity, self._ports)

    def _candidates(self, deployment: Deployment) -> list[Node]:
        return placing.candidates(deployment, self._nodes, self._capacity, self._problem.settling)

    def _free_ids(self, deployment: str) -> Iterator[str]:
        """Ids of replicas that are being replaced, then those with the smallest free ordinals."""
        freed = {id_ for id_ in self._problem.replacing if id_.rpartition("-")[0] == deployment}
        numbered = (f"{deployment}-{number}" for number in count())
        for id_ in chain(sorted(freed, key=rollout.ordinal), numbered):
            if id_ not in self._standing and id_ not in self._puts:
                yield id_

    def _leave(self, runner: Runner, why: str) -> None:
        """Asks a replica to drain; one with a lost member has nobody left to ask as a whole."""
        if runner.lost:
            self._delete(runner.assignment, why)
            return
        self._put(_draining(runner.assignment), why)

    def _put(self, assignment: Assignment, why: str) -> None:
        self._puts[assignment.replica] = assignment
        self._why[assignment.replica] = why

    def _delete(self, assignment: Assignment, why: str) -> None:
        self._deletes.append(assignment.replica)
        self._why[assignment.replica] = why

    def _leaving(self, deployment: Deployment) -> list[str]:
        return [
            assignment.replica
            for assignment in self._by_deployment[deployment.name]
            if assignment.replica not in self._deletes
            and self._puts.get(assignment.replica, assignment).wanted is not Wanted.RUN
        ]

    def _leaving_hint(self, deployment: Deployment) -> str:
        leaving = self._leaving(deployment)
        return f" Still draining: {', '.join(sorted(leaving)[:3])}{', …' * (len(leaving) > 3)}." if leaving else ""

    def _note_unplaced(self, deployment: Deployment, replicas: int, hint: str = "") -> None:
        reason = placing.why_not(deployment, self._nodes, self._capacity, self._problem.settling)
        self._unplaced.append(Unplaced(deployment.name, replicas, f"{reason}.{hint}"))

    def _replacing(self) -> frozenset[str]:
        """Ids freed now, and those freed earlier that still wait for room."""
        waiting = {
            id_
            for id_ in self._problem.replacing
            if id_ not in self._puts and id_ not in self._standing and id_.rpartition("-")[0] in self._unmet
        }
        return frozenset(self._freed | waiting)


def _largest_first(deployment: Deployment) -> tuple[int, int, str]:
    return (-deployment.gang_size * max(1, deployment.gpus_per_node), -deployment.gpus_per_node, deployment.name)


def _draining(a: Assignment) -> Assignment:
    return replace(a, wanted=Wanted.DRAIN, warmings=())
