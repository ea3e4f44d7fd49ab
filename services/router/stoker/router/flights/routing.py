"""The router itself: plan a request, choose its replica, wait for room, and let it fly."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from msgspec.structs import replace

from stoker.common.errors import Exhausted, InvalidRequest, Unavailable
from stoker.common.headers import POLICY
from stoker.router import core, metrics
from stoker.router.config import QueueConfig, TenantsConfig
from stoker.router.decisions.decided import Decided, Recent
from stoker.router.decisions.recorder import Recorder
from stoker.router.fleet.pools import Pool, Target, replicas_of
from stoker.router.fleet.view import View
from stoker.router.flights.confirm import Confirmations
from stoker.router.flights.demand import Demand, Waiting
from stoker.router.flights.flight import Flight
from stoker.router.flights.holding import Holding
from stoker.router.flights.tenants import NOBODY, Caller, Tenants
from stoker.router.flights.turns import Turns
from stoker.router.prompts.plan import NONE, TOKENS, Basis, Plan, Planner
from stoker.router.prompts.prompt import Asked
from stoker.router.prompts.recall import Known, Recall


class Router:
    """Decides, for both APIs."""

    def __init__(
        self,
        view: View,
        planner: Planner,
        *,
        policy: str,
        allow_policy: bool,
        max_in_flight: int,
        retries: int,
        queue: QueueConfig | None = None,
        tenants: TenantsConfig | None = None,
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
        announce: Callable[[Decided], None] = lambda decided: None,
        hurry: Callable[[], None] = lambda: None,
        recorder: Recorder | None = None,
    ) -> None:
        self.view = view
        self.planner = planner
        self.budget = core.RetryBudget()
        self.confirmations = Confirmations()
        self.clock = clock
        self.tenants = Tenants(tenants or TenantsConfig(), clock)
        self.recent = Recent()
        self.recall = Recall()
        queue = queue or QueueConfig()
        self.turns = Turns(queue, rng, clock)
        self.demand = Demand(view, self._waiting, clock)
        self.holding = Holding(view, queue, clock, self._turned_away, hurry)
        self.in_flight = 0
        self.draining = False
        self.idle = asyncio.Event()
        """Set while no request is in this router."""
        self.idle.set()
        self._policy = policy
        self._allow_policy = allow_policy
        self._max_in_flight = max_in_flight
        self._retries = retries
        self._rng = rng
        self._announce = announce
        self.recorder = recorder

    def _waiting(self) -> Iterator[Waiting]:
        yield from self.turns.waiting()
        yield from self.holding.waiting()

    def _turned_away(self, model: str) -> None:
        self.demand.of(model).refused += 1

    def _resolve(self, model: str) -> tuple[Pool, str]:
        try:
            return self.view.resolve(model)
        except Unavailable:
            if self.view.deployed.serving(model):
                self._turned_away(model)
            raise

    async def plan(
        self,
        asked: Asked,
        caller: Caller = NOBODY,
        *,
        policy: str = "",
        pinned: str = "",
        told_late: bool = False,
        body: bytes = b"",
    ) -> Plan:
        """Read a request as far as the decision needs. `told_late`: its first token will be heard of late, if at all.

        `body` is given where the very same bytes may come again.
        Raises NotFound, Unavailable, InvalidRequest, and Exhausted where its tenant has used what it may.
        """
        plan = await self.draft(asked, policy, body)
        return self.charge(plan, caller, pinned=pinned, told_late=told_late)

    async def draft(self, asked: Asked, policy: str = "", body: bytes = b"") -> Plan:
        """A plan that is nobody's yet. Raises NotFound, Unavailable, InvalidRequest."""
        known = self.recalled(asked.api, body, policy) if body else None
        if known is not None:
            return known.plan
        pool, adapter = self._resolve(asked.model)
        basis = self.planner.basis(pool)  # what changes while the prompt is read must not pass for it
        plan = await self.planner.plan(asked, pool, adapter, self._policy_of(policy))
        if body and plan.source == TOKENS:
            now = self.clock()
            self.recall.note(asked.api, Known(body, asked.model, asked.stream, asked.priority, plan, basis, now))
        return plan

    def recalled(self, api: str, body: bytes, policy: str = "") -> Known | None:
        """What was made of the same body, where it still holds. Raises NotFound, Unavailable, InvalidRequest."""
        known = self.recall.find(api, body, self.clock())
        if known is None or self.holding.needed(known.model):
            return None
        if not self.holds(known.plan, known.basis, known.model, policy):
            return None
        metrics.RECALLED.inc()
        metrics.of(metrics.KEYS, known.plan.source, known.plan.why).inc()
        return known

    def draft_at_once(self, asked: Asked, policy: str = "") -> Plan | None:
        """The same where that holds up nobody; None for what is a thread's work, or has to be held first."""
        if self.holding.needed(asked.model):
            return None
        pool, adapter = self._resolve(asked.model)
        return self.planner.plan_at_once(asked, pool, adapter, self._policy_of(policy))

    def holds(self, plan: Plan, basis: Basis, model: str, policy: str = "") -> bool:
        """Whether the same request would be planned like this now. Raises NotFound, Unavailable, InvalidRequest."""
        pool, adapter = self.view.resolve(model)
        return (
            pool is plan.pool
            and adapter == plan.request.adapter
            and self._policy_of(policy) == plan.policy
            and self.planner.basis(pool) == basis
        )

    def charge(self, plan: Plan, caller: Caller = NOBODY, *, pinned: str = "", told_late: bool = False) -> Plan:
        """A draft as its caller's, who is counted for it. Raises Exhausted."""
        self.tenants.take(caller.tenant, plan.request.prompt_tokens + plan.request.output_tokens)
        self.demand.arrived(plan)
        changes: dict[str, Any] = {}
        if told_late and plan.request.streamed:
            changes["streamed"] = False
        if caller is not NOBODY:
            weight = self.tenants.weight(caller.tenant)
            changes.update(tenant=caller.tenant, priority=caller.priority, weight=weight)
        request = replace(plan.request, **changes) if changes else plan.request
        return replace(plan, request=request, pinned=pinned) if changes or pinned else plan

    async def replan(self, plan: Plan, asked: Asked) -> Plan:
        """Plan the rest of a request that was planned before: same caller, who has paid for it."""
        rest = await self.planner.plan(asked, plan.pool, plan.request.adapter, plan.policy)
        whole = plan.request
        request = replace(rest.request, tenant=whole.tenant, priority=whole.priority, weight=whole.weight)
        return replace(rest, request=request)

    def _policy_of(self, wanted: str) -> str:
        if not wanted or wanted == self._policy:
            return self._policy
        if not self._allow_policy:
            raise InvalidRequest.field(POLICY, "this router does not let requests choose their policy")
        if wanted not in core.POLICIES:
            raise InvalidRequest.field(POLICY, f"must be one of {', '.join(core.POLICIES)}")
        return wanted

    def choose(self, plan: Plan, tried: frozenset[str] = frozenset(), *, since: float | None = None) -> Decided:
        """Choose a replica for a plan that came at `since`, none of `tried`. Raises Unavailable."""
        pool, request, now = plan.pool, _request(plan, tried), self.clock()
        decision = core.decide(request, pool.fleet, now, self._rng, policy=plan.policy, explain=True)
        return _decided(plan, decision, now, now if since is None else since, tried)

    async def board(
        self, plan: Plan, request_id: str, tried: frozenset[str] = frozenset(), *, since: float | None = None
    ) -> Flight:
        """Choose a replica, none of `tried`, wait until it has room, and count the request as sent there.

        `since` is when the request came, by `clock`: one that was tried elsewhere keeps its place. The baseline
        policy never waits.
        Raises Unavailable where no replica can serve, Exhausted where too many wait or the wait is too long.
        """
        came = self.clock() if since is None else since
        flight = self.board_at_once(plan, request_id, tried, since=came)
        if flight is not None:
            return flight
        pool = plan.pool

        def depart(decision: core.Decision) -> Flight:
            return self.fly(_decided(plan, decision, self.clock(), came, tried), request_id)

        request = _request(plan, tried)
        try:
            return await self.turns.wait(pool, request, depart, since if tried else None)
        except (Exhausted, Unavailable):
            if not tried:
                self.demand.refused(plan)
            raise

    def board_at_once(
        self, plan: Plan, request_id: str, tried: frozenset[str] = frozenset(), *, since: float | None = None
    ) -> Flight | None:
        """The same where nobody needs to wait; None where it has to. Raises Unavailable."""
        pool = plan.pool
        baseline = plan.policy == core.ROUND_ROBIN
        if not baseline and self.turns.before(pool):
            return None
        try:
            decided = self.choose(plan, tried, since=since)
        except Unavailable:
            if not tried:
                self.demand.refused(plan)
            raise
        if not baseline and pool.fleet.busy(decided.decision.replica, decided.at):
            return None
        return self.fly(decided, request_id)

    def fly(self, decided: Decided, request_id: str) -> Flight:
        """Count a decision as taken and its request as sent."""
        model = decided.plan.pool.model
        metrics.of(metrics.DECISIONS, model, decided.decision.reason.value).inc()
        if decided.plan.source == TOKENS:
            metrics.of(metrics.PREDICTED, model).inc(decided.decision.cached_tokens)
        if decided.plan.source != NONE:
            self._announce(decided)
        self.recent.note(request_id, decided)
        return Flight(self, decided)

    def elsewhere(self, decided: Decided, tried: frozenset[str]) -> bool:
        """Whether another replica than the chosen one, and than `tried`, could serve the request now."""
        plan, now = decided.plan, self.clock()
        health, tried = plan.pool.fleet.health, tried | decided.target.siblings
        return not plan.pinned and any(
            other.id not in tried and not health.ejected(other.id, now)
            for other in plan.pool.fleet.fit(plan.request.adapter, plan.request.role)
        )

    def others(self, decided: Decided, count: int) -> list[Target]:
        """Up to `count` replicas that a request may go to when the chosen one fails, best first."""
        plan = decided.plan
        if plan.pinned:
            return []
        together = decided.target.siblings
        most = count + len(together) - 1
        names = core.alternatives(plan.request, decided.decision, plan.pool.fleet, decided.at, most)
        targets = [plan.pool.targets[name] for name in names if name not in together and name in plan.pool.targets]
        return targets[:count]

    def move(self, decided: Decided, target: Target, request_id: str) -> Flight:
        """Count a request as sent to one of its spares. Raises Unavailable where that has left."""
        self.budget.spend()
        metrics.of(metrics.RETRIES, "taken").inc()
        tried, plan = decided.tried | decided.target.siblings, replace(decided.plan, pinned=target.id)
        return self.fly(self.choose(plan, tried - {target.id}, since=decided.since), request_id)

    def tries_left(self, failed: frozenset[str]) -> bool:
        """Whether a request that `failed` there, by the ids of targets, may be tried once more."""
        return len(replicas_of(failed)) <= self._retries

    def may_retry(self, failed: frozenset[str]) -> bool:
        """Spend a retry of a request that `failed` there, if it has one left and the budget too."""
        if not self.tries_left(failed):
            return False
        allowed = self.budget.take()
        metrics.of(metrics.RETRIES, "taken" if allowed else "no_budget").inc()
        return allowed

    def admit(self) -> Admission:
        """Count a request as in this router; a context manager. Raises Exhausted or Unavailable."""
        if self.draining:
            raise Unavailable(
                "this router is shutting down; another one serves", reason="DRAINING", retry_after_s=0.1
            )
        if self.in_flight >= self._max_in_flight:
            raise Exhausted(
                f"this router has {self.in_flight} requests in flight, as many as it takes; try again later",
                reason="TOO_MANY_REQUESTS",
                retry_after_s=1.0,
            )
        return Admission(self)


class Admission:
    """A request's stay in the router."""

    __slots__ = ("_router",)

    def __init__(self, router: Router) -> None:
        self._router = router

    def begin(self) -> None:
        """It is in the router; whoever says so ends it."""
        self._router.in_flight += 1
        self._router.idle.clear()
        self._router.budget.request()

    def end(self) -> None:
        """It has left."""
        self._router.in_flight -= 1
        if not self._router.in_flight:
            self._router.idle.set()

    def __enter__(self) -> None:
        self.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def _request(plan: Plan, tried: frozenset[str]) -> core.Request:
    if plan.pinned:
        tried = tried | (frozenset(plan.pool.targets) - {plan.pinned})
    return replace(plan.request, exclude=tried) if tried else plan.request


def _decided(plan: Plan, decision: core.Decision, now: float, since: float, tried: frozenset[str]) -> Decided:
    target = plan.pool.targets.get(decision.replica)
    if target is None:  # cannot be: pool and fleet change together
        raise Unavailable(f"replica {decision.replica} has just left; try again", retry_after_s=0.1)
    return Decided(plan, decision, target, now, since, tried)
