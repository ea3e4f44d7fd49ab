"""What an agent has yet to tell its registry: bounded, newest wins, order kept where order matters."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from stoker.api.registry.v1 import records_pb2, registry_pb2

Member = tuple[str, int]


@dataclass
class Outbox:
    """Reports waiting to be sent.

    Members and loads are kept by their newest value, so they are bounded by what the node runs. Digests need
    every step; when more than `max_digest_bytes` wait, all of them are dropped and their replicas are named to
    be sent as snapshots, which is smaller.
    """

    max_digest_bytes: int = 32 * 1024 * 1024
    members: dict[Member, records_pb2.MemberStatus] = field(default_factory=dict)
    """All members that exist, newest status of each: what a Hello carries."""
    _dirty: dict[Member, None] = field(default_factory=dict)
    _gone: dict[Member, None] = field(default_factory=dict)
    _loads: dict[str, registry_pb2.ReplicaLoad] = field(default_factory=dict)
    _digests: deque[registry_pb2.DigestUpdate] = field(default_factory=deque)
    _digest_bytes: int = 0
    _published: set[str] = field(default_factory=set)

    def member(self, status: records_pb2.MemberStatus) -> None:
        """A member's newest status."""
        key = (status.replica_id, status.rank)
        self.members[key] = status
        self._dirty[key] = None
        self._gone.pop(key, None)

    def member_gone(self, replica_id: str, rank: int) -> None:
        """A member that exists no more."""
        key = (replica_id, rank)
        self.members.pop(key, None)
        self._dirty.pop(key, None)
        self._gone[key] = None
        if rank == 0:
            self._published.discard(replica_id)
            self._loads.pop(replica_id, None)

    def load(self, loads: Iterable[registry_pb2.ReplicaLoad]) -> None:
        """Newest load of some replicas."""
        for load in loads:
            self._loads[load.replica_id] = load

    def digest(self, update: registry_pb2.DigestUpdate) -> frozenset[str]:
        """A step of a digest. Returns replicas whose waiting steps were dropped: they need snapshots."""
        self._published.add(update.replica_id)
        self._digests.append(update)
        self._digest_bytes += _size(update)
        return self._drop_digests() if self._digest_bytes > self.max_digest_bytes else frozenset()

    def reconnected(self) -> frozenset[str]:
        """Forget what the next Hello says anyway. Returns the replicas whose digests must start with snapshots."""
        self._dirty.clear()
        self._gone.clear()
        self._drop_digests()
        return frozenset(self._published)

    def __bool__(self) -> bool:
        return bool(self._dirty or self._gone or self._loads or self._digests)

    def take(self) -> Iterator[registry_pb2.ReportRequest]:
        """Everything that waits, as messages; members first."""
        dirty, self._dirty = self._dirty, {}
        gone, self._gone = self._gone, {}
        loads, self._loads = self._loads, {}
        digests, self._digests = self._digests, deque()
        self._digest_bytes = 0
        for replica_id, rank in gone:
            yield registry_pb2.ReportRequest(member_gone=registry_pb2.MemberGone(replica_id=replica_id, rank=rank))
        for key in dirty:
            yield registry_pb2.ReportRequest(member=self.members[key])
        if loads:
            yield registry_pb2.ReportRequest(load=registry_pb2.LoadReport(loads=loads.values()))
        for update in digests:
            yield registry_pb2.ReportRequest(digest=update)

    def _drop_digests(self) -> frozenset[str]:
        dropped = frozenset(update.replica_id for update in self._digests)
        self._digests.clear()
        self._digest_bytes = 0
        return dropped


def _size(update: registry_pb2.DigestUpdate) -> int:
    # The message around the keys counts too, or a million empty steps would weigh nothing.
    return len(update.added) + len(update.removed) + 128
