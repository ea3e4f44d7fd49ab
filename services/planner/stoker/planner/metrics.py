"""What Prometheus reads of a planner."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from prometheus_client import Counter, Gauge, Histogram

from stoker.planner.core.facility.values import Facility
from stoker.planner.core.holding import Load, Violation
from stoker.planner.core.placement import Goal, Score
from stoker.planner.core.values import Unplaced

CHANGES = Counter("stoker_planner_changes_total", "Assignments written and deleted.", ["kind"])
SEARCH_SECONDS = Histogram(
    "stoker_planner_search_seconds",
    "Time of drawing up a plan, searching for places included.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
)
_UNPLACED = Gauge("stoker_planner_unplaced_replicas", "Replicas wanted that have no place, as the leader sees it.")
_FEED_SHARE = Gauge(
    "stoker_planner_feed_share",
    "Greatest share of its capacity that stands on any feed of a level: 0 are those that racks hang on, 3 all from "
    "there up. `normal` with all feeds, `after_loss` with any one source lost.",
    ["level", "case"],
)
_STRANDED = Gauge("stoker_planner_stranded_watts", "Power that free GPUs could draw and no asked-for member can.")
_OVERSUBSCRIBED = Gauge(
    "stoker_planner_oversubscribed_bytes_per_second", "Traffic over uplinks narrower than what hangs below them."
)
_GOAL = Gauge("stoker_planner_goal", "How far the placement is from each goal; 0 is best.", ["goal"])
_VIOLATIONS = Gauge("stoker_planner_violations", "What stands against a limit of the facility.", ["limit"])
_FACILITY = Gauge("stoker_planner_facility_readable", "0 while the facility as written cannot be read.")

_LIMITS = ("node", "gpus", "power", "cooling", "spread")
_LEVELS = 4
_AFTER_LOSS = " after the loss of "


def forget() -> None:
    """Tell nothing of the fleet: whoever does not lead does not know."""
    for single in (_UNPLACED, _STRANDED, _OVERSUBSCRIBED, _FACILITY):
        single.set(math.nan)
    for several in (_FEED_SHARE, _GOAL, _VIOLATIONS):
        several.clear()


def note_unplaced(entries: Sequence[Unplaced]) -> None:
    """What has no place."""
    _UNPLACED.set(sum(entry.replicas for entry in entries))


def note_readable(*, readable: bool) -> None:
    """Whether the facility can be read."""
    _FACILITY.set(readable)


def note_scores(scores: Iterable[Score]) -> None:
    """What the placement as it stands is worth."""
    for score in scores:
        _GOAL.labels(score.goal.value).set(score.value)
        if score.goal is Goal.STRANDED:
            _STRANDED.set(score.value)
        if score.goal is Goal.OVERSUBSCRIBED:
            _OVERSUBSCRIBED.set(score.value)


def note_violations(violations: Iterable[Violation]) -> None:
    """What no longer holds."""
    counts = dict.fromkeys(_LIMITS, 0)
    for violation in violations:
        counts[violation.limit] = counts.get(violation.limit, 0) + 1
    for limit, count in counts.items():
        _VIOLATIONS.labels(limit).set(count)


def note_loads(facility: Facility, loads: Iterable[Load]) -> None:
    """How much of the feeds is in use."""
    shares: dict[tuple[str, str], float] = {}
    for load in loads:
        if not load.name.startswith("feed ") or not load.capacity_w:
            continue
        name, loss, _ = load.name.removeprefix("feed ").partition(_AFTER_LOSS)
        key = (str(_level(facility, name)), "after_loss" if loss else "normal")
        shares[key] = max(shares.get(key, 0.0), load.share)
    _FEED_SHARE.clear()
    for (level, case), share in shares.items():
        _FEED_SHARE.labels(level, case).set(share)


def _level(facility: Facility, name: str) -> int:
    """How many feeds are between this one and the nearest rack below it, at most `_LEVELS` - 1."""
    leaves = {feed for rack in facility.racks.values() for feed in rack.feeds}
    level, current = 0, {name}
    while level < _LEVELS - 1 and not current & leaves:
        current = {feed.name for feed in facility.feeds.values() if feed.parent in current}
        level += 1
    return level
