"""What this router sent where a moment ago, before the replicas' digests can show it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Speculation:
    """Block keys that dispatches have probably brought to replicas; each lives `ttl_s` to twice that.

    Two generations of `limit` keys at most: the older is dropped whole when the younger is full or old, so
    expiry costs nothing per key and memory is bounded.
    """

    def __init__(self, ttl_s: float = 10.0, limit: int = 262_144) -> None:
        self._ttl_s = ttl_s
        self._limit = limit
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._turned_at = 0.0
        self._bits: dict[str, int] = {}
        self._owners: dict[int, str] = {}
        self._alive = 0  # all bits of `_owners`
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
        get = young.get
        for key in keys[: self._limit]:
            young[key] = get(key, 0) | bit

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
            del self._owners[bit]
            self._alive ^= bit
            self._gone[bit] = 2

    def expire(self, now: float) -> None:
        """Drop what has outlived its time."""
        if now - self._turned_at >= self._ttl_s:
            stale = now - self._turned_at >= 2 * self._ttl_s
            self._turn(now)
            if stale:
                self._turn(now)

    def extend(self, keys: Sequence[int], depths: dict[str, int]) -> dict[str, int]:
        """Return each replica's depth in blocks when `depths` blocks are known to be there already.

        Speculation continues a known prefix: key i counts for a replica when it is speculated there or
        i < depths[replica].
        """
        if not self._alive or not keys:
            return depths
        # Replicas whose known prefix ends beyond a position pass it without speculation.
        ends: dict[int, int] = {}
        bits = self._bits
        known = 0
        for replica, depth in depths.items():
            bit = bits.get(replica)
            if bit and depth:
                known |= bit
                ends[depth] = ends.get(depth, 0) | bit
        young, old = self._young.get, self._old.get
        alive = self._alive
        reached = dict(depths)
        position = 0
        for position, key in enumerate(keys):
            known &= ~ends.get(position, 0)
            held = (young(key, 0) | old(key, 0) | known) & alive
            if held != alive:
                self._settle(alive ^ held, position, reached)
                alive = held
                if not alive:
                    return reached
        self._settle(alive, len(keys), reached)
        return reached

    def _settle(self, bits: int, depth: int, reached: dict[str, int]) -> None:
        if not depth:
            return
        while bits:
            bit = bits & -bits
            bits ^= bit
            replica = self._owners[bit]
            if depth > reached.get(replica, 0):
                reached[replica] = depth

    def _turn(self, now: float) -> None:
        self._young, self._old = {}, self._young
        self._turned_at = now
        self._gone = {bit: turns - 1 for bit, turns in self._gone.items() if turns > 1}

    def _new_bit(self, replica: str) -> int:
        used = self._alive | sum(self._gone)
        bit = ~used & (used + 1)
        self._bits[replica] = bit
        self._owners[bit] = replica
        self._alive |= bit
        return bit
