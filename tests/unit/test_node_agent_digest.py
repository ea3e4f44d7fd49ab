"""What a digest does with single events."""

from __future__ import annotations

from stoker.common.blocks import block_keys, root_key
from stoker.node_agent.core.digest import CacheDigest, nothing
from stoker.node_agent.engine.events import Cleared, Ignored, Removed, Stored


def stored(*hashes: bytes | int, parent: bytes | int | None = None, first: int = 0, **fields: object) -> Stored:
    values: dict[str, object] = {
        "hashes": hashes,
        "parent": parent,
        "tokens": tuple(range(first, first + 2 * len(hashes))),
        "block_size": 2,
        "lora": None,
        "salt": None,
        "extras": ((),) * len(hashes),
        "tier": "GPU",
    }
    return Stored(**{**values, **fields})  # type: ignore[arg-type]


def digest_of(*events: object, blocks: int = 0) -> CacheDigest:
    digest = CacheDigest("m", blocks)
    digest.begin(1)
    digest.apply(events)  # type: ignore[arg-type]
    return digest


def test_keys_are_those_that_a_router_computes() -> None:
    digest = digest_of(stored(b"a", b"b"), stored(b"c", parent=b"b", first=4))
    assert digest.held() == frozenset(block_keys(range(6), 2, root_key("m")))


def test_lora_and_salt_keep_prompts_apart() -> None:
    salted = digest_of(stored(1, salt="s")).held()
    adapted = digest_of(stored(1, lora="l")).held()
    assert salted == frozenset(block_keys([0, 1], 2, root_key("m", cache_salt="s")))
    assert adapted == frozenset(block_keys([0, 1], 2, root_key("m", lora="l")))
    assert len(salted | adapted | digest_of(stored(1)).held()) == 3


def test_images_change_their_block_only() -> None:
    plain = digest_of(stored(1, 2)).held()
    image = digest_of(stored(1, 2, extras=((), (("image-hash", 3),)))).held()
    assert len(plain & image) == 1
    other = digest_of(stored(1, 2, extras=((), (("image-hash", 4),)))).held()
    assert image != other


def test_hashes_may_be_numbers_or_bytes() -> None:
    assert digest_of(stored(1), Removed((1,), "GPU")).held() == frozenset()
    assert digest_of(stored(b"\1"), Removed((b"\1",), "GPU")).held() == frozenset()


def test_a_second_copy_outlives_the_first() -> None:
    digest = digest_of(stored(1), stored(1), Removed((1,), "GPU"))
    assert digest.count() == 1
    digest.apply([Removed((1,), "GPU")])
    assert digest.count() == 0


def test_a_block_of_unknown_parent_is_skipped_and_counted() -> None:
    digest = digest_of(stored(5, 6, parent=b"never seen"))
    assert digest.count() == 0
    assert digest.counts.orphans == 2


def test_an_unknown_removal_is_counted() -> None:
    digest = digest_of(Removed((9,), "GPU"))
    assert digest.counts.strangers == 1


def test_a_child_keeps_its_parent_known_across_tiers() -> None:
    digest = digest_of(
        stored(1), stored(1, tier="CPU"), Removed((1,), "GPU"), stored(2, parent=1, first=2, tier="CPU")
    )
    assert digest.count("GPU") == 0
    assert digest.count("CPU") == 2


def test_host_memory_may_hold_more_than_the_gpu() -> None:
    digest = digest_of(blocks=1)
    digest.apply([stored(*range(5000), tier="CPU")])
    assert (digest.count("CPU"), digest.counts.overflows) == (5000, 0)
    digest.apply([stored(*range(5000))])
    assert (digest.count("GPU"), digest.counts.overflows) == (0, 1)


def test_cleared_means_all() -> None:
    digest = digest_of(stored(1, 2), Cleared())
    assert digest.count() == 0
    assert digest.deltas() == []  # what came and went in between is nobody's business


def test_only_the_group_that_attends_to_everything_counts() -> None:
    window = stored(1, group=0, kind="sliding_window")
    full = stored(2, group=1, kind="full_attention")
    digest = digest_of(window, full, Removed((2,), "GPU", group=0))
    assert digest.count() == 1
    assert digest.counts.ignored == 1


def test_what_makes_no_sense_is_counted() -> None:
    digest = digest_of(Ignored("New", "unknown kind of event"), stored(1, tier="MOON"))
    assert digest.counts.ignored == 2


def test_large_snapshots_come_in_pieces_that_say_so() -> None:
    digest = digest_of(stored(*range(10)))
    digest.deltas()
    pieces = digest.snapshot(limit=4)
    assert [(len(piece.keys), piece.more) for piece in pieces] == [(4, True), (4, True), (2, False)]
    assert {piece.sequence for piece in pieces} == {1}
    assert {key for piece in pieces for key in piece.keys} == digest.held()


def test_an_empty_digest_is_told_too() -> None:
    (piece,) = digest_of().snapshot()
    assert (piece.tier, piece.keys, piece.more) == ("GPU", (), False)
    assert [p.tier for p in nothing(3, ("GPU", "CPU"))] == ["GPU", "CPU"]


def test_a_copy_of_another_life_is_not_taken() -> None:
    image = digest_of(stored(1)).export()
    later = CacheDigest("m")
    later.begin(2)
    assert not later.restore(image)
    other = CacheDigest("another model")
    other.begin(1)
    assert not other.restore(image)
    assert later.count() == other.count() == 0
