"""The smallest count whose TTFT and ITL hold, by the model of `core.model`, for the demand of the last seconds.

Where what the routers saw says otherwise than the model, the model is corrected: by a factor on the need, bounded
and slowly learnt, that travels with what was wanted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from stoker.scaler.core.model import Demand, Model
from stoker.scaler.core.policies.windows import in_flight, last, mean, rate
from stoker.scaler.core.policy import Policy, Slo
from stoker.scaler.core.signals import Capacity, History, Sample
from stoker.scaler.core.values import Need, Reason

_PARTS = (1 / 6, 1 / 3)
"""Of the window, its end: these show a rise first."""
_BELIEF, _SURE = 2.0, 3.0
"""Standard deviations taken off what a part shows; those by which it must exceed the whole to be taken as it is."""
_PRIOR = 10.0
"""Samples' worth of belief in Poisson arrivals."""
_LEAST_CORRECTION, _MOST_CORRECTION = 0.7, 1.6
_LEARNT_PER_S = math.log(1.1) / 60.0
"""At most: ten percent a minute."""
_LONGEST_STEP_S = 15.0
_SAMPLES = 240
"""So many samples tell sizes, spread and hit rate."""
_ANSWERED = 20.0
"""Requests in the window from which their times tell something."""


def need(policy: Policy, history: History, now: float) -> Need:
    """The count for the demand as it is."""
    demand, missing = measured(policy, history, now)
    if demand is None:
        return Need(None, Reason.UNKNOWN, missing)
    return answer(policy, history, now, demand, Reason.SLO)


def answer(policy: Policy, history: History, now: float, demand: Demand, reason: Reason) -> Need:
    """The count for a demand, corrected by what was learnt."""
    model = Model(history.capacity, policy.slo, demand.times(1.0 + policy.slo.headroom))
    if unmeasured := model.unmeasured():
        return Need(None, Reason.UNKNOWN, dict.fromkeys(unmeasured))
    estimate = model.estimate()
    correction = corrected(policy.slo, history, now, model, estimate.replicas)
    numbers = {
        "arrivals_per_s": demand.arrivals_per_s,
        "uncached_tokens_per_s": demand.uncached_tokens_per_s,
        "decode_tokens_per_s": demand.decode_tokens_per_s,
        "for_prefill": estimate.prefill,
        "for_decode": estimate.decode,
        "late": estimate.late,
        "within_slo": mean(history.samples, now - policy.slo.window_s, lambda sample: sample.within_slo),
        "correction": correction,
    }
    return Need(correction * estimate.replicas, reason, numbers, correction)


def measured(policy: Policy, history: History, now: float) -> tuple[Demand | None, dict[str, float | None]]:
    """The demand of the last `window_s`; None, and what is missing, where it is not known, or not of late."""
    slo, samples = policy.slo, history.samples[-_SAMPLES:]
    since = now - slo.window_s
    if rate(samples, now - policy.fresh_s, lambda sample: sample.arrivals_per_s) is None:
        return None, {"arrivals_per_s": None}
    arrivals = rate(samples, since, lambda sample: sample.arrivals_per_s)
    prompt = rate(samples, since, lambda sample: sample.prefill_tokens_per_s)
    decode = rate(samples, since, lambda sample: sample.decode_tokens_per_s)
    newest = samples[-1]
    if decode is None and not newest.ready:
        decode = 0.0
    if arrivals is None or prompt is None or decode is None:
        return None, {"arrivals_per_s": arrivals, "prefill_tokens_per_s": prompt, "decode_tokens_per_s": decode}
    if not arrivals and not decode and in_flight(newest) == 0:
        return Demand(0.0, 0.0, 0.0), {}
    hit_rate = mean(samples, -math.inf, lambda sample: sample.hit_rate)
    if hit_rate is None and history.minutes:
        hit_rate = history.minutes[-1].hit_rate
    if hit_rate is None:
        return None, {"hit_rate": None}

    arrival_scv = _arrival_scv(samples)
    prompt_tokens, output_tokens, prompt_scv = _sizes(samples)
    believed = max(arrivals, _risen(samples, slo, now, lambda each: each.arrivals_per_s, arrival_scv))
    # Of the tokens themselves only what is sure: a few long prompts make a noisy rate.
    spread = prompt_tokens * (arrival_scv + prompt_scv)
    longer = prompt - _BELIEF * math.sqrt(spread * prompt / slo.window_s)
    uncached = max(believed * prompt_tokens, longer) * (1.0 - hit_rate)
    backlog = (mean(samples, now - slo.window_s / 3, _waiting) or 0.0) * prompt_tokens * (1.0 - hit_rate)
    return (
        Demand(
            believed,
            uncached + _to_catch_up(slo, history, uncached, backlog),
            max(decode, believed * output_tokens),
            _uncached_scv(prompt_scv, hit_rate),
            arrival_scv,
            _kv_tokens(newest, history.capacity, prompt_tokens + output_tokens / 2.0),
        ),
        {},
    )


def _to_catch_up(slo: Slo, history: History, uncached: float, backlog: float) -> float:
    """Tokens a second on top, so that what waits, and what will until a replica started now is ready, is done as long
    after that as the start took."""
    prefill = history.capacity.prefill_tokens_per_s
    newest, startup_s = history.samples[-1], history.startup.p50_s or 0.0
    if prefill and newest.ready:
        falling_behind = uncached - prefill * (newest.ready + newest.starting / 2.0)
        backlog = max(0.0, backlog + falling_behind * startup_s)
    return backlog / max(slo.window_s, startup_s)


def _risen(
    samples: Sequence[Sample], slo: Slo, now: float, value: Callable[[Sample], float | None], variance: float
) -> float:
    """What a rate has surely risen to of late, before the whole window shows it: the mean of a part of the window
    that is as far above the whole as chance hardly ever is, else what chance leaves of it.

    What comes within t seconds varies by `variance` times its mean: for requests that of their number, for tokens
    that times what one request brings.
    """
    whole, risen = rate(samples, now - slo.window_s, value) or 0.0, 0.0
    for part in _PARTS:
        lately = rate(samples, now - part * slo.window_s, value) or 0.0
        chance = math.sqrt(variance * lately / (part * slo.window_s))
        risen = max(risen, lately if lately - _SURE * chance > whole else lately - _BELIEF * chance)
    return risen


def _arrival_scv(samples: Sequence[Sample]) -> float:
    """Variability of arrivals: variance of their number in a sample over its mean, 1 for Poisson arrivals.

    From successive differences, so that a rise or fall over minutes is not taken for variability.
    """
    counts = [
        sample.arrivals_per_s * (sample.at - before.at)
        for before, sample in pairwise(samples)
        if sample.arrivals_per_s is not None
    ]
    average = sum(counts) / len(counts) if counts else 0.0
    if len(counts) < 2 or average <= 0.0:
        return 1.0
    differences = sum((b - a) ** 2 for a, b in pairwise(counts)) / (2.0 * (len(counts) - 1))
    seen = len(counts) - 1
    return (_PRIOR + seen * differences / average) / (_PRIOR + seen)


def _sizes(samples: Sequence[Sample]) -> tuple[float, float, float]:
    """(prompt tokens, output tokens, squared coefficient of variation of the former) of a request, over all samples.

    The second moments of the samples are pooled, so that what differs between them is in it.
    """
    requests = prompts = outputs = squares = 0.0
    for before, sample in pairwise(samples):
        if sample.arrivals_per_s is None or sample.prefill_tokens_per_s is None:
            continue
        seconds = sample.at - before.at
        outputs += seconds * (sample.decode_tokens_per_s or 0.0)
        if not sample.arrivals_per_s:
            continue
        arrived, tokens = seconds * sample.arrivals_per_s, seconds * sample.prefill_tokens_per_s
        requests, prompts = requests + arrived, prompts + tokens
        squares += tokens * tokens / arrived * (1.0 + (sample.prompt_scv or 0.0))
    if not requests or not prompts:
        return 0.0, 0.0, 1.0
    average = prompts / requests
    return average, outputs / requests, max(0.0, squares / requests / (average * average) - 1.0)


def _uncached_scv(prompt_scv: float, hit_rate: float) -> float:
    """Of the part of prompts that is computed. Were hits spread evenly over prompts, it would be that of the prompts;
    were prompts found whole or not at all, (1 + scv) / (1 - hit rate) - 1. The truth lies between."""
    all_or_none = (1.0 + prompt_scv) / max(0.05, 1.0 - hit_rate) - 1.0
    return (prompt_scv + all_or_none) / 2.0


def _waiting(sample: Sample) -> float | None:
    """Requests that wait for their prefill, in routers and engines."""
    if sample.queued is None or sample.waiting is None:
        return sample.queued if not sample.ready else None
    return sample.queued + sample.waiting


def _kv_tokens(sample: Sample, capacity: Capacity, assumed: float) -> float:
    """KV tokens of one running sequence: as measured, shared blocks counted once, or else its own length."""
    if not sample.running or sample.kv_usage is None or not capacity.kv_tokens:
        return assumed
    return min(assumed, sample.kv_usage * capacity.kv_tokens * sample.ready / sample.running)


def corrected(slo: Slo, history: History, now: float, model: Model, modelled: float) -> float:
    """The factor on the model's need, learnt a step further where what was seen is sure to contradict it.

    It rises while requests miss the times though there are as many replicas as it says; it falls while they keep them
    with fewer, or where it would have more than half of what is allowed be late and less than that half is.
    """
    before = history.wanted[-1] if history.wanted else None
    factor = before.correction if before else 1.0
    recent = last(history.samples, now - slo.window_s)
    within = mean(history.samples, now - slo.window_s, lambda sample: sample.within_slo)
    ready = recent[0].ready
    steady = all(sample.ready == ready for sample in recent)
    answered = model.demand.arrivals_per_s * slo.window_s
    if before is None or within is None or not steady or not ready or answered < _ANSWERED:
        return factor
    seconds = min(max(0.0, now - before.at), _LONGEST_STEP_S)
    missed, may = 1.0 - within, model.allowed
    if ready >= factor * modelled and missed > may:
        error = min(1.0, (missed - may) / may)
    elif missed < may / 2.0 and (ready < factor * modelled or model.late(int(ready / factor)) > may / 2.0):
        error = -1.0
    else:
        return factor
    return min(_MOST_CORRECTION, max(_LEAST_CORRECTION, factor * math.exp(error * _LEARNT_PER_S * seconds)))
