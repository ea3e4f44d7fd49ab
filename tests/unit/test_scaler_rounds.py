"""Rounds of a scaler without registries: what is decided on, what is written, and what is kept for the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

import pytest

from stoker.api.common.v1 import common_pb2, scaling_pb2
from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.common.errors import InvalidRequest, StokerError, Unavailable
from stoker.registry.client import DemandSeen, FleetView, LoadChanged, RecordsChanged, RegistryClient, SourceChanged
from stoker.registry.core import scaling, validation
from stoker.registry.core.records import Kind, Name, Record
from stoker.scaler.config import ScalerConfig
from stoker.scaler.core.signals import Minute, Wanted
from stoker.scaler.core.values import Because, Reason
from stoker.scaler.core.warming import Warming
from stoker.scaler.decision_messages import because_message
from stoker.scaler.persisted import seconds, timestamp
from stoker.scaler.rounds import ScalerRound
from stoker.scaler.watching import Watching

pytestmark = pytest.mark.looptime

FENCE = common_pb2.Fence(role="scaler", revision=7)
WALL = 1_700_000_000.0
SIGN = SourceChanged("r1", True, registry_pb2.Freshness())
CONCURRENCY = scaling_pb2.ScalingPolicy(
    kind=scaling_pb2.SCALING_KIND_CONCURRENCY,
    concurrency=scaling_pb2.ScalingConcurrency(target=2, utilisation=1),
    bounds=scaling_pb2.ScalingBounds(most=50),
    pace=scaling_pb2.ScalingPace(settle_s=120),
)


class Registry:
    """Takes what is written, as the real one would, unless it refuses."""

    def __init__(self) -> None:
        self.view = FleetView()
        self.desired: list[records_pb2.Desired] = []
        self.kept: list[list[records_pb2.ScalingHistory]] = []
        self.removed: list[str] = []
        self.refuse: Callable[[], None] = lambda: None

    def put(self, *records: tuple[Kind, str, Record]) -> None:
        named: list[tuple[Name, Record]] = [((kind, name), record) for kind, name, record in records]
        self.view.delta(named, (), self.view.revision + 1)

    def deployment(self, name: str = "chat", generation: int = 1, **fields: object) -> None:
        spec = common_pb2.DeploymentSpec(name=name, model="m", replicas=1)
        spec.scaling.CopyFrom(CONCURRENCY)
        spec.MergeFrom(common_pb2.DeploymentSpec(**fields))  # type: ignore[arg-type]
        self.put((Kind.DEPLOYMENTS, name, records_pb2.Deployment(spec=spec, generation=generation)))

    def count(self, replicas: int, name: str = "chat", decided_at: float = WALL) -> None:
        record = records_pb2.Desired(deployment=name, replicas=replicas, generation=1, reason="CONCURRENCY")
        record.decided_at.CopyFrom(timestamp(decided_at))
        self.put((Kind.DESIRED, name, record))

    def replicas(self, count: int, name: str = "chat") -> registry_pb2.Records:
        """That many, ready."""
        found = [
            records_pb2.Replica(
                replica_id=f"{name}-{n}", deployment=name, state=records_pb2.STATE_READY, epoch=1, node_id="n1"
            )
            for n in range(count)
        ]
        self.put(*[(Kind.REPLICAS, replica.replica_id, replica) for replica in found])
        return registry_pb2.Records(replicas=found)

    async def set_desired(
        self, fence: common_pb2.Fence, desired: Sequence[records_pb2.Desired], removed: Sequence[str] = ()
    ) -> int:
        validation.require(scaling.decisions(desired))
        self.desired += desired
        self.put(*[(Kind.DESIRED, each.deployment, each) for each in desired])
        self.view.delta((), [(Kind.DESIRED, name) for name in removed], self.view.revision + 1)
        return self.view.revision

    async def set_scaling_history(
        self, fence: common_pb2.Fence, histories: Sequence[records_pb2.ScalingHistory], removed: Sequence[str] = ()
    ) -> int:
        self.refuse()
        self.kept.append(list(histories))
        self.removed += removed
        self.put(*[(Kind.SCALING, each.deployment, each) for each in histories])
        self.view.delta((), [(Kind.SCALING, name) for name in removed], self.view.revision + 1)
        return self.view.revision


class Stage:
    """A scaler before a registry; its wall clock is ahead of the loop's by what the test says."""

    def __init__(self, registry: Registry | None = None) -> None:
        self.registry = registry or Registry()
        self.ahead_s = WALL
        watching = Watching(self.registry.view, 2.0, lambda: now() + self.ahead_s)
        self.round = ScalerRound(
            cast(RegistryClient, self.registry), self.registry.view, watching, ScalerConfig(history_s=60)
        )
        self.sequence = self.arrivals = 0

    async def run(self) -> int | None:
        return await self.round.run(self.registry.view, FENCE, now())

    async def hear(self, seconds_: float, running: int, queued: int = 0, arriving: int = 1) -> None:
        """Reports each second, of every replica and of one router."""
        for _ in range(round(seconds_)):
            await asyncio.sleep(1)
            self.sequence += 1
            self.arrivals += arriving
            loads = [
                registry_pb2.ReplicaLoad(
                    replica_id=name, epoch=1, sequence=self.sequence, running=running, waiting=0, generation_tokens=9
                )
                for name in self.registry.view.replicas
            ]
            self.round.hear(LoadChanged(tuple(loads)), now())
            asked = registry_pb2.Demand(
                model="m", deployments=list(self.registry.view.deployments), arrivals=self.arrivals, queued=queued
            )
            self.round.hear(DemandSeen("router", 1, (asked,), False, 0.0), now())


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_a_round_before_any_event_forgets_neither_policy_nor_history() -> None:
    """The view is there before its events are heard: an unknown policy would mean the specification's count."""
    stage = Stage()
    stage.registry.deployment()
    stage.registry.count(5)
    kept = records_pb2.ScalingHistory(deployment="chat", changed_at=timestamp(WALL - 10))
    kept.wanted.add(at=timestamp(WALL - 1), replicas=4.5, correction=1.5)
    stage.registry.put((Kind.SCALING, "chat", kept))
    await stage.run()
    assert stage.registry.desired == []
    memory = stage.round.watching.memories["chat"]
    assert [(each.replicas, each.correction) for each in memory.wanted] == [(4.5, 1.5)]
    assert memory.changed_at == pytest.approx(now(), abs=0.1), "the count was written after the history of it"


async def test_a_leader_writes_what_it_decides_and_keeps_it() -> None:
    stage = Stage()
    stage.registry.deployment()
    stage.registry.count(1, decided_at=WALL - 999)
    stage.registry.replicas(1)
    await stage.hear(70, running=2)
    await stage.hear(70, running=8)
    assert await stage.run() == stage.registry.view.revision
    (desired,) = stage.registry.desired
    assert (desired.replicas, desired.reason) == (4, "PANIC")
    assert desired.because[0].numbers["stable"] == 8.0
    ((kept,),) = stage.registry.kept
    assert kept.wanted[-1].replicas == 4.0
    assert seconds(kept.changed_at) == pytest.approx(WALL + now(), abs=0.1)
    assert len(kept.minutes) == 8 * 2


async def test_history_is_written_with_each_change_and_else_each_minute() -> None:
    stage = Stage()
    stage.registry.deployment()
    stage.registry.replicas(1)
    written = []
    for second in range(130):
        await stage.hear(1, running=2 if second < 30 else 6)
        before = len(stage.registry.kept)
        await stage.run()
        if len(stage.registry.kept) > before:
            written.append(second)
    changes = len(stage.registry.desired)
    assert written[0] == 0
    assert changes >= 2
    assert len(written) <= changes + 3
    assert all(b - a <= 61 for a, b in zip(written, [*written[1:], 130], strict=True))


async def test_what_a_standby_heard_and_thought_it_leads_with() -> None:
    stage = Stage()
    stage.registry.deployment()
    stage.registry.count(3, decided_at=WALL - 999)
    stage.registry.replicas(3)
    await stage.hear(200, running=1)
    memory = stage.round.watching.memories["chat"]
    assert stage.registry.desired == []
    assert len(memory.wanted) >= 60, "it has decided along"
    stage.round.begin()
    await stage.run()
    assert [desired.replicas for desired in stage.registry.desired] == [2], "a whole settle window was seen"


async def test_a_scaler_that_has_just_begun_lowers_nothing() -> None:
    stage = Stage()
    stage.registry.deployment()
    stage.registry.count(3, decided_at=WALL - 999)
    stage.registry.replicas(3)
    await stage.hear(20, running=0)
    await stage.run()
    assert stage.registry.desired == []


async def test_a_jump_of_the_clock_moves_nothing() -> None:
    stage = Stage()
    stage.registry.deployment()
    stage.registry.count(2, decided_at=WALL - 999)
    stage.registry.replicas(2)
    for ahead_s in (0.0, -86_400.0, 0.0, 7 * 86_400.0):
        stage.ahead_s = WALL + ahead_s
        await stage.hear(70, running=2)
        await stage.run()
    assert stage.registry.desired == []
    memory = stage.round.watching.memories["chat"]
    assert memory.samples[-1].at - memory.samples[0].at > 120
    assert len(memory.wanted) > 60


async def test_one_made_anew_under_the_name_of_one_deleted_has_its_own_policy() -> None:
    """Both are of generation 1, and nobody looked between the two writes."""
    stage = Stage()
    stage.registry.deployment()
    stage.registry.count(3)
    stage.registry.replicas(3)
    await stage.hear(4, running=1)
    fixed = scaling_pb2.ScalingPolicy(kind=scaling_pb2.SCALING_KIND_FIXED)
    stage.registry.view.delta((), [(Kind.DEPLOYMENTS, "chat")], stage.registry.view.revision + 1)
    stage.registry.deployment(scaling=fixed, replicas=5)
    await stage.run()
    assert [(desired.replicas, desired.reason) for desired in stage.registry.desired] == [(5, "FIXED")]


async def test_why_a_count_fell_is_told_when_its_victims_have_gone_too() -> None:
    stage = Stage()
    stage.registry.deployment(scaling=scaling_pb2.ScalingPolicy(bounds=scaling_pb2.ScalingBounds(least=0, idle_s=60)))
    stage.registry.count(1, decided_at=WALL - 999)
    stage.registry.replicas(1)
    await stage.hear(200, running=0, arriving=0)
    await stage.run()
    (ended,) = stage.registry.desired
    assert (ended.replicas, list(ended.victims), ended.reason) == (0, ["chat-0"], "IDLE")
    stage.registry.view.delta((), [(Kind.REPLICAS, "chat-0")], stage.registry.view.revision + 1)
    await stage.hear(4, running=0, arriving=0)
    await stage.run()
    gone = stage.registry.desired[-1]
    assert (gone.replicas, list(gone.victims), gone.reason) == (0, [], "IDLE")
    assert [because.code for because in gone.because] == [because.code for because in ended.because]
    assert gone.decided_at == ended.decided_at


async def test_a_history_that_is_refused_costs_no_count() -> None:
    stage = Stage()
    stage.registry.deployment()
    stage.registry.count(1, decided_at=WALL - 999)
    stage.registry.replicas(1)
    await stage.hear(70, running=8)

    def refuse() -> None:
        raise InvalidRequest("too large")

    stage.registry.refuse = refuse
    assert await stage.run() is not None
    assert [desired.replicas for desired in stage.registry.desired] == [4]

    def unreachable() -> None:
        raise Unavailable("nobody answers")

    stage.registry.refuse = unreachable
    await stage.hear(70, running=8)
    with pytest.raises(StokerError):
        await stage.run()


async def test_many_large_histories_are_written_in_turn_each_call_within_its_bound() -> None:
    stage = Stage()
    names = [f"d{n}" for n in range(60)]
    forecast = scaling_pb2.ScalingPolicy(kind=scaling_pb2.SCALING_KIND_FORECAST)
    for name in names:
        stage.registry.deployment(name, scaling=forecast)
        stage.registry.count(1, name)
    stage.round.watching.catch_up(now())
    for name in names:
        memory = stage.round.watching.memories[name]
        memory.minutes.restore(Minute(60.0 * n, 1.0, 1.0, 1.0, 0.5) for n in range(7_200))
        memory.want(Wanted(now(), 1.0))
    for _ in range(6):
        await asyncio.sleep(1)
        await stage.run()
    assert {record.deployment for call in stage.registry.kept for record in call} == set(names)
    assert sum(len(call) for call in stage.registry.kept) == 60, "large ones are written less often"
    assert all(sum(record.ByteSize() for record in call) < 1_000_000 for call in stage.registry.kept)


async def test_many_large_decisions_are_written_in_calls_that_a_registry_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage()
    names = [f"d{n}" for n in range(60)]
    for name in names:
        stage.registry.deployment(name, scaling=scaling_pb2.ScalingPolicy(kind=scaling_pb2.SCALING_KIND_FIXED))
        stage.registry.count(2, name)
        stage.registry.replicas(2, name)
    many = [Warming(2**60 + n, "d0-0", "d0-1", 4_096.0, 4_096.0) for n in range(scaling.MAX_WARMINGS)]
    monkeypatch.setattr(stage.round.watching, "warmings", lambda *_: many)
    await stage.run()
    assert {record.deployment: record.replicas for record in stage.registry.desired} == dict.fromkeys(names, 1)
    assert sum(record.ByteSize() for record in stage.registry.desired) > scaling.MAX_CALL_BYTES, "too large for one"


async def test_what_is_deleted_is_forgotten_everywhere() -> None:
    stage = Stage()
    stage.registry.deployment()
    stage.registry.replicas(1)
    await stage.hear(4, running=1)
    await stage.run()
    assert stage.registry.kept
    stage.registry.view.delta(
        (), [(Kind.DEPLOYMENTS, "chat"), (Kind.REPLICAS, "chat-0")], stage.registry.view.revision + 1
    )
    stage.round.hear(RecordsChanged(registry_pb2.Records(), registry_pb2.Removals(replicas=["chat-0"]), False), now())
    await stage.run()
    assert stage.registry.removed == ["chat"]
    assert stage.registry.view.desired == {}
    assert stage.round.watching.memories == {}
    assert stage.round.watching.starts.since("chat-0") is None


def unreadable() -> list[scaling_pb2.ScalingPolicy]:
    """What can only come from another release: this one's registry refuses it."""
    hours = scaling_pb2.ScalingPolicy(kind=scaling_pb2.SCALING_KIND_SLO)
    hours.schedules.add(begins="noon", ends="late")
    # Kind 99 of a later release.
    return [hours, scaling_pb2.ScalingPolicy.FromString(bytes([0x08, 99]))]


@pytest.mark.parametrize("broken", unreadable())
async def test_a_policy_that_cannot_be_read_holds_the_count(broken: scaling_pb2.ScalingPolicy) -> None:
    stage = Stage()
    stage.registry.deployment(scaling=broken, replicas=9)
    stage.registry.count(4)
    stage.registry.replicas(4)
    await stage.hear(10, running=1)
    await stage.run()
    assert stage.registry.desired == []


async def test_no_sign_of_life_makes_no_samples_and_signs_alone_do() -> None:
    stage = Stage()
    stage.registry.deployment()
    await asyncio.sleep(60)
    assert not stage.round.watching.memories
    for _ in range(10):
        await asyncio.sleep(1)
        stage.round.hear(SIGN, now())
    samples = stage.round.watching.memories["chat"].samples
    assert len(samples) == 5
    assert samples[-1].queued is None


async def test_a_large_fleets_samples_are_made_a_few_at_each_event_and_a_held_request_waits_for_none() -> None:
    stage = Stage()
    names = [f"d{n}" for n in range(9)]
    for name in names:
        stage.registry.deployment(name)
        stage.registry.count(200, name)
        stage.registry.replicas(200, name)
    watching = stage.round.watching
    shared = registry_pb2.Demand(model="m", deployments=["d0", "d8"], arrivals=1)

    def sampled() -> list[int]:
        return [len(watching.memories[name].samples) for name in names]

    assert not watching.hear(DemandSeen("router", 1, (shared,), False, 0.0), now())
    while not watching.hear(SIGN, now()):
        pass
    assert sampled() == [1] * 9
    await asyncio.sleep(2)
    made = []
    for _ in range(2):
        assert not watching.hear(SIGN, now())
        made.append(sum(sampled()) - 9)
        assert sampled()[0] == sampled()[8], "who share a model are sampled together"
    assert 0 < made[0] < made[1] < 9
    held = registry_pb2.Demand(model="n", deployments=["d7"], queued=1, held=1)
    before = sampled()
    await asyncio.sleep(0.3)
    assert stage.round.hear(DemandSeen("router", 1, (shared, held), False, 0.0), now())
    assert sampled() == [each + (name == "d7") for name, each in zip(names, before, strict=True)]
    assert watching.hear(SIGN, now()), "these were the last"
    assert min(sampled()) == 2
    assert not watching.hear(SIGN, now()), "until it is time again"


async def test_a_request_that_is_held_waits_for_no_sample() -> None:
    stage = Stage()
    stage.registry.deployment(scaling=scaling_pb2.ScalingPolicy(bounds=scaling_pb2.ScalingBounds(least=0)))
    stage.registry.count(0, decided_at=WALL - 999)
    await stage.hear(10, running=0)
    asked = registry_pb2.Demand(model="m", deployments=["chat"], arrivals=stage.sequence, queued=1, held=1)
    await asyncio.sleep(0.3)
    assert stage.round.hear(DemandSeen("router", 1, (asked,), False, 0.0), now())
    await stage.run()
    (desired,) = stage.registry.desired
    assert desired.replicas == 1
    assert "WOKEN" in [because.code for because in desired.because]
    assert not stage.round.hear(DemandSeen("router", 1, (asked,), False, 0.0), now()), "once is enough"


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_words(reason: Reason) -> None:
    message = because_message(Because(reason, {"known": 1.0, "unknown": None}))
    assert message.text
    assert message.numbers["known"] == 1.0
    assert message.numbers["unknown"] != message.numbers["unknown"], "NaN"
