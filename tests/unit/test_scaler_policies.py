"""What each kind of policy needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stoker.scaler.core import policies
from stoker.scaler.core.model import Demand, Model
from stoker.scaler.core.policy import Concurrency, Forecast, Kind, Policy, Saturation, Slo
from stoker.scaler.core.signals import Capacity, History, Minute, Sample, Startup, Wanted
from stoker.scaler.core.values import Need, Reason

TICK_S = 2.0
CAPACITY = Capacity(prefill_tokens_per_s=10_000.0, step_s=0.02, sequence_s=0.0005, kv_tokens=500_000.0, max_seqs=256)


def samples(*stretches: tuple[float, Sample], end: float = 0.0) -> list[Sample]:
    """Each stretch of so many seconds repeats its sample; the last one ends at `end`."""
    made: list[Sample] = []
    at = end - sum(seconds for seconds, _ in stretches)
    for seconds, sample in stretches:
        for _ in range(round(seconds / TICK_S)):
            at += TICK_S
            made.append(replace(sample, at=at))
    return made


def in_flight(requests: float, ready: int) -> Sample:
    return Sample(0.0, ready=ready, running=requests, waiting=0.0, queued=0.0)


def concurrency(*stretches: tuple[float, Sample], wanted: list[Wanted] | None = None, **settings: Any) -> Need:
    asked = replace(Concurrency(target=10.0, utilisation=1.0), **settings)
    history = History(samples(*stretches), wanted=wanted or ())
    return policies.need(Policy(kind=Kind.CONCURRENCY, concurrency=asked), history, 0.0)


def said(need: Need) -> tuple[float | None, Reason]:
    return (None if need.replicas is None else round(need.replicas, 6)), need.reason


def test_the_stable_window_is_an_average_over_its_length() -> None:
    need = concurrency((100.0, in_flight(70.0, 5)), (30.0, in_flight(10.0, 5)), (30.0, in_flight(30.0, 5)))
    assert said(need) == (2.0, Reason.CONCURRENCY)


def test_only_part_of_the_target_is_used() -> None:
    assert concurrency((60.0, in_flight(28.0, 5)), utilisation=0.7).replicas == pytest.approx(4.0)


def test_a_weighted_average_follows_sooner() -> None:
    story = ((54.0, in_flight(10.0, 3)), (6.0, in_flight(25.0, 3)))
    plain, weighted = (concurrency(*story, weighted=weighted).replicas for weighted in (False, True))
    assert plain is not None
    assert weighted is not None
    assert plain < weighted <= 2.5


def test_panic_begins_when_the_short_window_asks_for_twice_what_is_ready() -> None:
    calm = concurrency((54.0, in_flight(20.0, 3)), (6.0, in_flight(50.0, 3)))
    assert calm.reason == Reason.CONCURRENCY
    panic = concurrency((54.0, in_flight(20.0, 3)), (6.0, in_flight(60.0, 3)))
    assert said(panic) == (6.0, Reason.PANIC)


def test_panic_lasts_a_stable_window_after_its_last_breach_and_takes_nothing_back() -> None:
    burst = (6.0, in_flight(60.0, 2))
    wanted = [Wanted(-50.0, 6.0)]
    panic = concurrency((60.0, in_flight(20.0, 2)), burst, (54.0, in_flight(10.0, 6)), wanted=wanted)
    assert said(panic) == (6.0, Reason.PANIC)
    calm = concurrency((60.0, in_flight(20.0, 2)), burst, (64.0, in_flight(10.0, 6)), wanted=wanted)
    assert said(calm) == (1.0, Reason.CONCURRENCY)


def test_what_was_wanted_before_a_panic_is_not_kept_by_it() -> None:
    wanted = [Wanted(-90.0, 20.0), Wanted(-2.0, 6.0)]
    assert concurrency(
        (54.0, in_flight(20.0, 3)), (6.0, in_flight(60.0, 3)), wanted=wanted
    ).replicas == pytest.approx(6)


def test_requests_that_nobody_counted_are_not_none() -> None:
    unknown = replace(in_flight(20.0, 2), queued=None)
    assert concurrency((60.0, unknown)).reason == Reason.UNKNOWN
    assert concurrency((56.0, in_flight(20.0, 2)), (4.0, unknown)).replicas == pytest.approx(2.0)
    assert concurrency((54.0, in_flight(20.0, 2)), (6.0, unknown)).reason == Reason.UNKNOWN
    assert concurrency((60.0, Sample(0.0, ready=0, queued=3.0))).replicas == pytest.approx(0.3)


def saturation(kv_usage: float, waiting: float = 0.0, hit_rate: float | None = 0.0, ready: int = 4) -> Need:
    sample = Sample(0.0, ready=ready, waiting=waiting, queued=0.0, kv_usage=kv_usage, hit_rate=hit_rate)
    policy = Policy(kind=Kind.SATURATION, saturation=Saturation(spare_kv=0.2, spare_queue=1.0))
    return policies.need(policy, History(samples((30.0, sample))), 0.0)


def test_saturation_keeps_the_asked_for_kv_free() -> None:
    assert saturation(0.8).replicas == pytest.approx(4.0)
    assert saturation(0.96).replicas == pytest.approx(4.8)
    assert saturation(0.4).replicas == pytest.approx(2.0)


def test_a_queue_saturates_too_but_at_most_doubles() -> None:
    assert saturation(0.1, waiting=6.0).replicas == pytest.approx(6.0)
    assert saturation(0.1, waiting=90.0).replicas == pytest.approx(8.0)


def test_fewer_replicas_cache_less_and_so_fewer_go() -> None:
    # m = x / (1 - h + x * h / n): with x = 2, h = 0.9, n = 4 it is 2 / (0.1 + 0.45)
    assert saturation(0.4, hit_rate=0.9).replicas == pytest.approx(2.0 / 0.55)
    assert saturation(0.4, hit_rate=None).replicas == pytest.approx(4.0)
    assert saturation(0.0, hit_rate=None).replicas == 0.0


def demand(rate: float, *, prompt: float = 2_000.0, output: float = 100.0) -> Demand:
    return Demand(rate, rate * prompt, rate * output, kv_tokens=prompt + output)


def test_the_model_needs_more_than_the_bare_load_and_less_so_in_large_pools() -> None:
    spare = []
    for rate in (2.0, 50.0, 500.0):
        estimate = Model(CAPACITY, Slo(ttft_s=1.0), demand(rate, output=0.0)).estimate()
        busy = rate * 2_000.0 / 10_000.0
        assert estimate.replicas > busy
        assert estimate.late <= 0.05
        spare.append(estimate.prefill / busy)
    assert spare[0] > spare[1] > spare[2]


def test_an_itl_bound_is_kept_beside_what_prefill_takes() -> None:
    strict, loose = (Model(CAPACITY, Slo(ttft_s=5.0, itl_s=itl), demand(20.0)).estimate() for itl in (0.03, 0.2))
    assert strict.decode > loose.decode
    count, load = strict.decode, 20.0 * 2_000.0 / 10_000.0
    sequences = 2_000.0 * 0.02 / (count - load - 2_000.0 * 0.0005)
    assert (0.02 + sequences * 0.0005) / (1.0 - load / count) <= 0.03


def test_sequences_must_fit_into_batch_and_cache() -> None:
    slo, asked = Slo(ttft_s=5.0, itl_s=1.0), demand(5.0, output=1_000.0)
    usual = Model(CAPACITY, slo, asked).estimate().decode
    assert Model(replace(CAPACITY, max_seqs=10), slo, asked).estimate().decode > usual
    assert Model(replace(CAPACITY, kv_tokens=30_000.0), slo, asked).estimate().decode > usual


def test_what_no_pool_can_keep_does_not_ask_for_all_there_is() -> None:
    slow = Model(CAPACITY, Slo(ttft_s=0.1, itl_s=0.01), demand(5.0)).estimate()  # prefill alone takes 0.2 s
    assert slow.replicas < 12.0


def test_nothing_asked_needs_nothing_measured() -> None:
    assert Model(Capacity(), Slo(), Demand(0.0, 0.0, 0.0)).unmeasured() == []
    assert Model(Capacity(), Slo(), Demand(0.0, 0.0, 0.0)).estimate().replicas == 0.0
    assert set(Model(Capacity(), Slo(), demand(1.0)).unmeasured()) == {"prefill_tokens_per_s", "step_s", "sequence_s"}


def asked(rate: float, *, ready: int = 3, within_slo: float | None = None) -> Sample:
    return Sample(
        0.0,
        ready=ready,
        running=rate,
        waiting=0.0,
        queued=0.0,
        arrivals_per_s=rate,
        prefill_tokens_per_s=2_000.0 * rate,
        decode_tokens_per_s=100.0 * rate,
        hit_rate=0.0,
        within_slo=within_slo,
    )


SLO = Policy(kind=Kind.SLO, slo=Slo(ttft_s=1.0, itl_s=0.5, headroom=0.0))


def slo(*stretches: tuple[float, Sample], correction: float = 1.0, startup: Startup | None = None) -> Need:
    history = History(
        samples(*stretches),
        wanted=[Wanted(-TICK_S, 1.0, correction)],
        capacity=CAPACITY,
        startup=startup or Startup(),
    )
    return policies.need(SLO, history, 0.0)


def of(need: Need) -> float:
    assert need.replicas is not None
    return need.replicas


def test_a_rise_is_believed_before_the_window_is_full() -> None:
    steady, risen = slo((60.0, asked(5.0))), slo((50.0, asked(5.0)), (10.0, asked(15.0)))
    assert risen.numbers["arrivals_per_s"] == pytest.approx(15.0, rel=0.25)
    assert of(risen) > 1.5 * of(steady)


def test_what_waits_and_will_wait_until_a_start_is_done_is_planned_for() -> None:
    burning = asked(20.0, ready=2)
    assert of(slo((60.0, burning), startup=Startup(120.0, 150.0))) > of(slo((60.0, burning))) + 1.0
    waiting = replace(asked(5.0), queued=60.0)
    assert of(slo((60.0, waiting))) > of(slo((60.0, asked(5.0))))


def test_the_model_learns_slowly_and_within_bounds() -> None:
    enough = int(of(slo((60.0, asked(5.0, ready=5))))) + 1
    missed = slo((60.0, asked(5.0, ready=enough, within_slo=0.5)))
    assert 1.0 < missed.correction < 1.01
    assert slo((60.0, asked(5.0, ready=20, within_slo=0.5)), correction=1.6).correction == 1.6
    kept = slo((60.0, asked(10.0, ready=2, within_slo=1.0)))
    assert 0.99 < kept.correction < 1.0
    assert slo((60.0, asked(10.0, ready=2, within_slo=1.0)), correction=0.7).correction == 0.7


def test_too_few_answers_and_a_fleet_that_changes_teach_nothing() -> None:
    assert slo((60.0, asked(0.1, ready=5, within_slo=0.0))).correction == 1.0
    changed = slo((50.0, asked(5.0, ready=4, within_slo=0.0)), (10.0, asked(5.0, ready=5, within_slo=0.0)))
    assert changed.correction == 1.0


def test_signals_that_the_model_needs_are_named_when_missing() -> None:
    need = slo((60.0, replace(asked(5.0), arrivals_per_s=None)))
    assert (need.replicas, need.reason) == (None, Reason.UNKNOWN)
    assert need.numbers["arrivals_per_s"] is None
    assert slo((60.0, replace(asked(5.0), hit_rate=None))).numbers == {"hit_rate": None}
    unmeasured = policies.need(SLO, History(samples((60.0, asked(5.0)))), 0.0)
    assert "prefill_tokens_per_s" in unmeasured.numbers


def test_no_sample_and_an_old_one_are_told_apart() -> None:
    assert policies.need(SLO, History(), 0.0).reason == Reason.UNKNOWN
    assert policies.need(SLO, History(samples((60.0, asked(5.0)))), 100.0).reason == Reason.STALE


def test_the_forecast_is_never_below_the_present_and_says_what_it_expects() -> None:
    minutes = [Minute(60.0 * n, 5.0 + 0.2 * n, 2_000.0 * (5.0 + 0.2 * n), 0.0, 0.0) for n in range(60)]
    history = History(
        samples((60.0, asked(17.0))), minutes, capacity=CAPACITY, startup=Startup(300.0, 300.0), now_wall=3_600.0
    )
    now = policies.need(replace(SLO, kind=Kind.SLO), history, 0.0)
    then = policies.need(replace(SLO, kind=Kind.FORECAST), history, 0.0)
    assert then.reason == Reason.FORECAST
    assert of(then) > of(now)
    fallen = replace(history, minutes=[replace(m, arrivals_per_s=1.0, prefill_tokens_per_s=2_000.0) for m in minutes])
    evident = replace(SLO, kind=Kind.FORECAST, forecast=Forecast(prior=0.0))
    assert of(policies.need(evident, fallen, 0.0)) == pytest.approx(of(now), rel=0.3)
    assert of(policies.need(replace(SLO, kind=Kind.FORECAST), fallen, 0.0)) > 1.2 * of(now)


def test_the_first_replica_after_none_is_sized_by_the_hit_rate_of_earlier() -> None:
    held = replace(asked(5.0, ready=0), running=None, waiting=None, hit_rate=None, decode_tokens_per_s=None)
    asleep = History(samples((20.0, held)), capacity=CAPACITY)
    assert policies.need(SLO, asleep, 0.0).replicas is None
    assert of(policies.need(SLO, replace(asleep, minutes=[Minute(0.0, 1.0, 2_000.0, 100.0, 0.5)]), 0.0)) > 0.0


@pytest.mark.parametrize("kind", [Kind.SLO, Kind.FORECAST])
@pytest.mark.parametrize("arrivals", [2.2e-309, 1e300])
def test_a_demand_beyond_all_measure_holds_one_count_and_ends_no_round(kind: Kind, arrivals: float) -> None:
    samples = [
        Sample(
            at,
            ready=1,
            running=0.0,
            waiting=0.0,
            queued=0.0,
            arrivals_per_s=arrivals,
            prefill_tokens_per_s=arrivals,
            decode_tokens_per_s=1.0,
            hit_rate=0.0,
        )
        for at in (98.0, 100.0)
    ]
    need = policies.need(Policy(kind), History(samples, capacity=Capacity(10_000.0, 0.02, 0.0)), 100.0)
    assert need.replicas is None or 0.0 <= need.replicas < float("inf")
    if arrivals < 1.0:
        assert (need.replicas, need.reason) == (None, Reason.UNKNOWN)
