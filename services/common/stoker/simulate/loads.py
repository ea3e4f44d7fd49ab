"""Seeded loads of known shape. The same seed gives the same requests on every machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import cos, pi
from random import Random

from stoker.bench.replicas import Job
from stoker.bench.traces import numbered_key

_BLOCK = 512
Rate = Callable[[float], float]
"""Requests per second at a time."""


@dataclass(frozen=True, slots=True)
class Asking:
    """What is asked: one of a number of long prompts that come again, and something of one's own behind it."""

    prefixes: int = 60
    prefix_blocks: tuple[int, int] = (4, 16)
    own_tokens: float = 5_000.0
    """Mean; sizes are log-normal, not above three times the mean."""
    spread: float = 0.6
    """Standard deviation of the logarithm."""
    output_tokens: float = 120.0
    """Mean; lengths are exponential."""


def arrivals(rate: Rate, most: float, seconds: float, seed: int, asking: Asking | None = None) -> Iterator[Job]:
    """Poisson arrivals at a rate that changes and is never above `most` (by thinning)."""
    rng = Random(seed)  # noqa: S311 (repeatable on purpose)
    asking = asking or Asking()
    names = iter(range(1, 2**62))
    prefixes = [_keys(names, rng.randint(*asking.prefix_blocks)) for _ in range(asking.prefixes)]
    weights = [1.0 / (rank + 1) ** 0.8 for rank in range(asking.prefixes)]
    at = 0.0
    while (at := at + rng.expovariate(most)) < seconds:
        if rng.random() * most >= rate(at):
            continue
        keys = rng.choices(prefixes, weights)[0]
        mean = asking.own_tokens
        own = min(3.0 * mean, mean * rng.lognormvariate(-(asking.spread**2) / 2, asking.spread))
        output = 1 + int(rng.expovariate(1.0 / asking.output_tokens))
        prompt = len(keys) * _BLOCK + max(1, int(own))
        yield Job(at, keys, prompt, output, own_blocks=-(-(prompt + output) // _BLOCK) - len(keys))


def steady(seed: int, *, rate: float = 4.0, seconds: float = 1_800.0) -> Iterator[Job]:
    """The same all the time."""
    return arrivals(lambda at: rate, rate, seconds, seed)


def step(seed: int, *, low: float = 3.0, times: float = 2.0, seconds: float = 2_400.0) -> Iterator[Job]:
    """Some of the time, then `times` as much from a quarter on to three quarters."""
    high = low * times
    return arrivals(lambda at: high if 0.25 <= at / seconds < 0.75 else low, max(low, high), seconds, seed)


def ramp(seed: int, *, low: float = 2.0, high: float = 8.0, seconds: float = 2_400.0) -> Iterator[Job]:
    """Slowly up for two fifths of the time, there for a fifth, and down again."""

    def rate(at: float) -> float:
        part = at / seconds
        return low + (high - low) * max(0.0, min(1.0, part / 0.4, (1.0 - part) / 0.4))

    return arrivals(rate, high, seconds, seed)


def burst(seed: int, *, low: float = 2.0, high: float = 6.0, seconds: float = 3_600.0) -> Iterator[Job]:
    """Quiet, and now and then (by chance, every ten minutes on average) a minute or more of much more."""
    rng = Random(f"{seed} bursts")  # noqa: S311
    spans, at = [], 0.0
    while (at := at + rng.expovariate(1.0 / 600.0)) < seconds:
        spans.append((at, at := at + rng.uniform(60.0, 180.0)))
    return arrivals(lambda at: high if any(begin <= at < end for begin, end in spans) else low, high, seconds, seed)


def diurnal(
    seed: int, *, low: float = 1.0, high: float = 6.0, day_s: float = 3_600.0, seconds: float = 7_200.0
) -> Iterator[Job]:
    """Days that are like each other, as short as `day_s`: lowest at their beginning, highest in their middle."""
    return arrivals(lambda at: low + (high - low) * (1.0 - cos(2 * pi * at / day_s)) / 2, high, seconds, seed)


def flapping(
    seed: int, *, low: float = 2.0, high: float = 5.0, period_s: float = 240.0, seconds: float = 2_400.0
) -> Iterator[Job]:
    """High and low in turns, each for half a period: what a scaler should sit out where starting takes as long."""
    return arrivals(lambda at: high if at % period_s < period_s / 2 else low, high, seconds, seed)


def daily_step(
    seed: int,
    *,
    low: float = 2.0,
    times: float = 2.0,
    day_s: float = 3_600.0,
    days: int = 3,
) -> Iterator[Job]:
    """A step that comes each day at the same hour, and ends after a quarter of the day."""
    high = low * times
    return arrivals(lambda at: high if 0.5 <= at % day_s / day_s < 0.75 else low, high, days * day_s, seed)


@dataclass(frozen=True, slots=True)
class Liveliness:
    """Tenants of three kinds: some have said their last word, some come seldom, some are about to come back."""

    tenants: int = 90
    over: float = 0.5
    """Share of those whose conversation is over at `turn_s`."""
    seldom: float = 0.25
    """Share of those that pause ten times as long as the others from then on."""
    pause_s: float = 40.0
    context_blocks: tuple[int, int] = (30, 90)
    """What a conversation begins with: documents, of its own."""
    turn_s: float = 900.0
    seconds: float = 1_800.0


def tenants(seed: int, *, shape: Liveliness | None = None) -> Iterator[Job]:
    """Conversations with contexts of their own, all alike until `turn_s`; from then on they differ in liveliness.

    A replica's cache is worth what those ask again whose contexts lie there: here replicas differ in that, as a
    tenant's turns all go where its context is. Each has one conversation, which grows and is answered, and whose
    pauses are drawn; `bench.traces.tenants_trace` has tenants of two kinds only, with many documents that stay as
    they are, asked about at nearly even times and not answered, for `bench/scale_down.py`.
    """
    shape = shape or Liveliness()
    rng = Random(seed)  # noqa: S311
    names = iter(range(1, 2**62))
    jobs = []
    for number in range(shape.tenants):
        lot = number / shape.tenants
        keys = list(_keys(names, rng.randint(*shape.context_blocks)))
        at = rng.random() * shape.turn_s / 4
        while at < shape.seconds and not (at > shape.turn_s and lot < shape.over):
            keys += _keys(names, rng.randint(1, 2))
            output = 1 + int(rng.expovariate(1 / 120.0))
            jobs.append(Job(at, tuple(keys), len(keys) * _BLOCK, output, tenant=f"tenant-{number}", own_blocks=1))
            late = at > shape.turn_s and lot < shape.over + shape.seldom
            at += 2.0 + rng.expovariate(1.0 / (shape.pause_s * (10.0 if late else 1.0)))
    yield from sorted(jobs, key=lambda job: job.at)


def _keys(names: Iterator[int], number: int) -> tuple[int, ...]:
    return tuple(numbered_key(next(names)) for _ in range(number))


GENERATORS: dict[str, Callable[[int], Iterator[Job]]] = {
    "steady": steady,
    "step": step,
    "ramp": ramp,
    "burst": burst,
    "diurnal": diurnal,
    "flapping": flapping,
    "daily_step": daily_step,
    "tenants": tenants,
}
