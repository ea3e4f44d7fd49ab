"""Which replica holds which KV block, in which tier, for a whole pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from stoker.router.core.tier import TierIndex
from stoker.router.core.values import Delta, Snapshot, Sync, Tier

_SEATED_LIMIT = 65_536
_NOWHERE = float("inf")
_Lookup = Callable[[int, int], int]


class BlockIndex:
    """The block digests of all replicas of a pool, by replica id.

    Every tier of a replica is a series of its own, with its own sequence: the steps of one say nothing of the
    others. Memory: about 120 bytes per distinct key and tier, plus 1 bit per replica that holds it.
    """

    def __init__(self, fresh_s: float = 15.0, stale_s: float = 60.0) -> None:
        self._fresh_s = fresh_s
        self._stale_s = stale_s
        self._tiers = {tier: TierIndex() for tier in Tier}
        self._gpu = self._tiers[Tier.GPU]
        self._slower = [self._tiers[tier] for tier in Tier if tier is not Tier.GPU]
        # A replica has another bit in each tier. Its seat is one bit that stands for it in all.
        self._seats: dict[str, int] | None = None
        self._sitters: dict[int, str] = {}
        self._seated: dict[Tier, dict[int, int]] = {}

    def __len__(self) -> int:
        return sum(len(index.blocks) for index in self._tiers.values())

    def snapshot(self, replica: str, message: Snapshot, now: float) -> Sync:
        """Take whole tiers in place of what was held of them; RESYNC when a digest is wrong.

        A newer epoch drops the tiers that are not told: they were another life's.
        """
        held = self.epoch(replica)
        if held is not None and message.epoch < held:
            return Sync.STALE
        self._seats = None
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

    def forget(self, replica: str) -> None:
        """Drop a replica's digest at once; its memory comes back by `sweep`."""
        self._seats = None
        for index in self._tiers.values():
            index.forget(replica)

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
        heard_at = _NOWHERE
        for index in self._tiers.values():
            slot = index.slots.get(replica)
            if slot is not None and slot.heard_at < heard_at:
                heard_at = slot.heard_at
        if heard_at == _NOWHERE:
            return 0.0
        age = now - heard_at
        if age <= self._fresh_s:
            return 1.0
        return max(0.0, 1.0 - (age - self._fresh_s) / (self._stale_s - self._fresh_s))

    def depths(self, keys: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return, for each replica that holds a prefix of `keys`, its depth in blocks per tier.

        Entry t counts the leading blocks held in tier t or a faster one, so entries never fall.
        """
        gpu = self._gpu
        if not any(index.blocks for index in self._slower):
            found = _walk(keys, gpu.live, gpu.owners, [gpu.blocks.get])
            alike = {depth: (depth,) * len(Tier) for depth in {depth for _, depth in found}}
            return {replica: alike[depth] for replica, depth in found}
        alive = self._seat()
        depths: dict[str, tuple[int, ...]] = {}
        union: list[_Lookup] = []
        for tier, index in self._tiers.items():
            if index.blocks:
                union = [*union, self._seats_of(tier)]
                for replica, depth in _walk(keys, alive, self._sitters, union):
                    before = depths.get(replica, ())
                    depths[replica] = before + (0,) * (tier - len(before)) + (depth,)
            elif depths:
                depths = {replica: (*before, before[-1]) for replica, before in depths.items()}
        return depths

    def depth(self, replica: str, keys: Sequence[int]) -> int:
        """Return how many leading blocks of `keys` a replica holds, in whatever tier."""
        union = [
            (index.blocks.get, index.slots[replica].bit)
            for index in self._tiers.values()
            if replica in index.slots and index.blocks
        ]
        for depth, key in enumerate(keys):
            if not any(held(key, 0) & bit for held, bit in union):
                return depth
        return len(keys) if union else 0

    def _seat(self) -> int:
        """Give every replica its seat; returns all seats together."""
        if self._seats is None:
            replicas = dict.fromkeys(replica for index in self._tiers.values() for replica in index.slots)
            self._seats = {replica: 1 << number for number, replica in enumerate(replicas)}
            self._sitters = {seat: replica for replica, seat in self._seats.items()}
            self._seated = {tier: {} for tier in Tier}
        return (1 << len(self._seats)) - 1

    def _seats_of(self, tier: Tier) -> _Lookup:
        """The seats of those who hold a key in a tier; the same few masks recur, so they are translated once."""
        index, seated, seats = self._tiers[tier], self._seated[tier], self._seats or {}
        held_by, live, owners = index.blocks.get, index.live, index.owners
        if len(seated) > _SEATED_LIMIT:
            seated.clear()

        def lookup(key: int, default: int) -> int:
            mask = held_by(key, default)
            found = seated.get(mask)
            if found is None:
                found = seated[mask] = sum(seats[owners[bit]] for bit in _bits(mask & live))
            return found

        return lookup


def _walk(
    keys: Sequence[int], alive: int, owners: Mapping[int, str], union: Sequence[_Lookup]
) -> list[tuple[str, int]]:
    """How far each replica of `alive` gets along `keys`, by what the lookups of `union` say together."""
    first, *rest = union
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


def _bits(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
