"""Load from scrapes: unknown is not zero, and a restart is no negative rate."""

from __future__ import annotations

import pytest

from stoker.node_agent.core.load import Load, Meter, in_flight, measure
from stoker.node_agent.engine.protocol import EngineLoad, Histogram
from stoker.node_agent.wire import load_of


def scrape(prompt: float, cached: float, ttft: tuple[float, float], waiting: int = 0, running: int = 1) -> EngineLoad:
    return EngineLoad(
        running=running,
        waiting=waiting,
        kv_cache_usage=0.5,
        prompt_tokens=prompt,
        cached_prompt_tokens=cached,
        generation_tokens=0,
        ttft_seconds=Histogram(sum=ttft[0], count=ttft[1]),
    )


def test_what_the_engine_does_not_say_stays_unknown() -> None:
    _, load = measure(Meter(16, 100), EngineLoad(), 5.0)
    assert load == Load(at=5.0)
    assert in_flight(load) is None


def test_active_tokens_come_from_the_caches_size() -> None:
    _, load = measure(Meter(16, 100), EngineLoad(kv_cache_usage=0.25), 0.0)
    assert load.active_tokens == 400
    _, unknown = measure(Meter(None, None), EngineLoad(kv_cache_usage=0.25), 0.0)
    assert unknown.active_tokens is None


def test_an_empty_queue_is_zero_tokens_and_a_queue_of_unknown_prompts_is_unknown() -> None:
    meter, load = measure(Meter(16, 100), EngineLoad(running=0, waiting=0), 0.0)
    assert load.queued_prefill_tokens == 0
    _, load = measure(meter, EngineLoad(running=1, waiting=3), 0.5)
    assert load.queued_prefill_tokens is None


def test_the_queue_is_estimated_by_the_mean_uncached_prompt() -> None:
    meter, _ = measure(Meter(16, 100), scrape(0, 0, (0, 0)), 0.0)
    meter, _ = measure(meter, scrape(3000, 1000, (1.0, 2)), 1.0)
    _, load = measure(meter, scrape(3000, 1000, (1.0, 2), waiting=4), 1.5)
    assert load.queued_prefill_tokens == 4000


def test_the_rate_of_single_prefills_is_tokens_by_time_to_first_token() -> None:
    meter, _ = measure(Meter(16, 100), scrape(0, 0, (0, 0)), 0.0)
    _, load = measure(meter, scrape(2000, 500, (0.5, 1)), 10.0)
    assert load.prefill_tokens_per_s == pytest.approx(3000)


def test_the_rate_under_backlog_is_tokens_by_the_clock() -> None:
    meter, _ = measure(Meter(16, 100), scrape(0, 0, (0, 0), waiting=5), 0.0)
    for step in range(1, 60):
        meter, load = measure(meter, scrape(500 * step, 0, (step * 4.0, step), waiting=5), step * 0.5)
    assert load.prefill_tokens_per_s == pytest.approx(1000)


def test_a_restarted_engine_teaches_nothing_false() -> None:
    meter, _ = measure(Meter(16, 100), scrape(10_000, 0, (5.0, 5)), 0.0)
    meter, load = measure(meter, scrape(10, 0, (0.1, 1)), 1.0)
    assert load.prefill_tokens_per_s is None
    _, load = measure(meter, scrape(1010, 0, (1.1, 2)), 2.0)
    assert load.prefill_tokens_per_s == pytest.approx(1000)


def test_prefills_that_overlap_are_measured_by_the_clock() -> None:
    meter, _ = measure(Meter(16, 100), scrape(0, 0, (0, 0)), 0.0)
    for step in range(1, 40):  # four at a time, each 4 s from its start, 1,000 tokens a second in all
        meter, load = measure(meter, scrape(1000 * step, 0, (4.0 * step, step)), float(step))
    assert load.prefill_tokens_per_s == pytest.approx(1000)


def test_prompts_found_in_the_cache_teach_nothing_of_the_rate() -> None:
    meter, _ = measure(Meter(16, 100), scrape(0, 0, (0, 0)), 0.0)
    meter, load = measure(meter, scrape(3000, 0, (1.0, 1)), 1.0)
    assert load.prefill_tokens_per_s == pytest.approx(3000)
    for step in range(1, 40):
        meter, load = measure(meter, scrape(3000 + 3000 * step, 2990 * step, (1 + 0.05 * step, 1 + step)), 1.0 + step)
    assert load.prefill_tokens_per_s == pytest.approx(3000)


def test_idle_time_does_not_lower_the_rate() -> None:
    meter, _ = measure(Meter(16, 100), scrape(0, 0, (0, 0)), 0.0)
    meter, busy = measure(meter, scrape(1000, 0, (1.0, 1)), 1.0)
    for step in range(100):
        meter, idle = measure(meter, scrape(1000, 0, (1.0, 1), running=0), 2.0 + step)
    assert idle.prefill_tokens_per_s == busy.prefill_tokens_per_s


def test_times_and_counters_of_the_engine_are_told_as_they_are() -> None:
    times = Histogram(sum=1.5, count=3)
    engine = EngineLoad(
        itl_seconds=times, queue_seconds=times, prefill_seconds=times, cached_prompt_tokens=7.0, preemptions=2.0
    )
    _, load = measure(Meter(16, 100), engine, 0.0)
    assert (load.itl_sum_s, load.itl_count) == (1.5, 3)
    assert (load.queue_sum_s, load.queue_count) == (1.5, 3)
    assert (load.prefill_sum_s, load.prefill_count) == (1.5, 3)
    assert (load.cached_prompt_tokens, load.preemptions) == (7, 2)
    told = load_of("chat-0", 1, 1, load, (), relayed=0, now=0.0)
    assert (told.itl_sum_s, told.queue_count, told.prefill_count, told.preemptions) == (1.5, 3, 3, 2)
    assert not told.HasField("ttft_count"), "unknown is not zero"
