"""The real router and scaler over simulated replicas: nothing is lost, and everything follows from the seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial

import pytest

from stoker.bench.replicas import Job
from stoker.common.errors import InvalidRequest
from stoker.simulate.figures import Run, replica_seconds
from stoker.simulate.loads import arrivals, flapping
from stoker.simulate.policies import parsed
from stoker.simulate.run import simulate
from stoker.simulate.settings import Settings, Starting
from stoker.simulate.traffic import Source

SETTINGS = Settings(starting=Starting(30.0), initial=3, most=20)
SHORT = partial(flapping, 5, period_s=160.0, seconds=400.0)


@cache
def run(policy: str, settings: Settings = SETTINGS, source: Source = SHORT) -> Run:
    return simulate(source, parsed(policy, settings.objective), settings)


def test_a_simulation_follows_from_trace_policy_and_seed() -> None:
    settings = replace(SETTINGS, starting=Starting(30.0, 0.4))
    first = run("concurrency:target=6,pace.settle_s=30,stable_s=30", settings)
    again = run.__wrapped__("concurrency:target=6,pace.settle_s=30,stable_s=30", settings)
    assert first == again
    assert first.figures.scale_ups >= 2
    other = run("concurrency:target=6,pace.settle_s=30,stable_s=30", replace(settings, seed=2))
    assert other.counts != first.counts


@pytest.mark.parametrize(
    "policy", ["fixed:4", "concurrency:target=3,stable_s=10,pace.settle_s=0,pace.down_cooldown_s=0"]
)
def test_every_request_is_answered_while_replicas_come_and_go(policy: str) -> None:
    """A policy that stops replicas all the time: whoever was sent there is served to the end."""
    shown = run(policy)
    arrived = len(list(SHORT()))
    assert shown.figures.requests == sum(bin_.arrived for bin_ in shown.bins) == arrived
    assert shown.figures.refused == 0
    if not policy.startswith("fixed"):
        assert shown.figures.scale_downs >= 5
    assert shown.figures.ttft_p50_ms is not None


def test_a_fixed_count_costs_its_replicas_for_the_time_of_the_trace() -> None:
    shown = run("fixed:4")
    assert shown.figures.replica_hours == pytest.approx(4 * shown.seconds / 3_600, abs=5e-4)
    assert shown.figures.cost == pytest.approx(shown.figures.replica_hours, abs=6e-3)
    assert (shown.figures.scale_ups, shown.figures.thrashing) == (0, 0)


def test_hours_are_those_of_the_counts() -> None:
    shown = run("concurrency:target=4,stable_s=20,pace.settle_s=60")
    hours = replica_seconds(shown.counts, shown.seconds) / 3_600
    assert shown.figures.replica_hours == pytest.approx(hours, abs=5e-4)
    changed = [change.after for change in shown.changes if change.at < shown.seconds]
    assert max(changed) <= shown.figures.replicas_most <= SETTINGS.most


def test_with_too_few_the_queue_fills_and_who_finds_no_room_is_refused() -> None:
    settings = replace(SETTINGS, queue=20, longest_s=15.0)
    shown = run("fixed:1", settings)
    assert shown.figures.refused > 100
    assert shown.figures.attainment is not None
    assert shown.figures.attainment < 0.5
    assert shown.figures.requests == len(list(SHORT()))


def test_a_replica_that_stops_takes_its_warmth_along() -> None:
    """One prefix all the time: with two replicas that take turns in being stopped, it is computed anew."""
    keys = tuple(range(1, 41))

    def waves() -> Iterator[Job]:
        for wave in range(6):
            for number in range(150):
                at = 240.0 * wave + number * 0.4
                yield Job(at, keys, 40 * 512 + 4_000, 40, own_blocks=9)

    policy = "concurrency:target=2,stable_s=20,pace.settle_s=30,pace.down_cooldown_s=0"
    moving = simulate(waves, parsed(policy, SETTINGS.objective), SETTINGS)
    still = simulate(waves, parsed("fixed:8", SETTINGS.objective), SETTINGS)
    assert moving.figures.scale_downs >= 3
    assert moving.figures.hit_rate is not None
    assert still.figures.hit_rate is not None
    assert moving.figures.hit_rate < still.figures.hit_rate


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no request is in it"):
        run("fixed:1", source=lambda: iter(()))


def test_what_starts_at_none_waits_for_the_first_replica() -> None:
    settings = replace(SETTINGS, initial=0, least=0)
    steady = partial(arrivals, lambda at: 0.5, 0.5, 300.0, 3)
    shown = run("concurrency", settings, steady)
    assert shown.figures.refused == 0
    assert shown.counts[0].total == 0
    assert shown.figures.ttft_p99_ms is not None
    assert 15_000 < shown.figures.ttft_p99_ms < 40_000, "the first waited for the start"
