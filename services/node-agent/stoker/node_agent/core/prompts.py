"""The token ids behind block keys: with them a prompt that one engine has computed can be computed on another.

Keys cannot be turned back, so the ids are kept while their block is held: for each block its parent's key and its ids
as u32. Not kept are blocks that depend on more than ids and an adapter (images, a `cache_salt`, which is a tenant's
own), and what comes after such.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from stoker.common.blocks import SAMPLE, root_key, unpack_tokens

_KEY_BYTES = 8
_OVERHEAD_BYTES = 96
"""Of one block, in CPython 3.12: the header of `bytes`, and a place in a `dict`."""
_MOST_ADAPTERS = 1_024
_MOST_BLOCKS = 1 << 20
"""Of one prompt."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the adapter they were computed with; empty for none."""

    tokens: Sequence[int]
    adapter: str = ""


PromptOf = Callable[[int], Prompt | None]
"""The prompt that a block, by its key, stands for; None where it is not known."""


class Prompts:
    """The ids of one cache's blocks, in at most about `limit_bytes`; beyond that new blocks are not kept."""

    def __init__(self, model: str, limit_bytes: int) -> None:
        """`model` is the served model's name, as in root keys."""
        self._model = model
        self._limit = limit_bytes
        self._adapters = {root_key(model): ""}
        """By root key."""
        self._blocks: dict[int, bytes] = {}
        """By block key: the parent's key, then the ids."""
        self.bytes = 0
        """Memory taken, about."""

    def begin(self, adapter: str) -> None:
        """A prompt begins that is computed with this adapter."""
        if adapter and len(self._adapters) < _MOST_ADAPTERS:
            self._adapters.setdefault(root_key(self._model, lora=adapter), adapter)

    def add(self, parent: int, keys: Sequence[int], packed: bytes) -> None:
        """Keep the ids of consecutive blocks, `packed` as little-endian u32; ignored where they cannot be used."""
        if not keys or (parent not in self._blocks and parent not in self._adapters):
            return
        size = len(packed) // len(keys)
        each = size + _KEY_BYTES + _OVERHEAD_BYTES
        blocks = self._blocks
        for at, key in enumerate(keys):
            if key not in blocks:
                if self.bytes + each > self._limit:
                    return
                blocks[key] = parent.to_bytes(_KEY_BYTES, "little") + packed[at * size : (at + 1) * size]
                self.bytes += each
            parent = key

    def remove(self, key: int) -> None:
        """A block is held no more."""
        block = self._blocks.pop(key, None)
        if block is not None:
            self.bytes -= len(block) + _OVERHEAD_BYTES

    def prompt(self, leaf: int) -> Prompt | None:
        """The prompt that ends with this block; None where some of it is not known."""
        pieces: list[bytes] = []
        key = leaf
        while key not in self._adapters:
            block = self._blocks.get(key)
            if block is None or len(pieces) >= _MOST_BLOCKS:
                return None
            pieces.append(block[_KEY_BYTES:])
            key = int.from_bytes(block[:_KEY_BYTES], "little")
        return Prompt(unpack_tokens(b"".join(reversed(pieces))), self._adapters[key]) if pieces else None

    def copy(self) -> list[tuple[int, bytes]]:
        """All that is kept, for `sole_followers`."""
        return list(self._blocks.items())

    def __len__(self) -> int:
        return len(self._blocks)


def sole_followers(blocks: Iterable[tuple[int, bytes]]) -> dict[int, int]:
    """By block the one that goes on from it; none where prompts part. Half a second for a million blocks."""
    found: dict[int, int] = {}
    parting = set()
    for key, block in blocks:
        parent = int.from_bytes(block[:_KEY_BYTES], "little")
        if parent in found:
            parting.add(parent)
        found[parent] = key
    for parent in parting:
        del found[parent]
    return found


def end_of(leaf: int, followers: Mapping[int, int]) -> int:
    """The block up to which a sampled one stands for its prompt: the last before the next that is sampled.

    Who names prefixes may know of the sampled blocks alone; of the others each belongs to the one before it.
    """
    if leaf % SAMPLE:
        return leaf
    for _ in range(4 * SAMPLE):
        after = followers.get(leaf, 0)
        if after % SAMPLE == 0:
            break
        leaf = after
    return leaf
