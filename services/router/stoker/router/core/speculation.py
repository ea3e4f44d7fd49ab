"""What this router sent where a moment ago, before the replicas' digests can show it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, islice

from stoker.router.core.seats import Seats, bits_of
from stoker.router.core.walk import Runs, Source, Translation, ends, passed, runs_of, walk

_LONGEST_S = 600.0


class Speculation:
    """Block keys that dispatches have probably brought to replicas; each lives `ttl_s` to twice that.

    Two generations of `limit` keys at most: the older is dropped whole when the younger is full or old, so
    expiry costs nothing per key and memory is bounded.

    Where no digest will tell what became of a dispatch, time says little: a block stays until others need its place.
    A generation then lives on until it has `room` keys, or for ten minutes.
    """

    def __init__(self, ttl_s: float = 10.0, limit: int = 262_144, seats: Seats | None = None) -> None:
        self._ttl_s = ttl_s
        self._limit = limit
        self.room = 0
        """Keys that a generation takes, old or not, before the next; 0 where digests tell."""
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._turned_at = 0.0
        self._seats = seats or Seats()
        # A bit outlives the replica's seat, as long as keys may hold it.
        self._bits: dict[str, int] = {}
        self._alive = 0
        self._seat_bits: dict[int, int] = {}  # by own bit
        self._own_bits: dict[int, int] = {}  # by the bit of the seat
        self._to_seats = Translation(self._seat_bits)
        self._from_seats = Translation(self._own_bits)
        self._gone: dict[int, int] = {}  # bit of a forgotten replica → turns until no key can hold it

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def add(self, replica: str, keys: Sequence[int], now: float) -> None:
        """Note that a request with these keys went to a replica."""
        self.expire(now)
        if len(self._young) + len(keys) > self._limit:
            self._turn(now)
        bit = self._bits.get(replica) or self._new_bit(replica)
        young = self._young
        if len(keys) > self._limit:
            keys = keys[: self._limit]
        # What a walk would take to be there is there already.
        start = passed(keys, 0, len(keys), bit, young.get)
        # Run by run, and one object for equal masks: a walk compares them.
        for held, run in groupby(map(young.get, islice(keys, start, None))):
            end = start + len(list(run))
            if not held or not held & bit:
                young.update(dict.fromkeys(keys[start:end], (held or 0) | bit))
            start = end

    def discard(self, replica: str, keys: Iterable[int]) -> None:
        """Withdraw keys that the replica has reported as evicted."""
        bit = self._bits.get(replica)
        if not bit or not (self._young or self._old):
            return
        for key in keys:
            for blocks in (self._young, self._old):
                held = blocks.get(key, 0)
                if held & bit:
                    blocks[key] = held ^ bit

    def forget(self, replica: str) -> None:
        """Drop all that is believed of a replica: it is gone or has restarted."""
        bit = self._bits.pop(replica, None)
        if bit:
            self._alive ^= bit
            del self._own_bits[self._seat_bits.pop(bit)]
            self._to_seats.clear()
            self._from_seats.clear()
            self._gone[bit] = 2

    def expire(self, now: float) -> None:
        """Drop what has outlived its time."""
        ttl_s = _LONGEST_S if len(self._young) < self.room else self._ttl_s
        if now - self._turned_at >= ttl_s:
            stale = now - self._turned_at >= 2 * ttl_s
            self._turn(now)
            if stale:
                self._turn(now)

    def extend(self, keys: Sequence[int], depths: Mapping[str, int]) -> dict[str, int]:
        """Return each replica's depth in blocks when `depths` blocks are known to be there already.

        Speculation continues a known prefix: key i counts for a replica when it is speculated there or
        i < depths[replica].
        """
        known = runs_of((depth, 1 << self._seats.number(replica)) for replica, depth in depths.items() if depth)
        reached = dict(depths)
        for depth, mask in ends(self.runs(keys, known)):
            for bit in bits_of(mask):
                reached[self._seats.names[bit.bit_length() - 1]] = depth
        return reached

    def runs(self, keys: Sequence[int], known: Runs) -> Runs:
        """Return how far seats get along `keys`, continuing `known`, if speculation takes any further than that."""
        if not self._alive or not keys:
            return []
        sources = [Source(self._young.get), *([Source(self._old.get)] if self._old else [])]
        here = self._from_seats.runs(known)
        found = walk(keys, self._alive, sources, here)
        return [] if found == here else self._to_seats.runs(found)

    def _turn(self, now: float) -> None:
        self._young, self._old = {}, self._young
        self._turned_at = now
        self._gone = {bit: turns - 1 for bit, turns in self._gone.items() if turns > 1}

    def _new_bit(self, replica: str) -> int:
        used = self._alive | sum(self._gone)
        bit = ~used & (used + 1)
        self._bits[replica] = bit
        self._alive |= bit
        seat_bit = 1 << self._seats.number(replica)
        self._seat_bits[bit] = seat_bit
        self._own_bits[seat_bit] = bit
        self._to_seats.clear()
        self._from_seats.clear()
        return bit
