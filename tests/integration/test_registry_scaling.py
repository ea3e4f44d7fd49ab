"""What scaling needs of the registry, on a real etcd: policies, pauses, the scaler's record, and routers' demand."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest

from stoker.api.common.v1 import scaling_pb2
from stoker.api.registry.v1 import records_pb2, registry_pb2, registry_pb2_grpc
from stoker.common import rpc
from stoker.common.errors import StokerError
from stoker.registry.client import DemandSeen, DispatchAnnouncer, Leadership, RegistryClient
from tests.integration.test_router_process import start
from tests.support.etcd import EtcdServer
from tests.support.registry import RegistryUnderTest, Watcher, spec, two_registries
from tests.support.waiting import eventually

SLO = scaling_pb2.ScalingPolicy(
    kind=scaling_pb2.SCALING_KIND_SLO,
    slo=scaling_pb2.ScalingSlo(ttft_s=0.5),
    bounds=scaling_pb2.ScalingBounds(least=0, most=4),
)


# Policies and pauses


async def test_a_policy_changes_alone_and_counts_as_a_change(client: RegistryClient) -> None:
    await client.put_deployment(spec("chat", replicas=3, max_output_tokens=9))
    written = await client.set_scaling_policy("chat", SLO)
    assert (written.generation, written.spec.scaling, written.spec.max_output_tokens) == (2, SLO, 9)
    assert (await client.set_scaling_policy("chat", SLO)).generation == 2, "the same again is no change"
    with pytest.raises(StokerError) as late:
        await client.set_scaling_policy("chat", None, expected_generation=1)
    assert late.value.reason == "GENERATION_MISMATCH"
    gone = await client.set_scaling_policy("chat", None, expected_generation=2)
    assert (gone.generation, gone.spec.HasField("scaling"), gone.spec.replicas) == (3, False, 3)
    with pytest.raises(StokerError) as unknown:
        await client.set_scaling_policy("nobody", SLO)
    assert unknown.value.reason == "NOT_FOUND"


async def test_every_bad_field_of_a_policy_is_named(client: RegistryClient) -> None:
    broken = scaling_pb2.ScalingPolicy()
    broken.CopyFrom(SLO)
    broken.slo.attainment = 1.0
    broken.bounds.least = 5
    broken.schedules.add(begins="8 o'clock", ends="17:00")
    fields = ["slo.attainment", "bounds.least", "schedules[0].begins"]
    with pytest.raises(StokerError) as refused:
        await client.put_deployment(spec("chat", scaling=broken))
    assert [v.field for v in refused.value.fields] == [f"spec.scaling.{field}" for field in fields]
    await client.put_deployment(spec("chat"))
    with pytest.raises(StokerError) as refused:
        await client.set_scaling_policy("chat", broken)
    assert [v.field for v in refused.value.fields] == [f"policy.{field}" for field in fields]


async def test_a_count_that_a_policy_would_undo_is_refused(client: RegistryClient) -> None:
    await client.put_deployment(spec("chat", scaling=SLO))
    with pytest.raises(StokerError) as refused:
        await client.scale_deployment("chat", 7)
    assert refused.value.reason == "SCALED_BY_POLICY"
    assert "'slo'" in refused.value.message
    await client.set_scaling_policy("chat", scaling_pb2.ScalingPolicy(kind=scaling_pb2.SCALING_KIND_FIXED))
    assert (await client.scale_deployment("chat", 7)).deployment.spec.replicas == 7


async def test_a_pause_outlives_the_specification(client: RegistryClient) -> None:
    await client.put_deployment(spec("chat", scaling=SLO))
    paused = await client.pause_scaling("chat", note="incident")
    assert (paused.generation, paused.pause.note) == (1, "incident")
    assert paused.pause.since.seconds > 0
    again = await client.put_deployment(spec("chat", replicas=2, scaling=SLO))
    assert (again.generation, again.pause) == (2, paused.pause), "a deployment file does not end a pause"
    renamed = await client.pause_scaling("chat", note="still")
    assert (renamed.pause.note, renamed.pause.since) == ("still", paused.pause.since)
    assert (await client.set_scaling_policy("chat", None)).HasField("pause")
    resumed = await client.pause_scaling("chat", resume=True)
    assert not resumed.HasField("pause")
    assert await client.pause_scaling("chat", resume=True) == resumed
    with pytest.raises(StokerError) as refused:
        await client.pause_scaling("chat", note="x" * 513)
    assert [v.field for v in refused.value.fields] == ["note"]


# The scaler's record


def history(deployment: str, minutes: int = 3, **fields: Any) -> records_pb2.ScalingHistory:
    return records_pb2.ScalingHistory(deployment=deployment, first_minute=7, minutes=bytes(8 * minutes), **fields)


@contextlib.asynccontextmanager
async def scaler(client: RegistryClient) -> AsyncIterator[Leadership]:
    async with Leadership(client, "scaler", "scaler-1", 3.0, rng=random.Random(1)) as leadership:
        yield leadership


async def test_what_a_scaler_writes_the_next_one_reads(client: RegistryClient, registry: RegistryUnderTest) -> None:
    async with scaler(client) as leadership, Watcher([registry.endpoint], "chat") as watcher:
        fence = await leadership.wait_leading()
        large = history("chat", 8_000, wanted=[records_pb2.ScalingWanted(replicas=2.5)])
        await client.set_scaling_history(fence, [large, history("code")])
        await eventually(lambda: "chat" in watcher.watch.view.scaling)
        kept = watcher.watch.view.scaling["chat"]
        assert (kept.minutes, kept.wanted[0].replicas, kept.fence) == (large.minutes, 2.5, fence)
        assert "code" not in watcher.watch.view.scaling, "not asked for"
        fleet = await client.get_fleet()
        assert not fleet.records.scaling, "megabytes that nobody asks for"
        await client.set_scaling_history(fence, [], ["chat"])
        await eventually(lambda: "chat" not in watcher.watch.view.scaling)
    async with Watcher([registry.endpoint]) as later:
        await eventually(lambda: set(later.watch.view.scaling) == {"code"})


async def test_only_the_leading_scaler_writes_it(client: RegistryClient) -> None:
    async with scaler(client) as leadership:
        old = await leadership.wait_leading()
    async with scaler(client) as leadership:
        await leadership.wait_leading()
        with pytest.raises(StokerError) as refused:
            await client.set_scaling_history(old, [history("chat")])
        assert refused.value.reason == "FENCED"


async def test_the_record_is_bounded(client: RegistryClient) -> None:
    async with scaler(client) as leadership:
        fence = await leadership.wait_leading()
        with pytest.raises(StokerError) as refused:
            await client.set_scaling_history(fence, [history("chat", 8_192)])
        assert [v.field for v in refused.value.fields] == ["histories[0]"]
        # As much as one call may hold fits into one transaction of etcd.
        await client.set_scaling_history(fence, [history(f"d{n}", 8_150) for n in range(16)])
        with pytest.raises(StokerError) as refused:
            await client.set_scaling_history(fence, [history(f"d{n}", 8_150) for n in range(17)])
        assert [v.field for v in refused.value.fields] == ["histories"]


# Demand


class Router:
    """Announces what a test has it count."""

    def __init__(self, endpoints: list[str], router_id: str) -> None:
        self.counts: dict[str, int] = {}
        self.wholes: list[bool] = []
        self.announcer = DispatchAnnouncer(endpoints, router_id, demand=self._demand, rng=random.Random(1))

    def _demand(self, whole: bool) -> Iterable[registry_pb2.Demand]:
        self.wholes.append(whole)
        return [
            registry_pb2.Demand(model=model, deployments=[model], arrivals=count)
            for model, count in self.counts.items()
        ]

    async def __aenter__(self) -> Router:
        await self.announcer.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.announcer.close()


def seen(watcher: Watcher) -> list[tuple[str, bool, dict[str, int]]]:
    return [
        (event.router_id, event.gone, {each.model: each.arrivals for each in event.demand})
        for event in watcher.events
        if isinstance(event, DemandSeen)
    ]


async def test_demand_reaches_who_watches_and_who_comes_late(registry: RegistryUnderTest) -> None:
    endpoints = [registry.endpoint]
    async with Watcher(endpoints) as watcher, Router(endpoints, "r1") as router:
        await asyncio.wait_for(router.announcer.connected.wait(), 60)
        router.counts["chat"] = 5
        await eventually(lambda: ("r1", False, {"chat": 5}) in seen(watcher))
        router.counts["chat"] = 6
        await eventually(lambda: ("r1", False, {"chat": 6}) in seen(watcher))
        assert router.wholes[:2] == [True, False], "all of it first, then what changed"
        async with Watcher(endpoints) as late, Watcher(endpoints, "code") as other:
            await eventually(lambda: seen(late)[:1] == [("r1", False, {"chat": 6})])
            await router.announcer.close()
            await eventually(lambda: ("r1", True, {}) in seen(late))
            assert ("r1", False, {"chat": 6}) not in seen(other)
        await eventually(lambda: seen(watcher)[-1] == ("r1", True, {}))
        assert registry.registry is not None
        assert not list(registry.registry.hub.demand.all(0.0)), "it went with its stream"


async def test_demand_that_somebody_waits_for_is_told_at_once_but_not_all_the_time(
    registry: RegistryUnderTest,
) -> None:
    async with Watcher([registry.endpoint]) as watcher, Router([registry.endpoint], "r1") as router:
        router.counts["chat"] = 0
        await eventually(lambda: ("r1", False, {"chat": 0}) in seen(watcher))
        loop = asyncio.get_running_loop()
        began, told = loop.time(), len(router.wholes)
        while len(router.wholes) < told + 3:
            router.counts["chat"] += 1
            router.announcer.hurry()
            await asyncio.sleep(0)
        assert 0.15 <= loop.time() - began <= 1.5, "three in some tenths of a second: neither at once nor each second"


async def test_a_router_that_moves_is_not_gone(etcd: EtcdServer) -> None:
    async with two_registries(etcd.endpoint) as both:
        endpoints = [each.endpoint for each in both]
        async with Watcher(endpoints) as watcher, Router(endpoints, "r1") as router:
            router.counts["chat"] = 5
            await eventually(lambda: ("r1", False, {"chat": 5}) in seen(watcher))
            first = next(r for r in both if r.registry is not None and list(r.registry.hub.demand.all(0.0)))
            await first.stop()
            router.counts["chat"] = 7
            await eventually(lambda: ("r1", False, {"chat": 7}) in seen(watcher))
            assert router.wholes.count(True) == 2, "a new registry is told all of it"


async def test_malformed_demand_costs_itself_alone(registry: RegistryUnderTest) -> None:
    async with Watcher([registry.endpoint]) as watcher, rpc.channel(registry.endpoint) as channel:
        await asyncio.wait_for(watcher.watch.synced.wait(), 60)
        stub: Any = registry_pb2_grpc.RegistryServiceStub(channel)
        call = stub.Announce()
        good = registry_pb2.Demand(model="chat", deployments=["chat"], arrivals=1)
        bad = registry_pb2.Demand(model="code", oldest_queued_s=float("nan"))
        report = registry_pb2.RouterDemand(router_id="someone-else", began_ns=1, sequence=1, demand=[bad, good])
        await call.write(registry_pb2.AnnounceRequest(router_id="r1", demand=report))
        await eventually(lambda: seen(watcher) == [("r1", False, {"chat": 1})])
        call.cancel()


async def test_the_end_of_an_older_stream_of_a_router_says_nothing(registry: RegistryUnderTest) -> None:
    async with Watcher([registry.endpoint]) as watcher, rpc.channel(registry.endpoint) as channel:
        await asyncio.wait_for(watcher.watch.synced.wait(), 60)
        stub: Any = registry_pb2_grpc.RegistryServiceStub(channel)
        calls = [stub.Announce() for _ in range(2)]
        for sequence, call in enumerate(calls, 1):
            demand = [registry_pb2.Demand(model="chat", deployments=["chat"], arrivals=sequence)]
            report = registry_pb2.RouterDemand(began_ns=1, sequence=sequence, demand=demand)
            await call.write(registry_pb2.AnnounceRequest(router_id="r1", demand=report))
            await eventually(lambda: ("r1", False, {"chat": sequence}) in seen(watcher))  # noqa: B023
        await calls[0].done_writing()
        await asyncio.wait_for(calls[0], 60)
        assert registry.registry is not None
        (standing,) = registry.registry.hub.demand.all(0.0)
        assert [each.arrivals for each in standing.demand] == [2]
        await calls[1].done_writing()
        await eventually(lambda: seen(watcher)[-1] == ("r1", True, {}))
        assert len([gone for _, gone, _ in seen(watcher) if gone]) == 1


async def test_a_slow_watcher_hears_the_newest(registry: RegistryUnderTest) -> None:
    async with Watcher([registry.endpoint]) as watcher, Router([registry.endpoint], "r1") as router:
        await asyncio.wait_for(watcher.watch.synced.wait(), 60)
        await asyncio.wait_for(router.announcer.connected.wait(), 60)
        assert registry.registry is not None
        hub = registry.registry.hub
        await eventually(lambda: "r1" in hub._routers)
        stream = hub._routers["r1"]
        began = next(hub.demand.all(0.0)).began_ns
        # Without a pause between: the watcher has no chance to take any of them.
        for count in range(1_000):
            demand = [registry_pb2.Demand(model="chat", deployments=["chat"], arrivals=count)]
            report = registry_pb2.RouterDemand(router_id="r1", began_ns=began, sequence=1_000 + count, demand=demand)
            hub.take_demand(stream, report)
        await eventually(lambda: ("r1", False, {"chat": 999}) in seen(watcher))
        assert len([counts for _, _, counts in seen(watcher) if counts]) == 1


async def test_each_worker_of_a_router_counts_for_itself(registry: RegistryUnderTest, client: RegistryClient) -> None:
    await client.put_deployment(spec("chat", scaling=SLO))
    settings = (
        "workers=2",
        "listen.grpc=127.0.0.1:0",
        "listen.http=127.0.0.1:0",
        f"registries=[{registry.endpoint}]",
    )
    async with Watcher([registry.endpoint]) as watcher:
        parent = await start(*settings)
        try:
            await eventually(
                lambda: len({router for router, _, counts in seen(watcher) if "chat" in counts}) == 2, "", 30
            )
        finally:
            parent.terminate()
            await asyncio.wait_for(parent.wait(), 30)
        await eventually(lambda: sum(gone for _, gone, _ in seen(watcher)) == 2)
