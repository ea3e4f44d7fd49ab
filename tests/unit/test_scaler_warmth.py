"""What is learnt of blocks: who will be asked for again, for how long caches keep, and that a sample tells it."""

from __future__ import annotations

from random import Random

import pytest

from stoker.scaler.core.warmth import Warmth, WarmthConfig

ALL = WarmthConfig(sample=1)


def chance(warmth: Warmth, key: int, now: float) -> float:
    (held,) = (held for name, held in warmth.held_by(warmth.replicas, now).items() if name == key)
    return held.chance


def ask(warmth: Warmth, key: int, times: int, every: float, last: float) -> None:
    for number in reversed(range(times)):
        warmth.used([key], last - number * every)
    warmth.stored("a", [key], last)


def test_a_conversation_is_over_after_a_while_of_its_own() -> None:
    warmth = Warmth(16, ALL)
    for key in range(100, 150):
        ask(warmth, key, 7, 60.0, 1_000.0)
    ask(warmth, 1, 7, 60.0, 1_000.0)
    ask(warmth, 2, 7, 600.0, 1_000.0)
    assert chance(warmth, 1, 1_030.0) > 0.7
    assert chance(warmth, 2, 1_300.0) > 0.7, "half of its own gap has passed"
    assert chance(warmth, 1, 1_300.0) < 0.05, "five times its own gap has passed"


def test_nothing_is_worth_anything_while_nothing_was_ever_asked_for_again() -> None:
    warmth = Warmth(16, ALL)
    warmth.stored("a", range(100), 0.0)
    assert warmth.worth(10.0).lost_with(["a"]) == 0.0


def test_a_block_that_is_evicted_before_its_next_use_is_worth_nothing() -> None:
    warmth = Warmth(16, ALL)
    for number in range(2_000):  # one use each, evicted after ten seconds, ten a second
        warmth.used([1_000 + number], number / 10)
        warmth.stored("a", [1_000 + number], number / 10)
        warmth.removed("a", [1_000 + number - 100], number / 10)
    for key in range(100):
        ask(warmth, key, 3, 60.0, 200.0)
    assert warmth.keep_s("a", 200.0) < 25.0
    assert chance(warmth, 1, 200.0) < 0.05
    assert warmth.keep_s("a", 900.0) == 3_600.0, "it evicts nothing any more"


def test_a_smaller_fleet_keeps_less() -> None:
    warmth = Warmth(16, ALL)
    for key in range(50):
        ask(warmth, key, 3, 600.0, 1_000.0)
    whole, half = warmth.worth(1_000.0), warmth.worth(1_000.0, staying=0.1)
    assert half.lost_with(["a"]) < 0.2 * whole.lost_with(["a"])


def test_blocks_that_another_holds_are_lost_only_with_both() -> None:
    warmth = Warmth(16, ALL)
    for key in range(10):
        ask(warmth, key, 7, 60.0, 1_000.0)
    warmth.stored("b", range(5), 1_000.0)
    worth = warmth.worth(1_001.0)
    alone, both = worth.lost_with(["a"]), worth.lost_with(["a", "b"])
    assert worth.lost_with(["b"]) == 0.0
    assert alone == pytest.approx(both / 2)
    warmth.forget("b")
    assert warmth.worth(1_001.0).lost_with(["a"]) == pytest.approx(both)


def test_memory_is_bounded_and_what_was_asked_for_last_stays() -> None:
    warmth = Warmth(16, WarmthConfig(sample=1, limit=100))
    for key in range(1_000):
        warmth.used([key], float(key))
        warmth.stored("a", [key], float(key))
    assert len(warmth) == 100
    assert set(warmth.held_by(["a"], 1_000.0)) == set(range(900, 1_000))
    warmth.limit = 10
    warmth.used([5_000], 1_001.0)
    assert len(warmth) == 10
    assert set(warmth.held_by(["a"], 1_001.0)) == set(range(991, 1_000))


@pytest.mark.parametrize("seed", range(4))
def test_one_block_in_sixteen_tells_the_worth_of_all(seed: int) -> None:
    rng = Random(seed)
    prompts = [[rng.getrandbits(64) for _ in range(rng.randint(5, 60))] for _ in range(400)]
    every, sampled = Warmth(16, ALL), Warmth(16, WarmthConfig(sample=16))
    for at in range(3_000):
        prompt = prompts[int(len(prompts) * rng.random() ** 2)]
        for warmth in (every, sampled):
            warmth.used(prompt, at)
            warmth.stored(f"chat-{len(prompt) % 4}", prompt, at)
    for count in range(1, 5):
        going = [f"chat-{number}" for number in range(count)]
        whole, guess = every.worth(3_000.0).lost_with(going), sampled.worth(3_000.0).lost_with(going)
        assert guess == pytest.approx(whole, rel=0.25), f"seed {seed}"
    assert len(sampled) < len(every) / 10
