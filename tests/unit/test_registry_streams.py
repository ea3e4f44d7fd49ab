"""Digest and load stores, what waits for watchers and agents, and the merge of several registries."""

from __future__ import annotations

from random import Random

import pytest

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.common.blocks import pack_keys, unpack_keys
from stoker.common.errors import InvalidRequest
from stoker.registry.core import rendezvous, validation
from stoker.registry.core.digests import DigestStore, Outcome, Resyncs, Series
from stoker.registry.core.loads import LoadStore
from stoker.registry.core.merge import Change, DigestMerge, FleetView, LoadMerge, Verdict
from stoker.registry.core.outbox import Outbox
from stoker.registry.core.outflow import Interest, Outflow
from stoker.registry.core.records import Kind, Name, Record
from stoker.registry.core.validation import Limits
from tests.support.registry import ALL_TOPICS, assignment, delta, node, snapshot, spec, status

GPU = common_pb2.TIER_GPU
SERIES = Series("chat-0", 0, GPU)


def held(store: DigestStore, replica_id: str = "chat-0") -> set[int]:
    return {key for piece in store.snapshot(Series(replica_id, 0, GPU), 2) for key in unpack_keys(piece.added)}


# The registry's digest store


def test_a_delta_without_a_base_asks_for_one() -> None:
    store = DigestStore()
    assert store.apply(delta("chat-0", {1}, 1, {1})) is Outcome.RESYNC
    assert store.apply(snapshot("chat-0", {1}, 1)) is Outcome.APPLIED
    assert store.apply(delta("chat-0", {1, 2}, 2, {2})) is Outcome.APPLIED
    assert store.apply(delta("chat-0", {2}, 3, set(), {1})) is Outcome.APPLIED
    assert held(store) == {2}


def test_each_rank_counts_its_own_sequence() -> None:
    store = DigestStore()
    updates = [snapshot("chat-0", {1}, 5), snapshot("chat-0", {2}, 9), delta("chat-0", {1, 3}, 6, {3})]
    updates[1].dp_rank = 1
    assert [store.apply(update) for update in updates] == [Outcome.APPLIED] * 3
    told = [piece for series in store.series() for piece in store.snapshot(series, 10)]
    assert [(piece.dp_rank, sorted(unpack_keys(piece.added))) for piece in told] == [(0, [1, 3]), (1, [2])]
    store.forget("chat-0")
    assert store.series() == []


def test_a_good_tier_does_not_hurry_the_snapshots_of_a_bad_one() -> None:
    resyncs = Resyncs(Random(1))
    storage = Series("chat-0", 0, common_pb2.TIER_STORAGE)
    assert resyncs.wrong(storage, again=False) == 0.0
    assert resyncs.wrong(storage, again=False) is None, "one question is enough"
    delays = []
    for _ in range(8):
        resyncs.right(SERIES)  # an agent answers with all tiers
        delay_s = resyncs.wrong(storage, again=True)
        assert delay_s is not None
        delays.append(delay_s)
    assert delays[-1] > 10 * delays[0] > 0
    resyncs.right(storage)
    assert resyncs.wrong(storage, again=False) == 0.0
    resyncs.forget("chat-0")
    assert resyncs.wrong(storage, again=False) == 0.0


def test_tiers_are_bounded_and_later_ones_pass() -> None:
    update = snapshot("chat-0", {1}, 1)
    for tier, fine in ((0, True), (9, True), (15, True), (16, False), (-1, False)):
        update.tier = common_pb2.Tier.ValueType(tier)
        assert (not list(validation.digest(update, Limits()))) is fine


def test_a_gap_keeps_what_is_held_but_vouches_for_it_no_more() -> None:
    store = DigestStore()
    store.apply(snapshot("chat-0", {1}, 1))
    assert store.apply(delta("chat-0", {1, 2, 3}, 3, {3})) is Outcome.RESYNC
    assert store.series() == []
    assert store.apply(delta("chat-0", {1, 2, 3, 4}, 4, {4})) is Outcome.RESYNC, "one good step heals nothing"
    assert store.apply(snapshot("chat-0", {1, 2, 3, 4}, 4)) is Outcome.APPLIED
    assert held(store) == {1, 2, 3, 4}


def test_a_replica_is_doubtful_until_every_tier_is_whole_again() -> None:
    store = DigestStore(max_keys=2)
    store.apply(snapshot("chat-0", {1}, 1))
    assert store.doubtful() == set()
    on_disk = delta("chat-0", {1}, 1, {1})
    on_disk.tier = common_pb2.TIER_STORAGE
    assert store.apply(on_disk) is Outcome.RESYNC
    assert store.apply(delta("chat-0", {1, 2, 3}, 2, {2, 3})) is Outcome.RESYNC, "too large"
    assert store.doubtful() == {"chat-0"}
    assert store.apply(snapshot("chat-0", {1, 2}, 2)) is Outcome.APPLIED
    assert store.doubtful() == {"chat-0"}, "one good tier heals no other"
    whole = snapshot("chat-0", {1}, 1)
    whole.tier = common_pb2.TIER_STORAGE
    assert store.apply(whole) is Outcome.APPLIED
    assert store.doubtful() == set()
    assert store.apply(delta("chat-0", {1}, 9, {1})) is Outcome.RESYNC
    store.forget("chat-0")
    assert store.doubtful() == set()


def test_a_repeated_step_is_stale_and_a_restatement_harmless() -> None:
    store = DigestStore()
    store.apply(snapshot("chat-0", {1}, 1))
    step = delta("chat-0", {1, 2}, 2, {1, 2})
    assert store.apply(step) is Outcome.APPLIED, "a block announced twice is there once"
    assert store.apply(step) is Outcome.STALE


@pytest.mark.parametrize("wrong", ["xor", "count"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_false_checksum_asks_for_a_snapshot(wrong: str, whole: bool) -> None:
    store = DigestStore()
    store.apply(snapshot("chat-0", {1}, 1))
    update = snapshot("chat-0", {1, 2}, 2) if whole else delta("chat-0", {1, 2}, 2, {2})
    if wrong == "xor":
        update.xor_digest ^= 1
    else:
        update.count += 1
    assert store.apply(update) is Outcome.RESYNC
    assert held(store) == ({1} if whole else set())


def test_a_new_epoch_needs_a_snapshot_and_an_old_one_is_void() -> None:
    store = DigestStore()
    store.apply(snapshot("chat-0", {1}, 9, epoch=1))
    assert store.apply(delta("chat-0", {2}, 1, {2}, epoch=2)) is Outcome.RESYNC
    assert store.apply(snapshot("chat-0", {2}, 1, epoch=2)) is Outcome.APPLIED
    assert store.apply(delta("chat-0", {1, 3}, 10, {3}, epoch=1)) is Outcome.STALE
    assert store.apply(snapshot("chat-0", {1}, 10, epoch=1)) is Outcome.STALE
    assert held(store) == {2}


def test_a_snapshot_in_pieces_replaces_in_one_step() -> None:
    store = DigestStore()
    store.apply(snapshot("chat-0", {1}, 1))
    source = DigestStore()
    source.apply(snapshot("chat-0", {5, 6, 7, 8, 9}, 4))
    pieces = list(source.snapshot(SERIES, 2))
    assert [(len(p.added) // 8, p.more) for p in pieces] == [(2, True), (2, True), (1, False)]
    for piece in pieces[:-1]:
        assert store.apply(piece) is Outcome.PARTIAL
        assert held(store) == {1}
    assert store.apply(pieces[-1]) is Outcome.APPLIED
    assert held(store) == {5, 6, 7, 8, 9}


def test_an_empty_digest_is_one_empty_piece() -> None:
    store = DigestStore()
    store.apply(snapshot("chat-0", set(), 1))
    assert [(p.count, p.more, p.added) for p in store.snapshot(SERIES, 2)] == [(0, False, b"")]


def test_a_set_beyond_its_bound_is_refused() -> None:
    store = DigestStore(max_keys=3)
    assert store.apply(snapshot("chat-0", {1, 2, 3, 4}, 1)) is Outcome.RESYNC
    store.apply(snapshot("chat-0", {1, 2, 3}, 1))
    assert store.apply(delta("chat-0", {1, 2, 3, 4}, 2, {4})) is Outcome.RESYNC
    assert store.keys_held() == 0


def test_tiers_count_for_themselves_and_go_together() -> None:
    store = DigestStore()
    store.apply(snapshot("chat-0", {1}, 1))
    cpu = snapshot("chat-0", {2}, 7)
    cpu.tier = common_pb2.TIER_CPU
    assert store.apply(cpu) is Outcome.APPLIED
    assert store.keys_held() == 2
    store.forget("chat-0")
    assert store.keys_held() == 0


def test_the_newest_load_wins() -> None:
    store = LoadStore()

    def load(epoch: int, sequence: int) -> registry_pb2.ReplicaLoad:
        return registry_pb2.ReplicaLoad(replica_id="chat-0", epoch=epoch, sequence=sequence)

    assert [store.offer(load(*place)) for place in ((1, 1), (1, 3), (1, 2), (1, 3), (2, 1), (1, 9))] == [
        *(True, True, False, False),
        *(True, False),
    ]


# What waits for a watcher


def outflow(*deployments: str, max_digest_bytes: int = 10_000) -> Outflow:
    request = registry_pb2.WatchRequest(topics=ALL_TOPICS, deployments=deployments)
    return Outflow(Interest.of(request), max_digest_bytes)


def records_of(*items: Record) -> tuple[tuple[Name, Record], ...]:
    return tuple(((Kind.DEPLOYMENTS, item.spec.name), item) for item in items)  # type: ignore[union-attr]


def deployment(name: str, generation: int = 1) -> records_pb2.Deployment:
    return records_pb2.Deployment(spec=spec(name), generation=generation)


def test_records_that_wait_are_told_once_by_their_newest_value() -> None:
    flow = outflow()
    for generation in range(1, 1001):
        flow.change(Change(records_of(deployment("chat", generation), deployment("code", generation))), generation)
    flow.change(Change(removals=((Kind.DEPLOYMENTS, "code"),)), 1001)
    upserts, removals = flow.take_records()
    assert [d.generation for d in upserts.upserts.deployments] == [1000]
    assert list(removals.removals.deployments) == ["code"]
    assert flow.told_revision == 1001
    assert not flow.take_records()


def test_a_record_that_went_and_came_again_is_an_upsert() -> None:
    flow = outflow()
    flow.change(Change(removals=((Kind.DEPLOYMENTS, "chat"),)), 1)
    flow.change(Change(records_of(deployment("chat"))), 2)
    (message,) = flow.take_records()
    assert message.HasField("upserts")


def test_too_many_digest_steps_give_way_to_a_snapshot() -> None:
    flow = outflow(max_digest_bytes=1000)
    blocks: set[int] = set()
    for sequence in range(1, 100):
        blocks.add(sequence)
        flow.digest(delta("chat-0", blocks, sequence, {sequence}))
    assert flow.coalesced == 1, "after that, steps are in the snapshot to come"
    assert list(flow.take_soft()) == []
    assert flow.take_untold() == SERIES
    flow.digest(delta("chat-0", blocks, 100, {100}))
    assert [m.digest.sequence for m in flow.take_soft()] == [100]


def test_a_new_snapshot_voids_waiting_steps() -> None:
    flow = outflow()
    flow.digest(delta("chat-0", {1}, 1, {1}))
    flow.digest(delta("code-0", {1}, 1, {1}))
    flow.replaced(SERIES)
    assert [m.digest.replica_id for m in flow.take_soft()] == ["code-0"]
    assert flow.take_untold() == SERIES
    assert flow.take_untold() is None


def test_other_deployments_stay_out() -> None:
    flow = outflow("chat")
    flow.change(Change(records_of(deployment("chat"), deployment("code"))), 1)
    flow.load([registry_pb2.ReplicaLoad(replica_id=r) for r in ("chat-0", "code-0", "chat-x-0")])
    flow.digest(delta("code-0", {1}, 1, {1}))
    flow.tell_all([Series("code-0", 0, GPU)])
    (upserts,) = flow.take_records()
    assert [d.spec.name for d in upserts.upserts.deployments] == ["chat"]
    assert [load.replica_id for m in flow.take_soft() for load in m.load.loads] == ["chat-0"]
    assert not flow


# What waits for the registry


def test_an_outbox_keeps_newest_members_and_every_digest_step() -> None:
    box, chat = Outbox(), assignment("chat-0", "n1")
    box.member(status(node("n1"), chat, records_pb2.STATE_STARTING))
    box.member(status(node("n1"), chat, records_pb2.STATE_READY))
    for sequence in (1, 2):
        box.load([registry_pb2.ReplicaLoad(replica_id="chat-0", sequence=sequence)])
        box.digest(delta("chat-0", {1}, sequence, {1}))
    told = list(box.take())
    assert [r.WhichOneof("report") for r in told] == ["member", "load", "digest", "digest"]
    assert told[0].member.state == records_pb2.STATE_READY
    assert [load.sequence for load in told[1].load.loads] == [2]
    assert not box


def test_an_outbox_drops_digests_beyond_its_bound_and_says_whose() -> None:
    box = Outbox(max_digest_bytes=500)
    dropped = [box.digest(delta("chat-0", {1}, n, {1})) for n in range(1, 5)]
    assert dropped == [frozenset(), frozenset(), frozenset(), {"chat-0"}]
    assert not box


def test_a_member_that_went_is_told_once_and_needs_no_resync() -> None:
    box, chat = Outbox(), assignment("chat-0", "n1")
    box.member(status(node("n1"), chat))
    box.digest(delta("chat-0", {1}, 1, {1}))
    assert box.reconnected() == {"chat-0"}
    box.member_gone("chat-0", 0)
    assert [r.WhichOneof("report") for r in box.take()] == ["member_gone"]
    assert box.reconnected() == frozenset()


def test_a_lost_registry_moves_only_its_own_agents() -> None:
    endpoints = [f"r{i}:1" for i in range(4)]
    before = {n: rendezvous.order(f"n{n}", endpoints)[0] for n in range(400)}
    after = {n: rendezvous.order(f"n{n}", endpoints[1:])[0] for n in range(400)}
    assert all(after[n] == before[n] for n in before if before[n] != endpoints[0])
    for endpoint in endpoints:
        assert 60 < sum(first == endpoint for first in before.values()) < 140


# The merge


def at(revision: int, **generations: int) -> tuple[tuple[tuple[Name, Record], ...], int]:
    return records_of(*(deployment(name, g) for name, g in generations.items())), revision


def test_a_later_snapshot_is_a_difference() -> None:
    view = FleetView()
    assert len(view.snapshot(dict(at(5, chat=1, code=1)[0]), 5).upserts) == 2
    change = view.snapshot(dict(at(7, chat=1, new=1)[0]), 7)
    assert [name for (_, name), _ in change.upserts] == ["new"]
    assert change.removals == ((Kind.DEPLOYMENTS, "code"),)
    assert not view.snapshot({}, 6), "older than what is held"
    assert view.deployments.keys() == {"chat", "new"}


def test_the_same_step_from_two_registries_happens_once() -> None:
    view = FleetView()
    view.snapshot({}, 1)
    upserts, revision = at(2, chat=1)
    assert view.delta(upserts, (), revision)
    assert not view.delta(upserts, (), revision)
    assert not view.delta((), ((Kind.DEPLOYMENTS, "chat"),), 1), "old news"


def test_after_etcd_went_back_its_new_history_counts() -> None:
    view = FleetView()
    view.snapshot(dict(at(100, chat=1)[0]), 100)
    view.rewind(3)
    change = view.snapshot(dict(at(3, code=1)[0]), 3)
    assert (len(change.upserts), len(change.removals)) == (1, 1)


def owned(*sources: str) -> object:
    return lambda source, _: source in sources


def test_digests_follow_the_agent_from_one_registry_to_another() -> None:
    merge = DigestMerge()

    def offer(source: str, update: registry_pb2.DigestUpdate, *owners: str) -> Verdict:
        return merge.offer(source, update, lambda s, _: s in owners)[0]

    assert offer("a", delta("chat-0", {1}, 1, {1}), "a") is Verdict.GAP
    assert offer("a", snapshot("chat-0", {1}, 1), "a") is Verdict.TAKE
    assert offer("a", delta("chat-0", {1, 2}, 2, {2}), "a") is Verdict.TAKE
    # The agent moves; the new registry begins with the same snapshot, then goes on.
    assert offer("b", snapshot("chat-0", {1, 2}, 2), "b") is Verdict.DROP
    assert offer("b", delta("chat-0", {1, 2, 3}, 3, {3}), "b") is Verdict.TAKE
    # The old one, which does not know that yet, is old news.
    assert offer("a", snapshot("chat-0", {1, 2}, 2), "a", "b") is Verdict.DROP
    assert offer("a", delta("chat-0", {1, 2, 3}, 3, {3}), "a", "b") is Verdict.DROP
    # A restarted agent counts anew: nobody else speaks for it any more.
    assert offer("a", snapshot("chat-0", {9}, 0), "a") is Verdict.TAKE
    # And through the same registry too.
    assert offer("a", snapshot("chat-0", {8}, 0), "a") is Verdict.TAKE
    assert offer("a", delta("chat-0", {8, 9, 10}, 2, {10}), "a") is Verdict.GAP


def test_pieces_come_back_as_one_and_half_a_snapshot_is_forgotten_with_its_source() -> None:
    source, merge = DigestStore(), DigestMerge()
    source.apply(snapshot("chat-0", {1, 2, 3}, 1))
    first, second = source.snapshot(SERIES, 2)
    assert merge.offer("a", first, lambda *_: True)[0] is Verdict.DROP
    verdict, whole = merge.offer("a", second, lambda *_: True)
    assert (verdict, set(unpack_keys(whole.added)), whole.more) == (Verdict.TAKE, {1, 2, 3}, False)
    merge.forget("chat-0")
    merge.offer("a", first, lambda *_: True)
    merge.disconnected("a")
    assert set(unpack_keys(merge.offer("a", second, lambda *_: True)[1].added)) != {1, 2, 3}


def test_loads_follow_the_agent_too() -> None:
    merge = LoadMerge()

    def offer(source: str, epoch: int, sequence: int, *owners: str) -> bool:
        load = registry_pb2.ReplicaLoad(replica_id="chat-0", epoch=epoch, sequence=sequence)
        return merge.offer(source, load, lambda s, _: s in owners)

    assert offer("a", 1, 5, "a")
    assert not offer("a", 1, 5, "a")
    assert offer("b", 1, 6, "b")
    assert not offer("a", 1, 5, "a", "b")
    assert offer("a", 1, 1, "a"), "a restarted agent counts anew"


# Refusals


def test_a_good_specification_passes() -> None:
    validation.require(validation.deployment(spec("chat", lora_adapters=[{"name": "a", "path": "p"}]), Limits()))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"name": ""}, "spec.name"),
        ({"name": "-a"}, "spec.name"),
        ({"name": "a" * 64}, "spec.name"),
        ({"model": ""}, "spec.model"),
        ({"engine": ""}, "spec.engine"),
        ({"replicas": 10_001}, "spec.replicas"),
        ({"gang_size": 65}, "spec.gang_size"),
        ({"gpus_per_node": 65}, "spec.gpus_per_node"),
        ({"drain_timeout_s": 86_401}, "spec.drain_timeout_s"),
        ({"env": {"A=B": "c"}}, "spec.env['A=B']"),
        ({"env": {"A": "b\0c"}}, "spec.env['A']"),
        ({"model": "a\0b"}, "spec.model"),
        ({"engine_args": ["a\0b"]}, "spec.engine_args[0]"),
        ({"lora_adapters": [{"name": "a"}]}, "spec.lora_adapters[0]"),
        ({"lora_adapters": [{"name": "a", "path": "p"}] * 2}, "spec.lora_adapters[1].name"),
        ({"engine_args": ["x" * 200_000]}, "spec"),
    ],
)
def test_a_bad_field_of_a_specification_is_named(fields: dict[str, object], expected: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        validation.require(validation.deployment(spec(**{"name": "chat", **fields}), Limits()))  # type: ignore[arg-type]
    assert [f.field for f in refused.value.fields] == [expected]


def test_an_agent_speaks_for_itself() -> None:
    chat = assignment("chat-0", "n1")
    hello = registry_pb2.Hello(node=node("n1"), members=[status(node("n2"), chat)])
    assert [f.field for f in validation.hello(hello, Limits())] == ["hello.members[0].node_id"]
    bad = registry_pb2.Hello(node=common_pb2.Node(node_id="a b", grpc_endpoint="nowhere"))
    assert [f.field for f in validation.hello(bad, Limits())] == [
        "hello.node.node_id",
        "hello.node.incarnation",
        "hello.node.grpc_endpoint",
    ]


def test_an_assignment_names_its_deployment_and_its_whole_gang() -> None:
    good, bad = assignment("chat-0", "n1"), assignment("big-0", "n1", "n2")
    bad.replica_id = "chat-0"
    del bad.members[1]
    found = [f.field for f in validation.assignments([good, bad], [], Limits())]
    assert found == ["puts", "puts[1].replica_id", "puts[1].members"]
    assert [f.field for f in validation.assignments([], [], Limits())] == ["puts"]
    many = [f"chat-{i}" for i in range(101)]
    assert [f.field for f in validation.batch("puts", [], many)] == ["puts"]


def test_malformed_digests_are_refused() -> None:
    bad = registry_pb2.DigestUpdate(added=b"seven..", removed=pack_keys([1]), snapshot=True)
    assert [f.field for f in validation.digest(bad, Limits())] == ["digest.added", "digest.removed"]
