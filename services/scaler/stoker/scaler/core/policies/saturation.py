"""Spare KV cache and spare queue: enough replicas that both margins hold.

Fewer replicas cache less: with m of n replicas the hit rate h is taken to fall to h * m / n, and what is computed
grows by (1 - h * m / n) / (1 - h). A count is lowered only as far as both margins hold at that lower hit rate.
"""

from __future__ import annotations

from stoker.scaler.core.policies.windows import mean
from stoker.scaler.core.policy import Policy
from stoker.scaler.core.signals import History, Sample
from stoker.scaler.core.values import Need, Reason

_AT_ONCE = 2.0
"""A queue alone never asks for more than so many times what is ready: it tells that there is too little, not by
how much."""


def need(policy: Policy, history: History, now: float) -> Need:
    """The count at which KV and queues have the asked-for room."""
    asked, since, newest = policy.saturation, now - policy.saturation.window_s, history.samples[-1]
    held = mean(history.samples, since, _held)
    waiting = mean(history.samples, since, _waiting)
    hit_rate = mean(history.samples, since, lambda sample: sample.hit_rate)
    numbers: dict[str, float | None] = {
        "kv_usage": newest.kv_usage,
        "waiting": waiting,
        "hit_rate": hit_rate,
        "ready": newest.ready,
    }
    known = mean(history.samples, now - policy.fresh_s, _held), mean(history.samples, now - policy.fresh_s, _waiting)
    if held is None or waiting is None or None in known or not newest.ready:
        return Need(None, Reason.UNKNOWN, numbers)
    for_kv = held / (1.0 - asked.spare_kv)
    for_queue = min(waiting / asked.spare_queue, _AT_ONCE * newest.ready)
    numbers |= {"for_kv": for_kv, "for_queue": for_queue}
    wanted = max(_with_colder_caches(each, newest.ready, hit_rate) for each in (for_kv, for_queue))
    return Need(wanted, Reason.SATURATION, numbers)


def _held(sample: Sample) -> float | None:
    """KV that running requests hold, in whole replicas."""
    return None if sample.kv_usage is None else sample.kv_usage * sample.ready


def _waiting(sample: Sample) -> float | None:
    if sample.queued is None or sample.waiting is None:
        return None
    return sample.queued + sample.waiting


def _with_colder_caches(wanted: float, ready: float, hit_rate: float | None) -> float:
    """What `wanted` of `ready` replicas becomes when fewer of them cache less: the m with
    m = wanted * (1 - h * m / ready) / (1 - h). With an unknown hit rate nothing is taken away."""
    if wanted <= 0.0 or wanted >= ready:
        return wanted
    if hit_rate is None:
        return ready
    return wanted / (1.0 - hit_rate + wanted * hit_rate / ready)
