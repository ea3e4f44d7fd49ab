"""A round of a large fleet is cheap."""

from __future__ import annotations

from bench.scaler_round import BOUND_MS, case, milliseconds


def test_ten_thousand_replicas_of_two_hundred_deployments_are_decided_within_a_second() -> None:
    assert milliseconds(case(200, 10_000), rounds=1) < BOUND_MS
