"""What one replica can do, learnt from what its replicas report."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import combinations
from statistics import median

from stoker.scaler.core.counting import Growth
from stoker.scaler.core.signals import Capacity

_POINTS = 24
"""Of each band of batch sizes the newest so many count."""
_BANDS_AN_OCTAVE = 4
_MOST_BANDS = 64
_SPREAD = 1.5
"""Batch sizes must differ by this factor before their times tell a slope."""
_LONGEST_S = 10.0
_MOST_PREFILL = 0.8
"""With more of a replica's time spent on prefill its steps tell little."""
_LEAST_TOKENS = 8.0
_MOST_SEQUENCES, _LONGEST_STEP_S, _MOST_TOKENS_PER_S = 1e6, 3_600.0, 1e9
"""What is beyond these was not measured."""


class DecodeSteps:
    """`step_s + n * sequence_s`, the time of a decode step of n sequences, from times between tokens.

    By the medians of bands of batch sizes, so that sizes seen rarely count as much as the usual one; the slope is
    the median over pairs of bands, weighted by their distance (Theil and Sen), which outliers do not turn. As long as
    all batches were of about one size, half of the time there is taken to be the sequences'.
    """

    def __init__(self) -> None:
        self._bands: dict[int, deque[tuple[float, float]]] = {}

    def add(self, sequences: float, step_s: float) -> None:
        """A mean step time at a mean batch size."""
        if not (0.0 < sequences <= _MOST_SEQUENCES and 0.0 < step_s <= _LONGEST_STEP_S):  # nor is NaN
            return
        band = round(_BANDS_AN_OCTAVE * math.log2(sequences))
        if band in self._bands or len(self._bands) < _MOST_BANDS:
            self._bands.setdefault(band, deque(maxlen=_POINTS)).append((sequences, step_s))

    def fit(self) -> tuple[float, float] | None:
        """(step_s, sequence_s); None before anything was measured."""
        points = [(median(n for n, _ in band), median(s for _, s in band)) for band in self._bands.values()]
        if not points:
            return None
        low, high = min(points), max(points)
        if high[0] < _SPREAD * low[0]:
            typical = median(step for _, step in points)
            return typical / 2, typical / 2 / median(n for n, _ in points)
        slope = max(0.0, _median_slope(points))
        base = median(step - slope * n for n, step in points)
        if base <= 0.0:
            return 0.0, median(step / n for n, step in points)
        return base, slope


def _median_slope(points: Sequence[tuple[float, float]]) -> float:
    slopes = sorted(((b[1] - a[1]) / (b[0] - a[0]), abs(b[0] - a[0])) for a, b in combinations(points, 2))
    half, below = sum(weight for _, weight in slopes) / 2, 0.0
    for slope, weight in slopes:
        below += weight
        if below >= half:
            return slope
    return slopes[-1][0]


class Measured:
    """The capacity of a deployment's replicas, as far as it was seen. What was seen once stays known."""

    def __init__(self) -> None:
        self.steps = DecodeSteps()
        self._prefill: float | None = None
        self._prefills: deque[tuple[float, float]] = deque(maxlen=_POINTS)
        self._kv_tokens: float | None = None
        self._max_seqs: int | None = None

    def engines(self, kv_tokens: Iterable[float], max_seqs: Iterable[int]) -> None:
        """What the ready replicas' engines say of themselves; 0 is unknown. The smallest counts."""
        self._kv_tokens = min((each for each in kv_tokens if each), default=self._kv_tokens)
        self._max_seqs = min((each for each in max_seqs if each), default=self._max_seqs)

    def prefill(self, rates: Iterable[float]) -> None:
        """Measured prefill rates of the ready replicas, tokens/s."""
        if known := [rate for rate in rates if 0.0 < rate <= _MOST_TOKENS_PER_S]:
            self._prefill = median(known)

    def prefilling(self, growth: Growth) -> None:
        """What one replica counted: tokens over the time that their prefills took. Overlapping ones count twice, and
        short ones are mostly overhead, so that this falls short of the rate; it serves where agents measure none, as
        with prompts that are all short."""
        prompt, seconds = growth.counts.get("prompt_tokens"), growth.counts.get("prefill_sum_s")
        if prompt is not None and seconds and 0.0 <= prompt <= seconds * _MOST_TOKENS_PER_S:
            self._prefills.append((max(0.0, prompt - growth.counts.get("cached_tokens", 0.0)), seconds))

    def decoding(self, growth: Growth) -> None:
        """What one replica counted: its mean time between tokens tells a step, prefill taken out."""
        itl_s, tokens = growth.counts.get("itl_sum_s"), growth.counts.get("itl_count")
        if itl_s is None or tokens is None or tokens < _LEAST_TOKENS or growth.seconds > _LONGEST_S:
            return
        share = self._prefill_share(growth)
        if share <= _MOST_PREFILL:
            # By Little's law: seconds between tokens, summed over sequences, over the clock's.
            self.steps.add(max(1.0, itl_s / growth.seconds), itl_s / tokens * (1.0 - share))

    def _prefill_share(self, growth: Growth) -> float:
        prompt, cached = growth.counts.get("prompt_tokens"), growth.counts.get("cached_tokens", 0.0)
        rate = self._prefill_rate
        return max(0.0, prompt - cached) / rate / growth.seconds if prompt is not None and rate else 0.0

    @property
    def _prefill_rate(self) -> float | None:
        tokens, seconds = (sum(each) for each in zip(*self._prefills, strict=True)) if self._prefills else (0.0, 0.0)
        return self._prefill or (tokens / seconds if tokens and seconds else None)

    @property
    def capacity(self) -> Capacity:
        """All of it."""
        step_s, sequence_s = self.steps.fit() or (None, None)
        return Capacity(self._prefill_rate, step_s, sequence_s, self._kv_tokens, self._max_seqs)
