"""KV events off the wire: every shape vLLM sends, and every way a message can be wrong."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.node_agent.engine.events import (
    END_OF_REPLAY,
    Batch,
    Cleared,
    Ignored,
    Malformed,
    Removed,
    Stored,
    decode,
    sequence_of,
)

STORED: dict[str, Any] = {
    "type": "BlockStored",
    "block_hashes": [11, 12],
    "parent_block_hash": None,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "extra_keys": [None, None],
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
}


def batch(*events: object, rank: int | None = 0) -> bytes:
    return msgspec.msgpack.encode([12.5, list(events), rank])


def only(payload: bytes) -> object:
    decoded = decode(payload)
    assert isinstance(decoded, Batch)
    (event,) = decoded.events
    return event


def test_reads_stored_blocks() -> None:
    assert decode(batch(STORED, rank=3)) == Batch(
        timestamp_s=12.5,
        events=(
            Stored(
                hashes=(11, 12),
                parent=None,
                tokens=(1, 2, 3, 4),
                block_size=2,
                lora=None,
                salt=None,
                extras=((), ()),
                tier="GPU",
                group=0,
                kind="full_attention",
            ),
        ),
        dp_rank=3,
    )


def test_hashes_may_be_bytes() -> None:
    event = only(batch({**STORED, "block_hashes": [b"a" * 32, b"b" * 32], "parent_block_hash": b"p" * 32}))
    assert isinstance(event, Stored)
    assert event.hashes == (b"a" * 32, b"b" * 32)
    assert event.parent == b"p" * 32


def test_extra_keys_are_told_apart() -> None:
    keys = [["adapter", ["image-1", -5], "tenant", b"digest"], ["adapter", ["image-1", -37]]]
    event = only(batch({**STORED, "lora_name": "adapter", "extra_keys": keys}))
    assert isinstance(event, Stored)
    assert (event.lora, event.salt) == ("adapter", "tenant")
    assert event.extras == ((("image-1", -5), b"digest"), (("image-1", -37),))


def test_a_salt_that_looks_like_the_adapter_is_still_a_salt() -> None:
    event = only(batch({**STORED, "lora_name": "same", "extra_keys": [["same", "same"], ["same"]]}))
    assert isinstance(event, Stored)
    assert (event.lora, event.salt, event.extras) == ("same", "same", ((), ()))


def test_only_the_first_block_of_a_sequence_has_a_salt() -> None:
    event = only(batch({**STORED, "parent_block_hash": 5, "extra_keys": [["text"], None]}))
    assert isinstance(event, Stored)
    assert (event.salt, event.extras) == (None, (("text",), ()))


def test_reads_other_kinds_and_defaults() -> None:
    removed = {"type": "BlockRemoved", "block_hashes": [7], "medium": "CPU", "group_idx": 1}
    decoded = decode(
        batch(removed, {"type": "BlockRemoved", "block_hashes": [8], "medium": None}, {"type": "AllBlocksCleared"})
    )
    assert isinstance(decoded, Batch)
    assert decoded.events == (Removed((7,), "CPU", 1), Removed((8,), "GPU", 0), Cleared())


def test_fields_of_newer_engines_are_tolerated() -> None:
    assert isinstance(only(batch({**STORED, "session_id": "s", "novelty": {"a": [1]}})), Stored)


def test_rank_may_be_left_out() -> None:
    assert decode(msgspec.msgpack.encode([1.0, [{"type": "AllBlocksCleared"}]])) == Batch(1.0, (Cleared(),), 0)
    assert decode(batch({"type": "AllBlocksCleared"}, rank=None)) == Batch(12.5, (Cleared(),), 0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"type": "BlockTeleported"}, "unknown kind"),
        ({"token_ids": [1, 2, 3]}, "3 tokens for 2 blocks of 2"),
        ({"block_size": 0}, "2 blocks of 0 tokens"),
        ({"block_hashes": []}, "0 blocks"),
        ({"token_ids": [1, 2, 3, -4]}, "outside"),
        ({"token_ids": [1, 2, 3, 1 << 32]}, "outside"),
        ({"block_hashes": "text"}, "array"),
    ],
)
def test_one_bad_event_costs_only_itself(change: dict[str, object], reason: str) -> None:
    decoded = decode(batch({**STORED, **change}, STORED))
    assert isinstance(decoded, Batch)
    bad, good = decoded.events
    assert isinstance(bad, Ignored)
    assert reason in bad.reason
    assert isinstance(good, Stored)


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\x93\x01", msgspec.msgpack.encode({"a": 1}), msgspec.msgpack.encode([1])]
)
def test_an_unreadable_batch_is_a_value(payload: bytes) -> None:
    assert isinstance(decode(payload), Malformed)


@given(st.binary(max_size=200))
def test_no_bytes_raise(payload: bytes) -> None:
    assert isinstance(decode(payload), Batch | Malformed)


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


@given(field=st.sampled_from(sorted(STORED)), value=_json)
def test_no_field_value_raises_or_harms_its_neighbours(field: str, value: object) -> None:
    decoded = decode(batch({**STORED, field: value}, {"type": "AllBlocksCleared"}))
    assert isinstance(decoded, Batch)
    assert decoded.events[1] == Cleared()
    event = decoded.events[0]
    if isinstance(event, Stored):
        assert len(event.tokens) == len(event.hashes) * event.block_size
        assert len(event.extras) == len(event.hashes)


def test_sequences_are_big_endian() -> None:
    assert sequence_of((258).to_bytes(8, "big")) == 258
    assert sequence_of((-1).to_bytes(8, "big", signed=True)) == END_OF_REPLAY
    assert sequence_of(b"short") is None
