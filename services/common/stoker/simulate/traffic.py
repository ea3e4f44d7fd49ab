"""Whose requests come when: a load, scaled as wanted."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from random import Random

from stoker.bench.replicas import Job
from stoker.bench.traces import numbered_key

Source = Callable[[], Iterator[Job]]
"""The same requests each time it is called, in order of arrival; the first comes at 0 or later."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How a trace is changed before it is replayed."""

    speed: float = 1.0
    """Arrivals come so many times as fast: their pattern is compressed."""
    load: float = 1.0
    """So many times as many requests in the same pattern. Each further copy of a request comes up to `spread_s`
    later and shares its prefix with nothing but that copy's own: as another group of users would."""
    spread_s: float = 10.0
    hours: float = 0.0
    """The trace is repeated until it is this long, and cut there; 0: as long as it is."""


def scaled(source: Source, scale: Scale, seed: int) -> Source:
    """The same requests, faster, more, and for longer."""

    def made() -> Iterator[Job]:
        jobs = _repeated(source, scale.hours * 3_600.0 * scale.speed) if scale.hours else source()
        faster = (replace(job, at=job.at / scale.speed) for job in jobs) if scale.speed != 1.0 else jobs
        return _heavier(faster, scale, seed) if scale.load != 1.0 else iter(faster)

    return made


def _repeated(source: Source, seconds: float) -> Iterator[Job]:
    """From the beginning again, as long as the trace and the mean time between its requests, until it is time."""
    offset = 0.0
    for turn in count():
        last, number = 0.0, 0
        for job in source():
            if offset + job.at >= seconds:
                return
            last, number = job.at, number + 1
            yield replace(job, at=offset + job.at, keys=_salted(job.keys, turn))
        if not number:
            return
        offset += last + max(1e-3, last / number)


def _heavier(jobs: Iterable[Job], scale: Scale, seed: int) -> Iterator[Job]:
    """Copies of each request, a fraction by lot."""
    rng = Random(seed)  # noqa: S311 (repeatable on purpose)
    whole, part = int(scale.load), scale.load % 1.0
    waiting: list[tuple[float, int, Job]] = []
    order = count()
    for job in jobs:
        while waiting and waiting[0][0] <= job.at:
            yield heapq.heappop(waiting)[2]
        for copy in range(whole + (rng.random() < part)):
            at = job.at + (rng.random() * scale.spread_s if copy else 0.0)
            # Salts of copies and of repetitions are apart.
            more = replace(job, at=at, keys=_salted(job.keys, copy << 32))
            heapq.heappush(waiting, (at, next(order), more))
    while waiting:
        yield heapq.heappop(waiting)[2]


def _salted(keys: tuple[int, ...], salt: int) -> tuple[int, ...]:
    if not salt or not keys:
        return keys
    mask = numbered_key(salt)
    return tuple(key ^ mask for key in keys)
