"""Replicas that die in a simulation: no request is lost, the fleet is whole again, and all follows from the seed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest

from stoker.simulate.figures import Run
from stoker.simulate.loads import arrivals
from stoker.simulate.policies import parsed
from stoker.simulate.run import simulate
from stoker.simulate.settings import Settings, Starting

SETTINGS = Settings(starting=Starting(30.0), initial=4, most=10)
STEADY = partial(arrivals, lambda at: 4.0, 4.0, 600.0, 3)


@cache
def run(policy: str, **changed: Any) -> Run:
    settings = replace(SETTINGS, **changed)
    return simulate(STEADY, parsed(policy, settings.objective), settings)


@pytest.mark.parametrize("policy", ["fixed:4", "slo"])
def test_every_request_is_answered_whoever_dies(policy: str) -> None:
    dying, whole = run(policy, mtbf_s=400.0), run(policy)
    assert dying.figures.deaths >= 3
    assert whole.figures.deaths == 0
    assert dying.figures.requests == whole.figures.requests == len(list(STEADY()))
    assert dying.figures.refused == 0
    assert sum(bin_.within for bin_ in dying.bins) < sum(bin_.within for bin_ in whole.bins)
    assert dying.figures.hit_rate is not None
    assert whole.figures.hit_rate is not None
    assert dying.figures.hit_rate < whole.figures.hit_rate, "their caches are gone"
    assert dying == run.__wrapped__(policy, mtbf_s=400.0)
    assert dying.figures != run(policy, mtbf_s=400.0, seed=5).figures


def test_who_dies_starts_anew_at_its_place() -> None:
    shown = run("fixed:4", mtbf_s=400.0)
    assert {count.total for count in shown.counts} == {4}
    assert min(count.ready for count in shown.counts) < 4
    assert shown.figures.replica_hours == pytest.approx(4 * shown.seconds / 3_600, abs=2e-3)
    assert shown.changes == ()
