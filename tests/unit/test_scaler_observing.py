"""Samples out of cumulative counters: nothing lost, nothing negative, and what is unknown stays unknown."""

from __future__ import annotations

import pytest

from stoker.scaler.core.counting import Meter, Reading
from stoker.scaler.core.observing import Asked, Observer, Report
from stoker.scaler.core.signals import Sample
from stoker.scaler.core.values import Replica, Standing

READY = Replica("chat-0", "chat", Standing.READY)


def asked(arrivals: float, *deployments: str, queued: float = 0.0, model: str = "chat", **counts: float) -> Asked:
    counted = {"arrivals": arrivals, "prompt_tokens": 100 * arrivals, **counts}
    return Asked(model, deployments or ("chat",), counted, queued, 3.0 if queued else 0.0)


def report(tokens: float, life: int = 1, **fields: float) -> Report:
    return Report(life, {"generation_tokens": tokens}, **fields)


def sample(observer: Observer, now: float, *replicas: Replica, of: str = "chat") -> Sample:
    return observer.samples([of], replicas or (READY,), now)[of].sample


# Counters


def test_a_meter_tells_what_grew_since_it_was_asked() -> None:
    meter = Meter()
    meter.read(Reading(10.0, 1, {"a": 100.0}))
    assert meter.grown() is None, "what was counted before is of unknown age"
    meter.read(Reading(11.0, 1, {"a": 103.0}))
    meter.read(Reading(12.0, 1, {"a": 104.0}))
    grown = meter.grown()
    assert grown is not None
    assert (grown.seconds, grown.counts) == (2.0, {"a": 4.0})
    assert meter.grown() is None


@pytest.mark.parametrize("again", [Reading(12.0, 2, {"a": 5.0}), Reading(12.0, 1, {"a": 5.0})])
def test_counters_that_begin_anew_never_show_less_than_nothing(again: Reading) -> None:
    meter = Meter()
    meter.read(Reading(10.0, 1, {"a": 100.0}))
    meter.read(again)
    assert meter.grown() is None
    meter.read(Reading(13.0, again.life, {"a": 7.0}))
    grown = meter.grown()
    assert grown is not None
    assert grown.counts == {"a": 2.0}


def test_what_was_lost_on_the_way_shows_in_the_next_reading() -> None:
    meter = Meter()
    for at, count in ((0.0, 0.0), (1.0, 10.0), (9.0, 90.0)):
        meter.read(Reading(at, 1, {"a": count}))
    meter.read(Reading(5.0, 1, {"a": 50.0}))  # late
    grown = meter.grown()
    assert grown is not None
    assert grown.rate("a") == 10.0
    assert grown.rate("b") is None


# Routers


def test_demand_of_all_routers_and_models_is_one() -> None:
    observer = Observer()
    for at in (0.0, 2.0):
        observer.demand("r1", 1, [asked(10 + 4 * at), asked(at, model="chat-lora")], at)
        observer.demand("r2", 1, [asked(3 * at)], at)
        seen = sample(observer, at)
    assert (seen.arrivals_per_s, seen.prefill_tokens_per_s) == (8.0, 800.0)
    assert (seen.queued, seen.ready) == (0.0, 1)


def test_nothing_new_of_a_model_means_that_nothing_came() -> None:
    observer = Observer()
    observer.demand("r1", 1, [asked(10)], 0.0)
    observer.demand("r1", 1, [], 2.0)
    assert sample(observer, 2.0).arrivals_per_s == 0.0


def test_without_any_router_demand_is_unknown() -> None:
    seen = sample(Observer(), 1.0)
    assert (seen.arrivals_per_s, seen.queued, seen.queue_s, seen.within_slo) == (None, None, None, None)


def test_a_router_that_falls_silent_makes_demand_unknown_until_it_has_surely_ended() -> None:
    observer = Observer()
    known = []
    for at in range(0, 60, 2):
        observer.demand("r1", 1, [asked(5.0 * at)], float(at))
        if at <= 10:
            observer.demand("r2", 1, [asked(7.0 * at, queued=2)], float(at))
        seen = sample(observer, float(at))
        known.append((at, seen.arrivals_per_s, seen.queued))
    assert known[5] == (10, 12.0, 2.0)
    assert [(at, rate) for at, rate, _ in known if 12 <= at <= 40] == [(at, None) for at in range(12, 41, 2)]
    assert [queued for at, _, queued in known if 12 <= at <= 40] == [2.0, 2.0, *[None] * 13]
    assert known[-1] == (58, 5.0, 0.0)


def test_a_router_that_has_gone_counts_no_more_after_a_moment_and_one_that_moved_goes_on() -> None:
    observer = Observer()
    rates = []
    for at in range(0, 20, 2):
        observer.demand("r1", 1, [asked(5.0 * at)], float(at))
        if at not in (6, 8):
            observer.demand("r2", 1, [asked(7.0 * at)], float(at))
        if at == 5:
            observer.gone("r2", 5.0)
        rates.append(sample(observer, float(at)).arrivals_per_s)
    assert rates == [None, 12, 12, None, None, 12, 12, 12, 12, 12]
    observer.gone("r2", 19.0)
    observer.demand("r1", 1, [asked(5.0 * 26)], 26.0)
    assert sample(observer, 26.0).arrivals_per_s == 5.0


def test_a_router_that_began_anew_shows_no_burst() -> None:
    observer = Observer()
    observer.demand("r1", 1, [asked(1_000)], 0.0)
    observer.demand("r1", 2, [asked(900)], 2.0)
    assert sample(observer, 2.0).arrivals_per_s is None
    observer.demand("r1", 2, [asked(902)], 4.0)
    assert sample(observer, 4.0).arrivals_per_s == 1.0


def test_deployments_of_one_model_share_its_demand_by_what_serves() -> None:
    observer = Observer()
    replicas = [Replica(f"a-{n}", "a", Standing.READY) for n in range(3)] + [Replica("b-0", "b", Standing.READY)]
    for at in (0.0, 2.0):
        observer.demand("r1", 1, [asked(4 * at, "a", "b", queued=8)], at)
        seen = observer.samples(["a", "b", "c"], replicas, at)
    assert [seen[name].sample.arrivals_per_s for name in "abc"] == [3.0, 1.0, None]
    assert [seen[name].sample.queued for name in "abc"] == [6.0, 2.0, None]
    observer.demand("r1", 1, [asked(12, "a", "b", queued=8)], 4.0)
    none = observer.samples(["a", "b"], [], 4.0)
    assert [none[name].sample.queued for name in "ab"] == [4.0, 4.0], "with nothing there, each could start"


def test_what_answers_were_like_is_told_of_those_that_ended() -> None:
    observer = Observer()
    observer.demand("r1", 1, [asked(0, judged=10, within_slo=9, ttft_s=5.0, ttfts=10)], 0.0)
    observer.demand("r1", 1, [asked(0, judged=14, within_slo=12, ttft_s=7.0, ttfts=14)], 2.0)
    seen = sample(observer, 2.0)
    assert (seen.within_slo, seen.ttft_s, seen.itl_s) == (0.75, 0.5, None)


def test_how_much_prompts_differ_follows_from_their_squares() -> None:
    observer = Observer()
    observer.demand("r1", 1, [asked(0, prompt_tokens_squared=0.0)], 0.0)
    assert sample(observer, 0.0).prompt_scv is None
    # Two prompts of 50 tokens and two of 150: a mean of 100, a deviation of 50.
    observer.demand("r1", 1, [asked(4, prompt_tokens_squared=2 * 50.0**2 + 2 * 150.0**2)], 2.0)
    assert sample(observer, 2.0).prompt_scv == pytest.approx(0.25)
    observer.demand("r1", 1, [asked(8, prompt_tokens_squared=50_000.0)], 4.0)
    assert sample(observer, 4.0).prompt_scv is None, "this router counts no squares"


# Replicas


def test_replicas_are_summed_while_they_are_ready() -> None:
    observer = Observer()
    replicas = [
        READY,
        Replica("chat-1", "chat", Standing.READY),
        Replica("chat-2", "chat", Standing.STARTING),
        Replica("chat-3", "chat", Standing.FAILING),
        Replica("chat-4", "chat", Standing.READY, leaving=True),
    ]
    for at in (0.0, 2.0):
        for replica in replicas:
            observer.load(replica.id, report(50 * at, running=2, waiting=1, kv_usage=0.5), at)
        seen = sample(observer, at, *replicas)
    assert (seen.ready, seen.starting, seen.running, seen.waiting, seen.kv_usage) == (2, 1, 4, 2, 0.5)
    assert seen.decode_tokens_per_s == 100.0


def test_an_engine_that_restarts_takes_nothing_away() -> None:
    observer = Observer()
    observer.load("chat-0", report(1_000), 0.0)
    observer.load("chat-0", report(10, life=2), 2.0)
    assert sample(observer, 2.0).decode_tokens_per_s is None
    observer.load("chat-0", report(30, life=2), 4.0)
    assert sample(observer, 4.0).decode_tokens_per_s == 10.0


@pytest.mark.parametrize(("silent", "running"), [(1, 20.0), (2, 20.0), (3, None)])
def test_nearly_all_stand_for_all_but_no_fewer(silent: int, running: float | None) -> None:
    observer = Observer()
    replicas = [Replica(f"chat-{n}", "chat", Standing.READY) for n in range(10)]
    for replica in replicas:
        observer.load(replica.id, report(0, running=2), 0.0)
    for replica in replicas[silent:]:
        observer.load(replica.id, report(0, running=2), 10.0)
    assert sample(observer, 10.0, *replicas).running == running


def test_hits_are_those_of_all_prompts_together() -> None:
    observer = Observer()
    for at, looked_up, found in ((0.0, 0, 0), (2.0, 1_000, 750)):
        observer.load("chat-0", Report(1, {"looked_up": looked_up, "found": found}), at)
        seen = sample(observer, at)
    assert seen.hit_rate == 0.75
    observer.load("chat-0", Report(1, {"looked_up": 1_000, "found": 750}), 4.0)
    assert sample(observer, 4.0).hit_rate is None, "no prompt, no rate"


def test_what_is_gone_is_forgotten() -> None:
    observer = Observer()
    observer.load("chat-0", report(0, running=2), 0.0)
    observer.forget("chat-0")
    assert sample(observer, 1.0).running is None
