"""What one watcher has yet to hear: bounded, whatever the watcher does.

Records and loads are kept by name, newest wins, so they are bounded by the fleet. Digest steps wait in order up
to a bound; beyond it all that wait are dropped and their series marked to be told anew as snapshots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from stoker.api.registry.v1 import registry_pb2
from stoker.registry.core import records
from stoker.registry.core.demand import Standing
from stoker.registry.core.digests import Series
from stoker.registry.core.dispatches import DropOldest, aged_ms
from stoker.registry.core.merge import Change
from stoker.registry.core.records import Kind, Name, Record

PIECE_BYTES = 1024 * 1024
"""Records and digests are cut into messages of about this size, far below the message bound."""


def deployment_of_replica(replica_id: str) -> str:
    """The deployment in a replica's id, {deployment}-{ordinal}."""
    return replica_id.rpartition("-")[0]


@dataclass(frozen=True)
class Interest:
    """What a watcher asked for."""

    kinds: frozenset[Kind]
    load: bool
    digests: bool
    dispatches: bool
    demand: bool
    deployments: frozenset[str]
    """Empty for all."""
    watcher: str = ""

    @classmethod
    def of(cls, request: registry_pb2.WatchRequest) -> Interest:
        """The interest that a valid request states."""
        topics = set(request.topics)
        return cls(
            kinds=frozenset(kind for topic, kind in records.TOPICS.items() if topic in topics),
            load=registry_pb2.TOPIC_LOAD in topics,
            digests=registry_pb2.TOPIC_DIGESTS in topics,
            dispatches=registry_pb2.TOPIC_DISPATCHES in topics,
            demand=registry_pb2.TOPIC_DEMAND in topics,
            deployments=frozenset(request.deployments),
            watcher=request.watcher,
        )

    def covers(self, name: Name) -> bool:
        """Whether the watcher wants to hear of this record."""
        kind, text = name
        if kind not in self.kinds:
            return False
        match kind:
            case Kind.NODES | Kind.LEADERS | Kind.FACILITIES:
                return True
            case Kind.ASSIGNMENTS | Kind.REPLICAS:
                return self.covers_deployment(deployment_of_replica(text))
            case _:
                return self.covers_deployment(text)

    def covers_deployment(self, deployment: str) -> bool:
        """Whether the watcher wants to hear of this deployment."""
        return not self.deployments or deployment in self.deployments


@dataclass
class Outflow:
    """A watcher's waiting messages."""

    interest: Interest
    max_digest_bytes: int = 32 * 1024 * 1024
    untold: dict[Series, None] = field(default_factory=dict)
    """Series to be told as snapshots, which will hold all steps that came in the meantime."""
    coalesced: int = 0
    """How often waiting digest steps gave way to snapshots."""
    told_revision: int = 0
    """etcd revision at which the records taken so far are complete."""
    _upserts: dict[Name, Record] = field(default_factory=dict)
    _removals: dict[Name, None] = field(default_factory=dict)
    _revision: int = 0
    _loads: dict[str, registry_pb2.ReplicaLoad] = field(default_factory=dict)
    _digests: deque[registry_pb2.DigestUpdate] = field(default_factory=deque)
    _digest_bytes: int = 0
    _dispatches: DropOldest[registry_pb2.Dispatches] = field(default_factory=DropOldest)
    _demand: dict[str, Standing] = field(default_factory=dict)

    def __bool__(self) -> bool:
        records_wait = self._upserts or self._removals
        soft_waits = self._loads or self._digests or self.untold or self._dispatches or self._demand
        return bool(records_wait or soft_waits)

    @property
    def dispatches_dropped(self) -> int:
        """How many batches of dispatches gave way to newer ones."""
        return self._dispatches.dropped

    def change(self, change: Change, revision: int) -> None:
        """Records that changed, if any, on the way to `revision`."""
        for name, record in change.upserts:
            if self.interest.covers(name):
                self._removals.pop(name, None)
                self._upserts[name] = record
        for name in change.removals:
            if self.interest.covers(name):
                self._upserts.pop(name, None)
                self._removals[name] = None
        self._revision = revision

    def load(self, loads: Iterable[registry_pb2.ReplicaLoad]) -> None:
        """Newer loads."""
        if self.interest.load:
            for load in loads:
                if self.interest.covers_deployment(deployment_of_replica(load.replica_id)):
                    self._loads[load.replica_id] = load

    def tell_all(self, series: Iterable[Series]) -> None:
        """Series that the watcher knows nothing of yet."""
        if self.interest.digests:
            for each in series:
                if self.interest.covers_deployment(deployment_of_replica(each.replica_id)):
                    self.untold[each] = None

    def digest(self, update: registry_pb2.DigestUpdate) -> None:
        """A step that the registry has applied; pieces of snapshots come as `tell_all` instead."""
        series = Series.of(update)
        if not self.interest.digests or series in self.untold:
            return
        if not self.interest.covers_deployment(deployment_of_replica(update.replica_id)):
            return
        self._digests.append(update)
        self._digest_bytes += len(update.added) + len(update.removed) + 128
        if self._digest_bytes > self.max_digest_bytes:
            self.coalesced += 1
            self._drop_digests()

    def _drop_digests(self) -> None:
        for update in self._digests:
            self.untold[Series.of(update)] = None
        self._digests.clear()
        self._digest_bytes = 0

    def replaced(self, series: Series) -> None:
        """A series has a new snapshot: waiting steps of it are void."""
        if self.interest.digests and self.interest.covers_deployment(deployment_of_replica(series.replica_id)):
            kept = deque(update for update in self._digests if Series.of(update) != series)
            if len(kept) != len(self._digests):
                self._digests = kept
                self._digest_bytes = sum(len(u.added) + len(u.removed) + 128 for u in kept)
            self.untold[series] = None

    def dispatched(self, batch: registry_pb2.Dispatches, now: float) -> bool:
        """What a router dispatched; False when this watcher does not want to hear of it."""
        interest = self.interest
        if not interest.dispatches or batch.router_id == interest.watcher:
            return False
        if interest.deployments:
            wanted = [d for d in batch.dispatches if interest.covers_deployment(deployment_of_replica(d.replica_id))]
            if not wanted:
                return False
            batch = registry_pb2.Dispatches(router_id=batch.router_id, dispatches=wanted)
        self._dispatches.put(batch, now)
        return True

    def demand(self, report: registry_pb2.RouterDemand, now: float) -> bool:
        """What a router's demand is; False when this watcher does not want to hear of it."""
        if not self.interest.demand:
            return False
        wanted = [each for each in report.demand if self._covers_any(each.deployments)]
        if not wanted and report.demand:
            return False  # of others; without any it is a sign of life
        waiting = self._demand.setdefault(report.router_id, Standing(report.router_id))
        waiting.take(report, wanted, now - report.age_ms / 1000)
        return True

    def _covers_any(self, deployments: Iterable[str]) -> bool:
        return not self.interest.deployments or any(name in self.interest.deployments for name in deployments)

    def take_records(self) -> list[registry_pb2.WatchResponse]:
        """Changed records, as messages that take effect together with the Freshness that must follow."""
        upserts, self._upserts = self._upserts, {}
        removals, self._removals = self._removals, {}
        self.told_revision = max(self.told_revision, self._revision)
        messages = [
            registry_pb2.WatchResponse(upserts=piece)
            for piece in records.pack_pieces(upserts.items(), self._revision, PIECE_BYTES)
        ]
        if removals:
            packed = records.pack_removals(removals, self._revision)
            messages.append(registry_pb2.WatchResponse(removals=packed))
        return messages

    def take_soft(self, now: float = 0.0) -> Iterator[registry_pb2.WatchResponse]:
        """Loads, digest steps, dispatches and demand that wait now; the last two are as much older as they waited."""
        loads, self._loads = self._loads, {}
        digests, self._digests = self._digests, deque()
        self._digest_bytes = 0
        if loads:
            yield registry_pb2.WatchResponse(load=registry_pb2.LoadReport(loads=loads.values()))
        for update in digests:
            yield registry_pb2.WatchResponse(digest=update)
        for since, batch in self._dispatches.take():
            message = registry_pb2.WatchResponse(dispatches=batch)
            for dispatch in message.dispatches.dispatches:
                dispatch.age_ms = aged_ms(dispatch.age_ms, since, now)
            yield message
        demand, self._demand = self._demand, {}
        for standing in demand.values():
            for report in standing.messages(now):
                yield registry_pb2.WatchResponse(demand=report)

    def take_untold(self) -> Series | None:
        """The next series to tell as a snapshot; steps from now on follow that snapshot."""
        if not self.untold:
            return None
        series = next(iter(self.untold))
        del self.untold[series]
        return series
