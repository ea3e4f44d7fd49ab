"""The fleet as this router sees it: what registries tell, drawn together into one pool per served model.

Nothing is dropped because a source falls silent: the last view serves (static stability). Only a record's
removal, a newer epoch or this router's own checks take something away.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from dataclasses import dataclass

import structlog

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.common.blocks import unpack_keys
from stoker.common.errors import InvalidRequest, NotFound, Unavailable
from stoker.router import core
from stoker.router.fleet.deployed import Deployments
from stoker.router.fleet.pools import PENDING, Pool, Target, target_ids

log = structlog.get_logger(__name__)

_TIERS = {
    common_pb2.TIER_UNSPECIFIED: core.Tier.GPU,
    common_pb2.TIER_GPU: core.Tier.GPU,
    common_pb2.TIER_CPU: core.Tier.CPU,
    common_pb2.TIER_STORAGE: core.Tier.STORAGE,
}
_EARLY_UPDATES = 1024
_EARLY_REPLICAS = 4096


@dataclass(slots=True)
class Source:
    """A registry, as last heard."""

    connected: bool = False
    heard_at: float | None = None


class View:
    """All pools. Fed with registry events, each with the router's monotonic `now` in seconds."""

    def __init__(self, routing: core.RoutingConfig, health: core.HealthConfig) -> None:
        self._routing = routing
        self._health = health
        self.told = asyncio.Event()
        """Set by the first snapshot: before that, this router knows nothing and says so."""
        self.targets: dict[str, Target] = {}
        self.pools: dict[str, Pool] = {}
        self.sources: dict[str, Source] = {}
        self.deployed = Deployments()
        self._ranks: dict[str, list[str]] = {}
        """The ids of each replica's targets."""
        self._early: dict[str, list[registry_pb2.DigestUpdate]] = {}

    @property
    def synced(self) -> bool:
        """A first snapshot was seen."""
        return self.told.is_set()

    # --- what requests ask ---------------------------------------------------------------------------------

    def resolve(self, model: str) -> tuple[Pool, str]:
        """The pool that serves `model`, and the adapter's name where it is one.

        Raises Unavailable while nothing is known or nothing is ready, NotFound for an unknown name.
        """
        if not self.synced:
            raise Unavailable(
                "this router has not heard a registry yet; try again in a moment",
                reason="NOT_READY",
                retry_after_s=1.0,
            )
        pool = self.pools.get(model)
        if pool is not None:
            return pool, ""
        for pool in self.pools.values():
            if model in pool.adapters:
                return pool, model
        if self.deployed.serving(model):
            raise Unavailable(
                f"model {model!r} is deployed, but none of its replicas has become ready yet; try again later",
                reason="NO_REPLICA",
                retry_after_s=5.0,
            )
        known = ", ".join(sorted([*self.names(), *self.asleep()])) or "none is deployed"
        raise NotFound(f"The model `{model}` does not exist. Models served here: {known}", reason="MODEL_NOT_FOUND")

    def able(self, model: str) -> bool:
        """Whether some replica is ready to take requests for a model or an adapter."""
        pool = self.pools.get(model)
        if pool is not None:
            return bool(pool.able)
        return any(model in other.adapters and other.able for other in self.pools.values())

    def asleep(self) -> list[str]:
        """Names that no replica serves now, but one would be started for a request."""
        served = set(self.names())
        return [model for model in self.deployed.models() if model not in served and self.deployed.wakes(model)]

    def names(self) -> list[str]:
        """All names that replicas serve."""
        return [*self.pools, *(name for pool in self.pools.values() for name in sorted(pool.adapters))]

    # --- what registries tell ------------------------------------------------------------------------------

    def records(
        self,
        upserts: registry_pb2.Records | None,
        removals: registry_pb2.Removals | None = None,
        *,
        now: float,
        snapshot: bool = False,
        whole: bool = False,
    ) -> None:
        """Take records that changed or went.

        `snapshot` says that all there is has been told by now; `whole`, that `upserts` alone is all there is.
        """
        upserts, removals = upserts or registry_pb2.Records(), removals or registry_pb2.Removals()
        touched: set[Pool] = set()
        for deployment in upserts.deployments:
            self.deployed.put(deployment)
        for record in upserts.replicas:
            self._put(record, touched, now)
        for name in removals.deployments:
            self.deployed.remove(name)
        gone = set(removals.replicas)
        if whole:
            gone |= self._ranks.keys() - {record.replica_id for record in upserts.replicas}
        for replica_id in gone:
            self._remove(replica_id, touched)
        for pool in touched:
            pool.settle()
            if not pool.targets:
                del self.pools[pool.model]
        if touched or upserts.deployments:
            for pool in self.pools.values():
                pool.max_output_tokens = self._most_output(pool)
        if snapshot:
            self.told.set()
        self._catch_up(now)

    def _most_output(self, pool: Pool) -> int:
        """The tightest bound of the pool's deployments: what it admits, all do."""
        deployments = {target.record.deployment for target in pool.targets.values()}
        bounds = map(self.deployed.max_output_tokens, deployments)
        return min((bound for bound in bounds if bound), default=0)

    def _put(self, record: records_pb2.Replica, touched: set[Pool], now: float) -> None:
        ids = target_ids(record)
        for gone in set(self._ranks.get(record.replica_id, ())) - set(ids):
            self._drop(gone, touched)
        self._ranks[record.replica_id] = ids
        for rank, target_id in enumerate(ids):
            target = self._put_target(target_id, rank if len(ids) > 1 else None, record, touched)
            # What the first snapshot shows as ready may have served for days.
            target.begins(now if self.synced else None)

    def _put_target(
        self, target_id: str, rank: int | None, record: records_pb2.Replica, touched: set[Pool]
    ) -> Target:
        target = self.targets.get(target_id)
        if target is None:
            target = self.targets[target_id] = Target(record, rank)
            renewed = True
        else:
            before = target.record
            target.announced(record)
            renewed = record.epoch != before.epoch or record.engine.http_url != before.engine.http_url
            if 0 < record.epoch < before.epoch and target.pool is not None:
                # Begun on a host whose clock is behind: what it tells would count as old news for ever.
                target.pool.fleet.index.forget(target.id)
        if renewed:
            self._renew(target)
        model = record.engine.model_names[0] if record.engine.model_names else ""
        if target.pool is not None and target.pool.model != model:
            self._leave(target, touched)
        if model:
            if target.pool is None:
                target.pool = self.pools.get(model) or Pool(model, core.Fleet(self._routing, self._health))
                self.pools[model] = target.pool
                target.pool.targets[target.id] = target
            touched.add(target.pool)
        return target

    def _renew(self, target: Target) -> None:
        """A new life of the engine: all that was believed of the old one is void."""
        target.parity = PENDING
        target.reachable = True
        target.load_tokens = None
        if target.pool is not None:
            fleet = target.pool.fleet
            fleet.health.forget(target.id)
            fleet.speculation.forget(target.id)
            told = fleet.index.epoch(target.id)
            # Its digest may have come before its record.
            if told is not None and told < target.record.epoch:
                fleet.index.forget(target.id)

    def _remove(self, replica_id: str, touched: set[Pool]) -> None:
        self._early.pop(replica_id, None)
        for target_id in self._ranks.pop(replica_id, ()):
            self._drop(target_id, touched)

    def _drop(self, target_id: str, touched: set[Pool]) -> None:
        target = self.targets.pop(target_id)
        if target.pool is not None:
            self._leave(target, touched)

    def _leave(self, target: Target, touched: set[Pool]) -> None:
        pool = target.pool
        assert pool is not None  # noqa: S101 - the callers checked
        pool.fleet.remove(target.id)
        pool.targets.pop(target.id, None)
        pool.able.discard(target.id)
        target.pool = None
        touched.add(pool)

    def load(self, loads: Iterable[registry_pb2.ReplicaLoad], now: float) -> None:
        """Take load reports; one without figures changes nothing: unknown is not zero."""
        for load in loads:
            ids = self._ranks.get(load.replica_id, ())
            # Of several ranks only their own figures say anything: the sum is nobody's load.
            figures: list[registry_pb2.ReplicaLoad | registry_pb2.RankLoad]
            figures = [*load.ranks] if len(ids) > 1 else [load]
            for target_id, figure in zip(ids, figures, strict=False):
                target = self.targets[target_id]
                if load.epoch >= target.record.epoch:
                    self._load(target, figure, now - load.age_ms / 1000)

    def _load(self, target: Target, load: registry_pb2.ReplicaLoad | registry_pb2.RankLoad, seen_at: float) -> None:
        if target.pool is None:
            return
        if load.HasField("prefill_tokens_per_s") and 0 < load.prefill_tokens_per_s < math.inf:
            target.prefill_rate = load.prefill_tokens_per_s
            target.pool.announce(target)
        if load.HasField("queued_prefill_tokens"):
            target.load_tokens = load.queued_prefill_tokens + self._routing.kv_weight * load.active_tokens
            target.pool.fleet.load.report(target.id, target.load_tokens, seen_at)

    def digest(self, update: registry_pb2.DigestUpdate, now: float) -> core.Sync:
        """Take a whole snapshot or the delta that follows. RESYNC: what is held is wrong, a snapshot is needed."""
        target = self._target(update.replica_id, update.dp_rank)
        tier = _TIERS.get(update.tier)
        if tier is None:
            return core.Sync.STALE  # a tier of a later version
        if target is None or target.pool is None:
            self._keep_early(update)
            return core.Sync.APPLIED
        try:
            added, removed = unpack_keys(update.added), unpack_keys(update.removed)
        except InvalidRequest as error:
            log.warning("view.digest_unreadable", replica=target.id, error=error.message)
            return core.Sync.RESYNC
        fleet, sums = target.pool.fleet, {tier: update.xor_digest}
        if update.snapshot:
            return fleet.snapshot(target.id, core.Snapshot(update.epoch, update.sequence, {tier: added}, sums), now)
        step = core.Delta(update.epoch, update.sequence, {tier: added}, {tier: removed}, sums)
        return fleet.delta(target.id, step, now)

    def _target(self, replica_id: str, rank: int) -> Target | None:
        ids = self._ranks.get(replica_id, ())
        return self.targets[ids[rank]] if rank < len(ids) else None

    def _keep_early(self, update: registry_pb2.DigestUpdate) -> None:
        """An engine's digest may be told before the engine is ready and has a model."""
        early = self._early.setdefault(update.replica_id, [])
        if update.snapshot:
            early[:] = [held for held in early if (held.dp_rank, held.tier) != (update.dp_rank, update.tier)]
        early.append(update)
        if len(early) > _EARLY_UPDATES:
            del self._early[update.replica_id]  # what follows will not fit, and ask for a snapshot
        elif len(self._early) > _EARLY_REPLICAS:
            # The oldest: an engine's last word often comes after its replica has gone, and stays here.
            del self._early[next(iter(self._early))]

    def _catch_up(self, now: float) -> None:
        for replica_id in [name for name in self._early if name in self._ranks]:
            if self.targets[self._ranks[replica_id][0]].pool is not None:
                for update in self._early.pop(replica_id):
                    self.digest(update, now)

    def dispatched(self, dispatches: Iterable[registry_pb2.Dispatch], now: float) -> None:
        """Take what other routers sent where a moment ago, which neither digest nor load shows yet."""
        for dispatch in dispatches:
            target = self._target(dispatch.replica_id, dispatch.dp_rank)
            if target is None or target.pool is None or dispatch.epoch != target.record.epoch:
                continue
            try:
                keys = unpack_keys(dispatch.keys)
            except InvalidRequest as error:
                log.warning("view.dispatch_unreadable", replica=target.id, error=error.message)
                continue
            told = core.Dispatched(target.id, keys, dispatch.prefill_tokens, dispatch.kv_tokens)
            target.pool.fleet.overhear(told, now - dispatch.age_ms / 1000, now)

    def source(self, endpoint: str, connected: bool, freshness: registry_pb2.Freshness | None, now: float) -> None:
        """Note how a registry is. What it vouches for stays fresh, though nothing changed there."""
        source = self.sources.setdefault(endpoint, Source())
        source.connected = connected
        if not connected or freshness is None:
            return
        source.heard_at = now
        nodes, doubtful = set(freshness.nodes), set(freshness.doubtful_replicas)
        for target in self.targets.values():
            if target.record.node_id in nodes and target.id not in doubtful and target.pool is not None:
                target.pool.fleet.index.vouch(target.id, now)

    def tidy(self, limit: int = 50_000) -> None:
        """Give back memory of digests that are no more, about `limit` blocks of each pool; call it every while."""
        for pool in self.pools.values():
            pool.fleet.index.sweep(limit)

    # --- what this router finds out itself -----------------------------------------------------------------

    def reached(self, target: Target, reachable: bool) -> None:
        """An engine answered, or refused to be connected to."""
        if target.reachable is reachable:
            return
        replica_id = target.record.replica_id
        log.info("view.replica_reachable" if reachable else "view.replica_unreachable", replica=replica_id)
        for target_id in self._ranks.get(replica_id, ()):
            sibling = self.targets[target_id]
            sibling.reachable = reachable
            if sibling.pool is not None:
                sibling.pool.announce(sibling)

    def proved(self, target: Target, parity: str) -> None:
        """The parity probe has a verdict."""
        target.parity = parity
        if target.pool is not None:
            target.pool.announce(target)
            if target.refused:
                log.error("view.prefix_routing_refused", replica=target.id, parity=parity)
