"""Plans of one who knows every arrival: enough for each second, ordered one start before, and no sooner."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.scaling import Known, Load, Trials
from stoker.bench.replicas import Job
from stoker.simulate import clairvoyant
from stoker.simulate.hardware import DEFAULT
from stoker.simulate.loads import step
from stoker.simulate.settings import Settings, Starting


def loads(*each: float) -> clairvoyant.Load:
    return clairvoyant.Load(np.array(each))


def test_a_request_keeps_a_replica_busy_for_its_prefill_and_its_steps() -> None:
    hardware = replace(DEFAULT, prefill_rate=1_000.0, sequence_s=0.01)
    jobs = [Job(0.5, (), 2_000, 100, own_blocks=1), Job(2.1, (), 1_000, 0, own_blocks=1)]
    assert clairvoyant.Load.of(jobs, hardware, 0.5).each.tolist() == pytest.approx([2.0, 0.0, 0.5])


def test_a_replica_is_ordered_one_start_before_it_is_needed_and_kept_for_one() -> None:
    plan = loads(*[1.0] * 10, *[3.0] * 5, *[1.0] * 10).plan(1.0, 0.0, 4.0)
    assert [plan.at(second) for second in (4.9, 6.0, 14.9, 15.0, 1_000.0)] == [1, 3, 3, 1, 1]
    assert loads(3.0, 1.0, 1.0, 3.0).plan(1.0, 0.0, 4.0).counts.tolist() == [3, 3, 3, 3]


def test_more_on_top_never_takes_fewer() -> None:
    load = loads(*(float(second % 7) for second in range(60)))
    counts = [load.plan(10.0, spare, 5.0).counts for spare in (0.0, 0.5, 2.0)]
    assert all((more >= less).all() for less, more in itertools.pairwise(counts))


def test_a_plan_is_carried_out_and_what_was_simulated_is_known_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = tuple(step(2, low=2.0, seconds=240.0))
    load = Load("tiny", jobs, Settings(starting=Starting(20.0), initial=2, most=12))
    kept = tmp_path / "known.json"
    trials = Trials(load, Known.read(kept))
    found = trials.full(trials.planned(10.0, 1.0, 0.0))
    assert found.scale_ups >= 1
    assert (found.attainment or 0.0) > 0.8

    monkeypatch.setattr("bench.scaling.simulate", None)
    again = Trials(load, Known.read(kept))
    assert again.full(again.planned(10.0, 1.0, 0.0)) == found
    other = Trials(replace(load, settings=replace(load.settings, seed=2)), Known.read(kept))
    with pytest.raises(TypeError):
        other.full(other.planned(10.0, 1.0, 0.0))
