"""Requests in flight over a target, by a stable and a panic window: what Knative's autoscaler does.

Its rules (knative.dev, "Additional autoscaling configuration for the Knative Pod Autoscaler", and
docs/scaling/SYSTEM.md of knative/serving): the count is the mean number of requests in flight over the target, in
the stable window. When the panic window alone asks for `panic_at` times what is ready, it panics, for as long as
that is so and `stable_s` more; in a panic the larger of both windows counts, and nothing that was asked for since
it began is taken back. Step limits are `Pace.up_factor` and `down_factor` (there 1000 and 0.5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from stoker.scaler.core.policies.windows import in_flight, last, most_wanted
from stoker.scaler.core.policy import Concurrency, Policy
from stoker.scaler.core.signals import History, Sample
from stoker.scaler.core.values import Need, Reason

_REMAINDER = 1e-4
"""Weight that a weighted average gives to all that is older than its window."""
_LEAST_DECAY = 0.2


def need(policy: Policy, history: History, now: float) -> Need:
    """The count for the stable window, or the panic's."""
    asked = policy.concurrency
    per_replica = asked.target * asked.utilisation
    newest = history.samples[-1]
    stable = _average(history.samples, now - asked.stable_s, weighted=asked.weighted)
    panic = _average(history.samples, now - asked.panic_s, weighted=asked.weighted)
    if stable is None or panic is None:
        known = {"running": newest.running, "waiting": newest.waiting, "queued": newest.queued}
        return Need(None, Reason.UNKNOWN, known)
    numbers: dict[str, float | None] = {"stable": stable, "panic": panic, "per_replica": per_replica}
    wanted = stable / per_replica
    breaches = _breaches(history.samples, asked, per_replica, now)
    if not breaches:
        return Need(wanted, Reason.CONCURRENCY, numbers)
    kept = most_wanted(history.wanted, breaches[0])  # an earlier part of the same panic included
    numbers |= {"kept": kept, "ready": newest.ready, "calm_in_s": breaches[-1] + asked.stable_s - now}
    return Need(max(wanted, panic / per_replica, kept), Reason.PANIC, numbers)


def _average(samples: Sequence[Sample], since: float, *, weighted: bool) -> float | None:
    known = [requests for sample in last(samples, since) if (requests := in_flight(sample)) is not None]
    if not known:
        return None
    if not weighted:
        return sum(known) / len(known)
    decay = 1.0 - max(_LEAST_DECAY, 1.0 - _REMAINDER ** (1.0 / len(known)))
    weights: list[float] = [decay**age for age in range(len(known))]
    return sum(weight * requests for weight, requests in zip(weights, known, strict=True)) / sum(weights)


def _breaches(samples: Sequence[Sample], asked: Concurrency, per_replica: float, now: float) -> list[float]:
    """When, in the last `stable_s`, the panic window asked for `panic_at` times what was ready; oldest first.

    It panics while there is one. That is found from the samples alone, so that a scaler which takes over panics as
    the one before it did.
    """
    recent = last(samples, now - asked.stable_s - asked.panic_s)[::-1]
    demand = [in_flight(sample) for sample in recent]
    found: list[float] = []
    total, count, first = 0.0, 0, 0
    for sample, requests in zip(recent, demand, strict=True):
        if requests is not None:
            total, count = total + requests, count + 1
        while recent[first].at <= sample.at - asked.panic_s:
            if (gone := demand[first]) is not None:
                total, count = total - gone, count - 1
            first += 1
        if sample.at < now - asked.stable_s or not count:
            continue
        if math.ceil(total / count / per_replica - _REMAINDER) >= asked.panic_at * max(1.0, sample.ready):
            found.append(sample.at)
    return found
