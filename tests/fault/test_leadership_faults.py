"""Two scalers (or planners) and the loss of one: exactly one writes, and the other takes over in time."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import records_pb2
from stoker.common.errors import StokerError
from stoker.registry.client import FleetView, RegistryClient
from tests.support.deciders import TTL_S, DeciderProcess, ObedientAgent
from tests.support.etcd import EtcdServer
from tests.support.facilities import hall
from tests.support.registry import RegistryProcess, Watcher, node, spec
from tests.support.waiting import eventually

pytestmark = pytest.mark.fault


@pytest.fixture
async def registries(etcd_alone: EtcdServer, tmp_path: Path) -> AsyncIterator[list[RegistryProcess]]:
    """Two registries as processes."""
    started = [RegistryProcess(etcd_alone.endpoint, tmp_path) for _ in range(2)]
    try:
        for each in started:
            each.start()
        for each in started:
            await each.serving()
        yield started
    finally:
        for each in started:
            each.kill()


@pytest.fixture
async def scalers(registries: list[RegistryProcess], tmp_path: Path) -> AsyncIterator[list[DeciderProcess]]:
    """Two scalers as processes."""
    endpoints = [registry.endpoint for registry in registries]
    started = [DeciderProcess("scaler", endpoints, tmp_path) for _ in range(2)]
    try:
        for each in started:
            each.start()
        for each in started:
            await each.serving()
        yield started
    finally:
        for each in started:
            each.kill()


@pytest.fixture
async def client(registries: list[RegistryProcess]) -> AsyncIterator[RegistryClient]:
    async with RegistryClient([registry.endpoint for registry in registries]) as client:
        yield client


@pytest.fixture
async def watcher(registries: list[RegistryProcess]) -> AsyncIterator[Watcher]:
    async with Watcher([registry.endpoint for registry in registries]) as watcher:
        yield watcher


def wants(view: FleetView, replicas: int) -> bool:
    return "chat" in view.desired and view.desired["chat"].replicas == replicas


async def written(watcher: Watcher, last: int) -> list[records_pb2.Desired]:
    """Every desired count this watcher was told of, once it was told of `last`."""

    def told() -> list[records_pb2.Desired]:
        return [desired for change in watcher.changes() for desired in change.upserts.desired]

    await eventually(lambda: any(desired.replicas == last for desired in told()))
    return told()


def leader(view: FleetView, scalers: list[DeciderProcess]) -> tuple[DeciderProcess, DeciderProcess]:
    """The one that leads, and the other."""
    name = view.leaders["scaler"].candidate
    first = next(scaler for scaler in scalers if scaler.candidate == name)
    return first, next(scaler for scaler in scalers if scaler is not first)


async def led(watcher: Watcher, client: RegistryClient, scalers: list[DeciderProcess]) -> common_pb2.Fence:
    """Waits until a count of one is desired; returns the fence under which that was written."""
    await client.put_deployment(spec("chat", replicas=1))
    await eventually(partial(wants, watcher.watch.view, 1))
    return watcher.watch.view.desired["chat"].fence


async def test_exactly_one_writes(watcher: Watcher, client: RegistryClient, scalers: list[DeciderProcess]) -> None:
    fence = await led(watcher, client, scalers)
    for replicas in range(2, 12):
        await client.scale_deployment("chat", replicas)
        await eventually(partial(wants, watcher.watch.view, replicas))
    first, second = leader(watcher.watch.view, scalers)
    assert (await first.leading(), await second.leading()) == (True, False)
    counts = await written(watcher, 11)
    assert {desired.fence.revision for desired in counts} == {fence.revision}
    assert [desired.replicas for desired in counts] == list(range(1, 12)), "each count once, in order"


async def test_a_frozen_leader_is_deposed_and_its_late_write_refused(
    watcher: Watcher, client: RegistryClient, scalers: list[DeciderProcess]
) -> None:
    view = watcher.watch.view
    fence = await led(watcher, client, scalers)
    first, second = leader(view, scalers)
    first.send(signal.SIGSTOP)
    await client.scale_deployment("chat", 2)
    await eventually(partial(wants, view, 2), within_s=TTL_S + 30)
    assert view.leaders["scaler"].candidate == second.candidate
    # What the frozen one would still write, written for it with its own fence.
    late = records_pb2.Desired(deployment="chat", replicas=99, reason="LATE")
    with pytest.raises(StokerError) as refused:
        await client.set_desired(fence, [late])
    assert refused.value.reason == "FENCED"
    first.send(signal.SIGCONT)
    await client.scale_deployment("chat", 3)
    await eventually(partial(wants, view, 3))

    async def stands_back() -> bool:
        return not await first.leading()

    await eventually(stands_back)
    counts = await written(watcher, 3)
    assert [desired.replicas for desired in counts] == [1, 2, 3], "the late leader wrote"
    assert view.desired["chat"].fence.revision == view.leaders["scaler"].revision > fence.revision


async def test_a_killed_leader_is_replaced_in_time(
    watcher: Watcher, client: RegistryClient, scalers: list[DeciderProcess]
) -> None:
    view = watcher.watch.view
    await led(watcher, client, scalers)
    first, second = leader(view, scalers)
    first.kill()
    await client.scale_deployment("chat", 4)
    await eventually(partial(wants, view, 4), within_s=TTL_S + 30)
    assert view.leaders["scaler"].candidate == second.candidate


async def test_a_leader_that_is_asked_to_stop_hands_over_at_once(
    watcher: Watcher, client: RegistryClient, scalers: list[DeciderProcess]
) -> None:
    view = watcher.watch.view
    await led(watcher, client, scalers)
    first, second = leader(view, scalers)
    status = await asyncio.to_thread(first.terminate)
    assert status == 0, first.log()
    await client.scale_deployment("chat", 5)
    # Sooner than its lease could have ended.
    await eventually(partial(wants, view, 5), within_s=TTL_S - 1)
    assert view.leaders["scaler"].candidate == second.candidate


async def test_with_all_registries_gone_it_holds_and_goes_on_when_one_is_back(
    watcher: Watcher, client: RegistryClient, scalers: list[DeciderProcess], registries: list[RegistryProcess]
) -> None:
    view = watcher.watch.view
    await led(watcher, client, scalers)
    before = view.desired["chat"]
    for registry in registries:
        registry.kill()

    async def nobody_leads() -> bool:
        return not any([await scaler.leading() for scaler in scalers])

    await eventually(nobody_leads, within_s=TTL_S + 30)
    registries[0].start()
    await registries[0].serving()
    await client.scale_deployment("chat", 6)
    await eventually(partial(wants, view, 6), within_s=20)
    counts = await written(watcher, 6)
    assert [desired.replicas for desired in counts] == [1, 6]
    assert counts[0] == before


async def test_with_etcd_frozen_nothing_is_decided_until_it_is_back(
    etcd_alone: EtcdServer, watcher: Watcher, client: RegistryClient, scalers: list[DeciderProcess]
) -> None:
    view = watcher.watch.view
    await led(watcher, client, scalers)
    etcd_alone.freeze()

    async def nobody_leads() -> bool:
        return not any([await scaler.leading() for scaler in scalers])

    await eventually(nobody_leads, within_s=TTL_S + 30)
    etcd_alone.thaw()
    await eventually(partial(wants, view, 1))
    await client.scale_deployment("chat", 7)
    await eventually(partial(wants, view, 7), within_s=20)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_planner_lost_amid_a_large_plan_leaves_nothing_booked_twice(
    how: signal.Signals, watcher: Watcher, client: RegistryClient, registries: list[RegistryProcess], tmp_path: Path
) -> None:
    endpoints = [registry.endpoint for registry in registries]
    planners = [DeciderProcess("planner", endpoints, tmp_path) for _ in range(2)]
    scaler = DeciderProcess("scaler", endpoints, tmp_path)
    view = watcher.watch.view
    gpus = [common_pb2.Gpu(index=index, uuid=f"GPU-{index}") for index in range(64)]
    try:
        async with AsyncExitStack() as agents:
            for number in range(8):
                await agents.enter_async_context(ObedientAgent(endpoints, node(f"n{number}", gpus=gpus)))
            for each in (*planners, scaler):
                each.start()
            for each in (*planners, scaler):
                await each.serving()
            await eventually(lambda: view.leaders.get("planner") is not None)
            first = next(p for p in planners if p.candidate == view.leaders["planner"].candidate)
            racks = {"r1": "n[0-3]", "r2": "n[4-7]"}
            await client.put_facility(hall(racks, rack_kw=400, gpus=64))
            await client.put_deployment(spec("big", replicas=250, gpus_per_node=2))
            # The plan is written in three pieces; it is lost after the first.
            await eventually(lambda: len(view.assignments) > 0)
            first.send(how)
            await client.put_facility(hall({**racks, "r3": "x"}, rack_kw=400, gpus=64))
            await eventually(lambda: len(view.assignments) == 250, within_s=TTL_S + 30)
            booked = [(m.node_id, gpu) for a in view.assignments.values() for m in a.members for gpu in m.gpu_indices]
            assert len(booked) == len(set(booked)) == 500
            assert all(a.fence.role == "planner" for a in view.assignments.values())
            if how is signal.SIGSTOP:
                planned = dict(view.assignments)
                first.send(signal.SIGCONT)
                second = next(p for p in planners if p is not first)

                async def stands_back() -> bool:
                    return await second.leading() and not await first.leading()

                await eventually(stands_back)
                assert view.assignments == planned, "the late leader wrote"
    finally:
        for each in (*planners, scaler):
            each.kill()


async def test_planners_take_over_from_each_other_too(
    watcher: Watcher, client: RegistryClient, registries: list[RegistryProcess], tmp_path: Path
) -> None:
    endpoints = [registry.endpoint for registry in registries]
    planners = [DeciderProcess("planner", endpoints, tmp_path) for _ in range(2)]
    view = watcher.watch.view
    try:
        planners[0].start()
        await planners[0].serving()
        await eventually(lambda: view.leaders.get("planner") is not None)
        planners[1].start()
        await planners[1].serving()
        planners[0].kill()
        await eventually(planners[1].leading, within_s=TTL_S + 30)
    finally:
        for planner in planners:
            planner.kill()
