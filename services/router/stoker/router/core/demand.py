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
End = tuple[Outcome, Usage, float | None, float]
"""How a try ended: outcome, usage, seconds to the first token (None where none was told of), and since then."""
MOST_ENDS = 10_000
"""That wait to be counted; with more, whoever adds one counts them."""


@dataclass(slots=True)
class Tally:
    """What one router has seen of one model since it began."""

    most_ttft_s: float = math.inf
    """What an answer is judged by, now."""
    most_itl_s: float = math.inf
    arrivals: int = 0
    prompt_tokens: int = 0
    prompt_tokens_squared: int = 0
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
    tries: int = 0
    """Sent to replicas."""
    ttft: Times = field(default_factory=Times)
    itl: Times = field(default_factory=Times)
    ends: list[End] = field(default_factory=list)
    """Of tries, not counted yet: in a request's way each would cost 3 µs, together later they cost 0.8 each."""

    @property
    def in_flight(self) -> int:
        """Tries that have not ended."""
        return self.tries - self.finished - self.failed - self.cancelled - len(self.ends)

    def fold(self) -> None:
        """Count the ends that wait."""
        ends, self.ends = self.ends, []
        for end in ends:
            self._ended(*end)

    def _ended(self, outcome: Outcome, usage: Usage, ttft_s: float | None, rest_s: float) -> None:
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
        return self.arrivals, self.tries, self.finished, self.failed, self.refused, self.cancelled
