"""Which replica holds which KV block, in which tier, for a whole pool."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_

import numpy as np

from stoker.router.core.seats import Bools, Floats, Ints, Seats, bits_of, widened
from stoker.router.core.tier import TierIndex
from stoker.router.core.values import Delta, Snapshot, Sync, Tier
from stoker.router.core.walk import Runs, Source, Translation, ends, walk

_NOWHERE = float("inf")


class BlockIndex:
    """The block digests of all replicas of a pool, by replica id.

    Every tier of a replica is a series of its own, with its own sequence: the steps of one say nothing of the
    others. Memory: about 120 bytes per distinct key and tier, plus 1 bit per replica that holds it.
    """

    def __init__(self, fresh_s: float = 15.0, stale_s: float = 60.0, seats: Seats | None = None) -> None:
        self._fresh_s = fresh_s
        self._fading_s = stale_s - fresh_s
        self._tiers = {tier: TierIndex() for tier in Tier}
        self._seats = seats or Seats()
        # A replica has another bit in each tier, and another in each life: from those bits to the one of its seat.
        self._seated: dict[Tier, Translation] = {}
        self._heard: Floats = np.full(self._seats.width, _NOWHERE)  # by seat; without a digest, nothing to doubt
        self._oldest = _NOWHERE  # not later than any of `_heard`
        self.told = 0
        """How many replicas have a digest."""

    def __len__(self) -> int:
        return sum(len(index.blocks) for index in self._tiers.values())

    def snapshot(self, replica: str, message: Snapshot, now: float) -> Sync:
        """Take whole tiers in place of what was held of them; RESYNC when a digest is wrong.

        A newer epoch drops the tiers that are not told: they were another life's.
        """
        held = self.epoch(replica)
        if held is not None and message.epoch < held:
            return Sync.STALE
        result = self._snapshot(replica, message, now)
        self._seated.clear()
        self._note(replica)
        return result

    def _snapshot(self, replica: str, message: Snapshot, now: float) -> Sync:
        for tier, keys in (message.keys or {Tier.GPU: ()}).items():
            digest = message.digests.get(tier)
            index = self._tiers[tier]
            if index.snapshot(replica, message.epoch, message.sequence, keys, digest, now) is Sync.RESYNC:
                return Sync.RESYNC
        for index in self._tiers.values():
            slot = index.slots.get(replica)
            if slot is not None and slot.epoch < message.epoch:
                index.forget(replica)
        return Sync.APPLIED

    def delta(self, replica: str, message: Delta, now: float) -> Sync:
        """Apply one step of each tier told; RESYNC when a step is missing or the digest is wrong."""
        held = self.epoch(replica)
        if held is not None and message.epoch < held:
            return Sync.STALE
        results = {
            self._tiers[tier].delta(
                replica,
                message.epoch,
                message.sequence,
                message.stored.get(tier, ()),
                message.removed.get(tier, ()),
                message.digests.get(tier),
                now,
            )
            for tier in dict.fromkeys((*message.stored, *message.removed)) or (Tier.GPU,)
        }
        self._note(replica)
        for result in (Sync.RESYNC, Sync.STALE):
            if result in results:
                return result
        return Sync.APPLIED

    def vouch(self, replica: str, now: float) -> None:
        """Whoever tells a replica's changes is heard: what is held of it is complete, where no step is missing."""
        for index in self._tiers.values():
            slot = index.slots.get(replica)
            if slot is not None and slot.in_sync:
                slot.heard_at = now
        self._note(replica)

    def forget(self, replica: str) -> None:
        """Drop a replica's digest at once; its memory comes back by `sweep`."""
        for index in self._tiers.values():
            index.forget(replica)
        self._seated.clear()
        self._note(replica)

    def sweep(self, limit: int) -> bool:
        """Clear what is abandoned from at most about `limit` entries a tier; True when none is left to clear."""
        swept = [index.sweep(limit) for index in self._tiers.values()]
        return all(swept)

    def epoch(self, replica: str) -> int | None:
        """Return the epoch of the digest held of a replica, None if none is."""
        slots = (index.slots.get(replica) for index in self._tiers.values())
        return max((slot.epoch for slot in slots if slot is not None), default=None)

    def count(self, replica: str) -> int:
        """Return how many blocks a replica holds, copies in several tiers counted apart."""
        slots = (index.slots.get(replica) for index in self._tiers.values())
        return sum(slot.count for slot in slots if slot is not None)

    def trust(self, replica: str, now: float) -> float:
        """Return the confidence in a replica's digest: 1 while fresh, falling with age to 0, 0 if none.

        It is as good as its worst tier.
        """
        heard_at = self._heard_at(replica)
        if heard_at == _NOWHERE:
            return 0.0
        age = now - heard_at
        if age <= self._fresh_s:
            return 1.0
        return max(0.0, 1.0 - (age - self._fresh_s) / self._fading_s)

    def trusts(self, now: float) -> Floats | None:
        """Return the confidence in all digests, by seat and 1 where there is none; None while it is 1 in all."""
        if now - self._oldest <= self._fresh_s:
            return None
        self._oldest = float(self._heard.min())
        if now - self._oldest <= self._fresh_s:
            return None
        self._heard = widened(self._heard, self._seats.width, _NOWHERE)
        faded = (now - self._heard - self._fresh_s) / self._fading_s
        trusts: Floats = np.maximum(0.0, np.minimum(1.0, 1.0 - faded))
        return trusts

    def known(self, seats: Ints) -> Bools:
        """Return which of some seats have a digest."""
        self._heard = widened(self._heard, self._seats.width, _NOWHERE)
        return self._heard[seats] < _NOWHERE

    def known_rows(self, seats: Ints) -> list[bool]:
        """Return the same, one by one."""
        return [False] * len(seats) if not self.told else self.known(seats).tolist()

    def _heard_at(self, replica: str) -> float:
        slots = (index.slots.get(replica) for index in self._tiers.values())
        return min((slot.heard_at for slot in slots if slot is not None), default=_NOWHERE)

    def _note(self, replica: str) -> None:
        """Bring what decisions read of a replica's age up to date."""
        seat, heard_at = self._seats.number(replica), self._heard_at(replica)
        self._heard = widened(self._heard, self._seats.width, _NOWHERE)
        self.told += int(heard_at < _NOWHERE) - int(self._heard[seat] < _NOWHERE)
        self._heard[seat] = heard_at
        self._oldest = min(self._oldest, heard_at)

    def depths(self, keys: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return, for each replica that holds a prefix of `keys`, its depth in blocks per tier.

        Entry t counts the leading blocks held in tier t or a faster one, so entries never fall.
        """
        found = self.runs(keys)
        reached: list[dict[int, int]] = []
        for tier in Tier:
            before = reached[-1] if reached else {}
            here = {bit: depth for depth, mask in ends(found.get(tier, [])) for bit in bits_of(mask)}
            reached.append(here if tier in found else before)
        names = self._seats.names
        return {names[bit.bit_length() - 1]: tuple(depths.get(bit, 0) for depths in reached) for bit in reached[-1]}

    def runs(self, keys: Sequence[int]) -> dict[Tier, Runs]:
        """Return how far each seat gets along `keys` in each tier that holds anything, faster tiers included."""
        used = [(tier, index) for tier, index in self._tiers.items() if index.blocks]
        if not used:
            return {}
        # The first walk is in the tier's own bits, which spares the translation of its masks.
        (tier, index), *slower = used
        known = self._seats_in(tier).runs(walk(keys, index.live, [Source(index.blocks.get)]))
        found = {tier: known}
        for number, (tier, _) in enumerate(slower, 2):
            sources = [Source(each.blocks.get, self._seats_in(name)) for name, each in used[:number]]
            alive = reduce(or_, (self._seats_in(name)[each.live] for name, each in used[:number]))
            known = found[tier] = walk(keys, alive, sources, known)
        return found

    def _seats_in(self, tier: Tier) -> Translation:
        """From the bits of a tier to those of seats."""
        seated = self._seated.get(tier)
        if seated is None:
            number = self._seats.number
            bits = {bit: 1 << number(replica) for bit, replica in self._tiers[tier].owners.items()}
            seated = self._seated[tier] = Translation(bits)
        return seated
