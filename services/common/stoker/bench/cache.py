"""A modelled replica's KV cache: which blocks are in it, and which go when others come."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence


class Cache:
    """A replica's KV blocks: least recently used out first, a prompt's tail before its head, pins stay.

    `own` blocks are those that nobody else can use, of a request that runs: they have no key and go with it.
    """

    def __init__(self, blocks: int) -> None:
        self._limit = blocks
        self._own = 0
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._pins: dict[int, int] = {}

    def keys(self) -> list[int]:
        """What is here, those first that are evicted first."""
        return list(self._blocks)

    def grow(self, blocks: int) -> None:
        """Have room for so many more."""
        self._limit += blocks

    @property
    def pinned(self) -> int:
        """Blocks in use by running requests."""
        return len(self._pins) + self._own

    def hit(self, keys: Sequence[int]) -> int:
        """How many leading blocks are here."""
        depth = 0
        for key in keys:
            if key not in self._blocks:
                break
            depth += 1
        return depth

    def fits(self, keys: Sequence[int], own: int = 0) -> bool:
        """Whether the prompt fits beside what is pinned."""
        return sum(key not in self._pins for key in keys) + own + self.pinned <= self._limit

    def take(self, keys: Sequence[int], own: int = 0) -> tuple[list[int], list[int]]:
        """Pin a prompt's blocks, evicting what must go; return the keys that came and those that went."""
        for key in keys:
            self._pins[key] = self._pins.get(key, 0) + 1
        self._own += own
        came = [key for key in keys if key not in self._blocks]
        for key in reversed(keys):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        went = []
        excess = len(self._blocks) + self._own - self._limit
        if excess > 0:
            loose = (key for key in self._blocks if key not in self._pins)
            went = list(itertools.islice(loose, excess))
            for key in went:
                del self._blocks[key]
        return came, went

    def free(self, keys: Sequence[int], own: int = 0) -> None:
        """Unpin a prompt's blocks and make them the most recently used."""
        self._own -= own
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)
            left = self._pins[key] - 1
            if left:
                self._pins[key] = left
            else:
                del self._pins[key]
