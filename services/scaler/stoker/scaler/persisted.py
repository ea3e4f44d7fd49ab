"""What a scaler keeps in etcd for the one after it. Only here is time that of the wall clock."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

import numpy as np
from google.protobuf.timestamp_pb2 import Timestamp

from stoker.api.registry.v1 import records_pb2
from stoker.registry.core.scaling import MINUTE_BYTES as MEAN_BYTES
from stoker.scaler.core.memory import Memory
from stoker.scaler.core.minutes import MINUTE_S
from stoker.scaler.core.signals import Minute, Wanted
from stoker.scaler.core.starts import Start

MOST_MEANS = 7_200
"""56 KiB of the 64 that one record may have."""
_FINE = 2 * 1_440
"""Minutes that are kept one by one; older ones five by five: so there is room for the eight days of a forecast."""
_FIVE = 5
_MOST_WANTED = 128
_NANOS = 1_000_000_000


def record_of(
    deployment: str, memory: Memory, starts: Sequence[Start], now: float, wall: float
) -> records_pb2.ScalingHistory:
    """What is kept of a deployment at `now`, at which the wall clock says `wall`."""
    kept = memory.minutes.kept
    edge = (_number(kept[-1]) - _FINE) // _FIVE * _FIVE if kept else 0
    since = bisect_left(kept, edge, key=_number)
    first, packed = packed_minutes(kept[since:], MOST_MEANS)
    first_five, fives = packed_minutes(kept[:since], MOST_MEANS - len(packed) // MEAN_BYTES, _FIVE)
    return records_pb2.ScalingHistory(
        deployment=deployment,
        first_minute=first,
        minutes=packed,
        first_five_minutes=first_five,
        five_minutes=fives,
        wanted=[
            records_pb2.ScalingWanted(
                at=timestamp(wall - now + each.at), replicas=each.replicas, correction=each.correction
            )
            for each in _highest(memory.wanted, _MOST_WANTED)
        ],
        changed_at=timestamp(wall - now + memory.changed_at) if memory.changed_at is not None else None,
        startups=[records_pb2.ScalingStartup(seconds=each.seconds, first_start=each.first) for each in starts],
        written_at=timestamp(wall),
    )


def restore(record: records_pb2.ScalingHistory, memory: Memory, now: float, wall: float) -> tuple[Start, ...]:
    """Take what an earlier scaler kept into a memory; returns the starts it kept.

    A clock of theirs that was ahead of ours makes nothing lie in the future. Figures that no scaler keeps, of a
    damaged record or of another release, are left out.
    """
    wanted = [
        Wanted(
            min(now, now - wall + seconds(each.at)),
            each.replicas,
            each.correction if each.HasField("correction") else 1.0,
        )
        for each in record.wanted
        if _possible(each.replicas)
        and (not each.HasField("correction") or _possible(each.correction))
        and _possible(seconds(each.at))
    ]
    changed = seconds(record.changed_at)
    known = record.HasField("changed_at") and _possible(changed)
    changed_at = min(now, now - wall + changed) if known else None
    memory.restore(wanted, changed_at)
    old = unpacked_minutes(record.first_five_minutes, record.five_minutes, _FIVE)
    minutes = [*old, *unpacked_minutes(record.first_minute, record.minutes)]
    memory.minutes.restore(minute for minute in minutes if minute.at < wall)
    return tuple(
        Start(each.seconds, each.first_start if each.HasField("first_start") else None)
        for each in record.startups
        if _possible(each.seconds)
    )


def packed_minutes(minutes: Sequence[Minute], most: int = MOST_MEANS, width: int = 1) -> tuple[int, bytes]:
    """(number of the first step, 8 bytes for each step from there on): four bfloat16, NaN where nothing is known.

    A step is the mean of `width` minutes, of hits that over what was looked up. At most `most` steps from the last
    one backwards.
    """
    if not minutes or most <= 0:
        return 0, b""
    numbers = np.array([_number(minute) // width for minute in minutes])
    first = max(int(numbers[0]), int(numbers[-1]) - most + 1)
    inside = numbers >= first
    figures = [(m.arrivals_per_s, m.prefill_tokens_per_s, m.decode_tokens_per_s, m.hit_rate) for m in minutes]
    values, weights = np.array(figures, dtype=np.float64)[inside], np.ones((int(inside.sum()), 4))
    if width > 1:
        weights[:, 3] = 1e-9 + values[:, 1]
    sums, known = np.zeros((2, int(numbers[-1]) - first + 1, 4))
    np.add.at(sums, numbers[inside] - first, values * weights)
    np.add.at(known, numbers[inside] - first, weights)
    means = np.divide(sums, known, out=np.full_like(sums, np.nan), where=known > 0).astype("<f4")
    # To the nearest, so that a sum over days is not too small.
    upper = ((means.view("<u4") + np.uint32(0x8000)) >> np.uint32(16)).astype("<u2")
    upper[np.isnan(means)] = 0x7FC0
    return first, upper.tobytes()


def unpacked_minutes(first: int, packed: bytes, width: int = 1) -> list[Minute]:
    """The minutes that are known, `width` alike for each step; what is no whole number of steps, or absurd, is left
    out."""
    upper = np.frombuffer(packed[: len(packed) // MEAN_BYTES * MEAN_BYTES], dtype="<u2").reshape(-1, 4)
    values = (upper.astype("<u4") << np.uint32(16)).view("<f4")
    known = np.isfinite(values).all(axis=1) & (values >= 0.0).all(axis=1)
    return [
        Minute(((first + int(place)) * width + more) * MINUTE_S, *map(float, values[place]))
        for place in np.flatnonzero(known)
        for more in range(width)
    ]


def _possible(figure: float) -> bool:
    return 0.0 <= figure < math.inf


def _number(minute: Minute) -> int:
    return round(minute.at / MINUTE_S)


def timestamp(wall: float) -> Timestamp:
    """Wall-clock seconds as a timestamp."""
    whole = Timestamp()
    whole.FromNanoseconds(round(wall * _NANOS))
    return whole


def seconds(at: Timestamp) -> float:
    """A timestamp as wall-clock seconds."""
    return at.seconds + at.nanos / _NANOS


def _highest(wanted: Iterable[Wanted], most: int) -> list[Wanted]:
    """At most so many, the highest of each stretch: what settles a count is the highest."""
    every = list(wanted)
    width = -(-len(every) // most) or 1
    return [max(every[at : at + width], key=lambda each: each.replicas) for at in range(0, len(every), width)]
