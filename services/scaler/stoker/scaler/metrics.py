"""What Prometheus sees of a scaler, beside what every deciding service shows."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Counter, Gauge

from stoker.scaler.core.values import Decision, Reason

CHANGES = Counter("stoker_scaler_changes_total", "Desired counts written, by reason.", ["reason"])
HELD = Counter(
    "stoker_scaler_held_total", "Counts that a leader's round left, by the reason that held them.", ["reason"]
)
REPLICAS = Gauge(
    "stoker_scaler_replicas",
    "By deployment: replicas wanted by the policy before limits, desired, and ready.",
    ["deployment", "which"],
)

_MOST_DEPLOYMENTS = 1_000
_MOVING = {Reason.FIXED, Reason.CONCURRENCY, Reason.PANIC, Reason.SATURATION, Reason.SLO, Reason.FORECAST, Reason.NEW}
"""Reasons that say what a count follows; every other one says what keeps it from following."""


def held(decisions: tuple[Decision, ...]) -> None:
    """Count what a leader's round left as it was."""
    for decision in decisions:
        if decision.before == decision.replicas and decision.reason not in _MOVING:
            HELD.labels(str(decision.reason)).inc()


class ReplicasShown:
    """The gauges of as many deployments as may have some."""

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def show(self, decisions: tuple[Decision, ...], ready: Mapping[str, float]) -> None:
        """What was decided last, by this process, leading or not."""
        names = [decision.deployment for decision in decisions[:_MOST_DEPLOYMENTS]]
        for gone in self._shown - set(names):
            for which in ("wanted", "desired", "ready"):
                REPLICAS.remove(gone, which)
        self._shown = set(names)
        for decision in decisions[:_MOST_DEPLOYMENTS]:
            wanted = float("nan") if decision.wanted is None else decision.wanted.replicas
            REPLICAS.labels(decision.deployment, "wanted").set(wanted)
            REPLICAS.labels(decision.deployment, "desired").set(decision.replicas)
            REPLICAS.labels(decision.deployment, "ready").set(ready.get(decision.deployment, 0))
