"""Whatever routers and agents report, a round decides: within bounds, and for sane deployments as ever."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.api.common.v1 import common_pb2, scaling_pb2
from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.registry.client import DemandSeen, FleetView, LoadChanged, RegistryClient
from stoker.registry.core.records import Kind, Name, Record
from stoker.scaler.config import ScalerConfig
from stoker.scaler.rounds import ScalerRound
from stoker.scaler.watching import Watching

KINDS = [kind for kind in scaling_pb2.ScalingKind.values() if kind]
MOST = 20
COUNTS = st.one_of(st.integers(0, 100), st.integers(0, 2**64 - 1))
REALS = st.one_of(st.floats(0.0, 10.0), st.floats(), st.sampled_from([math.nan, math.inf, -math.inf, 5e-324, 1e308]))
LATE = st.one_of(st.just(1.0), st.sampled_from([0.0, -3_600.0, 3_600.0, 0.1]))


@st.composite
def demands(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "arrivals": draw(COUNTS),
        "prompt_tokens": draw(COUNTS),
        "prompt_tokens_squared": abs(draw(REALS)),
        "judged": draw(COUNTS),
        "within_slo": draw(COUNTS),
        "queued": draw(st.integers(0, 2**32 - 1)),
        "held": draw(st.integers(0, 2)),
        "oldest_queued_s": draw(REALS),
        "ttft": registry_pb2.LogHistogram(sum_s=draw(REALS), counts=[draw(COUNTS) % 2**32]),
    }


@st.composite
def loads(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "epoch": draw(st.integers(0, 2)),
        "running": draw(st.integers(0, 2**32 - 1)),
        "waiting": draw(st.integers(0, 2**32 - 1)),
        "kv_usage": draw(REALS),
        "prefill_tokens_per_s": draw(REALS),
        "generation_tokens": draw(COUNTS),
        "prompt_tokens": draw(COUNTS),
        "cached_prompt_tokens": draw(COUNTS),
        "itl_sum_s": draw(REALS),
        "itl_count": draw(COUNTS),
        "prefill_sum_s": draw(REALS),
    }


class Fleet:
    """A deployment of each kind that gets absurd reports, and one that gets sane ones."""

    def __init__(self) -> None:
        self.view = FleetView()
        self.now, self.written = 0.0, list[records_pb2.Desired]()
        watching = Watching(self.view, 1.0, lambda: 1.7e9 + self.now)
        self.round = ScalerRound(cast(RegistryClient, self), self.view, watching, ScalerConfig())
        self.names = [f"d{kind}" for kind in KINDS] + ["sane"]
        for name, kind in zip(self.names, [*KINDS, scaling_pb2.SCALING_KIND_CONCURRENCY], strict=True):
            scaling = scaling_pb2.ScalingPolicy(kind=kind, bounds=scaling_pb2.ScalingBounds(least=0, most=MOST))
            scaling.concurrency.target, scaling.concurrency.utilisation = 2.0, 1.0
            spec = common_pb2.DeploymentSpec(name=name, model=name, replicas=2, scaling=scaling)
            replica = records_pb2.Replica(
                replica_id=f"{name}-0", deployment=name, state=records_pb2.STATE_READY, epoch=1, node_id="n1"
            )
            desired = records_pb2.Desired(deployment=name, replicas=1, generation=1)
            self.put(
                (Kind.DEPLOYMENTS, name, records_pb2.Deployment(spec=spec, generation=1)),
                (Kind.REPLICAS, replica.replica_id, replica),
                (Kind.DESIRED, name, desired),
            )

    def put(self, *records: tuple[Kind, str, Record]) -> None:
        named: list[tuple[Name, Record]] = [((kind, name), record) for kind, name, record in records]
        self.view.delta(named, (), self.view.revision + 1)

    async def set_desired(
        self, fence: common_pb2.Fence, desired: Sequence[records_pb2.Desired], removed: Sequence[str] = ()
    ) -> int:
        self.written += desired
        self.put(*[(Kind.DESIRED, each.deployment, each) for each in desired])
        return self.view.revision

    async def set_scaling_history(self, *_: object) -> int:
        return self.view.revision


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(demands(), loads(), LATE), min_size=2, max_size=6))
def test_a_round_survives_whatever_is_reported(steps: list[tuple[dict[str, Any], dict[str, Any], float]]) -> None:
    asyncio.run(_survives(steps))


async def _survives(steps: list[tuple[dict[str, Any], dict[str, Any], float]]) -> None:
    fleet = Fleet()
    for turn in range(70):
        demand, load, late_s = steps[turn % len(steps)]
        fleet.now += 1.0
        asked = [registry_pb2.Demand(model=name, deployments=[name], **demand) for name in fleet.names[:-1]]
        sane = registry_pb2.Demand(model="sane", deployments=["sane"], arrivals=turn)
        told = [
            registry_pb2.ReplicaLoad(replica_id=f"{name}-0", sequence=turn, **load)
            if name != "sane"
            else registry_pb2.ReplicaLoad(replica_id="sane-0", epoch=1, sequence=turn, running=7, waiting=0)
            for name in fleet.names
        ]
        fleet.round.watching.hear(DemandSeen("router-1", 1, tuple(asked), False, late_s - 1.0), fleet.now)
        fleet.round.watching.hear(DemandSeen("router-2", 1, (sane,), False, 0.0), fleet.now)
        fleet.round.watching.hear(LoadChanged(tuple(told)), fleet.now)
        await fleet.round.run(fleet.view, common_pb2.Fence(role="scaler", revision=7), fleet.now)
    counts = {name: fleet.view.desired[name].replicas for name in fleet.names}
    assert all(0 <= count <= MOST for name, count in counts.items() if name != f"d{scaling_pb2.SCALING_KIND_FIXED}")
    assert counts["sane"] == 4
    for each in fleet.written:
        assert each.reason
