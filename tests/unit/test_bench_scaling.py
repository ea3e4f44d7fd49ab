"""The search that tunes the baseline: what cannot win is cut short, and what wins attains what was asked."""

from __future__ import annotations

import pytest

from bench import scaling
from bench.scaling import Dear, Late, Load, Trials, compared, smallest, tuned
from stoker.simulate.loads import flapping
from stoker.simulate.settings import Settings, Starting


@pytest.fixture(scope="module")
def load() -> Load:
    jobs = tuple(flapping(2, period_s=80.0, seconds=240.0))
    return Load("tiny", jobs, Settings(starting=Starting(10.0), initial=2, most=12))


def test_the_baseline_is_tuned_to_what_is_wanted(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "TARGETS", (1.0, 4.0, 32.0))
    monkeypatch.setattr(scaling, "WINDOWS", scaling.WINDOWS[:1])
    monkeypatch.setattr(scaling, "PANICS", scaling.PANICS[:1])
    monkeypatch.setattr(scaling, "DELAYS", scaling.DELAYS[:2])
    trials = Trials(load)
    best = tuned(trials, 0.85, 9.0)
    assert best is not None
    assert best.attainment is not None
    assert best.attainment >= 0.85
    assert tuned(trials, 1.1, 9.0) is None
    ours, theirs, fixed = compared(load, ["slo"])
    assert ours["saved_%"] is not None
    assert float(str(theirs["within_slo"])) >= float(str(ours["within_slo"]))
    assert str(fixed["policy"]).startswith("fixed:")


def test_what_is_late_or_dear_ends_early(load: Load) -> None:
    trials = Trials(load)
    with pytest.raises(Late):
        trials.attaining("fixed:1", 0.95)
    with pytest.raises(Dear):
        trials.attaining("fixed:12", 0.5, hours=0.1)
    found = smallest(trials, 0.9)
    assert found is not None
    assert (found.attainment or 0.0) >= 0.9
    count = int(found.policy.partition(":")[2])
    with pytest.raises(Late):
        trials.attaining(f"fixed:{count - 1}", 0.9)
