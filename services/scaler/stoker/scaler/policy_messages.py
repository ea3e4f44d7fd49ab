"""Scaling policies between the wire and the core. What a message leaves unset takes the core's default."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

from stoker.api.common.v1 import common_pb2, scaling_pb2
from stoker.scaler.core.policy import (
    Bounds,
    Caps,
    Concurrency,
    Forecast,
    Kind,
    Pace,
    Policy,
    Price,
    Saturation,
    Schedule,
    Slo,
)

T = TypeVar("T")

_KINDS = {
    scaling_pb2.SCALING_KIND_FIXED: Kind.FIXED,
    scaling_pb2.SCALING_KIND_CONCURRENCY: Kind.CONCURRENCY,
    scaling_pb2.SCALING_KIND_SATURATION: Kind.SATURATION,
    scaling_pb2.SCALING_KIND_SLO: Kind.SLO,
    scaling_pb2.SCALING_KIND_FORECAST: Kind.FORECAST,
}
_NUMBERS = {kind: number for number, kind in _KINDS.items()}
_ALL_DAYS = frozenset(range(7))
_MINUTE_S = 60.0


def policy_of(deployment: common_pb2.DeploymentSpec, *, paused: bool = False) -> Policy:
    """How a deployment is scaled; `fixed` where it does not say, or says what this release does not know."""
    return policy_from(deployment.scaling, paused=paused)


def policy_from(message: scaling_pb2.ScalingPolicy, *, paused: bool = False) -> Policy:
    """The policy that a message states."""
    default = Policy()
    return Policy(
        kind=_KINDS.get(message.kind, Kind.FIXED),
        group=message.group,
        concurrency=_part(Concurrency, message.concurrency),
        saturation=_part(Saturation, message.saturation),
        slo=slo_of(message),
        forecast=_part(Forecast, message.forecast),
        bounds=_bounds(message.bounds),
        pace=_part(Pace, message.pace),
        schedules=tuple(_schedule(schedule) for schedule in message.schedules),
        price=_part(Price, message.price),
        caps=_part(Caps, message.caps),
        paused=paused,
        fresh_s=message.fresh_s if message.HasField("fresh_s") else default.fresh_s,
    )


def slo_of(message: scaling_pb2.ScalingPolicy) -> Slo:
    """The times by which answers are judged, whatever the kind of policy."""
    return _part(Slo, message.slo)


def message_of(policy: Policy) -> scaling_pb2.ScalingPolicy:
    """A policy as a message that leaves nothing unset, but for what is without limit."""
    message = scaling_pb2.ScalingPolicy(kind=_NUMBERS[policy.kind], group=policy.group, fresh_s=policy.fresh_s)
    for part in ("concurrency", "saturation", "slo", "forecast", "bounds", "pace", "price", "caps"):
        values, said = getattr(policy, part), getattr(message, part)
        said.SetInParent()
        for field in fields(values):
            value = getattr(values, field.name)
            if value is not None:
                setattr(said, field.name, value)
    for schedule in policy.schedules:
        message.schedules.add(
            days=[day + 1 for day in sorted(schedule.days)],
            begins=_clock(schedule.from_s),
            ends=_clock(schedule.until_s),
            least=schedule.least,
            most=schedule.most,
        )
    return message


def _part(kind: type[T], message: Any) -> T:
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: getattr(message, name) for name in names if message.HasField(name)})


def _bounds(message: scaling_pb2.ScalingBounds) -> Bounds:
    bounds = _part(Bounds, message)
    if message.HasField("most"):
        return replace(bounds, least=min(bounds.least, bounds.most))
    return replace(bounds, most=max(bounds.least, bounds.most))


def _schedule(message: scaling_pb2.ScalingSchedule) -> Schedule:
    days = frozenset(day - 1 for day in message.days) & _ALL_DAYS
    most = message.most if message.HasField("most") else None
    return Schedule(days or _ALL_DAYS, _seconds(message.begins), _seconds(message.ends), message.least, most)


def _seconds(clock: str) -> float:
    """Seconds of the day of "HH:MM"."""
    hours, _, minutes = clock.partition(":")
    return _MINUTE_S * (60 * int(hours) + int(minutes))


def _clock(seconds: float) -> str:
    """ "HH:MM" of seconds of the day."""
    hours, minutes = divmod(round(seconds / _MINUTE_S), 60)
    return f"{hours:02}:{minutes:02}"
