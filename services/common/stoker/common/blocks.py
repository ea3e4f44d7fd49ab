"""Block keys: the names under which every service knows a KV block.

    key = xxh3_64(little-endian u32 token ids of the block ‖ extras, seed = key of its parent)

The parent of a prompt's first block is a root key made of everything that must keep caches apart: model
identity, LoRA adapter and `cache_salt`. Engines' own block hashes cannot be recomputed from outside (their
seed may be random), so the node agent maps them to these keys.

A key steers routing and never proves content: a collision costs a wrong guess about a cache, not data.
"""

from __future__ import annotations

import math
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import xor

import xxhash

from stoker.common.errors import InvalidRequest

# The version is part of every root: two releases that hash differently can share a fleet and never a key.
_ROOT_DOMAIN = b"stoker.blocks.v1"
_BIG_ENDIAN = sys.byteorder == "big"
_LENGTH = struct.Struct("<I")
SAMPLE = 16
"""Where blocks are followed one by one, only one in so many is: those whose key it divides. All services agree."""
_U32 = "I" if array("I").itemsize == 4 else "L"


def root_key(model: str, *, lora: str = "", cache_salt: str = "") -> int:
    """Return the parent key of first blocks (u64); each distinct triple has its own.

    `model` is the served model's identity (name and revision). An empty `lora` or `cache_salt` means none.
    """
    fields = [text.encode("utf-8", "surrogatepass") for text in (model, lora, cache_salt)]
    # Length-prefixed, so that no two triples spell the same bytes.
    body = b"".join(part for field in fields for part in (_LENGTH.pack(len(field)), field))
    key: int = xxhash.xxh3_64_intdigest(_ROOT_DOMAIN + body)
    return key


def block_keys(
    tokens: Sequence[int],
    block_size: int,
    parent: int,
    extras: Mapping[int, Sequence[bytes]] | None = None,
) -> list[int]:
    """Return the keys (u64) of the full blocks of `tokens`, first to last; a partial last block has none.

    `parent` is a root key, or the key of the block before `tokens[0]` to extend a known prefix. `extras`
    maps a block's position in this call (0 for the first) to what else its KV depends on, in order: the
    content hash of an image that overlaps it, say.

    Raises InvalidRequest when a token id does not fit in 32 bits.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1 token, got {block_size}")
    whole = len(tokens) - len(tokens) % block_size
    packed = pack_tokens(tokens[:whole] if whole != len(tokens) else tokens)
    if not extras:
        return packed_block_keys(packed, block_size, parent)
    digest = xxhash.xxh3_64_intdigest
    key = parent
    keys = []
    for position, (block,) in enumerate(struct.iter_unpack(f"{4 * block_size}s", packed)):
        key = digest(block + _pack_extras(extras.get(position, ())), key)
        keys.append(key)
    return keys


def packed_block_keys(packed: bytes | memoryview, block_size: int, parent: int) -> list[int]:
    """Return the same for token ids as little-endian u32, without extras."""
    digest = xxhash.xxh3_64_intdigest
    key = parent
    size = 4 * block_size
    whole = memoryview(packed)[: len(packed) - len(packed) % size]
    return [key := digest(block, key) for (block,) in struct.iter_unpack(f"{size}s", whole)]


def _pack_extras(extras: Sequence[bytes]) -> bytes:
    return b"".join(_LENGTH.pack(len(extra)) + extra for extra in extras)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Return token ids as little-endian u32. Raises InvalidRequest when one is not in 0 … 2³²−1."""
    try:
        packed = array(_U32, tokens)
    except (OverflowError, TypeError) as error:
        raise InvalidRequest.field("prompt", "token ids must be integers from 0 to 4294967295") from error
    if _BIG_ENDIAN:
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> array[int]:
    """Return the token ids that were packed as little-endian u32."""
    tokens = array(_U32)
    tokens.frombytes(packed)
    if _BIG_ENDIAN:
        tokens.byteswap()
    return tokens


def pack_keys(keys: Iterable[int]) -> bytes:
    """Return keys as little-endian u64, 8 bytes each: the form in which digests travel."""
    packed = array("Q", keys)
    if _BIG_ENDIAN:
        packed.byteswap()
    return packed.tobytes()


def sampled(keys: Iterable[int]) -> list[int]:
    """Return those keys that are followed one by one, in order: one in `SAMPLE` of any, for keys are hashes."""
    return [key for key in keys if not key % SAMPLE]


def at_most(tokens: float, block_size: int) -> int:
    """Return the tokens that prompts may have whose followed blocks stand for `tokens`: three standard errors more,
    which is much for a few prompts and little for many."""
    return math.ceil(tokens + 3 * math.sqrt(tokens * SAMPLE * block_size))


def unpack_keys(packed: bytes) -> array[int]:
    """Return the keys in a packed digest. Raises InvalidRequest when it is not a whole number of keys."""
    if len(packed) % 8:
        raise InvalidRequest.field("keys", f"{len(packed)} bytes are not a whole number of 8-byte keys")
    keys = array("Q")
    keys.frombytes(packed)
    if _BIG_ENDIAN:
        keys.byteswap()
    return keys


def xor_digest(keys: Iterable[int], start: int = 0) -> int:
    """Return the XOR of all keys: equal for equal sets, and updated by the keys that come or go."""
    return reduce(xor, keys, start)
