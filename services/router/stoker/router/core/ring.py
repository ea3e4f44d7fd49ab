"""Consistent hashing with capacity-weighted virtual nodes, the same in every process."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import numpy as np
import xxhash
from numpy.typing import NDArray

_HOMES_LIMIT = 16_384


class Ring:
    """Replicas at `vnodes × weight` points each on a circle of u64; immutable.

    A replica's points depend on its id alone: adding or removing one moves only keys to or from it.
    """

    def __init__(self, weights: Mapping[str, float], vnodes: int = 128) -> None:
        self._vnodes = vnodes
        self._weights: dict[str, float] = {}
        self._names: dict[int, str] = {}  # by the number that stands for a replica in `_owners`
        self._points: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._owners: NDArray[np.int64] = np.empty(0, np.int64)
        self._rising = array("Q")  # the points again: to look one key up, bisect is four times as fast as numpy
        self._homes: dict[int, str] = {}  # of keys that were asked for
        if weights:
            self._take(Ring({}, vnodes), weights)

    def turned_to(self, weights: Mapping[str, float]) -> Ring:
        """Return the ring of other weights. Costs one pass over the points, and a hash for each new one."""
        ring = Ring({}, self._vnodes)
        ring._take(self, weights)
        return ring

    def _take(self, old: Ring, weights: Mapping[str, float]) -> None:
        """Become the ring of `weights`, with the points of those that `old` has alike."""
        self._weights = dict(weights)
        gone = {number for number, name in old._names.items() if weights.get(name) != old._weights[name]}
        keep = ~np.isin(old._owners, list(gone))
        points, owners = old._points[keep], old._owners[keep]
        self._names = {number: name for number, name in old._names.items() if number not in gone}
        come = sorted(weights.keys() - set(self._names.values()))
        if come:
            unused = (number for number in range(len(weights)) if number not in self._names)
            numbered = dict(zip(unused, come, strict=False))
            self._names |= numbered
            counts = [max(1, round(self._vnodes * weights[name])) for name in come]
            new = np.fromiter(chain.from_iterable(map(_points, come, counts)), np.uint64, sum(counts))
            rising = new.argsort(kind="stable")
            at = points.searchsorted(new[rising])
            points = np.insert(points, at, new[rising])
            owners = np.insert(owners, at, np.repeat(list(numbered), counts)[rising])
        self._points, self._owners = points, owners
        self._rising = array("Q", points.tobytes())

    def order(self, key: int) -> Iterator[str]:
        """Yield each replica once, in the order in which `key`'s clockwise walk first meets it."""
        size, start = len(self._owners), self._start(key)
        seen: set[int] = set()
        for step in range(size):
            owner = self._owners.item((start + step) % size)
            if owner not in seen:
                seen.add(owner)
                yield self._names[owner]
                if len(seen) == len(self._names):
                    return

    def home(self, key: int) -> str | None:
        """Return the first replica of `key`'s order, None on an empty ring."""
        home = self._homes.get(key)
        size = len(self._owners)
        if home is None and size:
            if len(self._homes) >= _HOMES_LIMIT:
                self._homes.clear()
            home = self._homes[key] = self._names[self._owners.item(self._start(key) % size)]
        return home

    def homes(self, keys: Sequence[int]) -> list[str | None]:
        """Return the homes of several keys."""
        known = self._homes.get
        return [known(key) or self.home(key) for key in keys]

    def _start(self, key: int) -> int:
        # Keys of one prefix family may be close: mix, so that neighbours scatter.
        return bisect_left(self._rising, xxhash.xxh3_64_intdigest(key.to_bytes(8, "little")))


def _points(replica: str, count: int) -> Iterator[int]:
    digest = xxhash.xxh3_64_intdigest
    return (digest(f"{replica}\0{number}".encode()) for number in range(count))
