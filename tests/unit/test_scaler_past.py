"""Minutes in columns."""

from __future__ import annotations

import pytest

from stoker.scaler.core.past import NOTHING, Past, summed
from stoker.scaler.core.signals import Minute

MINUTES = [Minute(60.0 * n, 1.0 * n, 10.0 * n, 5.0 * n, 0.5) for n in range(1, 6)]


def test_a_past_is_a_sequence_of_its_minutes() -> None:
    past = Past.of(MINUTES)
    assert (list(past), past[-1], len(past[1:3])) == (MINUTES, MINUTES[-1], 2)
    assert list(past[-2:]) == MINUTES[-2:]
    assert Past.of(past) is past
    assert (list(NOTHING), bool(NOTHING)) == ([], False)
    with pytest.raises(IndexError):
        past[5]


def test_a_past_goes_on_and_is_cut_where_minutes_began() -> None:
    past = Past.of(MINUTES)
    assert list(past.between(120.0, 240.0)) == MINUTES[1:3]
    assert list(past.between(121.0, 1e9).followed_by(MINUTES[0])) == [*MINUTES[2:], MINUTES[0]]
    assert list(NOTHING.between(0.0, 1.0).followed_by(MINUTES[0])) == MINUTES[:1]


def test_what_was_found_is_computed_once_and_for_some_questions_only() -> None:
    asked: list[int] = []

    def find(past: Past, number: int) -> int:
        asked.append(number)
        return number * len(past)

    past = Past.of(MINUTES)
    assert [past.once(find, 3), past.once(find, 3)] == [15, 15]
    assert asked == [3]
    for number in range(100):
        past.once(find, number)
    assert len(past._found) <= 16


def test_sums_count_hits_over_what_was_looked_up_and_only_the_same_minutes() -> None:
    others = [
        Minute(60.0 + 29.0, 1.0, 30.0, 1.0, 0.1),  # begun 29 s later: the first minute still
        Minute(150.0, 1.0, 30.0, 1.0, 0.1),  # half a minute from two: that of the later one
        Minute(240.0, 0.0, 0.0, 0.0, 0.9),
    ]
    joined = summed(Past.of(MINUTES), [Past.of(others), NOTHING])
    assert joined.at.tolist() == [60.0, 120.0, 180.0, 240.0, 300.0]
    assert joined.arrivals_per_s.tolist() == [2.0, 2.0, 4.0, 4.0, 5.0]
    assert joined[0].hit_rate == pytest.approx((0.5 * 10.0 + 0.1 * 30.0) / 40.0)
    assert joined[3].hit_rate == 0.5, "who looked nothing up has no say"
