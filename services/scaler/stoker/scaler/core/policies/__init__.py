"""How many replicas a deployment needs, by each kind of policy: pure, before any limit."""

from __future__ import annotations

import math

from stoker.scaler.core.policies import concurrency, forecast, saturation, slo
from stoker.scaler.core.policy import Kind, Policy
from stoker.scaler.core.signals import History
from stoker.scaler.core.values import Need, Reason

_NEEDS = {
    Kind.CONCURRENCY: concurrency.need,
    Kind.SATURATION: saturation.need,
    Kind.SLO: slo.need,
    Kind.FORECAST: forecast.need,
}


def need(policy: Policy, history: History, now: float) -> Need:
    """What `policy` asks for at `now` (monotonic seconds); unknown where the last sample is missing or too old.

    `history` tells the demand of the whole group. A policy of `Kind.FIXED` has no need of its own.
    """
    if not history.samples:
        return Need(None, Reason.UNKNOWN)
    age_s = now - history.samples[-1].at
    if age_s > policy.fresh_s:
        return Need(None, Reason.STALE, {"age_s": age_s, "fresh_s": policy.fresh_s})
    try:
        found = _NEEDS[policy.kind](policy, history, now)
    except (
        ArithmeticError,
        ValueError,
    ):  # figures beyond all measure must not cost the other deployments their round
        return Need(None, Reason.UNKNOWN, {"computable": 0.0})
    if found.replicas is None or 0.0 <= found.replicas < math.inf:
        return found
    return Need(None, Reason.UNKNOWN, {**found.numbers, "computable": 0.0})
