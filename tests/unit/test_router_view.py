"""The merged view: what registries tell, in whatever order."""

from __future__ import annotations

import pytest

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.common.blocks import pack_keys, xor_digest
from stoker.common.errors import NotFound, Unavailable
from stoker.router import core
from stoker.router.fleet.view import View
from tests.support.router import replica


def view_of(*replicas: records_pb2.Replica) -> View:
    view = View(core.RoutingConfig(), core.HealthConfig())
    view.records(registry_pb2.Records(replicas=replicas), now=0.0, snapshot=True)
    return view


GPU, CPU = common_pb2.TIER_GPU, common_pb2.TIER_CPU


def snapshot(
    replica_id: str,
    keys: list[int],
    *,
    epoch: int = 1,
    sequence: int = 5,
    xor: int | None = None,
    tier: common_pb2.Tier.ValueType = GPU,
) -> registry_pb2.DigestUpdate:
    return registry_pb2.DigestUpdate(
        replica_id=replica_id,
        epoch=epoch,
        sequence=sequence,
        snapshot=True,
        tier=tier,
        added=pack_keys(keys),
        xor_digest=xor_digest(keys) if xor is None else xor,
        count=len(keys),
    )


def delta(
    replica_id: str,
    added: list[int],
    removed: list[int],
    xor: int,
    count: int,
    sequence: int = 6,
    tier: common_pb2.Tier.ValueType = GPU,
) -> registry_pb2.DigestUpdate:
    return registry_pb2.DigestUpdate(
        replica_id=replica_id, epoch=1, sequence=sequence, tier=tier,
        added=pack_keys(added), removed=pack_keys(removed), xor_digest=xor, count=count,
    )  # fmt: skip


def held(view: View, replica_id: str, keys: list[int]) -> int:
    return view.pools["tiny"].fleet.index.depths(keys).get(replica_id, (0,))[-1]


def test_names_are_known_before_replicas_are_ready() -> None:
    view = View(core.RoutingConfig(), core.HealthConfig())
    with pytest.raises(Unavailable) as early:
        view.resolve("tiny")
    assert early.value.reason == "NOT_READY"
    deployment = records_pb2.Deployment(spec=common_pb2.DeploymentSpec(name="d", served_model_name="tiny"))
    view.records(registry_pb2.Records(deployments=[deployment]), now=0.0, snapshot=True)
    with pytest.raises(Unavailable) as soon:
        view.resolve("tiny")
    assert soon.value.reason == "NO_REPLICA"
    with pytest.raises(NotFound):
        view.resolve("other")


def test_adapters_resolve_to_their_pool() -> None:
    view = view_of(replica("a", "http://a", models=("tiny", "lora-x")))
    pool, adapter = view.resolve("lora-x")
    assert (pool.model, adapter) == ("tiny", "lora-x")
    assert view.names() == ["tiny", "lora-x"]


def test_digest_snapshot_then_deltas() -> None:
    view = view_of(replica("a", "http://a"))
    assert view.digest(snapshot("a", [1, 2]), 0.0) is core.Sync.APPLIED
    assert held(view, "a", [1, 2, 3]) == 2
    assert view.digest(delta("a", [3], [2], 1 ^ 3, 2), 0.0) is core.Sync.APPLIED
    assert held(view, "a", [1, 2]) == 1
    assert view.targets["a"].known_blocks == 2


def test_tiers_are_told_apart_each_with_its_own_sequence() -> None:
    view = view_of(replica("a", "http://a"))
    view.digest(snapshot("a", [1, 2], sequence=700), 0.0)
    assert view.digest(delta("a", [3], [], 1 ^ 2 ^ 3, 3, sequence=701), 0.0) is core.Sync.APPLIED
    assert view.digest(snapshot("a", [4], sequence=1, tier=CPU), 0.0) is core.Sync.APPLIED
    assert held(view, "a", [1, 2, 3, 4]) == 4, "a tier's first snapshot leaves the others as they are"
    assert view.digest(delta("a", [5], [], 4 ^ 5, 2, sequence=2, tier=CPU), 0.0) is core.Sync.APPLIED
    assert view.digest(delta("a", [], [3], 1 ^ 2, 2, sequence=702), 0.0) is core.Sync.APPLIED
    assert held(view, "a", [1, 2, 3]) == 2
    assert view.digest(snapshot("a", [1, 2, 3], sequence=702), 0.0) is core.Sync.APPLIED
    assert held(view, "a", [1, 2, 3, 4, 5]) == 5
    assert view.targets["a"].known_blocks == 5


def test_a_step_missing_in_any_tier_is_noticed() -> None:
    view = view_of(replica("a", "http://a"))
    view.digest(snapshot("a", [1], sequence=5), 0.0)
    assert view.digest(delta("a", [2], [], 1 ^ 2, 2, sequence=7), 0.0) is core.Sync.RESYNC
    assert view.digest(delta("a", [9], [], 9, 1, sequence=1, tier=CPU), 0.0) is core.Sync.RESYNC


def test_a_digest_that_comes_before_its_replica_is_ready_is_kept() -> None:
    pending = records_pb2.Replica(replica_id="a", state=records_pb2.STATE_STARTING, epoch=1)
    view = view_of(pending)
    view.digest(snapshot("a", [1, 2]), 0.0)
    view.digest(delta("a", [3], [], 1 ^ 2 ^ 3, 3), 0.0)
    view.digest(snapshot("b", [7]), 0.0)
    view.records(registry_pb2.Records(replicas=[replica("a", "http://a"), replica("b", "http://b")]), now=1.0)
    assert held(view, "a", [1, 2, 3]) == 3
    assert held(view, "b", [7]) == 1


def test_what_never_becomes_a_replica_does_not_crowd_out_what_does() -> None:
    view = view_of()
    for number in range(5_000):
        view.digest(snapshot(f"gone-{number}", []), 0.0)
    view.digest(snapshot("a", [1, 2]), 0.0)
    view.records(registry_pb2.Records(replicas=[replica("a", "http://a")]), now=1.0)
    assert held(view, "a", [1, 2]) == 2
    assert len(view._early) <= 4096


def test_a_digest_with_a_wrong_sum_asks_for_another() -> None:
    view = view_of(replica("a", "http://a"))
    assert view.digest(snapshot("a", [1, 2], xor=9), 0.0) is core.Sync.RESYNC
    view.digest(snapshot("a", [1, 2]), 0.0)
    assert view.digest(delta("a", [3], [], 77, 3), 0.0) is core.Sync.RESYNC
    assert view.pools["tiny"].fleet.index.trust("a", 0.0) == 0.0


def test_a_new_epoch_voids_the_old_life_but_not_a_digest_that_came_first() -> None:
    view = view_of(replica("a", "http://a", epoch=1))
    view.digest(snapshot("a", [1, 2], epoch=1), 0.0)
    view.proved(view.targets["a"], "ok")
    view.digest(snapshot("a", [5], epoch=2), 0.0)
    view.records(registry_pb2.Records(replicas=[replica("a", "http://a", epoch=2)]), now=1.0)
    assert held(view, "a", [5]) == 1
    assert held(view, "a", [1]) == 0
    assert view.targets["a"].parity == "pending"
    view.records(registry_pb2.Records(replicas=[replica("a", "http://a", epoch=3)]), now=2.0)
    assert held(view, "a", [5]) == 0, "the engine that held it is gone"


def test_a_life_that_counts_from_a_slower_clock_voids_the_one_before() -> None:
    view = view_of(replica("a", "http://a", epoch=9))
    view.digest(snapshot("a", [1, 2], epoch=9), 0.0)
    view.records(registry_pb2.Records(replicas=[replica("a", "http://b", epoch=4)]), now=1.0)
    assert held(view, "a", [1, 2]) == 0, "it runs elsewhere, with nothing cached"
    assert view.digest(snapshot("a", [7], epoch=4), 1.0) is core.Sync.APPLIED


def test_what_a_replica_held_is_given_back_though_nothing_else_happens() -> None:
    view = view_of(replica("a", "http://a"), replica("b", "http://b"))
    index = view.pools["tiny"].fleet.index
    view.digest(snapshot("a", list(range(1, 5_001))), 0.0)
    view.digest(snapshot("b", [1, 2]), 0.0)
    view.records(None, registry_pb2.Removals(replicas=["a"]), now=1.0)
    for _ in range(10):
        view.tidy(1_000)
    assert len(index) == 2


def test_silence_ages_a_digest_and_a_registry_that_vouches_keeps_it_fresh() -> None:
    view = view_of(replica("a", "http://a"))
    index = view.pools["tiny"].fleet.index
    view.digest(snapshot("a", [1]), 0.0)
    assert index.trust("a", 60.0) == 0.0
    assert 0 < index.trust("a", 30.0) < 1
    view.source("r", True, registry_pb2.Freshness(nodes=["node-of-a"]), 60.0)
    assert index.trust("a", 60.0) == 1.0
    view.source("r", True, registry_pb2.Freshness(nodes=["another"]), 120.0)
    assert index.trust("a", 120.0) == 0.0


def test_nobody_vouches_for_a_digest_that_its_registry_doubts() -> None:
    view = view_of(replica("a", "http://a"))
    index = view.pools["tiny"].fleet.index
    view.digest(snapshot("a", [1]), 0.0)
    view.source("r", True, registry_pb2.Freshness(nodes=["node-of-a"], doubtful_replicas=["a"]), 60.0)
    assert index.trust("a", 60.0) == 0.0
    view.source("r", True, registry_pb2.Freshness(nodes=["node-of-a"], doubtful_replicas=["b"]), 61.0)
    assert index.trust("a", 61.0) == 1.0


def test_the_odd_one_out_earns_no_credit_but_stays() -> None:
    view = view_of(
        replica("a", "http://a", sha256="x"),
        replica("b", "http://b", sha256="x"),
        replica("c", "http://c", sha256="y"),
        replica("d", "http://d", sha256="x", block_size=16),
    )
    fleet = view.pools["tiny"].fleet
    assert [fleet.replicas[name].block_size for name in "abcd"] == [32, 32, 0, 0]
    assert all(fleet.replicas[name].ready for name in "abcd")
    assert view.targets["c"].refused == "tokenizer_mismatch"
    assert view.targets["d"].refused == "block_size_mismatch"


def test_unknown_load_is_not_zero() -> None:
    view = view_of(replica("a", "http://a"))
    load = view.pools["tiny"].fleet.load
    view.load([registry_pb2.ReplicaLoad(replica_id="a", epoch=1, sequence=1, queued_prefill_tokens=500)], 1.0)
    assert load.load("a") == 500
    view.load([registry_pb2.ReplicaLoad(replica_id="a", epoch=1, sequence=2)], 2.0)
    assert load.load("a") == 500
    view.load([registry_pb2.ReplicaLoad(replica_id="a", epoch=0, sequence=3, queued_prefill_tokens=0)], 3.0)
    assert load.load("a") == 500, "an older life's report"


def test_a_whole_snapshot_drops_what_it_does_not_name() -> None:
    view = view_of(replica("a", "http://a"), replica("b", "http://b"))
    view.records(registry_pb2.Records(replicas=[replica("a", "http://a")]), now=1.0, snapshot=True)
    assert set(view.targets) == {"a", "b"}
    view.records(registry_pb2.Records(replicas=[replica("a", "http://a")]), now=1.0, snapshot=True, whole=True)
    assert set(view.targets) == {"a"}
    view.records(None, registry_pb2.Removals(replicas=["a"]), now=2.0)
    assert not view.pools


def test_a_replica_that_draining_or_refused_connections_is_not_ready() -> None:
    view = view_of(replica("a", "http://a"), replica("b", "http://b", state=records_pb2.STATE_DRAINING))
    fleet = view.pools["tiny"].fleet
    assert (fleet.replicas["a"].ready, fleet.replicas["b"].ready) == (True, False)
    view.reached(view.targets["a"], False)
    assert not fleet.replicas["a"].ready
    view.reached(view.targets["a"], True)
    assert fleet.replicas["a"].ready


def test_a_replica_that_retires_is_ready_and_off_the_ring() -> None:
    leaver, heir = replica("a", "http://a"), replica("b", "http://b")
    leaver.wanted = records_pb2.WANTED_RETIRE
    view = view_of(leaver, heir)
    fleet = view.pools["tiny"].fleet
    assert fleet.replicas["a"].ready
    assert fleet.retiring == {"a"}
    assert fleet.ring.home(1) == "b"
    leaver.wanted = records_pb2.WANTED_RUN
    view.records(registry_pb2.Records(replicas=[leaver]), now=1.0)
    assert not fleet.retiring


def test_what_other_routers_sent_is_believed_for_this_life_of_the_replica_only() -> None:
    view = view_of(replica("a", "http://a", epoch=2))
    view.digest(snapshot("a", [1], epoch=2), 0.0)
    fleet = view.pools["tiny"].fleet
    told = [
        registry_pb2.Dispatch(replica_id="a", epoch=2, keys=pack_keys([2, 3])),
        registry_pb2.Dispatch(replica_id="a", epoch=1, keys=pack_keys([4])),
        registry_pb2.Dispatch(replica_id="a", epoch=2, keys=b"odd"),
        registry_pb2.Dispatch(replica_id="gone", epoch=2, keys=pack_keys([4])),
    ]
    view.dispatched(told, 1.0)
    assert fleet.speculation.extend([1, 2, 3, 4], {"a": 1}) == {"a": 3}


def test_a_new_life_begins_when_it_is_seen_to_become_ready() -> None:
    def ready_at(name: str) -> float | None:
        return view.pools["tiny"].fleet.replicas[name].ready_at

    def told(record: records_pb2.Replica, now: float) -> None:
        view.records(registry_pb2.Records(replicas=[record]), now=now)

    old, new = replica("old", "http://old"), replica("new", "http://new")
    view = view_of(old)
    assert ready_at("old") is None, "it may have served for days"
    new.state = records_pb2.STATE_STARTING
    told(new, 5.0)
    assert ready_at("new") is None
    new.state = records_pb2.STATE_READY
    told(new, 9.0)
    told(new, 12.0)
    assert ready_at("new") == 9.0
    view.reached(view.targets["new"], False)
    view.reached(view.targets["new"], True)
    assert ready_at("new") == 9.0, "out of reach for a moment is not cold"
    old.epoch += 1
    told(old, 20.0)
    assert ready_at("old") == 20.0


@pytest.mark.parametrize("rate", [float("inf"), float("nan"), -3.0, 0.0])
def test_a_prefill_rate_that_is_none_is_unknown(rate: float) -> None:
    view = view_of(replica("a", "http://a"))
    view.load([registry_pb2.ReplicaLoad(replica_id="a", epoch=1, prefill_tokens_per_s=rate)], 1.0)
    assert view.targets["a"].prefill_rate is None
