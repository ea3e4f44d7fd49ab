"""KV events off the wire, as neutral values. Pure: bytes in, values out, and nothing raises.

A message is `[topic, sequence, payload]`: sequence an unsigned 64-bit big-endian integer, payload a msgpack
array `[timestamp, events, data-parallel rank]`, each event a map whose `type` names its kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

BlockHash = bytes | int
"""The engine's own name of a block: opaque, equal for equal blocks of one engine process."""

END_OF_REPLAY = (1 << 64) - 1
"""The sequence that ends a replay: −1 as an unsigned 64-bit integer."""

_MAX_BLOCKS_PER_EVENT = 1 << 20


@dataclass(frozen=True)
class Stored:
    """Blocks that became reusable: a run of consecutive full blocks of one sequence.

    Engines announce a block again when a second copy of it appears, and announce the removal of each copy.
    """

    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    """The block before the first of these; `None` where the sequence begins."""
    tokens: tuple[int, ...]
    """Token ids of all the blocks: `len(hashes) * block_size` of them."""
    block_size: int
    lora: str | None
    salt: str | None
    """The `cache_salt`, known only from the event that holds the first block of a sequence."""
    extras: tuple[tuple[object, ...], ...]
    """For each block, what else its content depends on: (multimodal id, offset) pairs, embedding digests."""
    tier: str
    """`GPU`, `CPU` or `STORAGE`."""
    group: int = 0
    """KV cache group: a hybrid model keeps several, each with its own blocks."""
    kind: str | None = None
    """The group's attention kind, as the engine names it (`full_attention`, `sliding_window` …)."""


@dataclass(frozen=True)
class Removed:
    """Blocks that can no longer be reused from this tier; one copy each."""

    hashes: tuple[BlockHash, ...]
    tier: str
    group: int = 0


@dataclass(frozen=True)
class Cleared:
    """The whole cache was reset."""


@dataclass(frozen=True)
class Ignored:
    """An event of a kind this decoder does not know, or one that makes no sense: counted, not applied."""

    kind: str
    reason: str


Event = Stored | Removed | Cleared | Ignored


@dataclass(frozen=True)
class Batch:
    """The events of one engine step."""

    timestamp_s: float
    """The engine's wall clock."""
    events: tuple[Event, ...]
    dp_rank: int


@dataclass(frozen=True)
class Malformed:
    """A message that cannot be read. Its sequence, if readable, still counts as received."""

    reason: str


class _Wire(msgspec.Struct):
    """The union of the fields of all kinds: one tolerant shape instead of one per engine version."""

    type: str
    block_hashes: list[bytes | int] = []
    parent_block_hash: bytes | int | None = None
    token_ids: list[int] = []
    block_size: int = 0
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


_batch_decoder = msgspec.msgpack.Decoder(tuple[float, list[msgspec.Raw], int | None])
_short_batch_decoder = msgspec.msgpack.Decoder(tuple[float, list[msgspec.Raw]])
_wire_decoder = msgspec.msgpack.Decoder(_Wire)


def sequence_of(frame: bytes) -> int | None:
    """The sequence in a message's second frame, or `None` if it is not 8 bytes."""
    return int.from_bytes(frame, "big") if len(frame) == 8 else None


def decode(payload: bytes) -> Batch | Malformed:
    """Read one payload. One bad event costs that event; only an unreadable batch is `Malformed`."""
    try:
        try:
            timestamp, raw, rank = _batch_decoder.decode(payload)
        except msgspec.ValidationError:
            timestamp, raw = _short_batch_decoder.decode(payload)
            rank = 0
    except (msgspec.MsgspecError, ValueError) as error:
        return Malformed(str(error))
    return Batch(timestamp, tuple(_event(event) for event in raw), rank or 0)


def _event(raw: msgspec.Raw) -> Event:
    try:
        wire = _wire_decoder.decode(raw)
    except (msgspec.MsgspecError, ValueError) as error:
        return Ignored("?", str(error))
    match wire.type:
        case "BlockStored":
            return _stored(wire)
        case "BlockRemoved":
            return Removed(tuple(wire.block_hashes), wire.medium or "GPU", wire.group_idx or 0)
        case "AllBlocksCleared":
            return Cleared()
        case other:
            return Ignored(other[:64], "unknown kind of event")


def _stored(wire: _Wire) -> Stored | Ignored:
    count = len(wire.block_hashes)
    if not 0 < count <= _MAX_BLOCKS_PER_EVENT or wire.block_size <= 0:
        return Ignored(wire.type, f"{count} blocks of {wire.block_size} tokens")
    if len(wire.token_ids) != count * wire.block_size:
        return Ignored(wire.type, f"{len(wire.token_ids)} tokens for {count} blocks of {wire.block_size}")
    if min(wire.token_ids) < 0 or max(wire.token_ids) > 0xFFFFFFFF:
        return Ignored(wire.type, "a token id outside 0..2**32-1")
    begins = wire.parent_block_hash is None
    salt, extras = _extra_keys(wire.extra_keys, count, wire.lora_name, begins=begins)
    return Stored(
        hashes=tuple(wire.block_hashes),
        parent=wire.parent_block_hash,
        tokens=tuple(wire.token_ids),
        block_size=wire.block_size,
        lora=wire.lora_name,
        salt=salt,
        extras=extras,
        tier=wire.medium or "GPU",
        group=wire.group_idx or 0,
        kind=wire.kv_cache_spec_kind,
    )


def _extra_keys(
    per_block: Sequence[Sequence[Any] | None] | None, count: int, lora: str | None, *, begins: bool
) -> tuple[str | None, tuple[tuple[object, ...], ...]]:
    """Salt, and the other extras of each block.

    A block's entry holds, untagged and in this order: the LoRA name if there is one, a pair for each
    multimodal item, the salt (first block of a sequence only), digests of prompt embeddings.
    """
    salt: str | None = None
    extras: list[tuple[object, ...]] = []
    for entry in per_block or [None] * count:
        keys = list(entry or ())
        if lora is not None and keys and keys[0] == lora:
            keys.pop(0)
        if begins and not extras:
            at = next((i for i, key in enumerate(keys) if isinstance(key, str)), None)
            if at is not None:
                salt = keys.pop(at)
        extras.append(tuple(tuple(key) if isinstance(key, list) else key for key in keys))
    extras.extend(() for _ in range(count - len(extras)))
    return salt, tuple(extras[:count])
