"""Remembered keys are those that hashing anew gives, whatever was asked before and however little is remembered."""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.common.blocks import pack_tokens, packed_block_keys, root_key
from stoker.router.fleet.remembered_keys import RememberedKeys

PIECE = 128
ROOTS = [root_key("m"), root_key("m", lora="a")]
# Few distinct tokens in long stretches, so that prompts share beginnings, and also stretches behind other beginnings.
stretches = st.lists(st.tuples(st.integers(0, 2), st.sampled_from((5, 4 * PIECE, 8 * PIECE))), max_size=6)
asked = st.tuples(stretches, st.sampled_from((4, 8)), st.sampled_from(ROOTS))


@settings(max_examples=150, deadline=None)
@given(st.lists(asked, max_size=8), st.sampled_from((PIECE, 3 * PIECE, 10_000)))
def test_remembered_keys_are_the_keys(prompts: list[tuple[list[tuple[int, int]], int, int]], limit: int) -> None:
    remembered = RememberedKeys(limit)
    for stretch, block_size, root in prompts:
        packed = pack_tokens([token for token, count in stretch for _ in range(count)])
        assert remembered.of(packed, block_size, root) == packed_block_keys(packed, block_size, root)


def test_memory_is_bounded() -> None:
    remembered = RememberedKeys(limit=4 * PIECE)
    for number in range(50):
        remembered.of(array("I", [number] * 16 * PIECE).tobytes(), 16, 0)
    assert len(remembered._young) + len(remembered._old) <= 8
