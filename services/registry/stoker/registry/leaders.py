"""Leaders: who leads, and what only they may write."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import records_pb2
from stoker.common.errors import Conflict, NotFound
from stoker.etcd import Ambiguous, Compare, Delete, EtcdClient, Get, LeaseLost, Op, Put
from stoker.registry import metrics, txns
from stoker.registry.core import keys


class LeaderStore:
    """Grants leadership, and writes desired counts and assignments under its fence."""

    def __init__(self, etcd: EtcdClient) -> None:
        self._etcd = etcd

    async def acquire(self, role: str, candidate: str, ttl_ms: int) -> tuple[common_pb2.Fence, int]:
        """Lead a role; returns the fence and the lease. Raises NOT_LEADER, naming the holder."""
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
                    return common_pb2.Fence(role=role, revision=result.revision), lease_id
                existing = result.responses[0].kvs[0]
            if existing is None or existing.lease != lease_id:
                await txns.revoke(self._etcd, lease_id)
        holder = records_pb2.Leader.FromString(existing.value).candidate if existing is not None else ""
        if existing is not None and holder == candidate:
            # Its own earlier call, whose answer was lost.
            try:
                await self._etcd.keep_alive_once(existing.lease)
            except LeaseLost:
                raise _not_leader(role, "") from None
            return common_pb2.Fence(role=role, revision=existing.create_revision), existing.lease
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
        operations: list[Op] = []
        for each in desired:
            record = records_pb2.Desired()
            record.CopyFrom(each)
            record.fence.CopyFrom(fence)
            operations.append(Put(keys.desired(each.deployment), record.SerializeToString()))
        operations += [Delete(keys.desired(name)) for name in removed]
        return await self._fenced(fence, operations)

    async def apply_assignments(
        self, fence: common_pb2.Fence, puts: Sequence[records_pb2.Assignment], deletes: Sequence[str]
    ) -> int:
        """Write and remove assignments as the leader, as one step; returns the revision."""
        operations: list[Op] = []
        for each in puts:
            record = records_pb2.Assignment()
            record.CopyFrom(each)
            record.fence.CopyFrom(fence)
            record.created_revision = 0
            operations.append(Put(keys.assignment(each.replica_id), record.SerializeToString()))
        operations += [Delete(keys.assignment(replica_id)) for replica_id in deletes]
        return await self._fenced(fence, operations)

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

    async def _fenced(self, fence: common_pb2.Fence, operations: Sequence[Op]) -> int:
        leader = keys.leader(fence.role)
        leads = Compare.created_at(leader, fence.revision)
        written = [operation.key for operation in operations]
        for _ in range(txns.TRIES):
            # Compared too: etcd may run a write whose answer was lost much later, over a newer one of this leader.
            as_read = [
                txns.as_read(key, kv) for key, kv in zip(written, await txns.read(self._etcd, written), strict=True)
            ]
            try:
                result = await self._etcd.txn([leads, *as_read], operations, [Get(leader)])
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
        raise txns.contention(f"what the leader of {fence.role!r} writes")


def _not_leader(role: str, leader: str) -> Conflict:
    by = f"{leader!r} leads" if leader else "someone else leads, or nobody yet"
    return Conflict(f"role {role!r}: {by}; try again later", reason="NOT_LEADER", metadata={"leader": leader})
