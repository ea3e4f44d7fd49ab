"""One round of planning after the other: the core between a view and fenced writes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

import structlog

from stoker.api.common.v1 import common_pb2
from stoker.common.errors import Conflict
from stoker.control.loop import fitting, pieces
from stoker.planner import metrics
from stoker.planner.config import PlannerConfig
from stoker.planner.core import holding, placement, retiring
from stoker.planner.core.holding import Load, Violation
from stoker.planner.core.loss import Presence, look
from stoker.planner.core.placement import Member, Score
from stoker.planner.core.plan import plan
from stoker.planner.core.values import Limits, Plan, Problem, Unplaced, Wanted
from stoker.planner.records import assigned_nodes, problem_of, record_of, retirement_times
from stoker.planner.survey import Survey, Surveyor
from stoker.registry.client import FleetEvent, FleetView, RegistryClient
from stoker.registry.core import keys

log = structlog.get_logger(__name__)

_JUDGE_EVERY_S = 5.0
"""What stands is held against the facility at most so often."""
_VERDICT_S = 30.0
"""Longest time until a round says whether a move can be made."""


@dataclass(frozen=True)
class Judgement:
    """What stands, held against the facility."""

    loads: list[Load]
    violations: tuple[Violation, ...]
    scores: tuple[Score, ...]


class PlannerRound:
    """Draws up plans and writes them, while this process leads; answers what is asked of the fleet meanwhile."""

    def __init__(self, client: RegistryClient, view: FleetView, config: PlannerConfig) -> None:
        self._client = client
        self._view = view
        ports = config.rendezvous
        self._limits = Limits(
            rendezvous_ports=range(ports.first_port, ports.first_port + ports.ports),
            grace_s=config.loss.grace_s,
            mass_share=config.loss.mass_share,
            mass_grace_s=config.loss.mass_grace_s,
            settle_s=config.loss.settle_s,
            search_s=config.search.round_s,
            search_least=config.search.least_replicas,
        )
        self._retire = config.retire
        self._surveyor = Surveyor()
        self._forget()

    def _forget(self) -> None:
        self._presence = Presence()
        self._replacing: frozenset[str] = frozenset()
        self._retiring_since: dict[str, float] = {}
        self._unplaced: tuple[Unplaced, ...] = ()
        self._violations: tuple[Violation, ...] = ()
        self._last: tuple[Problem, Plan] | None = None
        self._searched: tuple[object, ...] = ()
        self._judged: tuple[object, ...] = ()
        self._judged_at = float("-inf")
        self._moves: dict[str, tuple[Member, ...]] = {}
        self._verdict: asyncio.Future[str] | None = None

    # --- what the service asks ---

    @property
    def unplaced(self) -> tuple[Unplaced, ...]:
        """What the last plan could not place."""
        return self._unplaced

    @property
    def violations(self) -> tuple[Violation, ...]:
        """What stood and no longer held when it was last looked at."""
        return self._violations

    @property
    def surveyed(self) -> Survey | None:
        """The facility that was planned for last."""
        return self._surveyor.survey

    async def problem(self) -> Problem:
        """The fleet as it is known here."""
        return await self._on_ground(self._view, problem_of(self._view, self._presence, self._replacing))

    async def warm_tokens(self) -> dict[str, float]:
        """What each replica is estimated to hold that others would have to compute anew: its KV cache, times the
        share of prompt tokens that it found there."""
        fleet = await self._client.get_fleet()
        engines = {replica.replica_id: replica.engine for replica in fleet.records.replicas}
        warm = {}
        for load in fleet.loads:
            engine = engines.get(load.replica_id)
            if engine is not None and engine.total_blocks and load.cache_query_tokens:
                share = min(1.0, load.cache_hit_tokens / load.cache_query_tokens)
                warm[load.replica_id] = share * engine.total_blocks * engine.block_size
        return warm

    async def move(self, replica: str, members: tuple[Member, ...]) -> str:
        """Has a replica moved from the next round on; returns why it cannot be, or nothing."""
        if self._verdict is not None and not self._verdict.done():
            raise Conflict("another move is being judged; ask again", reason="MOVE_REFUSED")
        under_way = [name for name in self._moves if name != replica]
        if under_way:
            return f"{under_way[0]} is still being moved; one at a time"
        self._moves = {replica: members}
        self._verdict = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(_VERDICT_S):
                return await self._verdict
        except asyncio.CancelledError:
            self._moves.pop(replica, None)
            raise
        except TimeoutError:
            self._moves.pop(replica, None)
            return (
                f"no round has looked at it within {_VERDICT_S:g} s; `stoker status` says what this planner waits for"
            )
        finally:
            self._verdict = None

    # --- what the loop asks ---

    def hear(self, event: FleetEvent, now: float) -> bool:
        """Plans from records alone."""
        return False

    def begin(self) -> None:
        """Absences seen in an earlier time of leading say nothing now; nor do moves asked for then go on."""
        self._let_go("another planner led meanwhile; ask again")

    def end(self) -> None:
        """Whoever waits for a move is told; gauges must not tell for ever how things were."""
        self._let_go("this planner leads no more; ask the one that does")
        metrics.forget()

    def _let_go(self, why: str) -> None:
        """Forget all, a move that is asked for with `why`."""
        if self._verdict is not None and not self._verdict.done():
            self._verdict.set_result(why)
        self._forget()

    async def run(self, view: FleetView, fence: common_pb2.Fence, now: float) -> int | None:
        """Plans and writes, deletions first: a later piece may need what an earlier one freed."""
        # All of one moment: what is awaited below must not see a later view than `seen` says.
        seen = view.revision
        self._presence = look(self._presence, view.nodes.keys(), assigned_nodes(view), now, self._limits)
        standing, deployments = dict(view.assignments), dict(view.deployments)
        agents = {name: replica.agent_endpoint for name, replica in view.replicas.items()}
        problem = problem_of(view, self._presence, self._replacing, self._overdue(view, now), self._moves)
        problem = await self._on_ground(view, problem)
        drawn = await self._drawn(problem)
        self._note(drawn)
        puts = [
            record_of(
                put,
                standing.get(put.replica),
                deployments.get(put.deployment),
                fence,
                agents=agents,
                retire_timeout_s=self._retire.timeout_s,
            )
            for put in drawn.puts
        ]
        revision = None
        for deletes in pieces(drawn.deletes):
            revision = await self._client.apply_assignments(fence, [], deletes, decided_at=seen)
            metrics.CHANGES.labels("delete").inc(len(deletes))
        for some in fitting(puts):
            revision = await self._client.apply_assignments(fence, some, decided_at=seen)
            metrics.CHANGES.labels("put").inc(len(some))
        self._replacing = drawn.replacing
        self._judge_moves(problem, drawn)
        await self._judge(problem, now)
        return revision

    async def _drawn(self, problem: Problem) -> Plan:
        """The plan. What stood still keeps its plan: a replica without a place is not looked for anew each second."""
        if self._last is None or not self._last[1].quiet or self._last[0] != problem:
            # In a thread: a large plan must not keep this process from renewing its leadership.
            with metrics.SEARCH_SECONDS.time():
                drawn = await asyncio.to_thread(_planned, problem, self._limits_for(problem))
            self._last = problem, drawn
        return self._last[1]

    def _on_ground(self, view: FleetView, problem: Problem) -> asyncio.Future[Problem]:
        """`problem` with the facility of the same moment."""
        record, nodes = view.facilities.get(keys.CURRENT), dict(view.nodes)
        return asyncio.ensure_future(asyncio.to_thread(lambda: self._surveyor.look(record, nodes).on(problem)))

    def _overdue(self, view: FleetView, now: float) -> frozenset[str]:
        """Replicas whose agents have not said in time that they have retired: older ones never will."""
        allowed_s = retirement_times(view)
        self._retiring_since = retiring.since(self._retiring_since, allowed_s.keys(), now)
        grace_s = self._retire.grace_s
        return frozenset(
            name for name, since in self._retiring_since.items() if now - since >= allowed_s[name] + grace_s
        )

    def _limits_for(self, problem: Problem) -> Limits:
        """Without a search where the same has been searched for before: what found no place finds none now."""
        fingerprint = _fingerprint(problem)
        if fingerprint == self._searched:
            return replace(self._limits, search_s=0.0)
        self._searched = fingerprint
        return self._limits

    def _judge_moves(self, problem: Problem, drawn: Plan) -> None:
        """Tells who asked whether the move is made, and forgets it once it is, or cannot be."""
        running = {put.replica for put in problem.assignments if put.wanted is Wanted.RUN}
        for replica in list(problem.moves):
            why = drawn.moves.get(replica)
            if replica not in running:
                why = f"{replica} does not run, or leaves already"
            if self._verdict is not None and not self._verdict.done():
                restless = "its deployment has more or fewer replicas than wanted just now; ask again at rest"
                self._verdict.set_result(restless if why is None else why)
                if why is None:
                    self._moves.pop(replica, None)
            if why:
                self._moves.pop(replica, None)

    async def _judge(self, problem: Problem, now: float) -> None:
        """Holds what stands against the facility, where something changed."""
        fingerprint = _fingerprint(problem)
        if fingerprint == self._judged or now - self._judged_at < _JUDGE_EVERY_S:
            return
        self._judged, self._judged_at = fingerprint, now
        judgement = await asyncio.to_thread(judged, problem)
        if judgement.violations != self._violations:
            for violation in judgement.violations[:100]:
                log.warning("planner.violation", limit=violation.limit, words=violation.words)
        self._violations = judgement.violations
        metrics.note_violations(judgement.violations)
        metrics.note_scores(judgement.scores)
        if problem.ground is not None:
            metrics.note_loads(problem.ground.facility, judgement.loads)

    def _note(self, drawn: Plan) -> None:
        for assignment in drawn.puts:
            log.info(
                "planner.put",
                replica=assignment.replica,
                wanted=assignment.wanted.value,
                nodes=[member.node for member in assignment.members],
                because=drawn.why[assignment.replica],
            )
        for replica in drawn.deletes:
            log.info("planner.delete", replica=replica, because=drawn.why[replica])
        if drawn.unplaced != self._unplaced:
            for entry in drawn.unplaced:
                log.warning(
                    "planner.unplaced", deployment=entry.deployment, replicas=entry.replicas, reason=entry.reason
                )
        self._unplaced = drawn.unplaced
        metrics.note_unplaced(drawn.unplaced)
        survey = self._surveyor.survey
        metrics.note_readable(readable=survey is None or not survey.problem)


def _planned(problem: Problem, limits: Limits) -> Plan:
    """The plan; with the first places found where the search for better ones ends in a defect."""
    try:
        return plan(problem, limits, time.monotonic)
    except Exception:
        if not limits.search_s:
            raise
        log.exception("planner.search_failed")
        return plan(problem, replace(limits, search_s=0.0))


def judged(problem: Problem) -> Judgement:
    """What stands, held against the problem's own ground."""
    if problem.ground is None:
        return Judgement([], (), ())
    state = holding.booked(problem, problem.ground)
    scores = placement.scores(state.problem, state.problem.standing, ground=problem.ground)
    return Judgement(holding.loads(state), holding.violations(problem, problem.ground, state), scores)


def _fingerprint(problem: Problem) -> tuple[object, ...]:
    """What decides where there is room for what; two problems alike in it place alike."""
    return (
        problem.ground,
        frozenset((a.replica, a.wanted, a.spec) for a in problem.assignments),
        frozenset((name, desired.replicas) for name, desired in problem.desired.items()),
        frozenset((d.name, d.spec) for d in problem.deployments),
        frozenset(node.id for node in problem.nodes if node.draining),
        problem.settling,
        problem.lost,
        frozenset(problem.moves),
    )
