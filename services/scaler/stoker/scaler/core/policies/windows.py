"""What samples and wanted counts of the last seconds tell."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import attrgetter

from stoker.scaler.core.signals import Sample, Wanted

_AT = attrgetter("at")


def last(samples: Sequence[Sample], since: float) -> Sequence[Sample]:
    """The samples after `since`, newest first; the newest in any case."""
    return samples[_first(samples, since) :][::-1]


def _first(samples: Sequence[Sample], since: float) -> int:
    return max(0, min(bisect_right(samples, since, key=_AT), len(samples) - 1))


def mean(samples: Sequence[Sample], since: float, value: Callable[[Sample], float | None]) -> float | None:
    """The mean of what is known of `value` after `since`; None where nothing is."""
    known = [found for sample in last(samples, since) if (found := value(sample)) is not None]
    return sum(known) / len(known) if known else None


def rate(samples: Sequence[Sample], since: float, value: Callable[[Sample], float | None]) -> float | None:
    """The mean of a rate after `since`, each sample weighted by the time it covers; None where nothing is known."""
    total = seconds = 0.0
    for place in range(len(samples) - 1, _first(samples, since) - 1, -1):
        found = value(samples[place])
        if found is not None:
            covered = samples[place].at - samples[place - 1].at if place else 1.0
            total, seconds = total + covered * found, seconds + covered
    return total / seconds if seconds else None


def in_flight(sample: Sample) -> float | None:
    """Requests that a deployment has: in batches, in engines' queues and held by routers.

    While nothing is ready nothing runs, so that those held are all; otherwise each of the three must be known.
    """
    engines = (sample.running, sample.waiting) if sample.ready else (sample.running or 0.0, sample.waiting or 0.0)
    parts = (*engines, sample.queued)
    return None if any(part is None for part in parts) else sum(part for part in parts if part is not None)


def at_rest(sample: Sample) -> bool:
    """Whether it is known that nothing arrived, waited or ran."""
    return in_flight(sample) == 0 and sample.arrivals_per_s == 0


def most_wanted(wanted: Sequence[Wanted], since: float) -> float:
    """The most that was wanted at or after `since`; 0 where nothing was."""
    most = 0.0
    for asked in reversed(wanted):
        if asked.at < since:
            break
        most = max(most, asked.replicas)
    return most
