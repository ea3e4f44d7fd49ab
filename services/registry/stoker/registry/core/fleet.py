"""The fleet's state, drawn from etcd's keys: what is true, what changed, and whom it concerns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from google.protobuf.message import DecodeError

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.registry.core import gang, keys
from stoker.registry.core.expiry import ExpiryGuard
from stoker.registry.core.keys import Key, Space
from stoker.registry.core.merge import Change
from stoker.registry.core.records import Kind, Name, Record

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of etcd with its value and revisions."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int


@dataclass(frozen=True)
class Step:
    """What one change of etcd did."""

    change: Change = field(default_factory=Change)
    tell: frozenset[str] = frozenset()
    """Nodes whose assignments, or whose gangs' peers, changed."""
    introduced: tuple[str, ...] = ()
    """Nodes whose record was written: whoever hears them must look whether it still does."""
    unreadable: tuple[str, ...] = ()
    """Keys whose values could not be read; they count as absent."""


@dataclass
class FleetState:
    """All records as of one etcd revision, with the derived ones: replicas, and nodes with operators' wishes."""

    guard: ExpiryGuard = field(default_factory=ExpiryGuard)
    revision: int = 0
    records: dict[Name, Record] = field(default_factory=dict)
    """What watchers see."""
    _nodes: dict[str, common_pb2.Node] = field(default_factory=dict)
    _draining: set[str] = field(default_factory=set)
    _deployments: dict[str, records_pb2.Deployment] = field(default_factory=dict)
    _desired: dict[str, records_pb2.Desired] = field(default_factory=dict)
    _assignments: dict[str, records_pb2.Assignment] = field(default_factory=dict)
    _members: dict[str, dict[int, records_pb2.MemberStatus]] = field(default_factory=lambda: defaultdict(dict))
    _leaders: dict[str, records_pb2.Leader] = field(default_factory=dict)
    _scaling: dict[str, records_pb2.ScalingHistory] = field(default_factory=dict)
    _facilities: dict[str, records_pb2.Facility] = field(default_factory=dict)
    _on_node: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    _held: dict[str, dict[Key, None]] = field(default_factory=dict)

    # Change

    def apply(self, puts: Iterable[Entry], deletes: Iterable[str], revision: int, now: float) -> Step:
        """Take one step of etcd's history; `now` is monotonic seconds."""
        touched, unreadable = _Touched(), []
        gone = [key for raw in deletes if (key := keys.parse(raw)) is not None]
        placed = {}
        for entry in puts:
            if (key := keys.parse(entry.key)) is not None:
                placed[key] = entry
        for key in self._postpone(gone, now):
            self._delete(key, touched)
        for key, entry in placed.items():
            if key.space is Space.NODE:
                self._welcome_back(key.name, placed, touched)
            try:
                self._put(key, entry, touched)
            except DecodeError:
                unreadable.append(entry.key)
                self._delete(key, touched)
        self.revision = revision
        introduced = tuple(key.name for key in placed if key.space is Space.NODE)
        return Step(self._derive(touched), frozenset(touched.tell), introduced, tuple(unreadable))

    def release(self, now: float) -> Step:
        """Drop a node that was held long enough, if there is one."""
        node_id = self.guard.due(now)
        if node_id is None:
            return Step()
        touched = _Touched()
        for key in self._held.pop(node_id, {}):
            self._delete(key, touched)
        return Step(self._derive(touched), frozenset(touched.tell))

    def _postpone(self, gone: list[Key], now: float) -> Iterator[Key]:
        """Those of the deleted keys that are to go now; a held node keeps its record and its members'."""
        fleet = len(self._nodes)
        for key in gone:
            node = self._nodes.get(key.name) if key.space is Space.NODE else None
            if node is None:
                continue
            # A node that said it leaves is expected to go.
            if node.draining or self.guard.lost(key.name, fleet, now):
                fleet -= 1
            else:
                self._held.setdefault(key.name, {})[key] = None
        for key in gone:
            owner = self._owner(key)
            if owner in self._held:
                self._held[owner][key] = None
            else:
                yield key

    def _owner(self, key: Key) -> str:
        match key.space:
            case Space.NODE:
                return key.name
            case Space.MEMBER:
                status = self._members.get(key.name, {}).get(key.rank)
                return status.node_id if status is not None else ""
        return ""

    def _welcome_back(self, node_id: str, placed: Container[Key], touched: _Touched) -> None:
        self.guard.returned(node_id)
        for key in self._held.pop(node_id, {}):
            if key not in placed:
                self._delete(key, touched)

    def _put(self, key: Key, entry: Entry, touched: _Touched) -> None:
        match key.space:
            case Space.NODE:
                self._nodes[key.name] = common_pb2.Node.FromString(entry.value)
            case Space.NODE_DRAINING:
                self._draining.add(key.name)
            case Space.DEPLOYMENT:
                self._deployments[key.name] = records_pb2.Deployment.FromString(entry.value)
            case Space.DESIRED:
                self._desired[key.name] = records_pb2.Desired.FromString(entry.value)
            case Space.ASSIGNMENT:
                self._assign(key.name, _assignment(entry), touched)
            case Space.MEMBER:
                self._members[key.name][key.rank] = records_pb2.MemberStatus.FromString(entry.value)
                for held in self._held.values():
                    held.pop(key, None)
            case Space.LEADER:
                leader = records_pb2.Leader.FromString(entry.value)
                leader.role, leader.revision = key.name, entry.create_revision
                self._leaders[key.name] = leader
            case Space.SCALING:
                self._scaling[key.name] = records_pb2.ScalingHistory.FromString(entry.value)
            case Space.FACILITY:
                facility = records_pb2.Facility.FromString(entry.value)
                facility.name, facility.revision = key.name, entry.mod_revision
                self._facilities[key.name] = facility
        self._touch(key, touched)

    def _delete(self, key: Key, touched: _Touched) -> None:
        match key.space:
            case Space.NODE:
                self._nodes.pop(key.name, None)
            case Space.NODE_DRAINING:
                self._draining.discard(key.name)
            case Space.DEPLOYMENT:
                self._deployments.pop(key.name, None)
            case Space.DESIRED:
                self._desired.pop(key.name, None)
            case Space.ASSIGNMENT:
                self._touch(key, touched)
                self._assign(key.name, None, touched)
            case Space.MEMBER:
                self._members[key.name].pop(key.rank, None)
                if not self._members[key.name]:
                    del self._members[key.name]
            case Space.LEADER:
                self._leaders.pop(key.name, None)
            case Space.SCALING:
                self._scaling.pop(key.name, None)
            case Space.FACILITY:
                self._facilities.pop(key.name, None)
        self._touch(key, touched)

    def _assign(self, replica_id: str, assignment: records_pb2.Assignment | None, touched: _Touched) -> None:
        old = self._assignments.pop(replica_id, None)
        for member in old.members if old is not None else ():
            touched.tell.add(member.node_id)
            self._on_node[member.node_id].discard(replica_id)
            if not self._on_node[member.node_id]:
                del self._on_node[member.node_id]
        if assignment is not None:
            self._assignments[replica_id] = assignment
            for member in assignment.members:
                touched.tell.add(member.node_id)
                self._on_node[member.node_id].add(replica_id)

    def _touch(self, key: Key, touched: _Touched) -> None:
        """Note which records, and which nodes, a changed key concerns."""
        match key.space:
            case Space.NODE | Space.NODE_DRAINING:
                touched.names[Kind.NODES, key.name] = None
                for replica_id in sorted(self._on_node.get(key.name, ())):
                    touched.names[Kind.REPLICAS, replica_id] = None
                    touched.tell.update(self._others(replica_id, key.name))
            case Space.ASSIGNMENT:
                touched.names[Kind.ASSIGNMENTS, key.name] = None
                touched.names[Kind.REPLICAS, key.name] = None
            case Space.MEMBER:
                touched.names[Kind.REPLICAS, key.name] = None
                assignment = self._assignments.get(key.name)
                own = {m.node_id for m in assignment.members if m.rank == key.rank} if assignment else set()
                touched.tell.update(self._others(key.name, *own))
            case _:
                touched.names[Kind(key.space.value), key.name] = None

    def _others(self, replica_id: str, *but: str) -> set[str]:
        assignment = self._assignments.get(replica_id)
        return {m.node_id for m in assignment.members} - set(but) if assignment is not None else set()

    # What is derived

    def _derive(self, touched: _Touched) -> Change:
        upserts, removals = [], []
        for name in touched.names:
            record = self._record(name)
            if record is None:
                if self.records.pop(name, None) is not None:
                    removals.append(name)
            elif self.records.get(name) != record:
                self.records[name] = record
                upserts.append((name, record))
        return Change(tuple(upserts), tuple(removals))

    def _record(self, name: Name) -> Record | None:
        match name:
            case (Kind.NODES, node_id):
                return self._node(node_id)
            case (Kind.DEPLOYMENTS, deployment):
                return self._deployments.get(deployment)
            case (Kind.DESIRED, deployment):
                return self._desired.get(deployment)
            case (Kind.ASSIGNMENTS, replica_id):
                return self._assignments.get(replica_id)
            case (Kind.REPLICAS, replica_id):
                assignment = self._assignments.get(replica_id)
                if assignment is None:
                    return None
                return gang.replica_of(assignment, self._members.get(replica_id, {}), self._nodes)
            case (Kind.SCALING, deployment):
                return self._scaling.get(deployment)
            case (Kind.FACILITIES, facility):
                return self._facilities.get(facility)
            case (_, role):
                return self._leaders.get(role)

    def _node(self, node_id: str) -> common_pb2.Node | None:
        node = self._nodes.get(node_id)
        if node is None or node_id not in self._draining or node.draining:
            return node
        marked = common_pb2.Node()
        marked.CopyFrom(node)
        marked.draining = True
        return marked

    # What agents are told

    def assignments_of(self, node_id: str) -> registry_pb2.NodeAssignments:
        """All assignments that name this node, with the other members of those gangs and their nodes."""
        told = registry_pb2.NodeAssignments(revision=self.revision)
        others = set()
        for replica_id in sorted(self._on_node.get(node_id, ())):
            assignment = self._assignments[replica_id]
            told.assignments.append(assignment)
            others |= self._others(replica_id, node_id)
            told.peers.extend(
                status
                for _, status in sorted(self._members.get(replica_id, {}).items())
                if status.node_id != node_id and gang.obeys(status, assignment)
            )
        told.nodes.extend(self._nodes[other] for other in sorted(others) if other in self._nodes)
        return told

    def members_of(self, node_id: str) -> list[tuple[str, int]]:
        """Replica and rank of each member status that this node wrote."""
        return [
            (replica_id, rank)
            for replica_id, ranks in self._members.items()
            for rank, status in ranks.items()
            if status.node_id == node_id
        ]

    def incarnation(self, node_id: str) -> int:
        """The incarnation of a node as recorded, 0 for a node that is not here."""
        node = self._nodes.get(node_id)
        return node.incarnation if node is not None else 0

    def absent(self) -> set[str]:
        """Nodes that assignments name and that are not here."""
        return self._on_node.keys() - self._nodes.keys()

    def replicas_on(self, node_id: str) -> list[str]:
        """Replicas with a member assigned to this node."""
        return sorted(self._on_node.get(node_id, ()))


@dataclass
class _Touched:
    # Ordered, so that one history always gives the same changes in the same order.
    names: dict[Name, None] = field(default_factory=dict)
    tell: set[str] = field(default_factory=set)


def _assignment(entry: Entry) -> records_pb2.Assignment:
    assignment = records_pb2.Assignment.FromString(entry.value)
    assignment.created_revision = entry.create_revision
    return assignment
