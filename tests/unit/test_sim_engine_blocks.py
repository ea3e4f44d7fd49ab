"""The simulated KV cache: what is shared, what is evicted first, and that nothing ever leaks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stoker.sim_engine.core.blocks import AllCleared, BlockPool, BlocksRemoved, BlocksStored, TokenSequence


def run(pool: BlockPool, tokens: list[int], salt: str | None = None) -> tuple[TokenSequence, int]:
    """Hold a whole prompt; says how many tokens were found."""
    sequence = TokenSequence(list(tokens), salt)
    hits = pool.lookup(sequence)
    assert pool.allocate(sequence, hits, len(tokens))
    return sequence, len(hits) * pool.block_size


def test_only_full_blocks_are_shared_and_one_token_is_left() -> None:
    pool = BlockPool(10, 4)
    first, _ = run(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert run(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9])[1] == 8
    assert run(pool, [1, 2, 3, 4, 5, 6, 7, 8])[1] == 4
    assert run(pool, [1, 2, 3, 4, 9, 9, 9, 9, 9])[1] == 4
    assert first.hashes[1] is not None


def test_salts_do_not_meet() -> None:
    pool = BlockPool(10, 2)
    run(pool, [1, 2, 3], "a")
    assert run(pool, [1, 2, 3], "b")[1] == 0
    assert run(pool, [1, 2, 3])[1] == 0
    assert run(pool, [1, 2, 3], "a")[1] == 2


def test_a_request_loses_its_last_block_first() -> None:
    pool = BlockPool(5, 2)
    sequence, _ = run(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    pool.free(sequence)
    pool.take_events()
    other, _ = run(pool, [9, 9])
    assert pool.take_events()[0] == BlocksRemoved((sequence.hashes[3],))
    pool.free(other)
    assert run(pool, [1, 2, 3, 4, 5])[1] == 4


def test_blocks_without_a_hash_are_taken_before_any_cached_one() -> None:
    pool = BlockPool(4, 2)
    full, _ = run(pool, [1, 2, 3, 4])
    part, _ = run(pool, [7])
    pool.free(full)
    pool.free(part)
    pool.take_events()
    run(pool, [8])
    assert pool.take_events() == []


def test_events_carry_tokens_parent_and_the_salt_of_the_first() -> None:
    pool = BlockPool(10, 2)
    sequence, _ = run(pool, [1, 2, 3, 4, 5], "s")
    sequence.tokens.append(6)
    assert pool.allocate(sequence, (), 6)
    first, second, third = sequence.hashes
    assert pool.take_events() == [
        BlocksStored((first, second), None, (1, 2, 3, 4), "s"),
        BlocksStored((third,), second, (5, 6), None),
    ]


def test_a_second_copy_is_announced_again_and_each_copy_removed() -> None:
    pool = BlockPool(3, 2)
    one, _ = run(pool, [1, 2])
    two, _ = run(pool, [1, 2])  # nothing to reuse: one token must be computed
    pool.free(one)
    pool.free(two)
    run(pool, [5, 6, 7, 8])
    kinds = Counter(type(event) for event in pool.take_events())
    assert kinds == {BlocksStored: 3, BlocksRemoved: 2}


def test_reset_waits_for_running_requests() -> None:
    pool = BlockPool(4, 2)
    sequence, _ = run(pool, [1, 2, 3])
    assert not pool.reset()
    pool.free(sequence)
    assert pool.reset()
    assert pool.take_events()[-1] == AllCleared()
    assert run(pool, [1, 2, 3])[1] == 0


def test_what_does_not_fit_changes_nothing() -> None:
    pool = BlockPool(4, 2)
    run(pool, [1, 2])
    pool.take_events()
    big = TokenSequence(list(range(100, 106)))
    assert not pool.allocate(big, (), 6)
    assert (pool.free_blocks, big.blocks, pool.take_events()) == (2, [], [])


@pytest.mark.parametrize("capacity", [0, 1])
def test_a_pool_that_holds_nothing_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        BlockPool(capacity, 16)


class PoolMachine(RuleBasedStateMachine):
    """Any order of starts, growth and ends, against the simplest model of a cache: a bag of names."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, 2)
        self.running: list[TokenSequence] = []
        self.copies: Counter[int] = Counter()

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=9), salt=st.sampled_from([None, "s"]))
    def start(self, tokens: list[int], salt: str | None) -> None:
        sequence = TokenSequence(tokens, salt)
        hits = self.pool.lookup(sequence)
        assert len(hits) * 2 < len(tokens)
        assert all(self.copies[block.hash or 0] for block in hits)
        if self.pool.allocate(sequence, hits, len(tokens)):
            self.running.append(sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token=st.integers(0, 2))
    def grow(self, data: st.DataObject, token: int) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        sequence.tokens.append(token)
        if not self.pool.allocate(sequence, (), len(sequence.tokens)):
            sequence.tokens.pop()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        self.running.remove(sequence)
        self.pool.free(sequence)

    @invariant()
    def events_tell_the_cache(self) -> None:
        for event in self.pool.take_events():
            if isinstance(event, BlocksStored):
                assert len(event.tokens) == 2 * len(event.hashes)
                self.copies.update(event.hashes)
            elif isinstance(event, BlocksRemoved):
                self.copies.subtract(event.hashes)
        cached = Counter({name: len(copies) for name, copies in self.pool._cached.items()})
        assert +self.copies == cached
        assert min(self.copies.values(), default=0) >= 0

    @invariant()
    def every_block_is_free_or_held(self) -> None:
        held = {block.id: block for sequence in self.running for block in sequence.blocks}
        assert not held.keys() & self.pool._free.keys()
        assert len(held) + self.pool.free_blocks == self.pool.capacity - 1
        references = Counter(block.id for sequence in self.running for block in sequence.blocks)
        assert references == {name: block.references for name, block in held.items()}
        assert self.pool.usage == pytest.approx(len(held) / (self.pool.capacity - 1))


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40))
def test_equal_prefixes_have_equal_hashes_and_others_do_not(one: list[int], two: list[int]) -> None:
    pool = BlockPool(60, 2)
    first, second = TokenSequence(one), TokenSequence(two)
    pool.lookup(first)
    pool.lookup(second)
    for at, (mine, other) in enumerate(zip(first.hashes, second.hashes, strict=False)):
        assert (mine == other) == (one[: 2 * at + 2] == two[: 2 * at + 2])
