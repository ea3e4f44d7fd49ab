"""Scaling policies on the wire: defaults, bounds, and nothing lost on the way."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass

import pytest

from stoker.api.common.v1 import common_pb2, scaling_pb2
from stoker.api.registry.v1 import records_pb2
from stoker.registry.core import scaling
from stoker.registry.core.validation import Limits
from stoker.scaler.core.policy import Bounds, Caps, Concurrency, Kind, Pace, Policy, Price, Schedule, Slo
from stoker.scaler.policy_messages import message_of, policy_from, policy_of

LIMITS = Limits(replicas=100)

FULL = Policy(
    kind=Kind.SLO,
    group="llama",
    concurrency=Concurrency(target=3.0),
    slo=Slo(ttft_s=0.5, itl_s=0.03, attainment=0.9, window_s=20.0),
    bounds=Bounds(least=0, most=7, idle_s=300.0),
    pace=Pace(up_replicas=2, down_factor=0.75, settle_s=60.0),
    schedules=(Schedule(frozenset({0, 6}), 8 * 3600.0, 86_400.0, 2), Schedule(frozenset(range(7)), 60.0, 30.0, 1, 4)),
    price=Price(2.5, 700.0),
    caps=Caps(per_hour=20.0),
    fresh_s=10.0,
)


def wrong(policy: scaling_pb2.ScalingPolicy) -> dict[str, str]:
    return {violation.field: violation.description for violation in scaling.policy("scaling", policy, LIMITS)}


def test_what_says_nothing_takes_the_defaults() -> None:
    assert policy_of(common_pb2.DeploymentSpec()) == Policy()
    assert policy_from(scaling_pb2.ScalingPolicy(kind=scaling_pb2.SCALING_KIND_SLO)) == Policy(kind=Kind.SLO)
    assert policy_from(scaling_pb2.ScalingPolicy(), paused=True).paused


def test_a_policy_survives_the_wire() -> None:
    seconds = Schedule(frozenset(range(7)), 60.0, 0.0, 1, 4)  # the wire tells whole minutes
    policy = Policy(
        **{f.name: getattr(FULL, f.name) for f in fields(FULL)} | {"schedules": (FULL.schedules[0], seconds)}
    )
    assert policy_from(message_of(policy)) == policy
    assert policy_from(message_of(Policy())) == Policy()
    assert not wrong(message_of(policy))
    assert not list(scaling.policy("scaling", message_of(Policy()), Limits()))


def test_every_setting_of_the_core_has_its_field() -> None:
    message = message_of(Policy())
    for part in fields(Policy):
        if part.name in {"paused", "schedules"}:
            continue
        assert part.name in message.DESCRIPTOR.fields_by_name, part.name
        values = getattr(Policy(), part.name)
        if is_dataclass(values):
            said = message.DESCRIPTOR.fields_by_name[part.name].message_type
            assert said is not None
            assert {field.name for field in fields(values)} == set(said.fields_by_name)


def test_every_number_has_a_range() -> None:
    """A figure that nobody bounds is read as it comes, NaN included."""
    policy = scaling_pb2.ScalingPolicy()
    for part in policy.DESCRIPTOR.fields:
        if part.name == "schedules" or (part.message_type is None and part.name != "fresh_s"):
            continue
        for field in part.message_type.fields if part.message_type is not None else [part]:
            broken = scaling_pb2.ScalingPolicy()
            holder = getattr(broken, part.name) if part.message_type is not None else broken
            if field.cpp_type == field.CPPTYPE_BOOL:
                continue
            is_float = field.cpp_type == field.CPPTYPE_DOUBLE
            for value in (math.nan, math.inf, -1.0) if is_float else (2**32 - 1,):
                setattr(holder, field.name, value)
                path = f"scaling.{part.name}.{field.name}" if part.message_type is not None else "scaling.fresh_s"
                assert path in wrong(broken), f"{path} = {value} passes"


def test_counts_are_bounded_and_in_order() -> None:
    policy = scaling_pb2.ScalingPolicy()
    policy.bounds.least, policy.bounds.most = 5, 4
    assert "raise `most`" in wrong(policy)["scaling.bounds.least"]
    policy.bounds.least = 0
    policy.bounds.most = 0
    assert "kind FIXED and replicas 0" in wrong(policy)["scaling.bounds.most"]
    assert policy_from(policy).bounds == Bounds(0, 0, 600.0), "what an earlier release took is read on"
    policy.bounds.ClearField("least")
    assert list(wrong(policy)) == ["scaling.bounds.most"], "told once"
    assert policy_from(policy).bounds.least == 0
    policy.schedules.add(begins="20:00", ends="08:00", most=0)
    assert list(wrong(policy)) == ["scaling.bounds.most"], "off at night is something else"
    policy.bounds.most = 101
    assert wrong(policy) == {"scaling.bounds.most": "101 is too large; at most 100"}


def test_windows_fit_into_each_other() -> None:
    policy = scaling_pb2.ScalingPolicy()
    policy.concurrency.stable_s = 3.0
    assert list(wrong(policy)) == ["scaling.concurrency.stable_s"]
    policy.concurrency.panic_s = 2.0
    assert not wrong(policy)


def test_a_window_given_alone_is_measured_by_the_default_of_the_other() -> None:
    default, policy = Concurrency(), scaling_pb2.ScalingPolicy(kind=scaling_pb2.SCALING_KIND_CONCURRENCY)
    for given, other in (("panic_s", default.stable_s), ("stable_s", default.panic_s)):
        policy.concurrency.Clear()
        setattr(policy.concurrency, given, other)
        assert not wrong(policy)
        setattr(policy.concurrency, given, other + (1.0 if given == "panic_s" else -1.0))
        assert list(wrong(policy)) == [f"scaling.concurrency.{given}"]


def test_schedules_name_what_is_wrong() -> None:
    monday = scaling_pb2.WEEKDAY_MONDAY
    policy = scaling_pb2.ScalingPolicy()
    policy.schedules.add(days=[monday], begins="08:00", ends="24:00", least=2)
    assert not wrong(policy)
    policy.schedules.add(days=[monday, 0, monday, 9], begins="24:00", ends="8", least=3, most=2)
    assert set(wrong(policy)) == {
        f"scaling.schedules[1].{field}" for field in ("days[1]", "days[2]", "days[3]", "begins", "ends", "least")
    }
    for _ in range(64):
        policy.schedules.add(begins="08:00", ends="09:00")
    assert "scaling.schedules" in wrong(policy)


def test_kinds_and_groups_are_known() -> None:
    assert "FIXED" in wrong(scaling_pb2.ScalingPolicy(kind=77))["scaling.kind"]  # type: ignore[arg-type]
    assert "scaling.group" in wrong(scaling_pb2.ScalingPolicy(group="Not a name"))
    # A kind of a later version must not scale anything here.
    assert policy_from(scaling_pb2.ScalingPolicy(kind=77)).kind is Kind.FIXED  # type: ignore[arg-type]


def test_histories_are_bounded() -> None:
    def complaints(*puts: records_pb2.ScalingHistory) -> set[str]:
        return {violation.field for violation in scaling.histories(puts, ())}

    assert not complaints(records_pb2.ScalingHistory(deployment="chat", minutes=bytes(8 * 7200)))
    assert complaints(records_pb2.ScalingHistory(deployment="chat", minutes=bytes(9))) == {"histories[0].minutes"}
    large = records_pb2.ScalingHistory(deployment="chat", minutes=bytes(8 * 8192))
    assert complaints(large) == {"histories[0]"}
    many = [records_pb2.ScalingHistory(deployment=f"d{n}", minutes=bytes(8 * 8000)) for n in range(17)]
    assert complaints(*many) == {"histories"}
    assert complaints(records_pb2.ScalingHistory(deployment="No")) == {"histories[0].deployment"}


def test_reasons_and_warmings_are_bounded() -> None:
    decision = records_pb2.Desired(deployment="chat")
    assert not list(scaling.decisions([decision]))
    decision.because.extend(records_pb2.Because(code="X") for _ in range(65))
    decision.because[0].numbers.update({str(n): 0.0 for n in range(65)})
    decision.warmings.extend(records_pb2.Warming() for _ in range(1025))
    assert {violation.field for violation in scaling.decisions([decision])} == {
        "desired[0].because",
        "desired[0].because[0].numbers",
        "desired[0].warmings",
    }


@pytest.mark.parametrize("name", ["FIXED", "CONCURRENCY", "SATURATION", "SLO", "FORECAST"])
def test_only_the_fixed_policy_leaves_the_count_to_people(name: str) -> None:
    policy = scaling_pb2.ScalingPolicy(kind=scaling_pb2.ScalingKind.Value(f"SCALING_KIND_{name}"))
    assert scaling.decided_by_policy(common_pb2.DeploymentSpec(scaling=policy)) == (name != "FIXED")
    assert scaling.kind_name(policy) == name.lower()
    assert not scaling.decided_by_policy(common_pb2.DeploymentSpec())
