"""The one demand of several deployments of a model, told to each of them in its own replicas."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import overload

from stoker.scaler.core.minutes import Identical, Lasting, lasting
from stoker.scaler.core.signals import History, Minute, Sample

_GAP_S = 15.0
"""Samples of two deployments closer than this tell of the same moment."""

_REMEMBERED = 512


def shared(histories: Mapping[str, History], weights: Mapping[str, float]) -> dict[str, History]:
    """Each history with the demand of all of them; `weights` is what one replica of each carries, in any one unit.

    Requests and tokens are summed; replicas are counted in replicas of the one that is told; how full its caches
    are and what it can do stays its own. What any of them that has replicas does not know is not known of the sum.
    """
    joined = {}
    for name, own in histories.items():
        others = [(history, weights[other] / weights[name]) for other, history in histories.items() if other != name]
        minutes = _summed(own.minutes, [other.minutes for other, _ in others])
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


def _summed(own: Sequence[Minute], others: Sequence[Sequence[Minute]]) -> Sequence[Minute]:
    """The same object for the same tuples: what was found of them is remembered until the next minute ends."""
    parts = (own, *others)
    return _summed_once(tuple(map(Identical, parts))) if all(map(lasting, parts)) else _Summed(own, others)


class _Summed(Sequence[Minute]):
    """The minutes of several deployments as one, added up as they are looked at: days of them are kept, few used."""

    def __init__(self, own: Sequence[Minute], others: Sequence[Sequence[Minute]]) -> None:
        self._own = own
        self._others = others

    def __len__(self) -> int:
        return len(self._own)

    @overload
    def __getitem__(self, place: int) -> Minute: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Minute]: ...
    def __getitem__(self, place: int | slice) -> Minute | Sequence[Minute]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        minute = self._own[place]
        parts = [minute, *(found for other in self._others if (found := _same(other, minute.at)))]
        prefill = sum(part.prefill_tokens_per_s for part in parts)
        hits = sum(part.hit_rate * part.prefill_tokens_per_s for part in parts)
        return Minute(
            minute.at,
            sum(part.arrivals_per_s for part in parts),
            prefill,
            sum(part.decode_tokens_per_s for part in parts),
            hits / prefill if prefill else minute.hit_rate,
        )


class _LastingSum(_Summed, Lasting):
    """Of minutes that never change."""


@lru_cache(maxsize=_REMEMBERED)
def _summed_once(parts: tuple[Identical, ...]) -> Sequence[Minute]:
    own, *others = parts
    return _LastingSum(own.minutes, [other.minutes for other in others])


def _same(minutes: Sequence[Minute], at: float) -> Minute | None:
    place = bisect_left(minutes, at - 30.0, key=lambda minute: minute.at)
    return minutes[place] if place < len(minutes) and minutes[place].at < at + 30.0 else None
