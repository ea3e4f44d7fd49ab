"""The one demand of several deployments of a model, told to each of them in its own replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from stoker.scaler.core.past import Past, summed
from stoker.scaler.core.signals import History, Sample

_GAP_S = 15.0
"""Samples of two deployments closer than this tell of the same moment."""


def shared(histories: Mapping[str, History], weights: Mapping[str, float]) -> dict[str, History]:
    """Each history with the demand of all of them; `weights` is what one replica of each carries, in any one unit.

    Requests and tokens are summed; replicas are counted in replicas of the one that is told; how full its caches
    are and what it can do stays its own. What any of them that has replicas does not know is not known of the sum.
    """
    joined = {}
    for name, own in histories.items():
        others = [(history, weights[other] / weights[name]) for other, history in histories.items() if other != name]
        minutes = Past.of(own.minutes).once(summed, tuple(Past.of(other.minutes) for other, _ in others))
        joined[name] = replace(own, samples=_samples(own, others), minutes=minutes)
    return joined


def _samples(own: History, others: Sequence[tuple[History, float]]) -> list[Sample]:
    places = [0] * len(others)
    joined = []
    for sample in own.samples:
        beside: list[tuple[Sample, float]] = []
        for number, (other, ratio) in enumerate(others):
            place, samples = places[number], other.samples
            while place + 1 < len(samples) and samples[place + 1].at <= sample.at:
                place += 1
            places[number] = place
            if samples and 0.0 <= sample.at - samples[place].at <= _GAP_S:
                beside.append((samples[place], ratio))
        joined.append(_joined(sample, beside, whole=len(beside) == len(others)))
    return joined


def _joined(sample: Sample, beside: Sequence[tuple[Sample, float]], *, whole: bool) -> Sample:
    every = (sample, *(other for other, _ in beside))

    def total(value: Callable[[Sample], float | None]) -> float | None:
        known = [(value(each), each.ready) for each in every]
        if not whole or any(found is None and ready for found, ready in known):
            return None
        parts = [found for found, _ in known if found is not None]
        return sum(parts) if parts else None

    return replace(
        sample,
        ready=sample.ready + sum(other.ready * ratio for other, ratio in beside),
        starting=sample.starting + sum(other.starting * ratio for other, ratio in beside),
        running=total(lambda each: each.running),
        waiting=total(lambda each: each.waiting),
        queued=total(lambda each: each.queued),
        arrivals_per_s=total(lambda each: each.arrivals_per_s),
        prefill_tokens_per_s=total(lambda each: each.prefill_tokens_per_s),
        decode_tokens_per_s=total(lambda each: each.decode_tokens_per_s),
    )
