"""Between which counts a deployment may move in one round, and what keeps it there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stoker.scaler.core.policies.windows import at_rest
from stoker.scaler.core.policy import Kind, Pace, Policy, Schedule
from stoker.scaler.core.signals import History, Sample, Wanted
from stoker.scaler.core.values import Because, Reason

_DAY_S = 86_400.0
_FIRST_WEEKDAY = 3  # 1970-01-01 was a Thursday


@dataclass(frozen=True, slots=True)
class Bounds:
    """The lowest and the highest count allowed at this hour, and the reasons to give for them."""

    least: int
    most: int
    least_reason: Reason = Reason.AT_LEAST
    most_reason: Reason = Reason.AT_MOST


@dataclass(frozen=True, slots=True)
class Room:
    """The counts within reach of one round; `below` and `above` say why no further."""

    low: int
    high: int
    below: Because
    above: Because


def bounds_at(policy: Policy, wall: float) -> Bounds:
    """The policy's bounds at the wall-clock second `wall`: those of the first schedule that holds then, or its own.
    With `wall` 0, unknown, no schedule holds."""
    usual = policy.bounds
    for schedule in policy.schedules if wall else ():
        if _active(schedule, wall):
            most = usual.most if schedule.most is None else schedule.most
            reason = Reason.AT_MOST if schedule.most is None else Reason.SCHEDULE
            return Bounds(min(schedule.least, most), most, Reason.SCHEDULE, reason)
    return Bounds(min(usual.least, usual.most), usual.most)


def _active(schedule: Schedule, wall: float) -> bool:
    day, second = (int(wall // _DAY_S) + _FIRST_WEEKDAY) % 7, wall % _DAY_S
    if schedule.from_s <= schedule.until_s:
        return day in schedule.days and schedule.from_s <= second < schedule.until_s
    begun_today = day in schedule.days and second >= schedule.from_s
    return begun_today or ((day - 1) % 7 in schedule.days and second < schedule.until_s)


def room(policy: Policy, bounds: Bounds, history: History, start: int, ready: int, now: float) -> Room:
    """How far a count that stands at `start`, within `bounds`, may move, `ready` of its replicas serving."""
    pace = policy.pace
    since_change = now - history.changed_at if history.changed_at is not None else math.inf
    floors = [(bounds.least, Because(bounds.least_reason, {"least": bounds.least}))]
    ceilings = [(bounds.most, Because(bounds.most_reason, {"most": bounds.most}))]

    seen_s, window_s = seen(history.wanted, now, policy.fresh_s), _window_s(policy)
    if seen_s < window_s:
        floors.append((start, Because(Reason.UNSEEN, {"seen_s": seen_s, "window_s": window_s})))
    if since_change < pace.down_cooldown_s:
        floors.append((start, Because(Reason.COOLDOWN, {"left_s": pace.down_cooldown_s - since_change})))
    step = max(math.ceil(pace.down_factor * ready), ready - pace.down_replicas) if ready > 1 else 0
    step = min(start, step)
    floors.append((step, Because(Reason.STEP, {"ready": ready, "to": step})))

    if since_change < pace.up_cooldown_s:
        ceilings.append((start, Because(Reason.COOLDOWN, {"left_s": pace.up_cooldown_s - since_change})))
    step = _step_up(pace, start if since_change > overdue_s(history) else ready)
    step = max(start, step)
    ceilings.append((step, Because(Reason.STEP, {"ready": ready, "to": step})))

    low, below = max(floors, key=lambda floor: floor[0])
    high, above = min(ceilings, key=lambda ceiling: ceiling[0])
    return Room(min(low, bounds.most), high, below, above)


def _step_up(pace: Pace, base: int) -> int:
    factor = math.ceil(pace.up_factor * max(1, base))
    return max(base + 1, min(base + pace.up_replicas, factor))


def _window_s(policy: Policy) -> float:
    """Seconds of demand to be seen before a count may fall."""
    stable_s = policy.concurrency.stable_s if policy.kind is Kind.CONCURRENCY else 0.0
    return max(policy.pace.settle_s, stable_s)


def overdue_s(history: History) -> float:
    """Seconds after which a replica that was asked for should long be ready."""
    slowest = history.startup.p95_s if history.startup.p95_s is not None else history.startup.p50_s
    return 900.0 if slowest is None else max(60.0, 3 * slowest)


def seen(wanted: Sequence[Wanted], now: float, gap_s: float) -> float:
    """For how many seconds up to `now` the demand has been known, without a gap longer than `gap_s`."""
    since = now
    for asked in reversed(wanted):
        if since - asked.at > gap_s:
            break
        since = asked.at
    return now - since


def idle(samples: Sequence[Sample], idle_s: float, now: float, gap_s: float) -> bool:
    """Whether for `idle_s` seconds up to `now` it is known that nothing arrived, waited or ran."""
    since = now
    for sample in reversed(samples):
        if since - sample.at > gap_s or not at_rest(sample):
            return False
        since = sample.at
        if now - since >= idle_s:
            return True
    return False


def waiting(samples: Sequence[Sample]) -> float:
    """Requests that routers hold or that came lately, by the last sample: what starts the first replica."""
    return (samples[-1].queued or samples[-1].arrivals_per_s or 0.0) if samples else 0.0
