"""A paged KV cache with prefix reuse: the bookkeeping of vLLM's block pool, without the memory.

Blocks hold `block_size` tokens. A full block gets a hash chained over everything before it and may then be
shared. A freed block keeps its hash and waits in the free queue: least recently freed first, a request's
last blocks before its first, blocks without a hash before all others. Two requests that compute the same
block at once leave two copies, each announced when stored and when evicted.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import xxhash


@dataclass(frozen=True)
class BlocksStored:
    """Consecutive full blocks of one sequence that became reusable."""

    hashes: tuple[int, ...]
    parent: int | None
    tokens: tuple[int, ...]
    salt: str | None
    """Only when the first of these blocks begins the sequence."""


@dataclass(frozen=True)
class BlocksRemoved:
    """Copies of blocks that were evicted."""

    hashes: tuple[int, ...]


@dataclass(frozen=True)
class AllCleared:
    """The cache was reset."""


CacheEvent = BlocksStored | BlocksRemoved | AllCleared


@dataclass
class _Block:
    id: int
    references: int = 0
    hash: int | None = None


@dataclass
class TokenSequence:
    """One request's tokens and the blocks that hold them."""

    tokens: list[int]
    salt: str | None = None
    blocks: list[_Block] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    """Of every full block so far, whether or not it is in the cache."""
    cached_blocks: int = 0
    """How many of `blocks` carry their hash."""


class BlockPool:
    """`capacity` blocks. One is set aside as a placeholder, as in vLLM, so `capacity - 1` can be used."""

    def __init__(self, capacity: int, block_size: int, *, seed: int = 0, caching: bool = True) -> None:
        if capacity < 2 or block_size < 1:
            raise ValueError(f"a pool of {capacity} blocks of {block_size} tokens holds nothing")
        self.block_size = block_size
        self.capacity = capacity
        self.caching = caching
        self._seed = seed
        self._free: OrderedDict[int, _Block] = OrderedDict((i, _Block(i)) for i in range(1, capacity))
        self._cached: dict[int, dict[int, _Block]] = {}
        self._events: list[CacheEvent] = []

    @property
    def free_blocks(self) -> int:
        """Blocks that no request holds, reusable ones included."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return 1 - len(self._free) / (self.capacity - 1)

    def take_events(self) -> list[CacheEvent]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def lookup(self, sequence: TokenSequence) -> list[_Block]:
        """The longest run of cached blocks that the sequence begins with.

        At least one token is always left to compute, for its logits: a prompt of whole blocks recomputes
        its last block.
        """
        if not self.caching:
            return []
        self._extend_hashes(sequence)
        found: list[_Block] = []
        for digest in sequence.hashes[: (len(sequence.tokens) - 1) // self.block_size]:
            copies = self._cached.get(digest)
            if copies is None:
                break
            found.append(next(iter(copies.values())))
        return found

    def blocks_to_take(self, sequence: TokenSequence, hits: Sequence[_Block], tokens: int) -> int:
        """Free blocks that holding the first `tokens` tokens would take from the queue."""
        needed = -(-tokens // self.block_size) - len(sequence.blocks) - len(hits)
        return max(0, needed) + sum(block.references == 0 for block in hits)

    def allocate(self, sequence: TokenSequence, hits: Sequence[_Block], tokens: int) -> bool:
        """Hold the first `tokens` tokens, `hits` included; mark what becomes full. False if they do not fit."""
        if self.blocks_to_take(sequence, hits, tokens) > len(self._free):
            return False
        for block in hits:
            if block.references == 0:
                del self._free[block.id]
            block.references += 1
        sequence.blocks.extend(hits)
        sequence.cached_blocks += len(hits)
        for _ in range(-(-tokens // self.block_size) - len(sequence.blocks)):
            sequence.blocks.append(self._take())
        self._store_full(sequence, tokens)
        return True

    def free(self, sequence: TokenSequence) -> None:
        """Give up all blocks of a sequence; those with a hash stay findable until they are taken."""
        bare: list[_Block] = []
        for block in reversed(sequence.blocks):
            block.references -= 1
            if block.references == 0:
                if block.hash is None:
                    bare.append(block)
                else:
                    self._free[block.id] = block
        for block in reversed(bare):
            self._free[block.id] = block
            self._free.move_to_end(block.id, last=False)
        sequence.blocks, sequence.cached_blocks = [], 0

    def reset(self) -> bool:
        """Forget all cached blocks. False, and nothing done, while any request holds blocks."""
        if len(self._free) != self.capacity - 1:
            return False
        self._cached.clear()
        for block in self._free.values():
            block.hash = None
        self._events.append(AllCleared())
        return True

    def _take(self) -> _Block:
        _, block = self._free.popitem(last=False)
        if block.hash is not None:
            copies = self._cached[block.hash]
            del copies[block.id]
            if not copies:
                del self._cached[block.hash]
            self._events.append(BlocksRemoved((block.hash,)))
            block.hash = None
        block.references = 1
        return block

    def _store_full(self, sequence: TokenSequence, tokens: int) -> None:
        full = min(tokens, len(sequence.tokens)) // self.block_size
        first = sequence.cached_blocks
        if not self.caching or full <= first:
            return
        self._extend_hashes(sequence)
        for block, digest in zip(sequence.blocks[first:full], sequence.hashes[first:full], strict=True):
            block.hash = digest
            self._cached.setdefault(digest, {})[block.id] = block
        sequence.cached_blocks = full
        self._events.append(
            BlocksStored(
                hashes=tuple(sequence.hashes[first:full]),
                parent=sequence.hashes[first - 1] if first else None,
                tokens=tuple(sequence.tokens[first * self.block_size : full * self.block_size]),
                salt=sequence.salt if first == 0 else None,
            )
        )

    def _extend_hashes(self, sequence: TokenSequence) -> None:
        size, hashes = self.block_size, sequence.hashes
        for at in range(len(hashes), len(sequence.tokens) // size):
            parent = hashes[-1] if hashes else xxhash.xxh3_64_intdigest((sequence.salt or "").encode(), self._seed)
            ids = sequence.tokens[at * size : (at + 1) * size]
            hashes.append(xxhash.xxh3_64_intdigest(array("I", ids).tobytes(), parent))
