"""What a scaler hears, leading or not, and remembers."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import structlog

from stoker.api.common.v1 import scaling_pb2
from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.registry.client import (
    DemandSeen,
    DigestChanged,
    DispatchesSeen,
    FleetEvent,
    FleetView,
    LoadChanged,
    RecordsChanged,
)
from stoker.scaler.caches import Caches
from stoker.scaler.core.memory import Memory
from stoker.scaler.core.moving import Move
from stoker.scaler.core.observing import Observer
from stoker.scaler.core.policy import Kind, Policy
from stoker.scaler.core.signals import History
from stoker.scaler.core.starts import Starts
from stoker.scaler.core.steady_clock import SteadyClock
from stoker.scaler.core.values import Decision, Fleet, Standing
from stoker.scaler.core.warming import Warming
from stoker.scaler.moving import Moving
from stoker.scaler.observed import Loads, asked_of, fleet_of, replica_of, report_of, standing_of, start_of
from stoker.scaler.persisted import restore, seconds
from stoker.scaler.policy_messages import policy_of

log = structlog.get_logger(__name__)

_SHORTEST_S = 0.25
"""Between two samples, whatever hurries."""
_AT_A_TIME = 500
"""Replicas and deployments whose samples are made in one go: some 15 ms."""
_HOLD = Policy(Kind.CONCURRENCY, paused=True)
"""For a policy that cannot be read: whatever it means, the count stands."""


class Watching:
    """Signals and records as they come, drawn into one sample a deployment each `sample_s` seconds.

    Samples are made while events come: a registry gives a sign of life each second. Where none comes there is no
    sample either, and what is known grows old. All times are those of the event loop; `wall` is asked for what is
    persisted, schedules and seasons alone.
    """

    def __init__(self, view: FleetView, sample_s: float, wall: Callable[[], float] = time.time) -> None:
        self._view = view
        self._sample_s = sample_s
        self._wall = wall
        self._clock = SteadyClock()
        self._observer = Observer()
        self._sampled_at = self._hurried_at = float("-inf")
        self._due: deque[list[str]] = deque()
        self._ids: Mapping[str, Sequence[str]] = {}
        self._reports: dict[str, tuple[registry_pb2.ReplicaLoad, float]] = {}
        self.caches = Caches(view)
        self.moving = Moving(view)
        self.starts = Starts()
        self.memories: dict[str, Memory] = {}
        self.policies: dict[str, Policy] = {}
        self._read: dict[str, records_pb2.Deployment] = {}

    def hear(self, event: FleetEvent, now: float, *, at_once: Collection[str] = ()) -> bool:
        """Take note of an event; returns whether all samples were made, because it was time, or those of deployments
        that need one `at_once`.

        A large fleet's samples are made a few at each event: the loop must not stand still for all of them.
        """
        match event:
            case LoadChanged(loads):
                replicas = self._view.replicas
                self._reports.update({load.replica_id: (load, now) for load in loads if load.replica_id in replicas})
            case DemandSeen() if event.gone:
                self._observer.gone(event.router_id, now)
            case DemandSeen():
                asked = [asked_of(demand) for demand in event.demand]
                self._observer.demand(event.router_id, event.began_ns, asked, now - max(0.0, event.age_s))
            case DispatchesSeen():
                self.caches.dispatched(event.dispatches, now)
            case DigestChanged():
                self.caches.told(event.update, now)
            case RecordsChanged():
                self._records(event, now)
        if at_once and now - max(self._hurried_at, self._sampled_at) >= _SHORTEST_S:
            self._hurried_at = now
            self.catch_up(now)
            parts = self._observer.together(self.memories)
            self._ids = self._by_deployment()
            self._sample([name for part in parts if any(each in at_once for each in part) for name in part], now)
            return True
        if not self._due and now - self._sampled_at >= self._sample_s:
            self._sampled_at = now
            self.catch_up(now)
            self._ids = self._by_deployment()
            self._due = deque(self._observer.together(self.memories))
            return self._go_on(now)
        return bool(self._due) and self._go_on(now)

    def _go_on(self, now: float) -> bool:
        """Make the next samples of those that are due; returns whether these were the last."""
        names, room = list[str](), _AT_A_TIME
        while self._due and room > 0:
            part = self._due.popleft()
            names += part
            room -= sum(1 + len(self._ids.get(name, ())) for name in part)
        self._sample(names, now)
        return not self._due

    def wall(self, now: float) -> float:
        """The wall-clock second at `now`, without the clock's jumps."""
        return self._clock.at(now, self._wall())

    def fleet(self) -> Callable[[], Fleet]:
        """What draws up, in any thread, the records as they are now, with the last load of each replica, and since
        when it stands as it does."""
        since = {replica: self.starts.since(replica) for replica in self._view.replicas}
        return partial(fleet_of, self._view.copy(), Loads(dict(self._reports)), since, self.moving.movers)

    def histories(self, now: float) -> Mapping[str, History]:
        """What is known of each deployment."""
        wall = self.wall(now)
        return {name: memory.history(self.starts.startup(name), wall) for name, memory in self.memories.items()}

    def warmings(self, decision: Decision, warm_s: float, now: float) -> Sequence[Warming]:
        """What those that stay are to compute of what the victims hold, each for at most `warm_s` seconds; `moved`
        tells it of those that are replaced."""
        move = self.moving.moves.get(decision.deployment)
        going = [name for name in decision.victims if move is None or name not in move.going]
        mine = [r for r in self._view.replicas.values() if r.deployment == decision.deployment]
        heirs = [
            r.replica_id
            for r in mine
            if r.replica_id not in decision.victims
            and r.wanted == records_pb2.WANTED_RUN
            and standing_of(r) is Standing.READY
        ]
        budget = self._budget(decision.deployment, warm_s, len(heirs))
        return self.caches.warmings(decision.deployment, going, heirs, budget, now) if going else ()

    def moved(self, deployment: str, move: Move, warm_s: float, now: float) -> Sequence[Warming]:
        """The same of replicas that are replaced."""
        budget = self._budget(deployment, warm_s, len(move.heirs))
        return self.caches.warmings(deployment, move.going, move.heirs, budget, now, replaced=True)

    def _budget(self, deployment: str, warm_s: float, heirs: int) -> float:
        """Tokens that so many can compute in `warm_s` seconds each; none where that is not known."""
        memory = self.memories.get(deployment)
        rate = memory.measured.capacity.prefill_tokens_per_s if memory is not None else None
        return warm_s * (rate or 0.0) * heirs

    def catch_up(self, now: float) -> None:
        """Take the deployments and counts of the view, which is ahead of the events: a deployment that is decided on
        without its policy, or without what was persisted of it, would fall to the count of its specification."""
        deployments = self._view.deployments
        for gone in self.memories.keys() - deployments.keys():
            del self.memories[gone], self.policies[gone], self._read[gone]
        self.starts.keep(deployments)
        self.moving.look()
        wall = self.wall(now)
        for name, deployment in deployments.items():
            memory = self.memories.get(name)
            if memory is None:
                memory = self.memories[name] = self._recalled(name, now, wall)
            if self._read.get(name) is not deployment:  # generations begin anew where it was deleted in between
                self._read[name] = deployment
                self._deployment(deployment)
            desired = self._view.desired.get(name)
            if desired is not None and desired.replicas != memory.count:
                decided_at = now - max(0.0, wall - seconds(desired.decided_at))
                memory.counted(desired.replicas, decided_at if memory.count is None else now)

    def _recalled(self, name: str, now: float, wall: float) -> Memory:
        memory = Memory()
        kept = self._view.scaling.get(name)
        if kept is not None:
            self.starts.restore(name, restore(kept, memory, now, wall))
        return memory

    def _deployment(self, deployment: records_pb2.Deployment) -> None:
        name = deployment.spec.name
        self.starts.serves(name, deployment.spec.model)
        self.policies[name] = _policy(deployment)

    def _records(self, event: RecordsChanged, now: float) -> None:
        for replica in event.upserts.replicas:
            self._replica(replica, now)
        for gone in event.removals.replicas:
            self._reports.pop(gone, None)
            self.caches.forget(gone)
            self._observer.forget(gone)
            self.starts.forget(gone)

    def _replica(self, replica: records_pb2.Replica, now: float) -> None:
        life, start = start_of(replica)
        self.starts.stands(replica.replica_id, replica.deployment, standing_of(replica), life, start, now)

    def _by_deployment(self) -> Mapping[str, Sequence[str]]:
        ids: defaultdict[str, list[str]] = defaultdict(list)
        for name, replica in self._view.replicas.items():
            ids[replica.deployment].append(name)
        return ids

    def _sample(self, names: Collection[str], now: float) -> None:
        wanted = {name for name in names if name in self.memories}  # some may have been deleted since
        known = (self._view.replicas.get(each) for name in wanted for each in self._ids.get(name, ()))
        records = [record for record in known if record is not None and record.deployment in wanted]
        for record in records:
            if (told := self._reports.get(record.replica_id)) is not None:
                report, came_at = told
                self._observer.load(record.replica_id, report_of(report), came_at - report.age_ms / 1000)
        replicas, wall = [replica_of(self._view, record) for record in records], self.wall(now)
        engines: dict[str, list[records_pb2.EngineInfo]] = {}
        for record, replica in zip(records, replicas, strict=True):
            if replica.standing is Standing.READY:
                engines.setdefault(replica.deployment, []).append(record.engine)
        for name, seen in self._observer.samples(wanted, replicas, now).items():
            memory = self.memories[name]
            serving = engines.get(name, [])
            memory.measured.engines(
                (float(engine.block_size * engine.total_blocks) for engine in serving),
                (engine.max_num_seqs for engine in serving),
            )
            memory.measured.prefill(seen.prefill_rates)
            for growth in seen.grown:
                memory.measured.prefilling(growth)
                memory.measured.decoding(growth)
            memory.add(seen.sample, self.policies[name], wall)


def _policy(deployment: records_pb2.Deployment) -> Policy:
    """How a deployment is scaled; what another release wrote and this one cannot read holds the count."""
    kind, name = deployment.spec.scaling.kind, deployment.spec.name
    if kind not in scaling_pb2.ScalingKind.values():
        log.error("scaler.policy_unknown", deployment=name, kind=kind)
        return _HOLD
    try:
        return policy_of(deployment.spec, paused=deployment.HasField("pause"))
    except ValueError as error:
        log.error("scaler.policy_unreadable", deployment=name, error=str(error))
        return _HOLD
