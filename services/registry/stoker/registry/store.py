"""Every write to etcd, each as a transaction that is safe to send twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import structlog

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import records_pb2
from stoker.common.errors import Code, Conflict, NotFound, StokerError
from stoker.etcd import (
    Ambiguous,
    Compare,
    Delete,
    EtcdClient,
    EtcdUnavailable,
    Get,
    KeyValue,
    LeaseLost,
    Op,
    Put,
    TxnResult,
)
from stoker.registry import metrics
from stoker.registry.core import keys

log = structlog.get_logger(__name__)

T = TypeVar("T")

_TRIES = 8


@dataclass(frozen=True)
class Registered:
    """A node's membership: its lease, and the revision at which its record was written."""

    lease_id: int
    revision: int


class Superseded(Conflict):
    """A newer incarnation of the node took over."""

    reason = "SUPERSEDED"


class Moved(StokerError):
    """The node's record was written by another registry: its agent speaks there now."""

    code = Code.ABORTED
    reason = "STREAM_MOVED"


class FleetStore:
    """Writes the fleet's records. `lease_ttl_s` is the time to live of nodes."""

    def __init__(self, etcd: EtcdClient, lease_ttl_s: int) -> None:
        self._etcd = etcd
        self._lease_ttl_s = lease_ttl_s

    # Nodes

    async def register(
        self,
        node: common_pb2.Node,
        members: Sequence[records_pb2.MemberStatus],
        lease_hint: int,
        known: Callable[[], Iterable[tuple[str, int]]],
    ) -> Registered:
        """Write a node and its members under one lease: the one of `lease_hint` if it is the node's, or a new one.

        Members that `known` still lists and the agent does not run are removed. Raises Superseded when a newer
        incarnation is registered.
        """
        key = keys.node(node.node_id)
        for _ in range(_TRIES):
            existing = await self._etcd.get(key)
            if existing is not None:
                _refuse_older(existing, node)
            lease_id = await self._lease_for(existing, lease_hint)
            ours = {(status.replica_id, status.rank) for status in members}
            operations: list[Op] = [Put(key, node.SerializeToString(), lease_id)]
            operations += [_put_member(status, lease_id) for status in members]
            operations += [Delete(keys.member(*each)) for each in set(known()) - ours]
            try:
                result = await self._etcd.txn([_as_read(key, existing)], operations)
            except (Ambiguous, LeaseLost):
                continue
            if result.succeeded:
                if existing is not None and existing.lease not in {0, lease_id}:
                    await self._revoke(existing.lease)
                return Registered(lease_id, result.revision)
        raise _contention(f"node {node.node_id}")

    async def still_ours(self, node: common_pb2.Node, registered: Registered) -> bool:
        """Whether the record is as this registry wrote it; False when the lease was lost.

        Raises Superseded or Moved when someone else wrote it.
        """
        existing = await self._etcd.get(keys.node(node.node_id))
        if existing is None:
            return False
        if existing.mod_revision == registered.revision:
            return True
        _refuse_older(existing, node)
        raise Moved(f"node {node.node_id}: its agent was introduced elsewhere; follow it there")

    async def write_members(
        self,
        node: common_pb2.Node,
        registered: Registered,
        statuses: Sequence[records_pb2.MemberStatus],
        gone: Sequence[tuple[str, int]],
        revisions: Mapping[tuple[str, int], int],
    ) -> int | None:
        """Write and remove member statuses; returns the revision, or None when something is not as we left it.

        `revisions` are those of each member's last write, 0 for none. They are compared: etcd may run a write
        whose answer was lost much later, over what was written since.
        """
        operations: list[Op] = [_put_member(status, registered.lease_id) for status in statuses]
        operations += [Delete(keys.member(*each)) for each in gone]
        members = [*((each.replica_id, each.rank) for each in statuses), *gone]
        as_left = [Compare.unchanged(_at(keys.node(node.node_id), registered.revision))]
        as_left += [Compare.unchanged(_at(keys.member(*each), revisions.get(each, 0))) for each in members]
        try:
            result = await self._etcd.txn(as_left, operations)
        except LeaseLost:
            return None
        return result.revision if result.succeeded else None

    async def member_revisions(self, members: Iterable[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """The revision of each member's last write, 0 for none."""
        wanted = list(members)
        found = await self._read([keys.member(*each) for each in wanted])
        return {each: kv.mod_revision if kv is not None else 0 for each, kv in zip(wanted, found, strict=True)}

    async def renew(self, lease_id: int, timeout_s: float) -> None:
        """Keep a node's lease alive. Raises LeaseLost when it is gone."""
        await self._etcd.keep_alive_once(lease_id, timeout=timeout_s)

    async def leave(self, node: common_pb2.Node, registered: Registered) -> None:
        """End a membership at once, after saying that it is on purpose."""
        farewell = common_pb2.Node()
        farewell.CopyFrom(node)
        farewell.draining = True
        key = keys.node(node.node_id)
        put = Put(key, farewell.SerializeToString(), registered.lease_id)
        try:
            result = await self._repeat([Compare.unchanged(_at(key, registered.revision))], [put])
        except LeaseLost:
            return
        existing = None if result.succeeded else await self._etcd.get(key)
        # Written, or written by a first try whose answer was lost.
        if result.succeeded or (existing is not None and existing.lease == registered.lease_id):
            await self._etcd.revoke(registered.lease_id)

    async def drain_node(self, node_id: str, undo: bool) -> None:
        """Mark a node, or unmark it. The mark outlives the agent and its lease."""
        mark = keys.node_draining(node_id)
        node, existing = await self._read([keys.node(node_id), mark])
        if undo and existing is not None:
            await self._repeat([Compare.unchanged(existing)], [Delete(mark)])
        elif not undo and node is None:
            raise NotFound(f"node {node_id!r} is not in the fleet; `stoker status` lists the nodes")
        elif not undo and existing is None:
            await self._repeat([Compare.absent(mark)], [Put(mark, b"")])

    async def _lease_for(self, existing: KeyValue | None, hint: int) -> int:
        if hint and existing is not None and existing.lease == hint:
            try:
                await self._etcd.keep_alive_once(hint)
            except LeaseLost:
                log.info("membership.lease_gone", lease=f"{hint:x}")
            else:
                return hint
        return await self._etcd.grant(self._lease_ttl_s)

    async def _revoke(self, lease_id: int) -> None:
        """End a lease that has no use any more; it ends by itself otherwise."""
        try:
            await self._etcd.revoke(lease_id)
        except EtcdUnavailable as error:
            log.info("membership.old_lease_left", lease=f"{lease_id:x}", error=error.message)

    # Deployments

    async def put_deployment(
        self, spec: common_pb2.DeploymentSpec, expected_generation: int | None
    ) -> records_pb2.Deployment:
        """Create or change a deployment; unchanged when it already is so."""

        def change(current: records_pb2.Deployment | None) -> records_pb2.Deployment:
            generation = current.generation if current is not None else 0
            if (
                current is not None
                and current.spec == spec
                and expected_generation
                in {
                    None,
                    generation,
                    generation - 1,  # this very call, sent a second time because its answer was lost
                }
            ):
                return current
            if expected_generation is not None and expected_generation != generation:
                raise Conflict(
                    f"deployment {spec.name!r} is at generation {generation}, not {expected_generation}; "
                    "read it and decide anew",
                    reason="GENERATION_MISMATCH",
                    metadata={"generation": str(generation)},
                )
            return records_pb2.Deployment(spec=spec, generation=generation + 1)

        return await self._change_deployment(spec.name, change)

    async def scale_deployment(self, name: str, replicas: int) -> tuple[records_pb2.Deployment, int]:
        """Change the replica count alone; returns the deployment and the count before."""
        previous = 0

        def change(current: records_pb2.Deployment | None) -> records_pb2.Deployment:
            nonlocal previous
            if current is None:
                raise _no_deployment(name)
            previous = current.spec.replicas
            if previous == replicas:
                return current
            scaled = records_pb2.Deployment()
            scaled.CopyFrom(current)
            scaled.spec.replicas = replicas
            scaled.generation += 1
            return scaled

        return await self._change_deployment(name, change), previous

    async def delete_deployment(self, name: str) -> None:
        """Remove a deployment."""
        key = keys.deployment(name)
        try:
            result = await self._etcd.txn([Compare.exists(key)], [Delete(key)])
        except Ambiguous:
            if await self._etcd.get(key) is not None:
                raise
            return
        if not result.succeeded:
            raise _no_deployment(name)

    async def _change_deployment(
        self, name: str, change: Callable[[records_pb2.Deployment | None], records_pb2.Deployment]
    ) -> records_pb2.Deployment:
        key = keys.deployment(name)
        for _ in range(_TRIES):
            existing = await self._etcd.get(key)
            current = records_pb2.Deployment.FromString(existing.value) if existing is not None else None
            changed = change(current)
            if changed is current:
                return changed
            try:
                result = await self._etcd.txn([_as_read(key, existing)], [Put(key, changed.SerializeToString())])
            except Ambiguous:
                continue
            if result.succeeded:
                return changed
        raise _contention(f"deployment {name!r}")

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
        for _ in range(_TRIES):
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
        raise _contention(f"assignment of {replica_id!r}")

    async def _fenced(self, fence: common_pb2.Fence, operations: Sequence[Op]) -> int:
        leader = keys.leader(fence.role)
        leads = Compare.created_at(leader, fence.revision)
        written = [operation.key for operation in operations]
        for _ in range(_TRIES):
            # Compared too: etcd may run a write whose answer was lost much later, over a newer one of this leader.
            as_read = [_as_read(key, kv) for key, kv in zip(written, await self._read(written), strict=True)]
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
        raise _contention(f"what the leader of {fence.role!r} writes")

    # Leaders

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
                await self._revoke(lease_id)
        holder = records_pb2.Leader.FromString(existing.value).candidate if existing is not None else ""
        if existing is not None and holder == candidate:
            # Its own earlier call, whose answer was lost.
            try:
                await self._etcd.keep_alive_once(existing.lease)
            except LeaseLost:
                raise _not_leader(role, "") from None
            return common_pb2.Fence(role=role, revision=existing.create_revision), existing.lease
        raise _not_leader(role, holder)

    async def renew_leader(self, fence: common_pb2.Fence, lease_id: int) -> float:
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
        result = await self._repeat([Compare.created_at(key, fence.revision)], [Delete(key)])
        if result.succeeded:
            await self._revoke(lease_id)

    async def _read(self, wanted: Sequence[str]) -> list[KeyValue | None]:
        """Keys as of one moment; None for each that is absent."""
        reads = [Get(key) for key in wanted]
        result = await self._repeat([], reads)
        return [response.kvs[0] if response.kvs else None for response in result.responses]

    async def _repeat(self, compare: Sequence[Compare], then: Sequence[Op]) -> TxnResult:
        """A transaction that does the same when sent twice, sent again when its answer is lost."""
        try:
            return await self._etcd.txn(compare, then)
        except Ambiguous:
            return await self._etcd.txn(compare, then)


def _at(key: str, revision: int) -> KeyValue:
    return KeyValue(key, b"", 0, revision, 0)


def _as_read(key: str, existing: KeyValue | None) -> Compare:
    return Compare.absent(key) if existing is None else Compare.unchanged(existing)


def _put_member(status: records_pb2.MemberStatus, lease_id: int) -> Put:
    return Put(keys.member(status.replica_id, status.rank), status.SerializeToString(), lease_id)


def _refuse_older(existing: KeyValue, node: common_pb2.Node) -> None:
    other = common_pb2.Node.FromString(existing.value)
    if other.incarnation > node.incarnation:
        raise Superseded(
            f"node {node.node_id!r}: a newer agent (incarnation {other.incarnation}, at {other.grpc_endpoint}) took "
            "over; this one must stop. If both should run, give each its own node_id",
            metadata={"incarnation": str(other.incarnation), "grpc_endpoint": other.grpc_endpoint},
        )


def _no_deployment(name: str) -> NotFound:
    return NotFound(f"deployment {name!r} does not exist; `stoker status` lists the deployments")


def _not_leader(role: str, leader: str) -> Conflict:
    by = f"{leader!r} leads" if leader else "someone else leads, or nobody yet"
    return Conflict(f"role {role!r}: {by}; try again later", reason="NOT_LEADER", metadata={"leader": leader})


def _contention(what: str) -> StokerError:
    return StokerError(
        f"{what} was changed by others {_TRIES} times in a row; try again",
        code=Code.ABORTED,
        reason="CONTENTION",
        retry_after_s=0.5,
    )
