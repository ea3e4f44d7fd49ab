"""Hashing only what is new: the keys of the long pieces that many prompts begin with are remembered."""

from __future__ import annotations

import xxhash

from stoker.common.blocks import packed_block_keys

_PIECE = 128  # blocks; shorter beginnings are hashed in less time than they are worth
_LIMIT = 262_144


class RememberedKeys:
    """Block keys of one pool's prompts. Thread-safe.

    A piece is known by its tokens' 128-bit hash, seeded with the key before it. Two generations of `limit` blocks,
    about 45 bytes each; the older is dropped whole when the younger is full.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._young: dict[tuple[int, int], tuple[int, ...]] = {}
        self._old: dict[tuple[int, int], tuple[int, ...]] = {}

    def of(self, packed: bytes, block_size: int, parent: int) -> list[int]:
        """Return what `packed_block_keys` does."""
        size = 4 * block_size * _PIECE
        tokens = memoryview(packed)
        keys: list[int] = []
        for start in range(0, len(packed) - size + 1, size):
            keys += self._piece(tokens[start : start + size], block_size, parent)
            parent = keys[-1]
        keys += packed_block_keys(tokens[4 * block_size * len(keys) :], block_size, parent)
        return keys

    def _piece(self, tokens: memoryview, block_size: int, parent: int) -> tuple[int, ...]:
        name = (block_size, xxhash.xxh3_128_intdigest(tokens, parent))
        known = self._young.get(name)
        if known is None:
            # Two threads may do the same at once; each step alone leaves the dicts sound.
            known = self._old.get(name) or tuple(packed_block_keys(tokens, block_size, parent))
            if _PIECE * len(self._young) >= self._limit:
                self._young, self._old = {}, self._young
            self._young[name] = known
        return known
