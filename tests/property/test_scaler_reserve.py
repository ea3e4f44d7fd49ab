"""What is kept in reserve: nothing where nothing jumped; more, the longer starts take and the higher loads jump."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.scaler.core.past import Past, Series
from stoker.scaler.core.reserve import MOST, Reserve, reserve
from stoker.scaler.core.signals import Minute

STARTS_S = st.floats(1.0, 3_600.0)
LOADS = st.lists(st.floats(0.0, 1e6), max_size=200)


@dataclass(frozen=True)
class Arrivals:
    def __call__(self, past: Past) -> Series:
        return past.arrivals_per_s


def kept(
    loads: Sequence[float],
    startup_s: float,
    *,
    prior: float = 0.0,
    settle_s: float = 300.0,
    season_s: float = 86_400.0,
    allowed: float = 0.025,
) -> Reserve:
    minutes = [Minute(60.0 * place, load, 0.0, 0.0, 0.0) for place, load in enumerate(loads)]
    return reserve(minutes, Arrivals(), startup_s, settle_s=settle_s, season_s=season_s, allowed=allowed, prior=prior)


@given(LOADS, STARTS_S, st.floats(0.0, 1e6))
def test_a_load_that_never_grew_has_no_reserve(loads: list[float], startup_s: float, now: float) -> None:
    assert kept(sorted(loads, reverse=True), startup_s).of(now) == now


@given(st.floats(0.01, 1e6), STARTS_S, st.floats(0.0, 5.0))
def test_what_is_made_up_fades_where_nothing_is_seen(load: float, startup_s: float, prior: float) -> None:
    """Within `prior` times one over the allowed share of starts, as long as a day is enough for that."""
    past = [kept([load] * minutes, startup_s, prior=prior).growth for minutes in (0, 60, 360, 1_440)]
    assert past == sorted(past, reverse=True)
    if prior * startup_s / 60.0 <= 0.025 * 1_440:
        assert past[-1] == 0.0


@given(LOADS, STARTS_S, STARTS_S, st.floats(0.0, 5.0))
def test_the_longer_a_start_takes_the_more_is_kept(
    loads: list[float], one_s: float, other_s: float, prior: float
) -> None:
    shorter, longer = sorted((one_s, other_s))
    before, after = kept(loads, shorter, prior=prior), kept(loads, longer, prior=prior)
    assert after.growth >= before.growth
    now = loads[-1] if loads else 1.0
    assert after.of(now) >= before.of(now)


@given(
    st.lists(st.booleans(), min_size=2, max_size=200),
    st.floats(1.0, 4.0),
    st.floats(1.0, 4.0),
    STARTS_S,
    st.sampled_from([0.0, 120.0, 600.0]),
)
def test_the_higher_the_jumps_the_more_is_kept(
    jumps: list[bool], one: float, other: float, startup_s: float, settle_s: float
) -> None:
    """Ratios of jumps that are as frequent for both: `allowed` counts requests, of which higher ones have more."""
    low, high = sorted((one, other))
    less, more = (
        kept([height if jump else 1.0 for jump in jumps], startup_s, settle_s=settle_s) for height in (low, high)
    )
    assert more.growth >= less.growth - 1e-3


@given(LOADS, STARTS_S, st.floats(0.0, 100.0), st.floats(0.000_1, 0.5), st.floats(0.0, 1e6))
def test_it_is_bounded(loads: list[float], startup_s: float, prior: float, allowed: float, now: float) -> None:
    found = kept(loads, startup_s, prior=prior, allowed=allowed)
    assert 0.0 <= found.growth <= MOST
    assert 0.0 <= found.missed <= allowed * (1.0 + 1e-9)
    assert now <= found.of(now) <= now * (1.0 + MOST)


@pytest.mark.parametrize(("startup_s", "growth"), [(30.0, 0.0), (90.0, 0.44), (600.0, 1.71)])
def test_before_anything_was_seen_a_start_that_takes_long_has_a_reserve(startup_s: float, growth: float) -> None:
    assert kept([], startup_s, prior=1.0).growth == pytest.approx(growth, abs=0.01)


@pytest.mark.parametrize(("every", "growth"), [(10, 1.0), (300, 0.0)])
def test_what_jumps_often_enough_to_be_late_is_waited_for(every: int, growth: float) -> None:
    """To twice the load for two minutes; a start takes one. Seldom ones are what the allowed share is for."""
    loads = [2.0 if minute % every >= every - 2 else 1.0 for minute in range(600)]
    assert kept(loads, 40.0, settle_s=0.0).growth == pytest.approx(growth, abs=0.01)


def test_in_the_midst_of_a_jump_none_higher_is_expected() -> None:
    loads = [4.0 if minute % 20 >= 18 else 1.0 for minute in range(600)]
    found = kept(loads, 40.0)
    assert found.of(1.0) == pytest.approx(4.0, abs=0.01)
    assert found.of(4.0) == 4.0


def test_nor_where_the_past_is_short_beyond_what_jumps_that_nobody_saw_may_bring() -> None:
    loads = [4.0 if minute % 10 >= 8 else 1.0 for minute in range(60)]
    found = kept(loads, 90.0, prior=1.0)
    assert found.of(1.0) == pytest.approx(4.0, abs=0.01)
    unseen = kept([1.0] * 60, 90.0, prior=1.0).growth
    assert 4.0 <= found.of(4.0) <= 4.0 * (1.0 + unseen) + 0.01


@pytest.mark.parametrize(("season_s", "growth"), [(7_200.0, 0.0), (86_400.0, 3.0)])
def test_what_comes_each_season_is_foreseen(season_s: float, growth: float) -> None:
    loads = [4.0 if 60 <= minute % 120 < 90 else 1.0 for minute in range(120 + 1_440)]
    assert kept(loads, 600.0, season_s=season_s).growth == pytest.approx(growth, abs=0.01)
