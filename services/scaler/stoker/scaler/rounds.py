"""Rounds of scaling: what was heard goes into the core, and what it decides is written."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

import structlog

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import records_pb2
from stoker.common.errors import Code, StokerError
from stoker.control.loop import MAX_ITEMS, fitting, pieces
from stoker.registry.client import DemandSeen, FleetEvent, FleetView, RegistryClient
from stoker.scaler import metrics
from stoker.scaler.config import ScalerConfig
from stoker.scaler.core.decide import decide
from stoker.scaler.core.policy import Kind, Policy
from stoker.scaler.core.values import Decision, Decisions, Desired
from stoker.scaler.core.warming import Warming
from stoker.scaler.core.warmth import Worth
from stoker.scaler.decision_messages import desired_record, warming_messages
from stoker.scaler.moving import moved
from stoker.scaler.persisted import record_of
from stoker.scaler.watching import Watching

log = structlog.get_logger(__name__)

_BYTES_PER_S = 256.0
"""Of history, of one deployment: etcd keeps every version until it compacts."""


class ScalerRound:
    """Decides with every sample; writes as the leader.

    A standby decides too, for itself: so it knows what was wanted lately, and goes on without a gap.
    """

    def __init__(self, client: RegistryClient, view: FleetView, watching: Watching, config: ScalerConfig) -> None:
        self.client = client
        self._view = view
        self._config = config
        self._shown = metrics.ReplicasShown()
        self._due_at: dict[str, float] = {}
        self._ran_at = float("-inf")
        self._thinking: asyncio.Task[None] | None = None
        self.watching = watching

    def hear(self, event: FleetEvent, now: float) -> bool:
        """Take note; without rounds of a leader, decide for oneself with each sample.

        Requests that are held because nothing runs wait for no round to come by itself.
        """
        asked = event.demand if isinstance(event, DemandSeen) else ()
        held = {name for each in asked if each.held for name in each.deployments}
        if not self.watching.hear(event, now, at_once=held):
            return False
        resting = now - self._ran_at >= 2 * self._config.loop.tick_s
        if resting and (self._thinking is None or self._thinking.done()):
            self._thinking = asyncio.create_task(self._think(now), name="scaler: decide along")
        return bool(held)

    def begin(self) -> None:
        """What was heard is as good for a leader; what others kept is written anew."""
        self._due_at.clear()

    def end(self) -> None:
        """Whoever does not lead decides along, and tells what it finds as before."""

    async def run(self, view: FleetView, fence: common_pb2.Fence, now: float) -> int | None:
        """Decides all deployments and writes what changed, then what is to be remembered."""
        self._ran_at = now
        decisions = await self.decided(now)
        self._remember(decisions, now)
        metrics.held(decisions.made)
        revision = await self._write(decisions, fence)
        for desired in decisions.changed:
            if (memory := self.watching.memories.get(desired.deployment)) is not None:
                memory.counted(desired.replicas, now)
        warmed = await self._move(decisions, fence, now)
        kept = await self._keep(decisions, fence, now)
        return next((each for each in (kept, warmed) if each is not None), revision)

    async def decided(self, now: float, policies: Mapping[str, Policy] | None = None) -> Decisions:
        """What would be decided now, `policies` in place of those there are. In a thread: a large fleet's round must
        not keep this process from renewing its leadership. What caches are worth is asked only where ready replicas
        are to go: then it is decided again with that."""
        self.watching.catch_up(now)
        policies = {**self.watching.policies, **(policies or {})}
        drawn, histories, fresh_s = self.watching.fleet(), self.watching.histories(now), self._config.load_fresh_s
        fleet = await asyncio.to_thread(drawn)
        settled = partial(decide, fleet, now, policies=policies, histories=histories, load_fresh_s=fresh_s)
        decisions = await asyncio.to_thread(settled)
        worths: dict[str, Worth] = {}
        for decision in decisions.made:
            if decision.costs:
                worths |= self.watching.caches.worths({decision.deployment: decision.victims}, now)
                await asyncio.sleep(0)  # a large cache takes a tenth of a second
        return await asyncio.to_thread(settled, worths=worths) if worths else decisions

    async def _think(self, now: float) -> None:
        try:
            self._remember(await self.decided(now), now)
        except Exception:  # one that cannot be decided must not end the hearing
            log.exception("scaler.not_decided")

    def _remember(self, decisions: Decisions, now: float) -> None:
        memories = self.watching.memories
        for decision in decisions.made:
            if decision.wanted is not None and decision.deployment in memories:
                memories[decision.deployment].want(decision.wanted)
        ready = {name: memory.samples[-1].ready for name, memory in memories.items() if memory.samples}
        self._shown.show(decisions.made, ready)

    async def _write(self, decisions: Decisions, fence: common_pb2.Fence) -> int | None:
        made = {decision.deployment: decision for decision in decisions.made}
        revision = None
        for removed in pieces(decisions.removed):
            log.info("scaler.removed", deployments=removed)
            revision = await self.client.set_desired(fence, [], removed)
        for desired in decisions.changed:
            _tell(desired, made[desired.deployment])
        for records in fitting(self._record(each, made[each.deployment], fence) for each in decisions.changed):
            revision = await self.client.set_desired(fence, records)
            for record in records:
                metrics.CHANGES.labels(record.reason).inc()
        return revision

    def _record(self, desired: Desired, decision: Decision, fence: common_pb2.Fence) -> records_pb2.Desired:
        # It may have been deleted while this was decided: then the next round removes its count.
        policy = self.watching.policies.get(desired.deployment)
        paused = policy is not None and policy.paused
        now, warmings = asyncio.get_running_loop().time(), list[Warming]()
        if decision.costs:
            warmings += self.watching.warmings(decision, self._config.warm_s, now)
        if move := self.watching.moving.moves.get(desired.deployment):
            warmings += self.watching.moved(desired.deployment, move, self._config.warm_s, now)
            self.watching.moving.planned(desired.deployment, move, now)
        record = desired_record(desired, decision, fence, paused=paused, warmings=warmings)
        return _carried_out(self._view.desired.get(desired.deployment), record)

    async def _move(self, decisions: Decisions, fence: common_pb2.Fence, now: float) -> int | None:
        """Write what others are to compute before replicas go that the planner replaces."""
        written = {desired.deployment for desired in decisions.changed}
        revision, records = None, []
        for name, move in self.watching.moving.due(now).items():
            standing = self._view.desired.get(name)
            if standing is None or name in written:
                continue
            warmings = warming_messages(self.watching.moved(name, move, self._config.warm_s, now))
            self.watching.moving.planned(name, move, now)
            record = moved(standing, move, warmings)
            if record.warmings != standing.warmings:
                record.fence.CopyFrom(fence)
                records.append(record)
        for some in fitting(records):
            revision = await self.client.set_desired(fence, some)
        return revision

    async def _keep(self, decisions: Decisions, fence: common_pb2.Fence, now: float) -> int | None:
        """Write what the next scaler must know: at once where a count has changed, each minute otherwise."""
        changed = {decision.deployment for decision in decisions.made if decision.before != decision.replicas}
        memories, starts, wall = self.watching.memories, self.watching.starts, self.watching.wall(now)
        due = sorted((at, name) for name, at in self._due(changed, now).items())
        calls = fitting(record_of(name, memories[name], starts.kept(name), now, wall) for _, name in due)
        records = next(calls, [])
        gone = [name for name in self._view.scaling if name not in self._view.deployments][: MAX_ITEMS - len(records)]
        if not records and not gone:
            return None
        try:
            revision = await self.client.set_scaling_history(fence, records, gone)
        except StokerError as error:
            if error.code is not Code.INVALID_ARGUMENT:
                raise
            log.error(
                "scaler.history_refused", deployments=[each.deployment for each in records], error=error.message
            )
            revision = None
        for record in records:
            pause_s = max(self._config.history_s, record.ByteSize() / _BYTES_PER_S)
            self._due_at[record.deployment] = now + pause_s
        for name in self._due_at.keys() - self.watching.memories.keys():
            del self._due_at[name]
        return revision

    def _due(self, changed: set[str], now: float) -> dict[str, float]:
        """Deployments whose history is to be written, by when it was due."""
        scaled = [name for name, policy in self.watching.policies.items() if policy.kind is not Kind.FIXED]
        times = {name: float("-inf") if name in changed else self._due_at.get(name, 0.0) for name in scaled}
        return {name: at for name, at in times.items() if at <= now}


def _carried_out(standing: records_pb2.Desired | None, record: records_pb2.Desired) -> records_pb2.Desired:
    """A record; with when and why it was decided, where it differs from the standing one in nothing but that some of
    its victims have gone."""
    if (
        standing is not None
        and (standing.replicas, standing.generation) == (record.replicas, record.generation)
        and set(record.victims) < set(standing.victims)
    ):
        record.reason = standing.reason
        record.decided_at.CopyFrom(standing.decided_at)
        del record.because[:]
        record.because.extend(standing.because)
    return record


def _tell(desired: Desired, decision: Decision) -> None:
    log.info(
        "scaler.decided",
        deployment=desired.deployment,
        before=decision.before,
        replicas=desired.replicas,
        victims=desired.victims,
        reason=str(desired.reason),
        because=[str(because.reason) for because in decision.because],
    )
