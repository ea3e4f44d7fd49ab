"""Writes of nodes: membership, members' statuses, drain marks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import records_pb2
from stoker.common.errors import Code, Conflict, NotFound, StokerError
from stoker.etcd import Ambiguous, Compare, Delete, EtcdClient, KeyValue, LeaseLost, Op, Put
from stoker.registry import txns
from stoker.registry.core import keys

log = structlog.get_logger(__name__)


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


class NodeStore:
    """Writes nodes and what they report. `lease_ttl_s` is their time to live."""

    def __init__(self, etcd: EtcdClient, lease_ttl_s: int) -> None:
        self._etcd = etcd
        self._lease_ttl_s = lease_ttl_s

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
        for _ in range(txns.TRIES):
            existing = await self._etcd.get(key)
            if existing is not None:
                _refuse_older(existing, node)
            lease_id = await self._lease_for(existing, lease_hint)
            ours = {(status.replica_id, status.rank) for status in members}
            operations: list[Op] = [Put(key, node.SerializeToString(), lease_id)]
            operations += [_put_member(status, lease_id) for status in members]
            operations += [Delete(keys.member(*each)) for each in set(known()) - ours]
            try:
                result = await self._etcd.txn([txns.as_read(key, existing)], operations)
            except (Ambiguous, LeaseLost):
                continue
            if result.succeeded:
                if existing is not None and existing.lease not in {0, lease_id}:
                    await txns.revoke(self._etcd, existing.lease)
                return Registered(lease_id, result.revision)
        raise txns.contention(f"node {node.node_id}")

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
        as_left = [Compare.unchanged(txns.at(keys.node(node.node_id), registered.revision))]
        as_left += [Compare.unchanged(txns.at(keys.member(*each), revisions.get(each, 0))) for each in members]
        try:
            result = await self._etcd.txn(as_left, operations)
        except LeaseLost:
            return None
        return result.revision if result.succeeded else None

    async def member_revisions(self, members: Iterable[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """The revision of each member's last write, 0 for none."""
        wanted = list(members)
        found = await txns.read(self._etcd, [keys.member(*each) for each in wanted])
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
            result = await txns.repeat(self._etcd, [Compare.unchanged(txns.at(key, registered.revision))], [put])
        except LeaseLost:
            return
        existing = None if result.succeeded else await self._etcd.get(key)
        # Written, or written by a first try whose answer was lost.
        if result.succeeded or (existing is not None and existing.lease == registered.lease_id):
            await self._etcd.revoke(registered.lease_id)

    async def drain(self, node_id: str, undo: bool) -> None:
        """Mark a node, or unmark it. The mark outlives the agent and its lease."""
        mark = keys.node_draining(node_id)
        node, existing = await txns.read(self._etcd, [keys.node(node_id), mark])
        if undo and existing is not None:
            await txns.repeat(self._etcd, [Compare.unchanged(existing)], [Delete(mark)])
        elif not undo and node is None:
            raise NotFound(f"node {node_id!r} is not in the fleet; `stoker status` lists the nodes")
        elif not undo and existing is None:
            await txns.repeat(self._etcd, [Compare.absent(mark)], [Put(mark, b"")])

    async def _lease_for(self, existing: KeyValue | None, hint: int) -> int:
        if hint and existing is not None and existing.lease == hint:
            try:
                await self._etcd.keep_alive_once(hint)
            except LeaseLost:
                log.info("membership.lease_gone", lease=f"{hint:x}")
            else:
                return hint
        return await self._etcd.grant(self._lease_ttl_s)


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
