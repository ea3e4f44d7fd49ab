"""One view out of the streams of several registries. Newest wins; nothing is cleared and then refilled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import cast

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.registry.core.digests import Series
from stoker.registry.core.records import Kind, Name, Record

# True when this source is still the one that hears the replica's agent.
Owns = Callable[[str, str], bool]


@dataclass(frozen=True)
class Change:
    """What leads from one state of the view to the next."""

    upserts: tuple[tuple[Name, Record], ...] = ()
    removals: tuple[Name, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.upserts or self.removals)


@dataclass
class FleetView:
    """All records, as of one etcd revision.

    Every registry tells the same history, so a step is taken from whichever tells it first: each stream is
    unbroken from its snapshot on, hence whoever tells revision r has told, to us, all before it.
    """

    revision: int = 0
    _records: dict[Kind, dict[str, Record]] = field(default_factory=lambda: {kind: {} for kind in Kind})

    def copy(self) -> FleetView:
        """The same records, for who looks at them for a while: records are replaced, never changed."""
        return FleetView(self.revision, {kind: dict(records) for kind, records in self._records.items()})

    @property
    def nodes(self) -> Mapping[str, common_pb2.Node]:
        """Nodes by id."""
        return cast(Mapping[str, common_pb2.Node], self._records[Kind.NODES])

    @property
    def deployments(self) -> Mapping[str, records_pb2.Deployment]:
        """Deployments by name."""
        return cast(Mapping[str, records_pb2.Deployment], self._records[Kind.DEPLOYMENTS])

    @property
    def desired(self) -> Mapping[str, records_pb2.Desired]:
        """Desired counts by deployment."""
        return cast(Mapping[str, records_pb2.Desired], self._records[Kind.DESIRED])

    @property
    def assignments(self) -> Mapping[str, records_pb2.Assignment]:
        """Assignments by replica id."""
        return cast(Mapping[str, records_pb2.Assignment], self._records[Kind.ASSIGNMENTS])

    @property
    def replicas(self) -> Mapping[str, records_pb2.Replica]:
        """Replicas by id."""
        return cast(Mapping[str, records_pb2.Replica], self._records[Kind.REPLICAS])

    @property
    def leaders(self) -> Mapping[str, records_pb2.Leader]:
        """Leaders by role."""
        return cast(Mapping[str, records_pb2.Leader], self._records[Kind.LEADERS])

    @property
    def scaling(self) -> Mapping[str, records_pb2.ScalingHistory]:
        """What scalers keep of the past, by deployment."""
        return cast(Mapping[str, records_pb2.ScalingHistory], self._records[Kind.SCALING])

    @property
    def facilities(self) -> Mapping[str, records_pb2.Facility]:
        """The facility by its name, "current", where one was written."""
        return cast(Mapping[str, records_pb2.Facility], self._records[Kind.FACILITIES])

    def snapshot(self, records: Mapping[Name, Record], revision: int) -> Change:
        """Take a whole snapshot, as the difference to what is held; one that is older changes nothing."""
        if revision < self.revision:
            return Change()
        gone = [(kind, name) for kind, held in self._records.items() for name in held if (kind, name) not in records]
        return self._apply(records.items(), gone, revision)

    def delta(self, upserts: Iterable[tuple[Name, Record]], removals: Iterable[Name], revision: int) -> Change:
        """Take one step; one that is older changes nothing, and a repeated one neither."""
        if revision < self.revision:
            return Change()
        return self._apply(upserts, removals, revision)

    def rewind(self, revision: int) -> None:
        """etcd's history went back to `revision`: what comes from there on is newer than what is held."""
        self.revision = revision

    def _apply(self, upserts: Iterable[tuple[Name, Record]], removals: Iterable[Name], revision: int) -> Change:
        self.revision = revision
        changed = []
        for (kind, name), record in upserts:
            if self._records[kind].get(name) != record:
                self._records[kind][name] = record
                changed.append(((kind, name), record))
        gone = [(kind, name) for kind, name in removals if self._records[kind].pop(name, None) is not None]
        return Change(tuple(changed), tuple(gone))


class Verdict(Enum):
    """What to do with an update."""

    TAKE = auto()
    DROP = auto()
    GAP = auto()
    """A step is missing: ask for a snapshot."""


@dataclass(frozen=True, slots=True)
class _Cursor:
    """Where one series of updates stands, and who told it last."""

    source: str
    epoch: int
    sequence: int
    xor_digest: int = 0
    count: int = 0

    @property
    def place(self) -> tuple[int, int]:
        return self.epoch, self.sequence


class LoadMerge:
    """Which of the loads that several registries tell is the newest."""

    def __init__(self) -> None:
        self._cursors: dict[str, _Cursor] = {}

    def offer(self, source: str, load: registry_pb2.ReplicaLoad, owns: Owns) -> bool:
        """Whether to take this load."""
        cursor = self._cursors.get(load.replica_id)
        place = (load.epoch, load.sequence)
        if cursor is not None and place <= cursor.place and not _restarted(cursor, source, load.replica_id, owns):
            return False
        if cursor is not None and place == cursor.place:
            return False
        self._cursors[load.replica_id] = _Cursor(source, load.epoch, load.sequence)
        return True

    def forget(self, replica_id: str) -> None:
        """The replica is gone."""
        self._cursors.pop(replica_id, None)


class DigestMerge:
    """Whole snapshots and unbroken deltas out of what several registries tell of each series.

    An agent speaks to one registry at a time. What another one still tells of it is older and is dropped.
    """

    def __init__(self) -> None:
        self._cursors: dict[Series, _Cursor] = {}
        self._pieces: dict[tuple[str, Series], list[registry_pb2.DigestUpdate]] = {}

    def offer(
        self, source: str, update: registry_pb2.DigestUpdate, owns: Owns
    ) -> tuple[Verdict, registry_pb2.DigestUpdate]:
        """What to do, and with what: pieces of a snapshot come back as one when the last has come."""
        key = Series.of(update)
        if not update.snapshot:
            return self._delta(source, update, self._cursors.get(key)), update
        whole = self._assemble(source, update)
        if whole is None:
            return Verdict.DROP, update
        cursor = self._cursors.get(key)
        mine = _Cursor(source, whole.epoch, whole.sequence, whole.xor_digest, whole.count)
        if cursor is not None:
            if mine.place < cursor.place and not _restarted(cursor, source, whole.replica_id, owns):
                return Verdict.DROP, whole
            if (mine.place, mine.xor_digest, mine.count) == (cursor.place, cursor.xor_digest, cursor.count):
                self._cursors[key] = mine
                return Verdict.DROP, whole
        self._cursors[key] = mine
        return Verdict.TAKE, whole

    def _delta(self, source: str, update: registry_pb2.DigestUpdate, cursor: _Cursor | None) -> Verdict:
        if cursor is None or update.epoch > cursor.epoch:
            return Verdict.GAP
        if (update.epoch, update.sequence) <= cursor.place:
            return Verdict.DROP
        if update.sequence != cursor.sequence + 1:
            return Verdict.GAP
        key = Series.of(update)
        self._cursors[key] = _Cursor(source, update.epoch, update.sequence, update.xor_digest, update.count)
        return Verdict.TAKE

    def _assemble(self, source: str, piece: registry_pb2.DigestUpdate) -> registry_pb2.DigestUpdate | None:
        key = (source, Series.of(piece))
        held = self._pieces.get(key, [])
        if held and (held[0].epoch, held[0].sequence) != (piece.epoch, piece.sequence):
            held = []
        held = [*held, piece]
        if piece.more:
            self._pieces[key] = held
            return None
        self._pieces.pop(key, None)
        if len(held) == 1:
            return piece
        whole = registry_pb2.DigestUpdate()
        whole.CopyFrom(piece)
        whole.added = b"".join(part.added for part in held)
        return whole

    def disconnected(self, source: str) -> None:
        """Half a snapshot from this source will not be completed."""
        for key in [key for key in self._pieces if key[0] == source]:
            del self._pieces[key]

    def forget(self, replica_id: str) -> None:
        """The replica is gone."""
        for key in [key for key in self._cursors if key.replica_id == replica_id]:
            del self._cursors[key]


def _restarted(cursor: _Cursor, source: str, replica_id: str, owns: Owns) -> bool:
    """Whether a lower place is a fresh count by a restarted agent, rather than old news from another registry."""
    return source == cursor.source or not owns(cursor.source, replica_id)
