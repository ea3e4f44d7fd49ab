"""Which replica holds which KV block, for a whole pool.

One dict per tier maps a block's key to a bitmask of slots; a slot is one life of one replica's digest. A
snapshot fills a fresh slot and then takes the old one's place in one step, so no reader ever sees a cleared
set; bits of abandoned slots are swept later, a bounded amount at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stoker.router.core.values import Delta, Snapshot, Sync, Tier

_INTERN_LIMIT = 65_536


@dataclass(slots=True)
class _Slot:
    """One life of a replica's digest."""

    bit: int
    epoch: int
    sequence: int
    heard_at: float
    digests: list[int] = field(default_factory=lambda: [0] * len(Tier))
    in_sync: bool = True


class BlockIndex:
    """The block digests of all replicas of a pool, by replica id.

    Memory: about 120 bytes per distinct key and tier, plus 1 bit per replica that holds it.
    """

    def __init__(self, fresh_s: float = 15.0, stale_s: float = 60.0) -> None:
        self._fresh_s = fresh_s
        self._stale_s = stale_s
        self._tiers: tuple[dict[int, int], ...] = tuple({} for _ in Tier)
        self._slots: dict[str, _Slot] = {}
        self._owners: dict[int, str] = {}  # bit → replica, live slots only
        self._live = 0
        self._dead = 0  # bits not yet swept
        self._masks: dict[int, int] = {}  # one object per distinct mask
        self._sweeping: list[tuple[dict[int, int], list[int]]] = []
        self._swept_bits = 0

    def __len__(self) -> int:
        return sum(len(blocks) for blocks in self._tiers)

    def snapshot(self, replica: str, message: Snapshot, now: float) -> Sync:
        """Take a replica's whole set in place of what was held; RESYNC when its digest is wrong."""
        old = self._slots.get(replica)
        if old and old.in_sync and (message.epoch, message.sequence) < (old.epoch, old.sequence):
            return Sync.STALE
        slot = _Slot(self._free_bit(), message.epoch, message.sequence, now)
        for tier, keys in message.keys.items():
            self._store(slot, tier, keys)
        if _differ(slot, message.digests):
            self._dead |= slot.bit
            return Sync.RESYNC
        self.forget(replica)
        self._slots[replica] = slot
        self._owners[slot.bit] = replica
        self._live |= slot.bit
        self.sweep(4 * sum(len(keys) for keys in message.keys.values()) + 1024)
        return Sync.APPLIED

    def delta(self, replica: str, message: Delta, now: float) -> Sync:
        """Apply one step; RESYNC when a step is missing, the epoch is another, or the digest is wrong."""
        slot = self._slots.get(replica)
        if slot is None or not slot.in_sync or message.epoch != slot.epoch:
            older = slot is not None and message.epoch < slot.epoch
            return Sync.STALE if older else Sync.RESYNC
        if message.sequence <= slot.sequence:
            return Sync.STALE
        if message.sequence != slot.sequence + 1:
            slot.in_sync = False
            return Sync.RESYNC
        for tier, keys in message.removed.items():
            self._remove(slot, tier, keys)
        for tier, keys in message.stored.items():
            self._store(slot, tier, keys)
        slot.sequence = message.sequence
        slot.heard_at = now
        if _differ(slot, message.digests):
            # What is held cannot be told right from wrong: no credit until the snapshot is here.
            slot.in_sync = False
            slot.heard_at = float("-inf")
            return Sync.RESYNC
        return Sync.APPLIED

    def heartbeat(self, replica: str, epoch: int, sequence: int, now: float) -> Sync:
        """Note that the replica stands at this epoch and sequence; RESYNC when that is not what is held."""
        slot = self._slots.get(replica)
        if slot is None or not slot.in_sync or (epoch, sequence) > (slot.epoch, slot.sequence):
            return Sync.RESYNC
        if (epoch, sequence) < (slot.epoch, slot.sequence):
            return Sync.STALE
        slot.heard_at = now
        return Sync.APPLIED

    def forget(self, replica: str) -> None:
        """Drop a replica's digest at once; its memory comes back by `sweep`."""
        slot = self._slots.pop(replica, None)
        if slot:
            del self._owners[slot.bit]
            self._live ^= slot.bit
            self._dead |= slot.bit

    def epoch(self, replica: str) -> int | None:
        """Return the epoch of the digest held of a replica, None if none is."""
        slot = self._slots.get(replica)
        return slot.epoch if slot else None

    def trust(self, replica: str, now: float) -> float:
        """Return the confidence in a replica's digest: 1 while fresh, falling with age to 0, 0 if none."""
        slot = self._slots.get(replica)
        if slot is None:
            return 0.0
        age = now - slot.heard_at
        if age <= self._fresh_s:
            return 1.0
        return max(0.0, 1.0 - (age - self._fresh_s) / (self._stale_s - self._fresh_s))

    def depths(self, keys: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return, for each replica that holds a prefix of `keys`, its depth in blocks per tier.

        Entry t counts the leading blocks held in tier t or a faster one, so entries never fall.
        """
        if not self._tiers[Tier.CPU] and not self._tiers[Tier.STORAGE]:
            return {replica: (depth,) * len(Tier) for replica, depth in self._walk(keys, [self._tiers[Tier.GPU]])}
        depths: dict[str, tuple[int, ...]] = {}
        union: list[dict[int, int]] = []
        for tier, blocks in enumerate(self._tiers):
            if blocks:
                union = [*union, blocks]
                for replica, depth in self._walk(keys, union):
                    before = depths.get(replica, ())
                    depths[replica] = before + (0,) * (tier - len(before)) + (depth,)
            elif tier and depths:
                depths = {replica: (*found, found[-1]) for replica, found in depths.items()}
        return depths

    def _walk(self, keys: Sequence[int], union: list[dict[int, int]]) -> Iterable[tuple[str, int]]:
        alive = self._live
        owners = self._owners
        first, *rest = (blocks.get for blocks in union)
        found: list[tuple[str, int]] = []
        for depth, key in enumerate(keys):
            held = first(key, 0)
            for more in rest:
                held |= more(key, 0)
            held &= alive
            if held != alive:
                if depth:
                    found += [(owners[bit], depth) for bit in _bits(alive ^ held)]
                alive = held
                if not alive:
                    return found
        found += [(owners[bit], len(keys)) for bit in _bits(alive)] if keys else []
        return found

    def _store(self, slot: _Slot, tier: Tier, keys: Iterable[int]) -> None:
        blocks, bit, digest = self._tiers[tier], slot.bit, slot.digests[tier]
        get, intern = blocks.get, self._masks
        if len(intern) > _INTERN_LIMIT:
            intern.clear()
        for key in keys:
            held = get(key, 0)
            if not held & bit:
                digest ^= key
                if held:
                    held |= bit
                    blocks[key] = intern.setdefault(held, held)
                else:
                    blocks[key] = bit
        slot.digests[tier] = digest

    def _remove(self, slot: _Slot, tier: Tier, keys: Iterable[int]) -> None:
        blocks, bit, digest = self._tiers[tier], slot.bit, slot.digests[tier]
        intern = self._masks
        for key in keys:
            held = blocks.get(key, 0)
            if held & bit:
                digest ^= key
                held ^= bit
                if held:
                    blocks[key] = intern.setdefault(held, held)
                else:
                    del blocks[key]
        slot.digests[tier] = digest

    def _free_bit(self) -> int:
        used = self._live | self._dead | self._swept_bits
        return ~used & (used + 1)

    def sweep(self, limit: int) -> bool:
        """Clear abandoned slots from at most about `limit` entries; True when none is left to clear."""
        while limit > 0:
            if not self._sweeping:
                if not self._dead:
                    return True
                self._swept_bits, self._dead = self._dead, 0
                self._sweeping = [(blocks, list(blocks)) for blocks in self._tiers if blocks]
            limit = self._sweep_some(limit)
            if not self._sweeping:
                self._swept_bits = 0
        return not (self._dead or self._swept_bits)

    def _sweep_some(self, limit: int) -> int:
        keep = ~self._swept_bits
        while self._sweeping and limit > 0:
            blocks, pending = self._sweeping[-1]
            batch = pending[-limit:]
            del pending[-limit:]
            for key in batch:
                held = blocks.get(key, 0)
                left = held & keep
                if left != held:
                    if left:
                        blocks[key] = self._masks.setdefault(left, left)
                    else:
                        del blocks[key]
            limit -= len(batch)
            if not pending:
                self._sweeping.pop()
        return limit


def _differ(slot: _Slot, digests: Mapping[Tier, int]) -> bool:
    return any(slot.digests[tier] != want for tier, want in digests.items())


def _bits(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
