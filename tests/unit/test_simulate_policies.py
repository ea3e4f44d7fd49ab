"""Policies as they are named on a command line."""

from __future__ import annotations

from math import inf

import pytest

from stoker.common.errors import InvalidRequest
from stoker.scaler.core.policy import Kind
from stoker.simulate.policies import parsed
from stoker.simulate.settings import Objective

OBJECTIVE = Objective(1.5, None)


def test_settings_of_the_own_section_need_no_prefix() -> None:
    found = parsed("concurrency:target=6,weighted=true,pace.settle_s=300", OBJECTIVE)
    assert found.policy.kind is Kind.CONCURRENCY
    assert found.policy.concurrency.target == 6.0
    assert found.policy.concurrency.weighted
    assert found.policy.pace.settle_s == 300.0
    assert found.replicas is None


def test_the_objective_is_the_slo_unless_something_else_is_said() -> None:
    assert (found := parsed("slo", OBJECTIVE).policy.slo).ttft_s == 1.5
    assert found.itl_s == inf
    said = parsed("forecast:season_s=3600,ttft_s=0.5", OBJECTIVE).policy
    assert (said.forecast.season_s, said.slo.ttft_s) == (3_600.0, 0.5)


def test_a_fixed_count() -> None:
    assert parsed("fixed:6", OBJECTIVE).replicas == 6


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lucky", "'lucky' is no policy; choose from fixed, concurrency"),
        ("fixed", "say how many, as in fixed:6"),
        ("concurrency:target", "'target' is not SETTING=VALUE"),
        ("concurrency:goal=3", "concurrency has no setting 'goal', but panic_at, panic_s, stable_s, target"),
        ("forecast:attainmnt=1", "but attainment, headroom, itl_s, prior, quantile"),
        ("slo:pace=3", "no setting 'pace'"),
        ("slo:pace.speed=3", "no setting 'speed'; there are down_cooldown_s"),
        ("fixed:99999999", "say how many, as in fixed:6, 10000 at most"),
        ("slo:attainment=2", "slo.attainment: 2 is out of range; give between 0 and 1"),
        ("slo:attainment=nan", "slo.attainment: nan is out of range"),
        ("concurrency:target=0", "concurrency.target: 0 is out of range; give 0.01"),
        ("slo:pace.settle_s=-1,ttft_s=0", "slo.ttft_s: 0 is out of range; give 0.001 to 3600; pace.settle_s: -1"),
        ("forecast:pace.up_replicas=-1", "give a count from 0 to 10000"),
        ("concurrency:target=many", "target cannot be 'many'; it is 8.0 by default"),
    ],
)
def test_what_cannot_be_is_said_with_what_can(text: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parsed(text, OBJECTIVE)
    assert said in raised.value.message
