"""The registry's one view: etcd feeds it, agents add load and digests, watchers and agents are told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import structlog

from stoker.api.registry.v1 import registry_pb2
from stoker.common.errors import Unavailable
from stoker.etcd import EtcdClient, KeyValue, Snapshot, Watch
from stoker.registry import metrics
from stoker.registry.agents import AgentStream
from stoker.registry.announcers import AnnounceStream
from stoker.registry.config import RegistryConfig
from stoker.registry.core import keys
from stoker.registry.core.demand import DemandStore
from stoker.registry.core.digests import DigestStore, Outcome, Series
from stoker.registry.core.expiry import ExpiryGuard
from stoker.registry.core.fleet import Entry, FleetState, Step
from stoker.registry.core.loads import LoadStore
from stoker.registry.core.merge import Change
from stoker.registry.core.shares import Shares
from stoker.registry.nodes import Moved, Superseded
from stoker.registry.watchers import WatcherStream

log = structlog.get_logger(__name__)


class Hub:
    """State and fan-out. All methods but `run` are synchronous: between them the view is consistent."""

    def __init__(self, etcd: EtcdClient, config: RegistryConfig) -> None:
        self._etcd = etcd
        self._config = config
        self.registry_id = config.registry_id
        guard = ExpiryGuard(config.membership.drop_share, config.membership.grace_s, config.membership.pace_s)
        self.state = FleetState(guard)
        self.digests = DigestStore(config.limits.digest_keys)
        self.loads = LoadStore()
        self.demand = DemandStore()
        self.synced = asyncio.Event()
        """Set once etcd's records are here."""
        self.settled = asyncio.Event()
        """Set once the nodes that have work are here too, or had one lease's time to come.

        Registries that were all away for longer than a lease find no nodes in etcd although the engines serve.
        Agents are back within seconds; to tell watchers before that would take every replica from them.
        """
        self._settle_by = float("inf")
        self._released: Change = Change()
        self._watch: Watch | None = None
        self._agents: dict[str, AgentStream] = {}
        self._routers: dict[str, AnnounceStream] = {}
        self._watchers: set[WatcherStream] = set()
        limits = config.watch.max_watchers, config.watch.max_watchers_per_host
        self._watches, self._announces = Shares(*limits), Shares(*limits)
        self.stopping = asyncio.Event()
        """Set when all streams are to end."""

    async def run(self) -> None:
        """Follow etcd for ever, and keep time."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            group.create_task(self._tick())

    async def _follow(self) -> None:
        async with self._etcd.watch_prefix(keys.PREFIX) as watch:
            self._watch = watch
            async for item in watch:
                if isinstance(item, Snapshot):
                    self._apply(item.kvs, (), item.revision)
                    self.synced.set()
                    self._settle_by = _now() + self._config.membership.lease_ttl_s
                    log.info("hub.synced", revision=item.revision, keys=len(item.kvs))
                else:
                    self._apply(item.puts, item.deletes, item.revision)
                self._settle()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._config.watch.freshness_s)
            self._settle()
            self._release()
            for watcher in [w for w in self._watchers if w.drop_if_stalled(self._config.watch.stall_s)]:
                log.warning("watcher.dropped", watcher=watcher.name)
                metrics.WATCHERS_DROPPED.inc()
                self.close_watch(watcher)
            for watcher in self._watchers:
                watcher.wake(freshness=True)
            metrics.DIGEST_KEYS.set(self.digests.keys_held())
            metrics.NODES_HELD.set(len(self.state.guard.held))
            metrics.ETCD_STALENESS.set(self.staleness_s())

    def _settle(self) -> None:
        if self.settled.is_set():
            return
        absent = self.state.absent()
        if not absent or _now() >= self._settle_by:
            log.info("hub.settled", absent=len(absent))
            self.settled.set()

    def _release(self) -> None:
        """Let go of a node that was held. Said twice: a watcher whom another registry had told of a later
        revision than ours dropped the first as old news."""
        again = Change(removals=tuple(n for n in self._released.removals if n not in self.state.records))
        step = self.state.release(_now())
        self._released = step.change
        self._announce(Step(again))
        self._announce(step)

    # etcd

    def _apply(self, puts: Iterable[KeyValue], deletes: Iterable[str], revision: int) -> None:
        entries = [Entry(kv.key, kv.value, kv.create_revision, kv.mod_revision) for kv in puts]
        deletes = tuple(deletes)
        step = self.state.apply(entries, deletes, revision, _now())
        for key in step.unreadable:
            metrics.RECORDS_UNREADABLE.inc()
            log.error("record.unreadable", key=key)
        self._announce(step)
        for node_id in {*step.introduced, *(key.removeprefix(keys.node("")) for key in deletes)}:
            if (agent := self._agents.get(node_id)) is not None:
                agent.membership.doubt()

    def _announce(self, step: Step) -> None:
        for watcher in self._watchers:
            watcher.outflow.change(step.change, self.state.revision)
            if step.change:
                watcher.wake()
        for node_id in step.tell:
            if (agent := self._agents.get(node_id)) is not None:
                agent.tell_assignments()

    def staleness_s(self) -> float:
        """Seconds since etcd last proved that the view is current; infinite before the first proof."""
        return self._watch.staleness() if self._watch is not None else float("inf")

    def freshness(self, revision: int | None = None) -> registry_pb2.Freshness:
        """How fresh the view is; `revision` is what its reader has been told, where that lags."""
        staleness_s = self.staleness_s()
        return registry_pb2.Freshness(
            registry_id=self.registry_id,
            etcd_staleness_ms=int(min(staleness_s, 1e9) * 1000),
            stale=staleness_s > self._config.watch.stale_s,
            revision=self.state.revision if revision is None else revision,
            nodes=sorted(self._agents),
            doubtful_replicas=sorted(self.digests.doubtful()),
        )

    def require_synced(self) -> None:
        """Raises Unavailable while there is nothing to tell."""
        if not self.synced.is_set():
            raise Unavailable("the registry has not read etcd yet", reason="NOT_SYNCED", retry_after_s=1.0)

    # Agents

    def attach(self, agent: AgentStream) -> None:
        """Hear an agent; an older stream of the same node ends. Raises Superseded for an older incarnation."""
        held = self._agents.get(agent.node_id)
        # By the last view, so also while etcd is away; etcd itself decides when the node is written.
        known = self.state.incarnation(agent.node_id)
        if max(known, held.incarnation if held is not None else 0) > agent.incarnation:
            raise Superseded(
                f"node {agent.node_id!r}: a newer agent (incarnation {known}) took over; this one must stop",
                metadata={"incarnation": str(known)},
            )
        if held is not None:
            newer = agent.incarnation > held.incarnation
            message = f"node {agent.node_id!r}: a newer stream took this one's place"
            held.end(Superseded(message) if newer else Moved(message))
            self._forget_soft(held)
        self._agents[agent.node_id] = agent
        metrics.AGENT_STREAMS.inc()
        self._sources_changed()

    def detach(self, agent: AgentStream) -> None:
        """An agent's stream has ended. Its node stays until its lease ends; only load and digests go."""
        metrics.AGENT_STREAMS.dec()
        if self._agents.get(agent.node_id) is agent:
            del self._agents[agent.node_id]
            self._forget_soft(agent)
            self._sources_changed()

    def _forget_soft(self, agent: AgentStream) -> None:
        for replica_id, rank in agent.membership.members:
            if rank == 0:
                self.forget_replica(replica_id)

    def forget_replica(self, replica_id: str) -> None:
        """Load and digests of a replica are unknown from now on. Watchers keep theirs, and judge their age."""
        self.loads.forget(replica_id)
        self.digests.forget(replica_id)

    def take_loads(self, loads: Iterable[registry_pb2.ReplicaLoad]) -> None:
        """Loads of an agent's replicas."""
        newer = [load for load in loads if self.loads.offer(load)]
        if newer:
            for watcher in self._watchers:
                watcher.outflow.load(newer)
                watcher.wake()

    def take_digest(self, update: registry_pb2.DigestUpdate) -> Outcome:
        """A step of a replica's digest."""
        outcome = self.digests.apply(update)
        if outcome is Outcome.APPLIED:
            for watcher in self._watchers:
                if update.snapshot:
                    watcher.outflow.replaced(Series.of(update))
                else:
                    before = watcher.outflow.coalesced
                    watcher.outflow.digest(update)
                    metrics.WATCH_COALESCED.inc(watcher.outflow.coalesced - before)
                watcher.wake()
        return outcome

    def _sources_changed(self) -> None:
        for watcher in self._watchers:
            watcher.wake(freshness=True)

    # Routers that announce

    def open_announce(self, host: str) -> None:
        """A router's stream of dispatches. Raises Unavailable when there are too many."""
        if refusal := self._announces.refusal(host):
            raise Unavailable(f"streams of announcements: {refusal}", reason="TOO_MANY_ANNOUNCERS", retry_after_s=5.0)
        self._announces.take(host)
        metrics.ANNOUNCERS.inc()

    def close_announce(self, host: str, stream: AnnounceStream) -> None:
        """The router is gone, and its demand is no more unless another stream of it goes on."""
        self._announces.give_back(host)
        metrics.ANNOUNCERS.dec()
        if self._routers.get(stream.router_id) is stream:
            del self._routers[stream.router_id]
            if (gone := self.demand.gone(stream.router_id)) is not None:
                self._tell_demand(gone)

    def take_demand(self, stream: AnnounceStream, report: registry_pb2.RouterDemand) -> None:
        """Keep what demand a router sees, and tell watchers of it."""
        self._routers[stream.router_id] = stream
        news = self.demand.offer(report, _now())
        if news is not None:
            self._tell_demand(news)

    def _tell_demand(self, report: registry_pb2.RouterDemand) -> None:
        now = _now()
        for watcher in self._watchers:
            if watcher.outflow.demand(report, now):
                watcher.wake()

    def pass_on(self, batch: registry_pb2.Dispatches) -> None:
        """Tell watchers what a router dispatched; kept nowhere."""
        now = _now()
        for watcher in self._watchers:
            before = watcher.outflow.dispatches_dropped
            if watcher.outflow.dispatched(batch, now):
                metrics.DISPATCH_BATCHES_DROPPED.inc(watcher.outflow.dispatches_dropped - before)
                watcher.wake()

    # Watchers

    def open_watch(self, request: registry_pb2.WatchRequest, host: str) -> WatcherStream:
        """A new watcher. Raises Unavailable when there are too many."""
        if refusal := self._watches.refusal(host):
            raise Unavailable(f"watches: {refusal}", reason="TOO_MANY_WATCHERS", retry_after_s=5.0)
        watcher = WatcherStream(self, request, host, _now, self._config.watch.max_digest_bytes)
        self._watchers.add(watcher)
        self._watches.take(host)
        metrics.WATCHERS.inc()
        return watcher

    def close_watch(self, watcher: WatcherStream) -> None:
        """The watcher is gone."""
        if watcher in self._watchers:
            self._watchers.remove(watcher)
            self._watches.give_back(watcher.host)
            metrics.WATCHERS.dec()

    def close_streams(self) -> None:
        """End all streams in good order: agents, routers and watchers go to another registry."""
        self.stopping.set()
        for watcher in tuple(self._watchers):
            watcher.close()
        for agent in tuple(self._agents.values()):
            agent.end(Unavailable("the registry stops", reason="STOPPING", retry_after_s=0.1))


def _now() -> float:
    return asyncio.get_running_loop().time()
