"""Records of the fleet by kind and name, and their packing into messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import records_pb2, registry_pb2

Record = (
    common_pb2.Node
    | records_pb2.Deployment
    | records_pb2.Desired
    | records_pb2.Assignment
    | records_pb2.Replica
    | records_pb2.Leader
    | records_pb2.ScalingHistory
    | records_pb2.Facility
)


class Kind(Enum):
    """The kinds of records, named as the fields of `Records` and `Removals`."""

    NODES = "nodes"
    DEPLOYMENTS = "deployments"
    DESIRED = "desired"
    ASSIGNMENTS = "assignments"
    REPLICAS = "replicas"
    LEADERS = "leaders"
    SCALING = "scaling"
    FACILITIES = "facilities"


Name = tuple[Kind, str]

TOPICS: Mapping[int, Kind] = {
    registry_pb2.TOPIC_NODES: Kind.NODES,
    registry_pb2.TOPIC_DEPLOYMENTS: Kind.DEPLOYMENTS,
    registry_pb2.TOPIC_DESIRED: Kind.DESIRED,
    registry_pb2.TOPIC_ASSIGNMENTS: Kind.ASSIGNMENTS,
    registry_pb2.TOPIC_REPLICAS: Kind.REPLICAS,
    registry_pb2.TOPIC_LEADERS: Kind.LEADERS,
    registry_pb2.TOPIC_SCALING: Kind.SCALING,
    registry_pb2.TOPIC_FACILITY: Kind.FACILITIES,
}

_NAME_FIELD = {
    Kind.NODES: "node_id",
    Kind.DEPLOYMENTS: "spec.name",
    Kind.DESIRED: "deployment",
    Kind.ASSIGNMENTS: "replica_id",
    Kind.REPLICAS: "replica_id",
    Kind.LEADERS: "role",
    Kind.SCALING: "deployment",
    Kind.FACILITIES: "name",
}


def name_of(kind: Kind, record: Record) -> str:
    """The record's name within its kind."""
    if isinstance(record, records_pb2.Deployment):
        return record.spec.name
    return str(getattr(record, _NAME_FIELD[kind]))


def unpack(records: registry_pb2.Records) -> Iterator[tuple[Name, Record]]:
    """The records of a message, one by one."""
    for kind in Kind:
        for record in getattr(records, kind.value):
            yield (kind, name_of(kind, record)), record


def unpack_removals(removals: registry_pb2.Removals) -> Iterator[Name]:
    """The names in a message, one by one."""
    for kind in Kind:
        for name in getattr(removals, kind.value):
            yield kind, name


def pack(items: Iterable[tuple[Name, Record]], revision: int) -> registry_pb2.Records:
    """Records as one message that reflects etcd's `revision`."""
    records = registry_pb2.Records(revision=revision)
    for (kind, _), record in items:
        getattr(records, kind.value).append(record)
    return records


def pack_removals(names: Iterable[Name], revision: int) -> registry_pb2.Removals:
    """Names as one message that reflects etcd's `revision`."""
    removals = registry_pb2.Removals(revision=revision)
    for kind, name in names:
        getattr(removals, kind.value).append(name)
    return removals


def pack_pieces(
    items: Iterable[tuple[Name, Record]], revision: int, piece_bytes: int
) -> Iterator[registry_pb2.Records]:
    """Records as messages of about `piece_bytes` each; none for no records."""
    piece: list[tuple[Name, Record]] = []
    size = 0
    for item in items:
        piece.append(item)
        size += item[1].ByteSize()
        if size >= piece_bytes:
            yield pack(piece, revision)
            piece, size = [], 0
    if piece:
        yield pack(piece, revision)
