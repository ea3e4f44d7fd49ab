"""What `stoker scaler policy` shows can be given back to it."""

from __future__ import annotations

import json

import yaml

from stoker.api.common.v1 import scaling_pb2
from stoker.cli import deployment_file, scaler_report
from stoker.cli.scaler import _nested
from stoker.scaler.core.policy import Caps, Concurrency, Kind, Policy, Schedule
from stoker.scaler.policy_messages import message_of

POLICY = message_of(
    Policy(
        Kind.CONCURRENCY,
        group="llama",
        concurrency=Concurrency(weighted=True),
        schedules=(Schedule(frozenset({0, 6}), 8 * 3_600.0, 86_400.0, 2, 9), Schedule(frozenset(), 0.0, 60.0, 1)),
        caps=Caps(per_hour=12.5),
    )
)


def test_lines_are_settings() -> None:
    lines = [str(line) for line in scaler_report.policy_lines(scaler_report.policy_json(POLICY))]
    assert "concurrency.weighted=true" in lines
    assert deployment_file.parse_policy(_nested(lines), "--set") == POLICY


def test_a_time_of_day_in_a_setting_is_none_of_yamls_sixties() -> None:
    setting = _nested(["schedules=[{begins: 10:30, ends: 12:00, least: 3}]", "bounds.most=4"])
    (schedule,) = deployment_file.parse_policy(setting, "--set", lines=False).schedules
    assert (schedule.begins, schedule.ends, schedule.least) == ("10:30", "12:00", 3)


def test_json_is_a_policy_file() -> None:
    shown = scaler_report.policy_json(POLICY)
    assert shown["schedules"][0]["days"] == ["monday", "sunday"]
    for text in (json.dumps(shown), yaml.safe_dump(shown)):
        assert deployment_file.parse_policy(text, "policy.yaml") == POLICY
    assert scaler_report.policy_json(scaling_pb2.ScalingPolicy()) == {"kind": "fixed"}
