"""What the registry refuses of scaling: policies, pauses, and what scalers keep of the past."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.api.common.v1 import common_pb2, scaling_pb2
from stoker.api.registry.v1 import records_pb2
from stoker.common.errors import FieldViolation
from stoker.registry.core import validation
from stoker.registry.core.validation import Limits, Violations

MAX_HISTORY_BYTES = 64 * 1024
"""One deployment's record."""
MAX_CALL_BYTES = 1024 * 1024
"""Records in one call: etcd takes 1.5 MiB in a transaction."""
MINUTE_BYTES = 8
MAX_NOTE_BYTES = 512
MAX_REASONS = MAX_NUMBERS = 64
"""Of one decision, and in each of its reasons."""
MAX_WARMINGS = 1_024
"""Of one decision."""
_MAX_SCHEDULES = 64
_DAY_S, _MONTH_S = 86_400.0, 30 * 86_400.0
_TIME = re.compile(r"([01]\d|2[0-3]):[0-5]\d")


@dataclass(frozen=True, slots=True)
class _Range:
    least: float
    most: float
    exclusive: bool = False
    """Neither end itself is allowed."""

    def __contains__(self, value: float) -> bool:
        return self.least < value < self.most if self.exclusive else self.least <= value <= self.most

    def __str__(self) -> str:
        ends = f"{self.least:g} to {self.most:g}"
        return f"between {self.least:g} and {self.most:g}, neither included" if self.exclusive else ends


_SHARE = _Range(0.0, 1.0)
_PROPER_SHARE = _Range(0.0, 1.0, exclusive=True)
_WINDOW_S = _Range(1.0, 3_600.0)
_COOLDOWN_S = _Range(0.0, _DAY_S)
_RANGES: Mapping[str, Mapping[str, _Range]] = {
    "concurrency": {
        "target": _Range(0.01, 100_000.0),
        "stable_s": _WINDOW_S,
        "panic_s": _WINDOW_S,
        "panic_at": _Range(1.0, 100.0),
        "utilisation": _Range(0.01, 1.0),
    },
    "saturation": {"spare_kv": _Range(0.0, 0.99), "spare_queue": _Range(0.01, 100_000.0), "window_s": _WINDOW_S},
    "slo": {
        "ttft_s": _Range(0.001, 3_600.0),
        "itl_s": _Range(0.000_1, 60.0),
        "attainment": _PROPER_SHARE,
        "window_s": _WINDOW_S,
        "headroom": _Range(0.0, 10.0),
    },
    "forecast": {
        "season_s": _Range(60.0, _MONTH_S),
        "quantile": _PROPER_SHARE,
        "prior": _Range(0.0, 100.0),
    },
    "bounds": {"idle_s": _Range(0.0, _DAY_S), "domain_least": _Range(0, 1_000)},
    "pace": {
        "up_replicas": _Range(1, 1_000_000),
        "up_factor": _Range(1.0, 1_000_000.0),
        "up_cooldown_s": _COOLDOWN_S,
        "down_replicas": _Range(1, 1_000_000),
        "down_factor": _SHARE,
        "down_cooldown_s": _COOLDOWN_S,
        "settle_s": _COOLDOWN_S,
        "margin": _Range(0.0, 0.99),
    },
    "price": {"per_hour": _Range(0.0, 1e9), "power_w": _Range(0.0, 1e9)},
    "caps": {"per_hour": _Range(0.0, 1e12), "power_w": _Range(0.0, 1e12)},
}
_FRESH_S = _Range(2.0, 3_600.0)
_STABLE_S, _PANIC_S = 60.0, 6.0
"""The scaler's defaults, by which a window given alone is measured."""


def policy(field: str, value: scaling_pb2.ScalingPolicy, limits: Limits) -> Violations:
    """What is wrong with a policy that `field` holds."""
    if value.kind not in scaling_pb2.ScalingKind.values():
        yield FieldViolation(f"{field}.kind", f"{value.kind} is unknown to this registry; use {_kinds()}")
    if value.group:
        yield from validation.name(f"{field}.group", value.group)
    for part, ranges in _RANGES.items():
        yield from _figures(f"{field}.{part}", getattr(value, part), ranges)
    yield from _figures(field, value, {"fresh_s": _FRESH_S})
    yield from _windows(f"{field}.concurrency", value.concurrency)
    bounds = value.bounds
    if bounds.HasField("most") and not bounds.most:
        yield FieldViolation(
            f"{field}.bounds.most",
            "0 would serve nobody, whatever is asked for; give 1 or more, or turn the deployment off: kind FIXED "
            "and replicas 0 (`least: 0` alone lets it go to none while nothing is asked for)",
        )
    yield from _counts(f"{field}.bounds", bounds.least, bounds.most if bounds.HasField("most") else None, limits)
    if len(value.schedules) > _MAX_SCHEDULES:
        yield FieldViolation(f"{field}.schedules", f"{len(value.schedules)} of them; at most {_MAX_SCHEDULES}")
    for place, schedule in enumerate(value.schedules[:_MAX_SCHEDULES]):
        yield from _schedule(f"{field}.schedules[{place}]", schedule, limits)


def _kinds() -> str:
    names = [name.removeprefix("SCALING_KIND_") for name in scaling_pb2.ScalingKind.keys()[1:]]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _figures(field: str, message: Any, ranges: Mapping[str, _Range]) -> Violations:
    for name, allowed in ranges.items():
        if message.HasField(name) and getattr(message, name) not in allowed:  # nor is NaN
            yield FieldViolation(f"{field}.{name}", f"{getattr(message, name):g} is out of range; give {allowed}")


def _windows(field: str, value: scaling_pb2.ScalingConcurrency) -> Violations:
    stable_s = value.stable_s if value.HasField("stable_s") else _STABLE_S
    panic_s = value.panic_s if value.HasField("panic_s") else _PANIC_S
    if panic_s > stable_s:
        at = "panic_s" if value.HasField("panic_s") else "stable_s"
        yield FieldViolation(
            f"{field}.{at}", f"the panic window, {panic_s:g} s, is longer than the stable one, {stable_s:g} s"
        )


def _counts(field: str, least: int, most: int | None, limits: Limits) -> Violations:
    if least > limits.replicas:
        yield FieldViolation(f"{field}.least", f"{least} is too large; at most {limits.replicas}")
    if most is None:
        return
    if most > limits.replicas:
        yield FieldViolation(f"{field}.most", f"{most} is too large; at most {limits.replicas}")
    if least > most:
        yield FieldViolation(f"{field}.least", f"{least} is above `most`, {most}; lower it or raise `most`")


def _schedule(field: str, value: scaling_pb2.ScalingSchedule, limits: Limits) -> Violations:
    known = set(scaling_pb2.Weekday.values()) - {scaling_pb2.WEEKDAY_UNSPECIFIED}
    for place, day in enumerate(value.days[: len(known) + 1]):
        if day not in known:
            yield FieldViolation(f"{field}.days[{place}]", "is no day; use MONDAY to SUNDAY, or none for all")
        elif day in value.days[:place]:
            yield FieldViolation(f"{field}.days[{place}]", "is there twice; name each day once")
    if not _TIME.fullmatch(value.begins):
        yield FieldViolation(f"{field}.begins", f'{value.begins[:20]!r} is no time of day; give "HH:MM" in UTC')
    if value.ends != "24:00" and not _TIME.fullmatch(value.ends):
        yield FieldViolation(
            f"{field}.ends", f'{value.ends[:20]!r} is no time of day; give "HH:MM" in UTC, "24:00" for midnight'
        )
    yield from _counts(field, value.least, value.most if value.HasField("most") else None, limits)


def set_policy(name: str, value: scaling_pb2.ScalingPolicy | None, limits: Limits) -> Violations:
    """What is wrong with a wish to change a policy; None where it shall go."""
    yield from validation.name("name", name)
    if value is not None:
        yield from policy("policy", value, limits)


def pause(name: str, note: str) -> Violations:
    """What is wrong with a wish to pause."""
    yield from validation.name("name", name)
    if len(note.encode()) > MAX_NOTE_BYTES:
        yield FieldViolation("note", f"is longer than {MAX_NOTE_BYTES} bytes; shorten it")


def histories(puts: Sequence[records_pb2.ScalingHistory], removed: Sequence[str]) -> Violations:
    """What is wrong with a batch of what a scaler keeps of the past."""
    yield from validation.batch("histories", [put.deployment for put in puts], removed)
    for place, put in enumerate(puts[: validation.MAX_WRITES]):
        field = f"histories[{place}]"
        yield from validation.name(f"{field}.deployment", put.deployment)
        for name, packed in (("minutes", put.minutes), ("five_minutes", put.five_minutes)):
            if len(packed) % MINUTE_BYTES:
                yield FieldViolation(
                    f"{field}.{name}", f"{len(packed)} bytes are not a whole number of {MINUTE_BYTES}-byte means"
                )
        if put.ByteSize() > MAX_HISTORY_BYTES:
            yield FieldViolation(field, f"is {put.ByteSize()} bytes; at most {MAX_HISTORY_BYTES} are kept: drop old")
    yield from _fits("histories", sum(put.ByteSize() for put in puts))


def decisions(desired: Sequence[records_pb2.Desired]) -> Violations:
    """What is wrong with the reasons and warmings of desired counts, and with their size."""
    for number, value in enumerate(desired):
        field = f"desired[{number}]"
        if len(value.because) > MAX_REASONS:
            yield FieldViolation(f"{field}.because", f"{len(value.because)} reasons; at most {MAX_REASONS}")
        for place, reason in enumerate(value.because[:MAX_REASONS]):
            if len(reason.numbers) > MAX_NUMBERS:
                yield FieldViolation(
                    f"{field}.because[{place}].numbers", f"{len(reason.numbers)} figures; at most {MAX_NUMBERS}"
                )
        if len(value.warmings) > MAX_WARMINGS:
            yield FieldViolation(f"{field}.warmings", f"{len(value.warmings)} prefixes; at most {MAX_WARMINGS}")
    yield from _fits("desired", sum(value.ByteSize() for value in desired))


def _fits(field: str, size: int) -> Violations:
    if size > MAX_CALL_BYTES:
        yield FieldViolation(
            field, f"{size} bytes in one call; at most {MAX_CALL_BYTES} fit in one transaction, split"
        )


def decided_by_policy(spec: common_pb2.DeploymentSpec) -> bool:
    """Whether another policy than the specification's count decides."""
    return spec.HasField("scaling") and spec.scaling.kind not in (
        scaling_pb2.SCALING_KIND_UNSPECIFIED,
        scaling_pb2.SCALING_KIND_FIXED,
    )


def kind_name(value: scaling_pb2.ScalingPolicy) -> str:
    """What people call its kind: "slo"."""
    return scaling_pb2.ScalingKind.Name(value.kind).removeprefix("SCALING_KIND_").lower()
