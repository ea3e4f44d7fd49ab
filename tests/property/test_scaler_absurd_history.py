"""Whatever a record of the past says, damaged or of another release, a scaler goes on within bounds and keeps it."""

from __future__ import annotations

import asyncio
import math
import struct

from hypothesis import example, given, settings
from hypothesis import strategies as st

from stoker.api.common.v1 import common_pb2, scaling_pb2
from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.registry.client import SourceChanged
from stoker.registry.core import scaling
from stoker.registry.core.records import Kind
from tests.property.test_scaler_absurd_signals import MOST, Fleet

REALS = st.one_of(st.floats(0.0, 10.0), st.floats(), st.sampled_from([math.nan, math.inf, -math.inf, 5e-324, 1e308]))
WHOLE = st.one_of(st.integers(28_333_000, 28_333_400), st.integers(-(2**63), 2**63 - 1))
STEPS = st.lists(st.tuples(*[st.one_of(st.integers(0, 2**16 - 1), st.just(0x3F80))] * 4), max_size=20)
WHENS = st.one_of(st.integers(1_699_999_000, 1_700_000_100), st.integers(-(2**63), 2**63 - 1))


@st.composite
def histories(draw: st.DrawFn) -> records_pb2.ScalingHistory:
    kept = records_pb2.ScalingHistory(first_minute=draw(WHOLE), first_five_minutes=draw(WHOLE))
    kept.minutes, kept.five_minutes = (
        b"".join(struct.pack("<4H", *step) for step in draw(STEPS)) + draw(st.sampled_from([b"", b"abc"]))
        for _ in range(2)
    )
    for at, replicas, correction in draw(st.lists(st.tuples(WHENS, REALS, st.none() | REALS), max_size=5)):
        wanted = kept.wanted.add(replicas=replicas)
        wanted.at.seconds, wanted.at.nanos = at, 7
        if correction is not None:
            wanted.correction = correction
    for seconds in draw(st.lists(REALS, max_size=5)):
        kept.startups.add(seconds=seconds)
    if (changed := draw(st.none() | WHENS)) is not None:
        kept.changed_at.seconds = changed
    return records_pb2.ScalingHistory.FromString(
        kept.SerializeToString() + draw(st.sampled_from([b"", b"\xb8\x3e\x07"]))
    )


def before_year_one() -> records_pb2.ScalingHistory:
    """Times that no Timestamp may hold, though the wire carries them."""
    kept = records_pb2.ScalingHistory()
    for at in (1_699_999_446, -62_135_596_801):
        kept.wanted.add().at.seconds = at
    return kept


class Keeping(Fleet):
    """A registry that takes no history that it would refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = dict[str, records_pb2.ScalingHistory]()

    async def set_scaling_history(self, *args: object) -> int:
        _, records, removed = args
        assert not list(scaling.histories(records, removed))  # type: ignore[arg-type]
        self.kept |= {record.deployment: record for record in records}  # type: ignore[attr-defined]
        return self.view.revision


@settings(max_examples=30, deadline=None)
@given(histories())
@example(before_year_one())
def test_a_scaler_goes_on_from_whatever_it_finds(kept: records_pb2.ScalingHistory) -> None:
    asyncio.run(_goes_on(kept))


async def _goes_on(kept: records_pb2.ScalingHistory) -> None:
    fleet = Keeping()
    for name in fleet.names[:-1]:
        kept.deployment = name
        own = records_pb2.ScalingHistory()
        own.CopyFrom(kept)
        fleet.put((Kind.SCALING, name, own))
    for _ in range(3):
        fleet.now += 61.0
        fleet.round.watching.hear(SourceChanged("r1", True, registry_pb2.Freshness()), fleet.now)
        await fleet.round.run(fleet.view, common_pb2.Fence(role="scaler", revision=7), fleet.now)
    fixed = f"d{scaling_pb2.SCALING_KIND_FIXED}"
    counts = {name: fleet.view.desired[name].replicas for name in fleet.names if name != fixed}
    assert all(0 <= count <= MOST for count in counts.values())
    assert fleet.kept.keys() >= counts.keys()
    for record in fleet.kept.values():
        assert all(math.isfinite(each.replicas) and math.isfinite(each.correction) for each in record.wanted)
        assert all(math.isfinite(each.seconds) for each in record.startups)
