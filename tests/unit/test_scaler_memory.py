"""What a scaler remembers: capacity, starts, minutes, counts; bounded, and without the wall clock's jumps."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from stoker.api.registry.v1 import records_pb2
from stoker.scaler.core.capacity import DecodeSteps, Measured
from stoker.scaler.core.counting import Growth
from stoker.scaler.core.memory import MOST_SAMPLES, Memory
from stoker.scaler.core.minutes import Minutes
from stoker.scaler.core.policy import Bounds, Kind, Policy, lookback_s, memory_s
from stoker.scaler.core.signals import Minute, Sample, Startup, Wanted
from stoker.scaler.core.starts import Start, Starts
from stoker.scaler.core.steady_clock import SteadyClock
from stoker.scaler.core.values import Standing
from stoker.scaler.persisted import MOST_MEANS, packed_minutes, record_of, restore, unpacked_minutes

DAY_S = 86_400.0

# Capacity


def test_steps_are_found_in_noise_and_outliers_do_not_turn_them() -> None:
    rng = random.Random(7)
    steps = DecodeSteps()
    for _ in range(600):
        n = rng.choice((1, 2, 5, 12, 30, 60))
        step = (0.020 + 0.0005 * n) * rng.uniform(0.9, 1.1)
        steps.add(n, 10 * step if rng.random() < 0.1 else step)
    step_s, sequence_s = steps.fit() or (0.0, 0.0)
    assert step_s == pytest.approx(0.020, rel=0.15)
    assert sequence_s == pytest.approx(0.0005, rel=0.25)


def test_of_one_size_of_batch_half_is_taken_to_grow() -> None:
    steps = DecodeSteps()
    assert steps.fit() is None
    for _ in range(5):
        steps.add(8.0, 0.040)
    assert steps.fit() == (0.020, 0.0025)


def test_steps_that_only_grow_have_no_fixed_part_and_none_shrink() -> None:
    grows, shrinks = DecodeSteps(), DecodeSteps()
    for n in (1.0, 4.0, 16.0):
        grows.add(n, 0.01 * n * n)
        shrinks.add(n, 0.1 / n)
    assert (grows.fit() or (1.0, 1.0))[0] == 0.0
    assert (shrinks.fit() or (1.0, 1.0))[1] == 0.0
    for odd in (float("nan"), float("inf"), 0.0, -1.0):
        grows.add(odd, 1.0)
        grows.add(1.0, odd)


def test_prefill_is_taken_out_of_what_a_step_took() -> None:
    measured = Measured()
    measured.prefill([900.0, 1_000.0, 1_500.0])
    for _ in range(3):
        # Half of the time computes prompts, so steps seem to take twice as long as they do.
        measured.decoding(
            Growth(2.0, {"itl_sum_s": 16.0, "itl_count": 400, "prompt_tokens": 1_500, "cached_tokens": 500})
        )
    capacity = measured.capacity
    assert capacity.prefill_tokens_per_s == 1_000.0
    assert (capacity.step_s or 0) + 8 * (capacity.sequence_s or 0) == pytest.approx(0.020)
    measured.prefill([])
    measured.engines([0.0, 4_096.0, 8_192.0], [0, 16])
    measured.engines([0.0], [0])
    assert (measured.capacity.prefill_tokens_per_s, measured.capacity.kv_tokens) == (1_000.0, 4_096.0)
    assert measured.capacity.max_seqs == 16


def test_where_agents_measure_no_prefill_rate_the_times_of_prefills_tell_it() -> None:
    measured = Measured()
    measured.prefilling(Growth(2.0, {"prompt_tokens": 300}))
    assert measured.capacity.prefill_tokens_per_s is None
    measured.prefilling(Growth(2.0, {"prompt_tokens": 300, "cached_tokens": 100, "prefill_sum_s": 0.4}))
    measured.prefilling(Growth(2.0, {"prompt_tokens": 200, "prefill_sum_s": 0.4}))
    measured.prefilling(Growth(2.0, {"prompt_tokens": 0, "prefill_sum_s": 0.0}))
    assert measured.capacity.prefill_tokens_per_s == 500.0
    measured.prefill([900.0])
    assert measured.capacity.prefill_tokens_per_s == 900.0


def test_few_tokens_and_much_prefill_tell_nothing() -> None:
    measured = Measured()
    measured.prefill([1_000.0])
    measured.decoding(Growth(2.0, {"itl_sum_s": 1.0, "itl_count": 3}))
    measured.decoding(Growth(2.0, {"itl_sum_s": 9.0, "itl_count": 90, "prompt_tokens": 1_900}))
    measured.decoding(Growth(60.0, {"itl_sum_s": 9.0, "itl_count": 90}))
    measured.decoding(Growth(2.0, {"generation_tokens": 90}))
    assert measured.capacity.step_s is None


# Starts


def test_a_start_counts_from_when_it_was_decided_or_from_what_the_agent_says() -> None:
    starts = Starts()
    starts.stands("a-0", "a", Standing.PENDING, 0, None, 100.0)
    starts.stands("a-0", "a", Standing.STARTING, 0, None, 105.0)
    starts.stands("a-0", "a", Standing.READY, 1, Start(80.0, True), 190.0)
    assert starts.since("a-0") == 190.0
    starts.stands("a-0", "a", Standing.READY, 1, Start(80.0, True), 200.0)
    starts.stands("a-1", "a", Standing.READY, 7, Start(60.0, False), 200.0)
    assert starts.kept("a") == (Start(90.0, True), Start(60.0, False))
    assert starts.since("a-0") == 190.0


def test_the_pauses_of_one_that_keeps_failing_are_no_start() -> None:
    starts = Starts()
    starts.stands("a-0", "a", Standing.STARTING, 0, None, 0.0)
    starts.stands("a-0", "a", Standing.FAILING, 0, None, 50.0)
    starts.stands("a-0", "a", Standing.STARTING, 0, None, 500.0)
    starts.stands("a-0", "a", Standing.READY, 3, Start(40.0), 545.0)
    assert starts.kept("a") == (Start(40.0),)


def test_percentiles_of_a_deployment_and_of_its_model_where_it_has_none() -> None:
    starts = Starts()
    for name, model in (("a", "llama"), ("b", "llama"), ("c", "qwen")):
        starts.serves(name, model)
    for number in range(200):
        starts.stands(f"a-{number}", "a", Standing.READY, 1, Start(float(number)), 0.0)
    assert starts.startup("a") == Startup(167.0, 196.0), "of the newest 64"
    assert starts.startup("b") == starts.startup("a")
    assert starts.startup("c") == Startup()
    starts.keep(["c"])
    assert starts.kept("a") == ()


# The wall clock and minutes


def test_a_jump_of_the_clock_is_believed_only_when_it_lasts() -> None:
    clock = SteadyClock()
    assert clock.at(0.0, 1_000.0) == 1_000.0
    assert clock.at(10.0, 5_000.0) == 1_010.0
    assert clock.at(30.0, 1_030.5) == 1_030.5, "slow corrections are followed"
    assert clock.at(40.0, 9_000.0) == 1_040.5
    assert clock.at(99.0, 9_059.0) == 1_099.5
    assert clock.at(100.5, 9_060.5) == 9_060.5


def test_a_clock_that_jumps_about_is_not_believed() -> None:
    clock = SteadyClock()
    clock.at(0.0, 1_000.0)
    for now in range(10, 400, 30):
        assert clock.at(now, 9_000.0 * now) == 1_000.0 + now
    assert clock.at(400.0, 5_400.0) == 1_400.0
    assert clock.at(461.0, 5_461.0) == 5_461.0


def run_minutes(minutes: Minutes, first: float, count: int, rate: float | None, memory_s: float = DAY_S) -> float:
    for number in range(1, count + 1):
        wall = first + 2.0 * number
        sample = Sample(wall, 1, 0, 0, 0, 0, 0, rate, rate, hit_rate=0.5, decode_tokens_per_s=rate)
        minutes.add(sample, 2.0, wall, memory_s)
    return first + 2.0 * count


def test_minutes_are_means_and_unknown_ones_are_missing() -> None:
    minutes = Minutes()
    wall = run_minutes(minutes, 600.0, 30, 4.0)
    wall = run_minutes(minutes, wall, 30, None)
    wall = run_minutes(minutes, wall, 31, 8.0)
    assert list(minutes.kept) == [Minute(600.0, 4.0, 4.0, 4.0, 0.5), Minute(720.0, 8.0, 8.0, 8.0, 0.5)]


def test_minutes_older_than_the_memory_go() -> None:
    minutes = Minutes()
    run_minutes(minutes, 0.0, 30 * 200, 1.0, memory_s=3_600.0)
    assert 60 <= len(minutes.kept) <= 62


def test_a_clock_that_was_set_back_leaves_no_minutes_in_the_future() -> None:
    minutes = Minutes()
    run_minutes(minutes, 6_000.0, 300, 1.0)
    run_minutes(minutes, 6_060.0, 70, 9.0)
    assert [(m.at, m.arrivals_per_s) for m in minutes.kept] == [(6_000.0, 1.0), (6_060.0, 9.0), (6_120.0, 9.0)]


def test_minutes_survive_packing_within_four_thousandths() -> None:
    kept = [Minute(60.0 * n, 0.1 * n, 1e5 + n, 3e-5 * n, 0.25) for n in range(28_000_000, 28_000_400) if n % 7]
    first, packed = packed_minutes(kept, MOST_MEANS)
    assert (first, len(packed) % 8) == (28_000_001, 0)
    back = unpacked_minutes(first, packed)
    assert [m.at for m in back] == [m.at for m in kept]
    for ours, theirs in zip(kept, back, strict=True):
        assert theirs.arrivals_per_s == pytest.approx(ours.arrivals_per_s, rel=0.004)
        assert theirs.prefill_tokens_per_s == pytest.approx(ours.prefill_tokens_per_s, rel=0.004)
        assert theirs.decode_tokens_per_s == pytest.approx(ours.decode_tokens_per_s, rel=0.004)
        assert theirs.hit_rate == 0.25
    assert packed_minutes([], 9) == (0, b"")
    assert unpacked_minutes(5, b"abc") == []


def test_a_gap_of_years_is_not_packed() -> None:
    first, packed = packed_minutes(
        [Minute(0.0, 1.0, 1.0, 1.0, 0.0), Minute(60.0 * 10_000_000, 2.0, 2.0, 2.0, 0.0)], MOST_MEANS
    )
    assert len(packed) <= 8 * MOST_MEANS
    assert [m.arrivals_per_s for m in unpacked_minutes(first, packed)] == [2.0]


# One deployment


def idle_sample(at: float, arrivals: float = 0.0) -> Sample:
    return Sample(at, 1, 0, running=0, waiting=0, queued=0, arrivals_per_s=arrivals, decode_tokens_per_s=0.0)


def test_samples_are_kept_for_the_longest_window_and_no_longer() -> None:
    memory, policy = Memory(), Policy(Kind.CONCURRENCY)
    for second in range(0, 2_000, 2):
        memory.add(idle_sample(second, arrivals=1.0), policy, 1e9 + second)
    assert memory.samples[-1].at - memory.samples[0].at == pytest.approx(lookback_s(policy), abs=2)


def test_a_day_of_idleness_takes_few_samples_without_a_gap() -> None:
    policy = Policy(Kind.SLO, bounds=Bounds(least=0, idle_s=DAY_S))
    memory = Memory()
    for second in range(0, 100_000, 2):
        memory.add(idle_sample(second), policy, 1e9 + second)
    assert len(memory.samples) <= MOST_SAMPLES
    times = [sample.at for sample in memory.samples]
    assert times[-1] - times[0] >= DAY_S
    assert max(b - a for a, b in pairwise(times)) <= policy.fresh_s


def test_rounds_in_quick_succession_keep_the_highest_wish() -> None:
    memory = Memory()
    for at, replicas in ((10.0, 3.0), (10.1, 5.0), (10.2, 2.0), (11.0, 4.0)):
        memory.want(Wanted(at, replicas, 1.1))
    assert list(memory.wanted) == [Wanted(10.0, 5.0, 1.1), Wanted(11.0, 4.0, 1.1)]


def test_a_count_changes_when_it_differs() -> None:
    memory = Memory()
    memory.counted(3, 5.0)
    memory.counted(3, 9.0)
    assert memory.changed_at == 5.0
    memory.counted(4, 12.0)
    assert memory.changed_at == 12.0


def test_what_one_scaler_keeps_the_next_one_goes_on_from() -> None:
    before, after = Memory(), Memory()
    wall, now = 1_700_000_000.0, 500.0
    for number in range(200):
        before.want(Wanted(now - 400 + 2 * number, 3.0 + (number == 150), 1.25))
    before.counted(4, now - 30)
    before.minutes.restore([Minute(1_699_999_920.0, 2.0, 200.0, 50.0, 0.5)])
    record = record_of("chat", before, [Start(40.0, True), Start(20.0)], now, wall)
    assert record.ByteSize() < 8_192
    starts = restore(record, after, now=7.0, wall=wall + 5.0)
    assert starts == (Start(40.0, True), Start(20.0, None))
    assert after.changed_at == pytest.approx(7.0 - 35.0)
    assert max(each.replicas for each in after.wanted) == 4.0, "the highest is what settles"
    assert after.wanted[-1].at == pytest.approx(7.0 - 7.0, abs=4)
    assert after.wanted[-1].correction == 1.25
    assert list(after.minutes.kept) == list(before.minutes.kept)


def test_what_a_forecast_looks_back_at_is_kept_the_last_days_by_the_minute() -> None:
    policy = Policy(Kind.FORECAST)
    minutes = round(memory_s(policy) / 60.0)
    last = 28_000_003
    before, after = Memory(), Memory()
    before.minutes.restore(
        Minute(60.0 * number, float(number % 4), 8.0 * (number % 2), 2.0, 0.5 * (number % 2))
        for number in range(last - minutes, last)
        if not last - 5_000 <= number < last - 4_900
    )
    record = record_of("chat", before, [], 0.0, 60.0 * last)
    assert record.ByteSize() < 48 * 1024
    restore(record, after, 0.0, 60.0 * last)
    kept = list(after.minutes.kept)
    numbers = [round(minute.at / 60.0) for minute in kept]
    assert numbers == sorted(set(numbers)), "each once"
    assert numbers[0] <= last - minutes + 5
    assert kept[-2_880:] == list(before.minutes.kept[-2_880:])
    assert 90 <= sum(after_ - before_ - 1 for before_, after_ in pairwise(numbers)) <= 100, "what is unknown stays so"
    old = kept[1_000]
    assert old.arrivals_per_s == pytest.approx(1.5, abs=0.41)
    assert old.prefill_tokens_per_s == pytest.approx(4.0, abs=0.9)
    assert old.hit_rate == 0.5, "of what was looked up"
    again = Memory()
    restore(record_of("chat", after, [], 0.0, 60.0 * last), again, 0.0, 60.0 * last)
    assert list(again.minutes.kept) == kept, "means of what is alike"


def test_a_record_of_an_earlier_release_is_read_on() -> None:
    first, packed = packed_minutes([Minute(60.0 * n, 1.0 + n % 2, 1.0, 1.0, 0.5) for n in range(7_200)], MOST_MEANS)
    memory = Memory()
    restore(records_pb2.ScalingHistory(first_minute=first, minutes=packed), memory, 0.0, 60.0 * 7_200)
    assert len(memory.minutes.kept) == 7_200
    record = record_of("chat", memory, [], 0.0, 60.0 * 7_200)
    assert len(record.minutes) < 8 * 2_900 < 8 * len(memory.minutes.kept)


def test_a_clock_ahead_of_ours_puts_nothing_into_the_future() -> None:
    before, after = Memory(), Memory()
    before.want(Wanted(100.0, 3.0))
    before.counted(3, 100.0)
    before.minutes.restore([Minute(1_700_003_000.0, 1.0, 1.0, 1.0, 0.0)])
    restore(record_of("chat", before, [], 100.0, 1_700_003_600.0), after, now=50.0, wall=1_700_000_000.0)
    assert (after.changed_at, after.wanted[0].at, len(after.minutes.kept)) == (50.0, 50.0, 0)


def test_the_largest_record_is_one_that_the_registry_takes() -> None:
    memory = Memory()
    memory.minutes.restore(Minute(60.0 * n, 1.0, 1.0, 1.0, 0.5) for n in range(20_000))
    for number in range(9_000):
        memory.want(Wanted(float(number), 1.0))
    record = record_of("d" * 63, memory, [Start(1.0, True)] * 64, 9_000.0, 1.7e9)
    assert record.ByteSize() <= 64 * 1024


def test_steps_beyond_all_measure_are_not_learnt_from() -> None:
    steps = DecodeSteps()
    for sequences, step_s in ((1e308, 1.0), (4.0, 1e308), (float("nan"), 1.0), (0.0, 1.0), (1.0, float("inf"))):
        steps.add(sequences, step_s)
    assert steps.fit() is None
    steps.add(4.0, 0.02)
    assert steps.fit() == (0.01, 0.0025)
