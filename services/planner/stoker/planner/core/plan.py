"""One round of planning: from desired counts and what is assigned to the next changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, count

from stoker.planner.core import placing, retiring, rollout, siting
from stoker.planner.core.capacity import Capacity
from stoker.planner.core.placement import Clock, Member
from stoker.planner.core.rollout import Runner
from stoker.planner.core.siting import Found
from stoker.planner.core.values import (
    Assignment,
    Condition,
    Deployment,
    Desired,
    Limits,
    Plan,
    Problem,
    Unplaced,
    Wanted,
)

_DEFAULTS = Limits()
_STUCK = " They run on draining nodes and stay there until there is room; drain them singly to stop them now."

_Remaining = tuple[Deployment, Desired, list[Runner]]
"""A deployment, what is desired of it, and what goes on running."""


def plan(problem: Problem, limits: Limits = _DEFAULTS, clock: Clock | None = None) -> Plan:
    """The changes that bring the assignments nearer to what is desired.

    What ended is deleted; then each deployment's surplus leaves; then what is missing is placed, the largest
    replicas first; then, where room is left, replacements for replicas that must move or be renewed. What has
    a place keeps it. Applied and run again with nothing else changed it comes to rest.

    What leaves drains; before that it retires, where the scaler named what is to be computed on others first. What
    retires is called back when it is wanted again, what drains is not.

    A deployment without a desired count is not touched: unknown is not zero. `clock` gives monotonic seconds, for
    who needs the limit of the search kept.
    """
    return _Round(problem, limits, clock).run()


class _Round:
    """The plan as it is drawn up."""

    def __init__(self, problem: Problem, limits: Limits, clock: Clock | None) -> None:
        self._problem = problem
        self._limits, self._clock = limits, clock
        self._standing = {assignment.replica: assignment for assignment in problem.assignments}
        self._by_deployment: defaultdict[str, list[Assignment]] = defaultdict(list)
        for assignment in problem.assignments:
            self._by_deployment[assignment.deployment].append(assignment)
        self._puts: dict[str, Assignment] = {}
        self._deletes: list[str] = []
        self._unplaced: list[Unplaced] = []
        self._why: dict[str, str] = {}
        self._moves: dict[str, str] = {}
        self._freed: set[str] = set()
        self._unmet: set[str] = set()
        self._leavers: set[str] = set()
        self._reserved: list[Assignment] = []
        self._doubled = rollout.doubly_booked(problem)

    def run(self) -> Plan:
        self._delete_ended()
        known = {deployment.name for deployment in self._problem.deployments}
        for name in sorted(self._by_deployment.keys() - known):
            self._leave_all(self._by_deployment[name])
        decided = [
            (deployment, self._problem.desired[deployment.name])
            for deployment in sorted(self._problem.deployments, key=_largest_first)
            if deployment.name in self._problem.desired
        ]
        remaining = [(d, want, self._let_leave(d, want)) for d, want in decided]
        self._leavers = {r.id for _, _, running in remaining for r in running if r.displaced or r.lost or r.doubled}
        self._fill(remaining)
        self._renew(remaining)
        self._drain_retired(known)
        return Plan(
            puts=tuple(self._puts.values()),
            deletes=tuple(self._deletes),
            unplaced=tuple(self._unplaced),
            replacing=self._replacing(),
            moves=self._moves,
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

    def _fill(self, remaining: Sequence[_Remaining]) -> None:
        """Places what is missing, and frees the ids of lost replicas for which there is room elsewhere.

        A lost replica is placed anew in the next round, under the same id: its successor must be another record
        than it, or a node that returns could take itself for the owner.
        """
        missing = {}
        for deployment, want, running in remaining:
            lacking = max(0, want.replicas - len(running))
            missing[deployment.name] = lacking - self._recall(deployment, lacking)
        lost = {deployment.name: [r for r in running if r.lost] for deployment, _, running in remaining}
        found = self._search({name: count + len(lost[name]) for name, count in missing.items()})
        stranded: dict[str, list[Runner]] = {}
        for deployment, _, _ in remaining:
            name = deployment.name
            places = list(found.places.get(name, ()))
            placed = self._place(deployment, places[: missing[name]], "wanted")
            if placed < missing[name]:
                self._unmet.add(name)
                self._note_unplaced(deployment, missing[name] - placed, found, self._leaving_hint(deployment))
            successors = places[missing[name] :]
            self._reserved += [Assignment("", name, deployment.spec, members) for members in successors]
            self._free(lost[name][: len(successors)])
            stranded[name] = lost[name][len(successors) :]
        self._free_gangs(remaining, stranded, found)

    def _free_gangs(
        self, remaining: Sequence[_Remaining], stranded: Mapping[str, list[Runner]], found: Found
    ) -> None:
        """Of lost replicas without a place elsewhere, those whose living members leave room for a successor."""
        gangs = {r.id for runners in stranded.values() for r in runners if len(r.assignment.members) > 1}
        again = self._search({name: sum(r.id in gangs for r in runners) for name, runners in stranded.items()}, gangs)
        for deployment, _, _ in remaining:
            runners = stranded[deployment.name]
            places = again.places.get(deployment.name, ())
            self._reserved += [Assignment("", deployment.name, deployment.spec, members) for members in places]
            freed = [r for r in runners if r.id in gangs][: len(places)]
            self._free(freed)
            if left := len(runners) - len(freed):
                self._note_unplaced(deployment, left, found, " Their nodes are lost, and they stay assigned there.")

    def _free(self, lost: Iterable[Runner]) -> None:
        for runner in lost:
            self._freed.add(runner.id)
            self._delete(runner.assignment, "its node is lost; a replacement follows")

    def _renew(self, remaining: Sequence[_Remaining]) -> None:
        """Places replacements first; where there is no room, renews in place, one replica at a time."""
        short = {}
        for deployment, want, running in remaining:
            excess = max(0, len(running) - want.replicas)
            if len(running) >= want.replicas:
                short[deployment.name] = max(0, rollout.surge(running) - excess)
        for name in self._move(remaining):
            short[name] = max(0, short.get(name, 0) - 1)
        nexts = {
            runner.id for d, _, running in remaining if short.get(d.name) for runner in rollout.next_outdated(running)
        }
        found = self._search(short, leaving=nexts)
        blocked = []
        for deployment, want, running in remaining:
            left = short.get(deployment.name, 0)
            left -= self._place(deployment, found.places.get(deployment.name, ()), "replaces one that leaves")
            if left <= 0:
                continue
            moving = sum(runner.displaced and not runner.moved for runner in running) - max(
                0, len(running) - want.replicas
            )
            if moving > 0:
                self._note_unplaced(deployment, min(left, moving), found, _STUCK)
            if any(runner.outdated and not runner.displaced for runner in running):
                blocked.append((deployment, want, running))
        self._renew_in_place(blocked, found)

    def _move(self, remaining: Sequence[_Remaining]) -> Iterator[str]:
        """Places successors where an operator wants them; yields the deployment of each replica that has to move."""
        for deployment, want, running in remaining:
            for runner in running:
                if not runner.moved or len(running) != want.replicas:
                    continue
                nodes = frozenset(member.node for member in self._problem.moves[runner.id])
                found = self._search({deployment.name: 1}, only=nodes)
                placed = self._place(deployment, found.places.get(deployment.name, ()), "moved as asked")
                there = " and ".join(sorted(nodes))
                why = found.why.get(deployment.name, "no port is left there")
                self._moves[runner.id] = "" if placed else f"{deployment.name} has no place on {there}: {why}"
                yield deployment.name

    def _renew_in_place(self, blocked: Sequence[_Remaining], found: Found) -> None:
        firsts = {}
        for deployment, want, running in blocked:
            able = rollout.renewable(running)
            if able and not self._leaving(deployment) and sum(r.ready for r in running) >= want.replicas:
                firsts[deployment.name] = min(able, key=lambda runner: rollout.ordinal(runner.id))
        made = self._search(dict.fromkeys(firsts, 1), {first.id for first in firsts.values()})
        for deployment, _, _ in blocked:
            first = firsts.get(deployment.name)
            if first is None:
                continue
            if made.places.get(deployment.name):
                self._leave(first, "makes room for its successor with the new specification")
            else:
                self._note_unplaced(deployment, 1, found, " The replicas with the earlier specification run on.")

    # --- placing and noting ---

    def _search(
        self,
        wanted: Mapping[str, int],
        but: Collection[str] = (),
        leaving: Collection[str] = (),
        only: Collection[str] | None = None,
    ) -> Found:
        """Places for `wanted` more of each deployment while all stands that does, but for those named in `but`; on
        nodes in `only`, or on any. Those in `leaving` leave too."""
        wanted = {name: number for name, number in wanted.items() if number > 0}
        if not wanted:
            return Found()
        gone = {*self._deletes, *but}
        after = {**self._standing, **self._puts}
        standing = [assignment for replica, assignment in after.items() if replica not in gone]
        standing += [replace(place, replica=f"({number})") for number, place in enumerate(self._reserved)]
        limits = self._limits
        return siting.search(
            self._problem,
            wanted,
            standing,
            self._leavers.union(leaving),
            only=only,
            search_s=limits.search_s,
            search_least=limits.search_least,
            clock=self._clock,
        )

    @cached_property
    def _capacity(self) -> Capacity:
        """What each node has left: for words and ports. Built where something is placed, or cannot be."""
        return Capacity(self._problem.nodes, [a for a in self._problem.assignments if a.replica not in self._deletes])

    def _place(self, deployment: Deployment, places: Sequence[tuple[Member, ...]], why: str) -> int:
        """Gives `places` to replicas of `deployment`; returns to how many, which is fewer where ports are short."""
        ids = self._free_ids(deployment.name)
        placed = 0
        for members in places:
            found = placing.assignment(next(ids), deployment, members, self._capacity, self._limits.rendezvous_ports)
            if found is None:
                break
            self._capacity.take(found)
            self._put(found, why)
            placed += 1
        return placed

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

    def _note_unplaced(self, deployment: Deployment, replicas: int, found: Found, hint: str = "") -> None:
        against = found.why.get(deployment.name, "")
        closed = {
            **dict.fromkeys(self._problem.unlisted, placing.UNLISTED),
            **dict.fromkeys(self._problem.settling, placing.JUST_BACK),
        }
        reason = placing.why_not(deployment, self._problem.nodes, self._capacity, closed, against)
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
