"""Times in logarithmic buckets: where a value goes, and what can be read back."""

from __future__ import annotations

import random

import pytest

from stoker.common import log_buckets


def counted(values: list[float]) -> list[int]:
    counts = [0] * log_buckets.BUCKETS
    for value in values:
        counts[log_buckets.bucket(value)] += 1
    while counts and not counts[-1]:
        counts.pop()
    return counts


def test_a_bucket_holds_its_upper_end() -> None:
    assert [log_buckets.bucket(value) for value in (0.0, 0.001, 0.0010001, 0.002, 1e9)] == [0, 0, 1, 4, 80]
    assert log_buckets.BUCKETS == 81


@pytest.mark.parametrize("seed", range(5))
def test_shares_and_quantiles_are_near_the_truth(seed: int) -> None:
    rng = random.Random(seed)
    values = [rng.lognormvariate(-2.0, 1.0) for _ in range(20_000)]
    counts = counted(values)
    for limit in (0.05, 0.2, 1.0, 3.0):
        truth = sum(value <= limit for value in values) / len(values)
        assert log_buckets.share_within(counts, limit) == pytest.approx(truth, abs=0.01), f"seed {seed}"
    for share in (0.5, 0.9, 0.99):
        truth = sorted(values)[int(share * len(values))]
        assert log_buckets.quantile(counts, share) == pytest.approx(truth, rel=0.05), f"seed {seed}"


def test_nothing_counted_is_unknown() -> None:
    assert log_buckets.share_within([], 1.0) is None
    assert log_buckets.share_within([0, 0], 1.0) is None
    assert log_buckets.quantile([], 0.5) is None


def test_what_lies_beyond_the_last_bound_is_within_no_limit() -> None:
    counts = counted([0.5, 5000.0])
    assert log_buckets.share_within(counts, 2000.0) == 0.5
    assert log_buckets.share_within(counts, 10.0) == 0.5
    assert log_buckets.quantile(counts, 1.0) == log_buckets.BOUNDS_S[-1]
    assert log_buckets.share_within(counted([0.5]), 2000.0) == 1.0


def test_the_difference_of_two_readings_is_what_came_between() -> None:
    assert log_buckets.difference([1, 5, 2], [1, 3]) == [0, 2, 2]
    assert log_buckets.difference([2], [5]) == [2], "counted anew"
    assert log_buckets.difference([2], [0, 1]) == [2], "counted anew"
    assert log_buckets.difference([3, 1], []) == [3, 1]
