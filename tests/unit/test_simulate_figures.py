"""What a simulation counts: replica-hours on a timeline made by hand, and what thrashing is."""

from __future__ import annotations

from functools import partial

import pytest

from stoker.bench.replicas import Clock, Job
from stoker.bench.sites import RouterSite
from stoker.router.core import RoutingConfig
from stoker.simulate.figures import replica_seconds, thrashing
from stoker.simulate.fleet import Count, SimulatedFleet
from stoker.simulate.settings import Settings, Starting


def fleet(initial: int = 1, startup_s: float = 30.0) -> tuple[SimulatedFleet, Clock]:
    clock = Clock()
    settings = Settings(initial=initial, starting=Starting(startup_s))
    return SimulatedFleet(settings, RouterSite(RoutingConfig(), "stoker", 1), clock), clock


def test_a_replica_costs_from_its_assignment_to_its_end() -> None:
    made, clock = fleet()
    clock.after(10.0, lambda: made.add(2))
    clock.after(20.0, lambda: made.remove(("model-3",)))  # before it serves: gone at once
    clock.after(100.0, lambda: made.remove(("model-1",)))  # idle: nothing to drain
    clock.run(until=lambda: False)
    assert made.counts == [
        Count(0.0, 1, 0, 0),
        Count(10.0, 1, 2, 0),
        Count(20.0, 1, 1, 0),
        Count(40.0, 2, 0, 0),
        Count(100.0, 1, 0, 0),
    ]
    # model-1 from 0 to 100, model-2 from 10 on, model-3 from 10 to 20.
    assert replica_seconds(made.counts, 200.0) == 100.0 + 190.0 + 10.0
    assert replica_seconds(made.counts, 50.0) == 50.0 + 40.0 + 10.0


def test_a_replica_that_drains_costs_until_its_last_request_has_ended() -> None:
    made, clock = fleet(initial=2)
    engine = made.engines["model-1"]
    ended = []

    def done(end: bool) -> None:
        if end:
            ended.append(clock.now)
            made.ended("model-1")

    def send() -> None:
        job = Job(5.0, (), 2_000, 300, own_blocks=5)
        made.sent("model-1", job)
        engine.submit(job, done, clock.now)

    clock.after(5.0, send)
    clock.after(6.0, partial(made.remove, ("model-1",)))
    clock.run(until=lambda: False)
    assert made.counts[-2:] == [Count(6.0, 1, 0, 1), Count(ended[0], 1, 0, 0)]
    assert ended[0] > 10.0
    assert replica_seconds(made.counts, 100.0) == pytest.approx(100.0 + ended[0])


@pytest.mark.parametrize(
    ("moves", "moved_back"),
    [
        ([], 0),
        ([(0, 3), (10, 4), (20, 1)], 0),  # a trend
        ([(0, 5), (60, -5)], 5),
        ([(0, 5), (60, -2), (120, -3)], 5),
        ([(0, 5), (700, -5)], 0),  # long ago
        ([(0, 2), (500, 3), (700, -5)], 3),  # only the later three were moved a short while ago
        ([(0, -4), (60, 1), (120, -1)], 1),  # one came back in vain
        ([(0, 1), (10, -1), (20, 1), (30, -1)], 2),
        ([(0, 6), (30, -4), (60, 2), (90, -4)], 8),
    ],
)
def test_thrashing_is_what_was_moved_one_way_and_back(moves: list[tuple[float, int]], moved_back: int) -> None:
    assert thrashing(moves, 600.0) == moved_back
