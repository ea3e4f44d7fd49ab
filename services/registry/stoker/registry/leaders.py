"""Leaders: who leads, and what only they may write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import records_pb2
from stoker.common.errors import Conflict, NotFound
from stoker.etcd import Ambiguous, Compare, Delete, EtcdClient, Get, Is, KeyValue, LeaseLost, Op, Put, Target
from stoker.registry import metrics, txns
from stoker.registry.core import keys

R = TypeVar("R", records_pb2.Desired, records_pb2.ScalingHistory, records_pb2.Assignment)


@dataclass(frozen=True)
class Granted:
    """A leadership: the right to write, its lease, and how long it lasts from the call on, ms."""

    fence: common_pb2.Fence
    lease_id: int
    ttl_ms: int


class LeaderStore:
    """Grants leadership, and writes desired counts and assignments under its fence."""

    def __init__(self, etcd: EtcdClient) -> None:
        self._etcd = etcd

    async def acquire(self, role: str, candidate: str, ttl_ms: int) -> Granted:
        """Lead a role. Raises NOT_LEADER, naming the holder."""
        key = keys.leader(role)
        existing = await self._etcd.get(key)
        if existing is None:
            lease_id = await self._etcd.grant(-(-ttl_ms // 1000))
            value = records_pb2.Leader(role=role, candidate=candidate).SerializeToString()
            try:
                result = await self._etcd.txn([Compare.absent(key)], [Put(key, value, lease_id)], [Get(key)])
            except Ambiguous:
                existing = await self._etcd.get(key)
            else:
                if result.succeeded:
                    return Granted(common_pb2.Fence(role=role, revision=result.revision), lease_id, ttl_ms)
                existing = result.responses[0].kvs[0]
            if existing is None or existing.lease != lease_id:
                await txns.revoke(self._etcd, lease_id)
        holder = records_pb2.Leader.FromString(existing.value).candidate if existing is not None else ""
        if existing is not None and holder == candidate:
            # Its own earlier call, whose answer was lost.
            try:
                ttl_s = await self._etcd.keep_alive_once(existing.lease)
            except LeaseLost:
                raise _not_leader(role, "") from None
            fence = common_pb2.Fence(role=role, revision=existing.create_revision)
            # That call may have asked for less: what is promised must not outlast the lease.
            return Granted(fence, existing.lease, min(ttl_ms, int(ttl_s * 1000)))
        raise _not_leader(role, holder)

    async def renew(self, fence: common_pb2.Fence, lease_id: int) -> float:
        """Lead on; returns seconds to live. Raises NOT_LEADER."""
        try:
            ttl_s = await self._etcd.keep_alive_once(lease_id)
        except LeaseLost:
            raise _not_leader(fence.role, "") from None
        existing = await self._etcd.get(keys.leader(fence.role))
        if existing is None or (existing.create_revision, existing.lease) != (fence.revision, lease_id):
            raise _not_leader(
                fence.role, records_pb2.Leader.FromString(existing.value).candidate if existing is not None else ""
            )
        return ttl_s

    async def resign(self, fence: common_pb2.Fence, lease_id: int) -> None:
        """Step down; quietly nothing when another leads already."""
        key = keys.leader(fence.role)
        result = await txns.repeat(self._etcd, [Compare.created_at(key, fence.revision)], [Delete(key)])
        if result.succeeded:
            await txns.revoke(self._etcd, lease_id)

    # What leaders write

    async def set_desired(
        self, fence: common_pb2.Fence, desired: Sequence[records_pb2.Desired], removed: Sequence[str]
    ) -> int:
        """Write desired counts as the leader; returns the revision."""
        puts = [Put(keys.desired(each.deployment), _under(fence, each).SerializeToString()) for each in desired]
        return await self._fenced(fence, [*puts, *(Delete(keys.desired(name)) for name in removed)])

    async def set_scaling_history(
        self, fence: common_pb2.Fence, histories: Sequence[records_pb2.ScalingHistory], removed: Sequence[str]
    ) -> int:
        """Write what the scaler keeps of the past as the leader; returns the revision."""
        puts = [Put(keys.scaling(each.deployment), _under(fence, each).SerializeToString()) for each in histories]
        return await self._fenced(fence, [*puts, *(Delete(keys.scaling(name)) for name in removed)])

    async def apply_assignments(
        self,
        fence: common_pb2.Fence,
        puts: Sequence[records_pb2.Assignment],
        deletes: Sequence[str],
        decided_at: int = 0,
    ) -> int:
        """Write and remove assignments as the leader, as one step; returns the revision.

        Raises CONFLICT where one, or the facility, was changed after revision `decided_at`, unless that is 0.
        """
        operations: list[Op] = []
        for each in puts:
            record = _under(fence, each)
            record.created_revision = 0
            operations.append(Put(keys.assignment(each.replica_id), record.SerializeToString()))
        operations += [Delete(keys.assignment(replica_id)) for replica_id in deletes]
        return await self._fenced(fence, operations, decided_at)

    async def drain_replica(self, replica_id: str) -> records_pb2.Assignment:
        """Ask a replica to drain: an operator's wish, not fenced."""
        key = keys.assignment(replica_id)
        for _ in range(txns.TRIES):
            existing = await self._etcd.get(key)
            if existing is None:
                raise NotFound(f"replica {replica_id!r} has no assignment; `stoker status` lists the replicas")
            assignment = records_pb2.Assignment.FromString(existing.value)
            assignment.created_revision = 0
            already = assignment.wanted == records_pb2.WANTED_DRAIN
            assignment.wanted = records_pb2.WANTED_DRAIN
            value = assignment.SerializeToString()
            assignment.created_revision = existing.create_revision
            if already:
                return assignment
            try:
                result = await self._etcd.txn([Compare.unchanged(existing)], [Put(key, value)])
            except Ambiguous:
                continue
            if result.succeeded:
                return assignment
        raise txns.contention(f"assignment of {replica_id!r}")

    async def _fenced(self, fence: common_pb2.Fence, operations: Sequence[Op], decided_at: int = 0) -> int:
        leader = keys.leader(fence.role)
        leads = Compare.created_at(leader, fence.revision)
        written = [operation.key for operation in operations]
        # What was decided for another facility than there is now may not fit it.
        facility = keys.facility()
        unchanged = [Compare(facility, Target.MOD_REVISION, Is.LESS, decided_at + 1)] if decided_at else []
        for _ in range(txns.TRIES):
            present = await txns.read(self._etcd, written)
            if decided_at:
                _refuse_unseen(operations, present, decided_at)
            # Compared too: etcd may run a write whose answer was lost much later, over a newer one of this leader.
            as_read = [txns.as_read(key, kv) for key, kv in zip(written, present, strict=True)]
            try:
                result = await self._etcd.txn([leads, *unchanged, *as_read], operations, [Get(leader), Get(facility)])
            except Ambiguous:
                continue
            if result.succeeded:
                return result.revision
            held = result.responses[0].kvs
            if not held or held[0].create_revision != fence.revision:
                metrics.FENCED.inc()
                raise Conflict(
                    f"fence {fence.revision} of role {fence.role!r} is void: another leads; stop writing",
                    reason="FENCED",
                )
            if decided_at:
                _refuse_unseen([Delete(facility)], [*result.responses[1].kvs, None][:1], decided_at)
        raise txns.contention(f"what the leader of {fence.role!r} writes")


def _under(fence: common_pb2.Fence, record: R) -> R:
    """A copy that names the leadership under which it is written."""
    written = type(record)()
    written.CopyFrom(record)
    written.fence.CopyFrom(fence)
    return written


def _refuse_unseen(operations: Sequence[Op], present: Sequence[KeyValue | None], decided_at: int) -> None:
    """Raises Conflict where a key was written after the view that the operations were decided on."""
    for operation, kv in zip(operations, present, strict=True):
        if kv is None or kv.mod_revision <= decided_at:
            continue
        # As wanted already: this very call, whose answer was lost.
        if not (isinstance(operation, Put) and operation.value == kv.value):
            raise Conflict(
                f"{kv.key.removeprefix(keys.PREFIX)} was changed at revision {kv.mod_revision}, after the view of "
                f"revision {decided_at} that this was decided on; look and decide again"
            )


def _not_leader(role: str, leader: str) -> Conflict:
    by = f"{leader!r} leads" if leader else "someone else leads, or nobody yet"
    return Conflict(f"role {role!r}: {by}; try again later", reason="NOT_LEADER", metadata={"leader": leader})
