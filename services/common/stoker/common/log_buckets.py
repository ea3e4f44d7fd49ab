"""Times in fixed logarithmic buckets, as `stoker.api.registry.v1.LogHistogram` has them.

Four buckets to an octave, from 1 ms to a quarter of an hour: a quantile or a share is within 19 % of the truth, and
within a few where values are spread evenly inside a bucket.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

BOUNDS_S: tuple[float, ...] = tuple(0.001 * 2 ** (i / 4) for i in range(80))
"""Upper end of each bucket but the last, seconds; a bucket holds its upper end."""
BUCKETS = len(BOUNDS_S) + 1


def bucket(seconds: float) -> int:
    """The bucket that a value falls into."""
    return bisect_left(BOUNDS_S, seconds)


def share_within(counts: Sequence[int], limit_s: float) -> float | None:
    """Share of the values that are at most `limit_s`, 0 to 1; None where there are none.

    `counts` are by bucket, those behind the last not empty left out. Inside a bucket values count as spread evenly.
    """
    total = sum(counts)
    if not total:
        return None
    at = bucket(limit_s)
    if at >= len(counts):
        return 1.0
    if at == len(BOUNDS_S):
        return sum(counts[:at]) / total
    low = BOUNDS_S[at - 1] if at else 0.0
    inside = max(0.0, limit_s - low) / (BOUNDS_S[at] - low)
    return (sum(counts[:at]) + inside * counts[at]) / total


def quantile(counts: Sequence[int], share: float) -> float | None:
    """The value, in seconds, that `share` (0 to 1) of the values are at most; None where there are none.

    The last bucket has no end: what lies there counts as its beginning.
    """
    left = share * sum(counts)
    if not any(counts):
        return None
    for at, count in enumerate(counts):
        if count and left <= count:
            low = BOUNDS_S[at - 1] if at else 0.0
            high = BOUNDS_S[at] if at < len(BOUNDS_S) else low
            return low + (high - low) * max(0.0, left) / count
        left -= count
    return BOUNDS_S[min(len(counts), len(BOUNDS_S)) - 1]


def difference(after: Sequence[int], before: Sequence[int]) -> list[int]:
    """What was counted between two readings; where a count fell, all of `after` is new."""
    before = [*before, *(0,) * (len(after) - len(before))]
    grown = [new - old for new, old in zip(after, before, strict=False)]
    if len(before) > len(after) or any(count < 0 for count in grown):
        return list(after)
    return grown
