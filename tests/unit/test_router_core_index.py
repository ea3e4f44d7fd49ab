"""The block index: snapshots, deltas, gaps, epochs, drift, tiers and memory."""

from __future__ import annotations

from stoker.common.blocks import xor_digest
from stoker.router.core import BlockIndex, Delta, Snapshot, Sync, Tier

KEYS = [101, 102, 103, 104]


def snapshot(keys: list[int], epoch: int = 1, sequence: int = 1, tier: Tier = Tier.GPU) -> Snapshot:
    return Snapshot(epoch, sequence, {tier: keys}, {tier: xor_digest(keys)})


def delta(sequence: int, stored: list[int] | None = None, removed: list[int] | None = None, epoch: int = 1) -> Delta:
    return Delta(epoch, sequence, {Tier.GPU: stored or []}, {Tier.GPU: removed or []})


def depth(index: BlockIndex, replica: str, keys: list[int] = KEYS) -> int:
    return index.depths(keys).get(replica, (0,))[0]


def test_depth_counts_leading_blocks_only() -> None:
    index = BlockIndex()
    index.snapshot("a", snapshot(KEYS), 0.0)
    index.snapshot("b", snapshot([101, 102, 104]), 0.0)
    index.snapshot("c", snapshot([102, 103]), 0.0)
    assert [depth(index, replica) for replica in "abc"] == [4, 2, 0]
    assert index.depths([]) == {}
    assert index.depths([999]) == {}


def test_deltas_add_and_remove() -> None:
    index = BlockIndex()
    index.snapshot("a", snapshot([101]), 0.0)
    assert index.delta("a", delta(2, stored=[102, 103]), 0.1) is Sync.APPLIED
    assert depth(index, "a") == 3
    assert index.delta("a", delta(3, removed=[103]), 0.2) is Sync.APPLIED
    assert depth(index, "a") == 2


def test_a_gap_asks_for_a_snapshot_and_keeps_what_is_held_until_it_comes() -> None:
    index = BlockIndex()
    index.snapshot("a", snapshot(KEYS), 0.0)
    assert index.delta("a", delta(3, removed=KEYS), 0.1) is Sync.RESYNC
    assert depth(index, "a") == 4
    # Not even the right next step heals a gap: what was lost is lost.
    assert index.delta("a", delta(2), 0.2) is Sync.RESYNC
    assert index.snapshot("a", snapshot([101], sequence=5), 0.3) is Sync.APPLIED
    assert depth(index, "a") == 1
    assert index.delta("a", delta(6, stored=[102]), 0.4) is Sync.APPLIED


def test_old_and_repeated_messages_are_ignored() -> None:
    index = BlockIndex()
    index.snapshot("a", snapshot(KEYS, epoch=2, sequence=7), 0.0)
    assert index.delta("a", delta(7, removed=KEYS, epoch=2), 0.1) is Sync.STALE
    assert index.delta("a", delta(99, removed=KEYS, epoch=1), 0.1) is Sync.STALE
    assert index.snapshot("a", snapshot([], epoch=1, sequence=9), 0.1) is Sync.STALE
    assert depth(index, "a") == 4


def test_a_new_epoch_drops_the_old_blocks() -> None:
    index = BlockIndex()
    index.snapshot("a", snapshot(KEYS, epoch=1), 0.0)
    assert index.delta("a", delta(1, epoch=2), 0.1) is Sync.RESYNC
    assert index.snapshot("a", snapshot([], epoch=2), 0.2) is Sync.APPLIED
    assert depth(index, "a") == 0


def test_drift_is_caught_and_earns_no_trust() -> None:
    index = BlockIndex()
    index.snapshot("a", snapshot([101]), 0.0)
    wrong = Delta(1, 2, {Tier.GPU: [102]}, {}, {Tier.GPU: 12345})
    assert index.delta("a", wrong, 0.1) is Sync.RESYNC
    assert index.trust("a", 0.1) == 0.0
    index.snapshot("a", snapshot([101, 102], sequence=2), 0.2)
    assert index.trust("a", 0.2) == 1.0


def test_a_snapshot_with_a_wrong_digest_leaves_the_old_one_in_place() -> None:
    index = BlockIndex()
    index.snapshot("a", snapshot([101]), 0.0)
    assert index.snapshot("a", Snapshot(1, 2, {Tier.GPU: KEYS}, {Tier.GPU: 1}), 0.1) is Sync.RESYNC
    assert depth(index, "a") == 1


def test_trust_falls_smoothly_with_silence() -> None:
    index = BlockIndex(fresh_s=10.0, stale_s=20.0)
    assert index.trust("a", 0.0) == 0.0
    index.snapshot("a", snapshot(KEYS), 0.0)
    assert [index.trust("a", now) for now in (10.0, 15.0, 20.0, 1e9)] == [1.0, 0.5, 0.0, 0.0]
    index.vouch("a", 100.0)
    assert index.trust("a", 100.0) == 1.0
    assert index.delta("a", delta(3), 101.0) is Sync.RESYNC
    index.vouch("a", 200.0)
    assert index.trust("a", 200.0) == 0.0, "nobody can vouch for a set with a step missing"


def test_tiers_are_told_apart_and_continue_each_other() -> None:
    index = BlockIndex()
    index.snapshot("a", Snapshot(1, 1, {Tier.GPU: [101], Tier.CPU: [101, 102], Tier.STORAGE: [103]}), 0.0)
    index.snapshot("b", snapshot([101, 102], tier=Tier.STORAGE), 0.0)
    assert index.depths(KEYS) == {"a": (1, 2, 3), "b": (0, 0, 2)}


def test_a_snapshot_of_one_tier_leaves_the_others_as_they_are() -> None:
    index = BlockIndex()
    index.snapshot("a", snapshot([101, 102], sequence=7), 0.0)
    index.snapshot("a", snapshot([103], sequence=3, tier=Tier.CPU), 0.0)
    assert index.depths(KEYS) == {"a": (2, 3, 3)}
    step = Delta(1, 8, {Tier.GPU: [104]}, {Tier.GPU: []}, {Tier.GPU: xor_digest([101, 102, 104])})
    assert index.delta("a", step, 0.1) is Sync.APPLIED
    assert index.snapshot("a", snapshot([103, 105], sequence=4, tier=Tier.CPU), 0.2) is Sync.APPLIED
    assert index.depths(KEYS) == {"a": (2, 4, 4)}
    assert index.count("a") == 5


def test_each_tier_counts_its_own_steps() -> None:
    index = BlockIndex()
    index.snapshot("a", snapshot([101], sequence=7), 0.0)
    index.snapshot("a", snapshot([102], sequence=3, tier=Tier.CPU), 0.0)
    lost = Delta(1, 5, {Tier.CPU: [103]}, {})
    assert index.delta("a", lost, 37.5) is Sync.RESYNC
    assert index.delta("a", delta(8, stored=[104]), 37.5) is Sync.APPLIED
    assert index.trust("a", 37.5) == 0.5, "the tier with a step missing ages, whatever the other does"
    assert index.snapshot("a", snapshot([102, 103], sequence=5, tier=Tier.CPU), 38.0) is Sync.APPLIED
    assert index.trust("a", 38.0) == 1.0


def test_steps_of_one_tier_do_not_keep_another_fresh() -> None:
    index = BlockIndex(fresh_s=10.0, stale_s=20.0)
    index.snapshot("a", snapshot([101], sequence=7), 0.0)
    index.snapshot("a", snapshot([102], sequence=3, tier=Tier.CPU), 0.0)
    assert index.delta("a", delta(8, stored=[104]), 20.0) is Sync.APPLIED
    assert index.trust("a", 20.0) == 0.0, "the registry may have lost steps of the other, and say so"
    index.vouch("a", 20.0)
    assert index.trust("a", 20.0) == 1.0


def test_a_new_life_told_in_one_tier_drops_the_old_one_in_all() -> None:
    index = BlockIndex()
    index.snapshot("a", Snapshot(1, 1, {Tier.GPU: [101], Tier.CPU: [102]}), 0.0)
    index.snapshot("a", snapshot([101], epoch=2), 0.1)
    assert index.depths(KEYS) == {"a": (1, 1, 1)}
    assert index.delta("a", Delta(1, 2, {Tier.CPU: [102]}, {}), 0.2) is Sync.STALE
    assert index.delta("a", Delta(2, 1, {Tier.CPU: [102]}, {}), 0.3) is Sync.RESYNC


def test_a_count_that_begins_anew_within_a_life_is_followed() -> None:
    index = BlockIndex()
    index.snapshot("a", snapshot(KEYS, sequence=50), 0.0)
    assert index.snapshot("a", snapshot([101], sequence=2), 0.1) is Sync.APPLIED
    assert index.delta("a", delta(3, stored=[102]), 0.2) is Sync.APPLIED
    assert depth(index, "a") == 2


def test_replicas_with_many_lives_in_one_tier_are_not_confused_across_tiers() -> None:
    index = BlockIndex()
    for number, replica in enumerate("abc"):
        for sequence in range(number + 1):
            index.snapshot(replica, snapshot([101], sequence=sequence), 0.0)
    for replica, keys in (("c", [102, 103]), ("a", [102])):
        index.snapshot(replica, snapshot(keys, tier=Tier.CPU), 0.0)
    assert index.depths(KEYS) == {"a": (1, 2, 2), "b": (1, 1, 1), "c": (1, 3, 3)}


def test_forgetting_gives_memory_back_without_touching_others() -> None:
    index = BlockIndex()
    index.snapshot("a", snapshot(list(range(1, 5_001))), 0.0)
    index.snapshot("b", snapshot([1, 2]), 0.0)
    index.forget("a")
    assert index.depths([1, 2, 3]) == {"b": (2, 2, 2)}
    while not index.sweep(512):
        pass
    assert len(index) == 2


def test_restarts_do_not_pile_up_memory() -> None:
    index = BlockIndex()
    for epoch in range(1, 200):
        keys = [epoch * 10_000 + number for number in range(100)]
        assert index.snapshot("a", snapshot(keys, epoch=epoch), 0.0) is Sync.APPLIED
        assert depth(index, "a", keys) == 100
    assert len(index) <= 400
