"""Block keys: what must keep prefixes together, and what must keep caches apart."""

from __future__ import annotations

import struct

import pytest
import xxhash

from stoker.common.blocks import block_keys, pack_keys, root_key, sampled, unpack_keys, xor_digest
from stoker.common.errors import InvalidRequest


def test_a_key_is_the_hash_of_little_endian_tokens_seeded_with_its_parent() -> None:
    root = root_key("m")
    first = xxhash.xxh3_64_intdigest(struct.pack("<4I", 1, 2, 3, 2**32 - 1), root)
    second = xxhash.xxh3_64_intdigest(struct.pack("<4I", 5, 6, 7, 8), first)
    assert block_keys([1, 2, 3, 2**32 - 1, 5, 6, 7, 8, 9], 4, root) == [first, second]


def test_known_values_stay_the_same_across_releases() -> None:
    # Two releases share a fleet during an upgrade: a change here needs a new root domain.
    assert root_key("m", lora="l", cache_salt="s") == KNOWN_ROOT
    assert block_keys(list(range(32)), 16, KNOWN_ROOT) == KNOWN_KEYS


def test_a_partial_block_has_no_key() -> None:
    assert block_keys([1, 2, 3], 4, 0) == []
    assert block_keys([], 4, 0) == []


def test_extending_a_prefix_equals_hashing_it_whole() -> None:
    tokens, root = list(range(160)), root_key("m")
    whole = block_keys(tokens, 16, root)
    head = block_keys(tokens[:64], 16, root)
    assert head + block_keys(tokens[64:], 16, head[-1]) == whole


def test_equal_blocks_after_different_parents_differ() -> None:
    keys = block_keys([7] * 48, 16, root_key("m"))
    assert len(set(keys)) == 3


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (("m", "", ""), ("n", "", "")),
        (("m", "a", ""), ("m", "", "a")),
        (("ma", "b", ""), ("m", "ab", "")),
        (("m", "a", "b"), ("m", "ab", "")),
        (("m", "\0", ""), ("m", "", "\0")),
    ],
)
def test_roots_keep_models_adapters_and_salts_apart(left: tuple[str, str, str], right: tuple[str, str, str]) -> None:
    roots = [root_key(model, lora=lora, cache_salt=salt) for model, lora, salt in (left, right)]
    assert roots[0] != roots[1]


def test_extras_change_their_block_and_all_after_it_only() -> None:
    tokens = list(range(64))
    plain = block_keys(tokens, 16, 1)
    image = block_keys(tokens, 16, 1, {1: (b"image",)})
    assert image[0] == plain[0]
    assert all(a != b for a, b in zip(image[1:], plain[1:], strict=True))
    # The boundary between two extras is part of what they say.
    assert block_keys(tokens, 16, 1, {1: (b"ab", b"c")}) != block_keys(tokens, 16, 1, {1: (b"a", b"bc")})


@pytest.mark.parametrize("bad", [[-1] * 16, [2**32] * 16, ["x"] * 16, [1.5] * 16])
def test_a_token_that_does_not_fit_names_the_field(bad: list[int]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        block_keys(bad, 16, 0)
    assert caught.value.fields[0].field == "prompt"


def test_packed_keys_are_little_endian_and_come_back() -> None:
    keys = [1, 2**64 - 1, 0x0102030405060708]
    packed = pack_keys(keys)
    assert packed[16:] == bytes([8, 7, 6, 5, 4, 3, 2, 1])
    assert list(unpack_keys(packed)) == keys


def test_a_torn_digest_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        unpack_keys(b"\0" * 9)


def test_the_xor_digest_ignores_order_and_follows_changes() -> None:
    assert xor_digest([1, 2, 3]) == xor_digest([3, 1, 2]) == 0
    assert xor_digest([3], xor_digest([1, 3])) == 1


KNOWN_ROOT = 0x5CA624AA02F0DA60
KNOWN_KEYS = [0x3D5DA8C6BD4CBE10, 0x308372B3A4121193]


def test_one_key_in_sixteen_is_followed_whatever_the_prompt() -> None:
    keys = block_keys(range(16 * 4_000), 16, root_key("model"))
    followed = sampled(keys)
    assert followed == [key for key in keys if key % 16 == 0]
    assert 200 <= len(followed) <= 300
    assert sampled(keys[:100]) == followed[: len(sampled(keys[:100]))]
