"""Forecasts of a load from its own past."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import pytest

from stoker.scaler.core.forecasting import Forecast, highest
from stoker.scaler.core.signals import Minute

DAY = 1_440
Load = Callable[[int], float]


def forecast(load: Load, until: int, *, ahead_s: float = 600.0, noise: float = 0.03, since: int = 0) -> Forecast:
    rng = Random(1)
    minutes = [Minute(60.0 * n, load(n) * (1 + rng.gauss(0, noise)), 0.0, 0.0, 0.0) for n in range(since, until)]
    return highest(
        minutes,
        lambda minute: minute.arrivals_per_s,
        60.0 * until + 20.0,
        load(until - 1),
        ahead_s,
        season_s=60.0 * DAY,
        quantile=0.9,
    )


def wave(minute: int) -> float:
    return 6.0 - 4.0 * math.cos(2 * math.pi * minute / DAY)


def step(minute: int) -> float:
    return 20.0 if 540 <= minute % DAY < 600 else 5.0


def ramp(minute: int) -> float:
    return 5.0 + 0.5 * max(0, minute - 60)


@pytest.mark.parametrize("days", [1, 2, 6])
def test_a_day_like_those_before_is_known_ahead(days: int) -> None:
    found = forecast(wave, days * DAY + 400)
    assert found.method == "season"
    assert found.expected == pytest.approx(max(wave(days * DAY + 400 + n) for n in range(11)), rel=0.15)


@pytest.mark.parametrize(("minute", "expected"), [(500, 5.0), (531, 20.0), (545, 20.0), (605, 5.0)])
def test_a_step_at_an_hour_is_seen_one_start_before_it(minute: int, expected: float) -> None:
    assert forecast(step, 3 * DAY + minute).expected == pytest.approx(expected, rel=0.3)


def test_a_season_that_ended_is_believed_for_half_a_week() -> None:
    def ended(minute: int) -> float:
        return step(minute) if minute < 3 * DAY else 5.0

    assert forecast(ended, 3 * DAY + 531).expected > 15.0
    assert forecast(ended, 4 * DAY + 531).expected > 15.0
    assert forecast(ended, 7 * DAY + 531).expected < 10.0


def test_a_ramp_goes_on_damped_and_bounded() -> None:
    for minute in (80, 120):
        found = forecast(ramp, minute, ahead_s=300.0)
        assert ramp(minute - 1) < found.expected < 1.6 * ramp(minute + 5)
    assert forecast(ramp, 80, ahead_s=300.0).method == "trend"
    assert forecast(ramp, 120, ahead_s=6_000.0).expected <= 2.5 * ramp(119)


def test_what_was_missed_lately_is_added_but_nothing_unseen() -> None:
    def bursts(minute: int) -> float:
        return 20.0 if minute % 10 == 0 else 4.0

    found = forecast(bursts, 200, ahead_s=120.0)
    assert 6.0 < found.expected <= 1.25 * 20.0 * 1.1


@pytest.mark.parametrize("until", range(200, 210))
def test_a_load_that_comes_and_goes_is_expected_at_the_quantile_of_what_came(until: int) -> None:
    """Whether it is high or low just now."""

    def restless(minute: int) -> float:
        return 10.0 * math.exp(0.8 * Random(minute).gauss(0.0, 1.0))

    found = forecast(restless, until, ahead_s=30.0)
    came = sorted(restless(minute) for minute in range(until - 60, until))
    assert found.method == "level"
    assert found.expected == pytest.approx(came[54], rel=0.3)


def test_a_level_is_left_for_a_step_that_stays() -> None:
    found = forecast(lambda minute: 20.0 if minute >= 150 else 4.0 + 2.0 * (minute % 2), 175, ahead_s=60.0)
    assert found.expected == pytest.approx(20.0, rel=0.15)


@pytest.mark.parametrize("until", [0, 1, 5, 15])
def test_little_history_says_what_is(until: int) -> None:
    assert forecast(lambda _: 7.0, until).expected == 7.0


def test_history_that_ended_long_ago_says_nothing() -> None:
    minutes = [Minute(60.0 * n, 50.0, 0.0, 0.0, 0.0) for n in range(100)]
    late = highest(minutes, lambda m: m.arrivals_per_s, 60.0 * 200, 3.0, 60.0, season_s=86_400.0, quantile=0.9)
    assert late == Forecast(3.0)


def test_gaps_are_filled_while_they_are_few() -> None:
    rng = Random(2)
    minutes = [Minute(60.0 * n, wave(n), 0.0, 0.0, 0.0) for n in range(2 * DAY + 400) if rng.random() > 0.05]
    found = highest(
        minutes, lambda m: m.arrivals_per_s, minutes[-1].at + 60.0, 7.0, 600.0, season_s=86_400.0, quantile=0.9
    )
    assert found.method == "season"
    sparse = minutes[::3]
    assert highest(
        sparse, lambda m: m.arrivals_per_s, sparse[-1].at + 60.0, 7.0, 600.0, season_s=86_400.0, quantile=0.9
    ) == Forecast(7.0)
