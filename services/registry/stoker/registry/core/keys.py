"""Keys of the records in etcd."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

PREFIX = "/stoker/v1/"
"""Everything Stoker keeps; the version changes when readers of the old form could not go on."""
CURRENT = "current"
"""Name of the one facility."""


class Space(Enum):
    """Kinds of keys, named as the path element after the prefix."""

    NODE = "nodes"
    NODE_DRAINING = "nodes-draining"
    """An operator's wish. Apart from the node's own record, whose lease it must outlive."""
    DEPLOYMENT = "deployments"
    DESIRED = "desired"
    ASSIGNMENT = "assignments"
    MEMBER = "members"
    LEADER = "leaders"
    SCALING = "scaling"
    FACILITY = "facilities"


@dataclass(frozen=True, slots=True)
class Key:
    """A parsed key. `rank` is that of a gang member, 0 elsewhere."""

    space: Space
    name: str
    rank: int = 0

    def __str__(self) -> str:
        tail = f"/{self.rank}" if self.space is Space.MEMBER else ""
        return f"{PREFIX}{self.space.value}/{self.name}{tail}"


def node(node_id: str) -> str:
    """Where a node's record is; it lives under the node's lease."""
    return str(Key(Space.NODE, node_id))


def node_draining(node_id: str) -> str:
    """Where an operator's wish to drain a node is; present or not."""
    return str(Key(Space.NODE_DRAINING, node_id))


def deployment(name: str) -> str:
    """Where a deployment is."""
    return str(Key(Space.DEPLOYMENT, name))


def desired(name: str) -> str:
    """Where a deployment's desired count is."""
    return str(Key(Space.DESIRED, name))


def assignment(replica_id: str) -> str:
    """Where a replica's assignment is."""
    return str(Key(Space.ASSIGNMENT, replica_id))


def member(replica_id: str, rank: int) -> str:
    """Where a gang member's status is; it lives under its node's lease."""
    return str(Key(Space.MEMBER, replica_id, rank))


def leader(role: str) -> str:
    """Where the leader of a role is; it lives under the leader's own lease."""
    return str(Key(Space.LEADER, role))


def scaling(name: str) -> str:
    """Where what a scaler keeps of a deployment's past is."""
    return str(Key(Space.SCALING, name))


def facility() -> str:
    """Where the facility is, as an operator wrote it."""
    return str(Key(Space.FACILITY, CURRENT))


def parse(key: str) -> Key | None:
    """The key's parts; None for a key that this release does not know."""
    if not key.startswith(PREFIX):
        return None
    match key.removeprefix(PREFIX).split("/"):
        case ["members", name, rank] if name and rank.isdecimal():
            return Key(Space.MEMBER, name, int(rank))
        case [space, name] if name and space != "members":
            try:
                return Key(Space(space), name)
            except ValueError:
                return None
    return None
