"""Which replica holds which KV block in one tier.

One dict maps a block's key to a bitmask of slots; a slot is one life of one replica's set. A snapshot fills a
fresh slot and then takes the old one's place in one step, so no reader ever sees a cleared set; bits of abandoned
slots are swept later, a bounded amount at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stoker.router.core.values import Sync

_INTERN_LIMIT = 65_536


@dataclass(slots=True)
class Slot:
    """One life of a replica's set."""

    bit: int
    epoch: int
    sequence: int
    heard_at: float
    digest: int = 0
    """XOR of the keys."""
    count: int = 0
    in_sync: bool = True


class TierIndex:
    """The sets of all replicas of a pool in one tier, by replica id."""

    def __init__(self) -> None:
        self.blocks: dict[int, int] = {}
        self.slots: dict[str, Slot] = {}
        self.owners: dict[int, str] = {}  # bit → replica, live slots only
        self.live = 0
        self._dead = 0  # bits not yet swept
        self._masks: dict[int, int] = {}  # one object per distinct mask
        self._sweeping: list[int] | None = None
        self._swept_bits = 0

    def snapshot(
        self, replica: str, epoch: int, sequence: int, keys: Iterable[int], digest: int | None, now: float
    ) -> Sync:
        """Take a replica's whole set in place of what was held; RESYNC, and nothing taken, when it is not whole."""
        slot = Slot(self._free_bit(), epoch, sequence, now)
        self._store(slot, keys)
        if digest is not None and slot.digest != digest:
            self._dead |= slot.bit
            return Sync.RESYNC
        self.forget(replica)
        self.slots[replica] = slot
        self.owners[slot.bit] = replica
        self.live |= slot.bit
        self.sweep(4 * slot.count + 1024)
        return Sync.APPLIED

    def delta(
        self, replica: str, epoch: int, sequence: int, stored: Iterable[int], removed: Iterable[int],
        digest: int | None, now: float,
    ) -> Sync:  # fmt: skip
        """Apply one step; RESYNC when a step is missing, the epoch is another, or the digest is wrong."""
        slot = self.slots.get(replica)
        if slot is None or not slot.in_sync or epoch != slot.epoch:
            older = slot is not None and epoch < slot.epoch
            return Sync.STALE if older else Sync.RESYNC
        if sequence <= slot.sequence:
            return Sync.STALE
        if sequence != slot.sequence + 1:
            slot.in_sync = False
            return Sync.RESYNC
        self._remove(slot, removed)
        self._store(slot, stored)
        slot.sequence = sequence
        slot.heard_at = now
        if digest is not None and slot.digest != digest:
            # What is held cannot be told right from wrong: no credit until the snapshot is here.
            slot.in_sync = False
            slot.heard_at = float("-inf")
            return Sync.RESYNC
        return Sync.APPLIED

    def forget(self, replica: str) -> None:
        """Drop a replica's set at once; its memory comes back by `sweep`."""
        slot = self.slots.pop(replica, None)
        if slot:
            del self.owners[slot.bit]
            self.live ^= slot.bit
            self._dead |= slot.bit

    def _store(self, slot: Slot, keys: Iterable[int]) -> None:
        blocks, bit, digest, count = self.blocks, slot.bit, slot.digest, slot.count
        get, intern = blocks.get, self._masks
        if len(intern) > _INTERN_LIMIT:
            intern.clear()
        for key in keys:
            held = get(key, 0)
            if not held & bit:
                digest ^= key
                count += 1
                if held:
                    held |= bit
                    blocks[key] = intern.setdefault(held, held)
                else:
                    blocks[key] = bit
        slot.digest, slot.count = digest, count

    def _remove(self, slot: Slot, keys: Iterable[int]) -> None:
        blocks, bit, digest, count = self.blocks, slot.bit, slot.digest, slot.count
        intern = self._masks
        for key in keys:
            held = blocks.get(key, 0)
            if held & bit:
                digest ^= key
                count -= 1
                held ^= bit
                if held:
                    blocks[key] = intern.setdefault(held, held)
                else:
                    del blocks[key]
        slot.digest, slot.count = digest, count

    def _free_bit(self) -> int:
        used = self.live | self._dead | self._swept_bits
        return ~used & (used + 1)

    def sweep(self, limit: int) -> bool:
        """Clear abandoned slots from at most about `limit` entries; True when none is left to clear."""
        while limit > 0:
            if self._sweeping is None:
                if not self._dead:
                    return True
                self._swept_bits, self._dead = self._dead, 0
                self._sweeping = list(self.blocks)
            limit -= self._sweep_some(self._sweeping, limit)
            if not self._sweeping:
                self._sweeping, self._swept_bits = None, 0
        return not (self._dead or self._swept_bits)

    def _sweep_some(self, pending: list[int], limit: int) -> int:
        keep, blocks = ~self._swept_bits, self.blocks
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
        return len(batch) or 1
