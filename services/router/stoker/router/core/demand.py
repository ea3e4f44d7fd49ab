"""Demand for one model, in counters that only grow; see `stoker.api.registry.v1.Demand` for what each one means."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field

from stoker.common.log_buckets import BOUNDS_S, BUCKETS
from stoker.router.core.health import Outcome

_OK, _FAULT = Outcome.OK, Outcome.FAULT


@dataclass(slots=True)
class Times:
    """A histogram of seconds in the buckets of `stoker.common.log_buckets`."""

    counts: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    sum_s: float = 0.0

    def told(self) -> list[int]:
        """The counts up to the last that is not zero."""
        end = BUCKETS
        while end and not self.counts[end - 1]:
            end -= 1
        return self.counts[:end]


Usage = tuple[int | None, int | None, int | None]
"""Prompt tokens, of these cached, and generated ones, as an engine says; None for what it does not say."""


@dataclass(slots=True)
class Tally:
    """What one router has seen of one model since it began."""

    most_ttft_s: float = math.inf
    """What an answer is judged by, now."""
    most_itl_s: float = math.inf
    arrivals: int = 0
    prompt_tokens: int = 0
    predicted_cached_tokens: int = 0
    compared_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    failed: int = 0
    refused: int = 0
    cancelled: int = 0
    judged: int = 0
    within_slo: int = 0
    in_flight: int = 0
    """Now."""
    ttft: Times = field(default_factory=Times)
    itl: Times = field(default_factory=Times)

    # A request costs a microsecond in all: hence few calls.

    def ended(self, outcome: Outcome, usage: Usage, ttft_s: float | None, rest_s: float) -> None:
        """A try ended. `ttft_s` is None where no first token was told of; `rest_s` is the time since that token."""
        self.in_flight -= 1
        prompt, cached, generated = usage
        if prompt is not None and cached is not None:
            self.compared_tokens += prompt
            self.cached_tokens += cached
        if generated is not None:
            self.output_tokens += generated
        if outcome is _OK:
            self.finished += 1
            if ttft_s is not None:
                self._judge(ttft_s, None if generated is None or generated < 2 else rest_s / (generated - 1))
        elif outcome is _FAULT:
            self.failed += 1
        else:
            self.cancelled += 1

    def _judge(self, ttft_s: float, itl_s: float | None) -> None:
        self.judged += 1
        times = self.ttft
        times.counts[bisect_left(BOUNDS_S, ttft_s)] += 1
        times.sum_s += ttft_s
        if itl_s is not None:
            times = self.itl
            times.counts[bisect_left(BOUNDS_S, itl_s)] += 1
            times.sum_s += itl_s
            if itl_s > self.most_itl_s:
                return
        if ttft_s <= self.most_ttft_s:
            self.within_slo += 1

    def marks(self) -> tuple[int, ...]:
        """What differs whenever anything has changed."""
        return self.arrivals, self.in_flight, self.finished, self.failed, self.refused, self.cancelled
