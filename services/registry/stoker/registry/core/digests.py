"""Which KV blocks each replica holds, as its agent tells it: proven complete, or asked for anew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice
from random import Random
from typing import NamedTuple

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import registry_pb2
from stoker.common.backoff import Backoff
from stoker.common.blocks import pack_keys, unpack_keys, xor_digest


class Series(NamedTuple):
    """What one sequence counts: the blocks that one data-parallel rank of a replica holds in one tier."""

    replica_id: str
    dp_rank: int
    tier: int

    @classmethod
    def of(cls, update: registry_pb2.DigestUpdate) -> Series:
        """The series that an update belongs to."""
        return cls(update.replica_id, update.dp_rank, update.tier)


class Outcome(Enum):
    """What became of an update."""

    APPLIED = auto()
    """The set is now what the update says: pass it on."""
    PARTIAL = auto()
    """A piece of a snapshot; the set is unchanged until the last piece."""
    STALE = auto()
    """Older than what is held."""
    RESYNC = auto()
    """Not to be trusted: ask the agent for a snapshot. What is held stays until it has come."""


@dataclass(slots=True)
class _Held:
    epoch: int
    sequence: int
    keys: set[int]
    xor: int
    trusted: bool = True


@dataclass(slots=True)
class _Partial:
    epoch: int
    sequence: int
    keys: set[int] = field(default_factory=set)


@dataclass
class DigestStore:
    """The digests of all replicas whose agents speak to this registry.

    `max_keys` bounds each set. Memory: about 75 bytes a key. Snapshots replace, they never clear and refill.
    """

    max_keys: int = 4_000_000
    _held: dict[Series, _Held] = field(default_factory=dict)
    _partial: dict[Series, _Partial] = field(default_factory=dict)
    _doubtful: set[Series] = field(default_factory=set)

    def apply(self, update: registry_pb2.DigestUpdate) -> Outcome:
        """Take an update. Raises InvalidRequest when its keys are malformed."""
        outcome = self._snapshot(update) if update.snapshot else self._delta(update)
        if outcome is Outcome.RESYNC:
            self._doubtful.add(Series.of(update))
        elif outcome is Outcome.APPLIED:
            self._doubtful.discard(Series.of(update))
        return outcome

    def doubtful(self) -> set[str]:
        """Replicas of whose digests one is not what its agent tells: a snapshot is still owed."""
        return {series.replica_id for series in self._doubtful}

    def _delta(self, update: registry_pb2.DigestUpdate) -> Outcome:
        held = self._held.get(Series.of(update))
        if held is None or update.epoch > held.epoch:
            return Outcome.RESYNC
        if (update.epoch, update.sequence) <= (held.epoch, held.sequence):
            return Outcome.STALE
        if not held.trusted or update.sequence != held.sequence + 1:
            held.trusted = False
            return Outcome.RESYNC
        removed = held.keys.intersection(unpack_keys(update.removed))
        held.keys -= removed
        added = set(unpack_keys(update.added)) - held.keys
        held.keys |= added
        held.xor = xor_digest(added, xor_digest(removed, held.xor))
        held.sequence = update.sequence
        held.trusted = (held.xor, len(held.keys)) == (update.xor_digest, update.count)
        if len(held.keys) > self.max_keys:
            del self._held[Series.of(update)]
            return Outcome.RESYNC
        return Outcome.APPLIED if held.trusted else Outcome.RESYNC

    def _snapshot(self, update: registry_pb2.DigestUpdate) -> Outcome:
        series = Series.of(update)
        held = self._held.get(series)
        if held is not None and update.epoch < held.epoch:
            return Outcome.STALE
        partial = self._partial.pop(series, None)
        if partial is None or (partial.epoch, partial.sequence) != (update.epoch, update.sequence):
            partial = _Partial(update.epoch, update.sequence)
        partial.keys.update(unpack_keys(update.added))
        if len(partial.keys) > self.max_keys:
            return Outcome.RESYNC
        if update.more:
            self._partial[series] = partial
            return Outcome.PARTIAL
        xor = xor_digest(partial.keys)
        if (xor, len(partial.keys)) != (update.xor_digest, update.count):
            return Outcome.RESYNC
        self._held[series] = _Held(update.epoch, update.sequence, partial.keys, xor)
        return Outcome.APPLIED

    def series(self) -> list[Series]:
        """All series that are held and trusted."""
        return [series for series, held in self._held.items() if held.trusted]

    def snapshot(self, series: Series, piece_keys: int) -> Iterator[registry_pb2.DigestUpdate]:
        """A series as snapshot pieces of at most `piece_keys` keys; at least one, none if it is not trusted."""
        held = self._held.get(series)
        if held is None or not held.trusted:
            return
        keys, left = iter(tuple(held.keys)), len(held.keys)
        epoch, sequence, xor, count = held.epoch, held.sequence, held.xor, left
        while True:
            packed = pack_keys(islice(keys, piece_keys))
            left -= len(packed) // 8
            yield registry_pb2.DigestUpdate(
                replica_id=series.replica_id,
                dp_rank=series.dp_rank,
                epoch=epoch,
                sequence=sequence,
                tier=common_pb2.Tier.ValueType(series.tier),
                snapshot=True,
                more=left > 0,
                added=packed,
                xor_digest=xor,
                count=count,
            )
            if left == 0:
                return

    def forget(self, replica_id: str) -> None:
        """Drop all that is held of a replica."""
        for table in (self._held, self._partial):
            for series in [series for series in table if series.replica_id == replica_id]:
                del table[series]
        self._doubtful = {series for series in self._doubtful if series.replica_id != replica_id}

    def keys_held(self) -> int:
        """Keys in all sets together."""
        return sum(len(held.keys) for held in self._held.values())


class Resyncs:
    """When to ask an agent for snapshots: once for a series, and ever more slowly if what comes is no good either.

    Told by series, although an agent answers with all of the replica: one that is good heals no other.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._backoff = Backoff(first_s=1.0, max_s=60.0)
        self._asked: dict[Series, int] = {}

    def wrong(self, series: Series, *, again: bool) -> float | None:
        """Seconds until to ask; None where that was done. `again`: what was wrong is the answer itself."""
        asked = self._asked.get(series, 0)
        if asked and not again:
            return None
        self._asked[series] = asked + 1
        return self._backoff.delay_s(asked - 1, self._rng) if asked else 0.0

    def right(self, series: Series) -> None:
        """A good snapshot has come."""
        self._asked.pop(series, None)

    def forget(self, replica_id: str) -> None:
        """The replica is gone."""
        for series in [series for series in self._asked if series.replica_id == replica_id]:
            del self._asked[series]
