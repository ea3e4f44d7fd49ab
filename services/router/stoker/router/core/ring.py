"""Consistent hashing with capacity-weighted virtual nodes, the same in every process."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping

import xxhash


class Ring:
    """Replicas at `vnodes × weight` points each on a circle of u64; treat it as immutable.

    A replica's points depend on its id alone: adding or removing one moves only keys to or from it.
    """

    def __init__(self, weights: Mapping[str, float], vnodes: int = 128) -> None:
        points = [
            (xxhash.xxh3_64_intdigest(f"{replica}\0{number}".encode()), replica)
            for replica, weight in weights.items()
            for number in range(max(1, round(vnodes * weight)))
        ]
        points.sort()
        self._points = [point for point, _ in points]
        self._owners = [owner for _, owner in points]
        self._size = len(weights)

    def order(self, key: int) -> Iterator[str]:
        """Yield each replica once, in the order in which `key`'s clockwise walk first meets it."""
        owners = self._owners
        if not owners:
            return
        start = self._start(key)
        seen: set[str] = set()
        for step in range(len(owners)):
            owner = owners[(start + step) % len(owners)]
            if owner not in seen:
                seen.add(owner)
                yield owner
                if len(seen) == self._size:
                    return

    def home(self, key: int) -> str | None:
        """Return the first replica of `key`'s order, None on an empty ring."""
        owners = self._owners
        return owners[self._start(key) % len(owners)] if owners else None

    def _start(self, key: int) -> int:
        # Keys of one prefix family may be close: mix, so that neighbours scatter.
        return bisect_left(self._points, xxhash.xxh3_64_intdigest(key.to_bytes(8, "little")))
