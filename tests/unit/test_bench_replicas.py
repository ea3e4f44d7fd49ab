"""The quick model of a replica against the step-by-step one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random

import pytest

from stoker.bench.cache import Cache
from stoker.bench.replicas import Clock, Engine, Hardware, Job, Machine, Outcome
from tests.support.stepwise_engine import StepwiseEngine

Marks = list[tuple[int, bool, float]]

BATCHING = Hardware(
    block_size=32,
    kv_blocks=400,
    prefill_rate=4_000.0,
    request_s=0.004,
    decode_s=0.011,
    sequence_s=0.0005,
    context_s=2e-7,
    attended_s=1e-8,
    batching=True,
    chunk_tokens=512,
)


def jobs(seed: int, count: int = 300, rate: float = 4.0) -> list[Job]:
    """Ten prefixes that come again, tails of their own, some prompts wholly cached, some answers of one token."""
    rng = Random(seed)
    families = [[rng.getrandbits(64) for _ in range(rng.randint(1, 30))] for _ in range(10)]
    made, at = [], 0.0
    for _ in range(count):
        at += rng.expovariate(rate) if rng.random() < 0.8 else 0.0
        keys = families[rng.randrange(10)] + [rng.getrandbits(64) for _ in range(rng.randint(0, 8))]
        made.append(Job(at, tuple(keys), 32 * len(keys) + rng.randint(0, 31), rng.choice((0, 1, 5, 60, 200))))
    return made


def served(
    make: Callable[..., Engine | StepwiseEngine], work: list[Job], hardware: Hardware, engines: int = 1
) -> tuple[Outcome, Marks]:
    clock, outcome, machine, marks = Clock(), Outcome(), Machine(hardware.cores), []
    here = [make(f"replica-{n}", hardware, clock, machine, outcome) for n in range(engines)]

    def done(number: int, end: bool) -> None:
        marks.append((number, end, clock.now))

    for number, job in enumerate(work):
        engine = here[number % engines]
        clock.after(job.at, partial(engine.submit, job, partial(done, number), job.at))
    clock.run(until=lambda: False)
    return outcome, marks


@pytest.mark.parametrize(
    "hardware",
    [
        BATCHING,
        replace(BATCHING, context_s=0.0),
        replace(BATCHING, kv_blocks=60),
        replace(BATCHING, cores=2),
        replace(BATCHING, decode_s=0.0),
        Hardware(block_size=32, kv_blocks=400, prefill_rate=4_000.0),
    ],
    ids=["batching", "no context", "little cache", "shared cores", "no decoding", "one at a time"],
)
@pytest.mark.parametrize("seed", range(3))
def test_every_first_token_and_end_comes_when_steps_taken_one_by_one_say(hardware: Hardware, seed: int) -> None:
    work = jobs(seed)
    quick, quick_marks = served(Engine, work, hardware, engines=2)
    plain, plain_marks = served(StepwiseEngine, work, hardware, engines=2)
    assert len(quick_marks) == 2 * len(work), "each has a first token and an end"
    assert [mark[:2] for mark in sorted(quick_marks)] == [mark[:2] for mark in sorted(plain_marks)]
    for mine, theirs in zip(sorted(quick_marks), sorted(plain_marks), strict=True):
        assert mine[2] == pytest.approx(theirs[2], rel=1e-9, abs=1e-6), (mine, theirs)
    assert (quick.hit_blocks, quick.blocks, quick.served) == (plain.hit_blocks, plain.blocks, plain.served)
    assert quick.waits == pytest.approx(plain.waits, abs=1e-6)


def test_what_is_computed_for_nobody_is_counted_apart_and_found_later() -> None:
    work = [
        Job(0.0, (1, 2, 3), 3 * 512, warming=True),
        Job(1.0, (1, 2, 3, 4), 4 * 512),
        Job(2.0, (1, 2, 3, 4, 5), 5 * 512, warming=True),
    ]
    outcome, marks = served(Engine, work, Hardware())
    assert outcome.warmed_blocks == 3 + 1
    assert (outcome.hit_blocks, outcome.blocks, outcome.prompt_tokens) == (3, 4, 4 * 512)
    assert len(outcome.ttfts) == len(outcome.waits) == outcome.served["replica-0"] == 1
    assert [number for number, end, _ in marks if end] == [0, 1, 2]


def test_a_cache_with_more_room_evicts_later_and_lists_its_blocks_by_age() -> None:
    cache = Cache(2)
    for key in (1, 2, 3):
        cache.take((key,))
        cache.free((key,))
    assert cache.keys() == [2, 3]
    cache.grow(1)
    assert cache.take((4,)) == ([4], [])
    assert cache.keys() == [2, 3, 4]


def test_no_more_run_than_a_batch_may_have() -> None:
    clock, outcome, machine = Clock(), Outcome(), Machine(0)
    engine = Engine("replica", replace(BATCHING, max_seqs=3), clock, machine, outcome)
    most = 0

    def look() -> None:
        nonlocal most
        most = max(most, engine.running)
        if not engine.idle:
            clock.after(0.05, look)

    for number in range(8):
        engine.submit(Job(0.0, (), 100, 20, own_blocks=4), lambda end: None, float(number))
    look()
    clock.run(until=lambda: False)
    assert (most, engine.idle, len(outcome.waits)) == (3, True, 8)


def test_blocks_of_answers_and_of_prompts_that_nobody_shares_keep_others_waiting_and_push_out_what_is_idle() -> None:
    clock, outcome, machine = Clock(), Outcome(), Machine(0)
    engine = Engine("replica", replace(BATCHING, kv_blocks=10), clock, machine, outcome)
    keys = tuple(range(6))
    engine.submit(Job(0.0, keys, 192, 1), lambda end: None, 0.0)
    clock.run(until=lambda: False)
    assert engine.cache.hit(keys) == 6
    for _ in range(2):
        engine.submit(Job(0.0, (), 100, 90, own_blocks=7), lambda end: None, clock.now)
    clock.run_for(0.2)
    assert (engine.running, engine.waiting, engine.cache.pinned) == (1, 1, 7)
    assert engine.cache.hit(keys) == 3, "the tail went, the head stayed"
    clock.run(until=lambda: False)
    assert (engine.cache.pinned, len(outcome.ttfts)) == (0, 3)


def test_tokens_are_counted_while_they_come() -> None:
    clock, outcome, machine = Clock(), Outcome(), Machine(0)
    hardware = replace(BATCHING, decode_s=0.1, sequence_s=0.0, context_s=0.0, request_s=0.0, attended_s=0.0)
    engine = Engine("replica", hardware, clock, machine, outcome)
    engine.submit(Job(0.0, (), 400, 11), lambda end: None, 0.0)
    seen = []
    for at in (0.05, 0.15, 0.25, 0.65, 2.0):
        clock.after(at, lambda: seen.append(engine.generated))
    clock.run(until=lambda: False)
    assert seen == [0, 1, 2, 6, 11], "400 tokens take 0.1 s, each of ten more tokens another"
