"""Token ids are kept with the blocks that an engine holds, so that a prompt can be computed elsewhere."""

from __future__ import annotations

import itertools

from stoker.common.blocks import SAMPLE, block_keys, root_key
from stoker.node_agent.core.digest import CacheDigest
from stoker.node_agent.core.prompts import Prompts, end_of, sole_followers
from stoker.node_agent.engine.events import Cleared, Event, Removed, Stored

PROMPT = tuple(range(40, 48))
KEYS = block_keys(PROMPT, 2, root_key("m"))


def stored(*hashes: int, parent: int | None = None, tokens: tuple[int, ...] = PROMPT, **fields: object) -> Stored:
    at = 2 * (hashes[0] - 1)
    values: dict[str, object] = {
        "hashes": hashes,
        "parent": parent,
        "tokens": tokens[at : at + 2 * len(hashes)],
        "block_size": 2,
        "lora": None,
        "salt": None,
        "extras": ((),) * len(hashes),
        "tier": "GPU",
    }
    return Stored(**{**values, **fields})  # type: ignore[arg-type]


def digest_of(*events: Event, prompt_bytes: int = 1 << 20) -> CacheDigest:
    digest = CacheDigest("m", prompt_bytes=prompt_bytes)
    digest.begin(1)
    digest.apply(events)
    return digest


def rebuilt(digest: CacheDigest, leaf: int) -> tuple[int, ...] | None:
    prompt = digest.prompts.prompt(leaf)
    return tuple(prompt.tokens) if prompt is not None else None


def test_a_prompt_is_rebuilt_from_any_of_its_blocks() -> None:
    digest = digest_of(stored(1, 2), stored(3, parent=2), stored(4, parent=3))
    for at, key in enumerate(KEYS, 1):
        assert rebuilt(digest, key) == PROMPT[: 2 * at]
    assert rebuilt(digest, 12345) is None
    assert rebuilt(digest, root_key("m")) is None


def test_what_is_evicted_is_not_rebuilt_and_costs_nothing() -> None:
    digest = digest_of(stored(1, 2, 3, 4), Removed((4, 2), "GPU"))
    assert rebuilt(digest, KEYS[0]) == PROMPT[:2]
    assert rebuilt(digest, KEYS[2]) is None, "a block of it is gone"
    assert rebuilt(digest, KEYS[3]) is None
    digest.apply([stored(2, parent=1)])
    assert rebuilt(digest, KEYS[2]) == PROMPT[:6]
    digest.apply([Cleared()])
    assert (len(digest.prompts), digest.prompts.bytes) == (0, 0)


def test_a_second_copy_and_another_tier_keep_it() -> None:
    digest = digest_of(stored(1), stored(1), Removed((1,), "GPU"))
    assert rebuilt(digest, KEYS[0]) == PROMPT[:2]
    digest.apply([stored(1, tier="CPU"), Removed((1,), "GPU")])
    assert rebuilt(digest, KEYS[0]) == PROMPT[:2]
    digest.apply([Removed((1,), "CPU")])
    assert rebuilt(digest, KEYS[0]) is None


def test_an_adapters_prompt_is_told_with_its_name() -> None:
    digest = digest_of(stored(1, 2, lora="poet"))
    leaf = block_keys(PROMPT[:4], 2, root_key("m", lora="poet"))[-1]
    prompt = digest.prompts.prompt(leaf)
    assert prompt is not None
    assert (prompt.adapter, tuple(prompt.tokens)) == ("poet", PROMPT[:4])
    assert rebuilt(digest, KEYS[1]) is None


def test_salted_prompts_and_images_are_not_kept() -> None:
    salted = digest_of(stored(1, 2, salt="tenant"), stored(3, parent=2))
    assert len(salted.prompts) == 0
    assert salted.count() == 3
    image = digest_of(stored(1), stored(2, 3, parent=1, extras=((("image", 0),), ())), stored(4, parent=3))
    assert len(image.prompts) == 1
    assert rebuilt(image, KEYS[0]) == PROMPT[:2]


def test_memory_is_bounded_and_what_is_beyond_is_not_kept() -> None:
    each = digest_of(stored(1)).prompts.bytes
    digest = digest_of(stored(1, 2, 3, 4), prompt_bytes=2 * each)
    assert (len(digest.prompts), digest.prompts.bytes) == (2, 2 * each)
    assert rebuilt(digest, KEYS[1]) == PROMPT[:4]
    assert rebuilt(digest, KEYS[2]) is None
    digest.apply([Removed((1, 2), "GPU"), stored(1)])
    assert rebuilt(digest, KEYS[0]) == PROMPT[:2]
    assert len(digest_of(stored(1, 2), prompt_bytes=0).prompts) == 0


def test_the_number_of_adapters_is_bounded() -> None:
    prompts = Prompts("m", 1 << 30)
    for number in range(2_000):
        prompts.begin(f"adapter-{number}")
    assert len(prompts._adapters) <= 1_024


def test_a_new_life_of_the_engine_holds_nothing() -> None:
    digest = digest_of(stored(1))
    digest.begin(2)
    assert rebuilt(digest, KEYS[0]) is None


def test_a_sampled_block_stands_for_what_follows_up_to_the_next_or_to_where_prompts_part() -> None:
    sampled, other = SAMPLE * 5, SAMPLE * 9
    chain = [sampled, 1, 2, 3, other, 4]
    followers = dict(itertools.pairwise(chain))
    assert end_of(sampled, followers) == 3
    assert end_of(other, followers) == 4
    assert end_of(1, followers) == 1, "named by somebody who knows all blocks: nothing is added"
    assert end_of(sampled, {}) == sampled
    assert end_of(SAMPLE, {SAMPLE: 1, 1: 1}) == 1, "keys that collide must not hold anybody"


def test_where_prompts_part_nothing_follows() -> None:
    digest = digest_of(stored(1, 2, 3), stored(4, parent=3))
    digest.apply([Stored((9,), 2, (7, 7), 2, None, None, ((),), "GPU")])
    followers = sole_followers(digest.prompts.copy())
    assert followers == {root_key("m"): KEYS[0], KEYS[0]: KEYS[1], KEYS[2]: KEYS[3]}
