"""The facility in the registry, on a real etcd: written, watched, compacted, and never planned against unseen."""

from __future__ import annotations

import random
import zlib

import pytest

from stoker.api.common.v1 import placement_pb2
from stoker.api.registry.v1 import registry_pb2, registry_pb2_grpc
from stoker.common import rpc
from stoker.common.errors import StokerError
from stoker.etcd import EtcdClient
from stoker.registry.client import Leadership, RegistryClient
from stoker.registry.core import documents
from tests.support.etcd import EtcdServer
from tests.support.registry import RegistryUnderTest, Watcher, assignment, config, spec
from tests.support.waiting import eventually


async def refused(call: object, reason: str) -> StokerError:
    with pytest.raises(StokerError) as error:
        await call  # type: ignore[misc]
    assert error.value.reason == reason
    return error.value


async def test_it_is_written_read_changed_by_who_has_seen_it_and_removed(client: RegistryClient) -> None:
    await refused(client.get_facility(), "NOT_FOUND")
    first = await client.put_facility("name: hall\n", expected_revision=0)
    assert (first.name, first.document_bytes, first.document_zlib) == ("current", 11, b"")
    read = await client.get_facility()
    assert documents.unpacked(read.document_zlib) == "name: hall\n"
    assert (read.revision, read.sha256) == (first.revision, first.sha256)
    same = await client.put_facility("name: hall\n", expected_revision=0)
    assert same.revision == first.revision, "the same again is no change"
    late = await refused(client.put_facility("name: b\n", expected_revision=0), "FACILITY_CHANGED")
    assert late.metadata["revision"] == str(first.revision)
    second = await client.put_facility("name: b\n", expected_revision=first.revision)
    assert second.revision > first.revision
    await refused(client.remove_facility(expected_revision=first.revision), "FACILITY_CHANGED")
    await client.remove_facility(expected_revision=second.revision)
    await refused(client.get_facility(), "NOT_FOUND")


async def test_what_is_no_document_or_too_large_is_refused_whatever_it_inflates_to(
    registry: RegistryUnderTest, client: RegistryClient
) -> None:
    noise = random.Random(1).randbytes(documents.MAX_PACKED_BYTES).hex()
    assert "compressed" in (await refused(client.put_facility(noise), "INVALID_REQUEST")).message
    bomb = zlib.compress(bytes(documents.MAX_DOCUMENT_BYTES + 1), 9)
    async with rpc.channel(registry.endpoint) as channel:
        stub: registry_pb2_grpc.RegistryServiceAsyncStub = registry_pb2_grpc.RegistryServiceStub(channel)
        for bad in (b"x", bomb, bomb[:100], zlib.compress(b"\xff\xfe")):
            with pytest.raises(Exception, match="document_zlib"):
                await stub.PutFacility(registry_pb2.PutFacilityRequest(document_zlib=bad), timeout=5)
    await refused(client.get_facility(), "NOT_FOUND")
    large = random.Random(2).randbytes(documents.MAX_PACKED_BYTES * 7 // 8).hex()
    assert (await client.put_facility(large)).document_bytes == len(large), "etcd takes what is not too large"
    assert documents.unpacked((await client.get_facility()).document_zlib) == large


async def test_watchers_hear_of_it_and_it_is_left_out_of_what_people_ask_for(
    registry: RegistryUnderTest, client: RegistryClient
) -> None:
    async with Watcher([registry.endpoint]) as watcher:
        view = watcher.watch.view
        written = await client.put_facility("name: hall\n")
        await eventually(lambda: "current" in view.facilities)
        told = view.facilities["current"]
        assert (told.revision, documents.unpacked(told.document_zlib)) == (written.revision, "name: hall\n")
        assert not (await client.get_fleet()).records.facilities
        await client.remove_facility()
        await eventually(lambda: not view.facilities)


async def test_a_compaction_that_a_registry_missed_loses_no_edit(etcd_alone: EtcdServer) -> None:
    async with (
        RegistryUnderTest(config(etcd_alone.endpoint)) as first,
        RegistryUnderTest(config(etcd_alone.endpoint)) as second,
        RegistryClient([second.endpoint]) as client,
        Watcher([first.endpoint]) as watcher,
    ):
        await client.put_facility("name: a\n")
        await eventually(lambda: "current" in watcher.watch.view.facilities)
        await first.stop()
        await client.put_facility("name: b\n")
        newest = await client.put_facility("name: c\n")
        async with EtcdClient([etcd_alone.endpoint]) as etcd:
            await etcd.compact(newest.revision)
        await first.start()
        await eventually(lambda: watcher.watch.view.facilities["current"].revision == newest.revision, within_s=60)


async def test_a_plan_drawn_before_an_edit_is_not_written(
    registry: RegistryUnderTest, client: RegistryClient
) -> None:
    leadership = Leadership(client, "planner", "one", 5.0)
    await leadership.start()
    fence = await leadership.wait_leading()
    await client.put_deployment(spec("chat", replicas=2))
    seen = (await client.put_facility("name: a\n")).revision
    await client.apply_assignments(fence, [assignment("chat-0", "n1")], decided_at=seen)
    edited = (await client.put_facility("name: b\n")).revision
    conflict = await refused(
        client.apply_assignments(fence, [assignment("chat-1", "n1")], decided_at=seen), "CONFLICT"
    )
    assert "facilities/current" in conflict.message
    await client.apply_assignments(fence, [assignment("chat-1", "n1")], decided_at=edited)
    await leadership.resign()


async def test_bad_placements_are_refused_field_by_field(client: RegistryClient) -> None:
    bad = placement_pb2.PlacementPolicy(
        tensor_parallel=3,
        watts_per_gpu=0,
        pair_bytes_per_s=5,
        spread=placement_pb2.PlacementSpread(domains=[placement_pb2.FAILURE_DOMAIN_UNSPECIFIED], largest_share=1.5),
        regions=[
            placement_pb2.RegionShare(region="eu", share=0.7),
            placement_pb2.RegionShare(region="us", share=0.7),
        ],
        reach_s=0.1,
        gpu_types=[""],
        weight=5_000,
    )
    error = await refused(client.put_deployment(spec("chat", gpus_per_node=8, placement=bad)), "INVALID_REQUEST")
    assert {each.field.removeprefix("spec.placement.") for each in error.fields} == {
        "tensor_parallel",
        "watts_per_gpu",
        "pair_bytes_per_s",
        "spread.domains[0]",
        "spread.largest_share",
        "regions",
        "reach_s",
        "gpu_types[0]",
        "weight",
    }
    good = placement_pb2.PlacementPolicy(tensor_parallel=16, pair="decode", pair_bytes_per_s=5)
    await client.put_deployment(spec("chat", gpus_per_node=8, gang_size=4, placement=good))
