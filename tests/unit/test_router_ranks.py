"""A data-parallel replica in a router's view: as many targets as ranks, which live and die together."""

from __future__ import annotations

from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.common.blocks import pack_keys
from stoker.router import core
from stoker.router.fleet.pools import replicas_of
from stoker.router.fleet.view import View
from stoker.router.http.engines import request_headers
from tests.support.registry import snapshot
from tests.support.router import replica

BOTH = {"a@0", "a@1"}


def ranked(ranks: int = 2, epoch: int = 1) -> records_pb2.Replica:
    record = replica("a", "http://a", epoch=epoch)
    record.engine.data_parallel = ranks
    return record


def view_of(*records: records_pb2.Replica) -> View:
    view = View(core.RoutingConfig(), core.HealthConfig())
    view.records(registry_pb2.Records(replicas=records), now=0.0, snapshot=True)
    return view


def of_rank(rank: int, *keys: int) -> registry_pb2.DigestUpdate:
    update = snapshot("a", set(keys), 1)
    update.dp_rank = rank
    return update


def holders(view: View, key: int) -> set[str]:
    return set(view.pools["tiny"].fleet.index.depths([key]))


def test_each_rank_is_a_target_with_its_share_of_the_cache() -> None:
    view = view_of(ranked())
    assert view.targets.keys() == view.pools["tiny"].targets.keys() == BOTH
    replicas = view.pools["tiny"].fleet.replicas
    assert {each.kv_blocks for each in replicas.values()} == {150}
    assert [view.targets[name].headers for name in sorted(BOTH)] == [
        {"x-data-parallel-rank": "0"},
        {"x-data-parallel-rank": "1"},
    ]


def test_a_replica_with_one_cache_names_no_rank() -> None:
    for ranks in (0, 1):
        (target,) = view_of(ranked(ranks)).targets.values()
        assert (target.id, target.headers) == ("a", {})


def test_what_one_rank_holds_the_other_is_not_credited_with() -> None:
    view = view_of(ranked())
    assert view.digest(of_rank(0, 7), 1.0) is view.digest(of_rank(1, 8), 1.0) is core.Sync.APPLIED
    assert (holders(view, 7), holders(view, 8)) == ({"a@0"}, {"a@1"})


def test_digests_of_ranks_that_come_before_their_replica_are_kept() -> None:
    view = view_of(records_pb2.Replica(replica_id="a", state=records_pb2.STATE_STARTING, epoch=1))
    view.digest(of_rank(1, 8), 1.0)
    view.digest(of_rank(0, 7), 1.0)
    view.records(registry_pb2.Records(replicas=[ranked()]), now=2.0)
    assert (holders(view, 7), holders(view, 8)) == ({"a@0"}, {"a@1"})


def test_the_sum_of_all_ranks_is_no_rank_s_load() -> None:
    view = view_of(ranked())
    ranks = [registry_pb2.RankLoad(queued_prefill_tokens=tokens, prefill_tokens_per_s=9.0) for tokens in (0, 500)]
    load = registry_pb2.ReplicaLoad(replica_id="a", epoch=1, sequence=1, queued_prefill_tokens=500, ranks=ranks)
    view.load([load], 1.0)
    assert [view.targets[name].load_tokens for name in sorted(BOTH)] == [0, 500]
    load.ClearField("ranks")
    load.queued_prefill_tokens = 900
    view.load([load], 2.0)
    assert [view.targets[name].load_tokens for name in sorted(BOTH)] == [0, 500]


def test_another_router_s_dispatch_counts_for_the_rank_it_went_to() -> None:
    view = view_of(ranked())
    sent = registry_pb2.Dispatch(
        replica_id="a", dp_rank=1, epoch=1, keys=pack_keys([5]), prefill_tokens=100, kv_tokens=100
    )
    view.dispatched([sent], 1.0)
    load = view.pools["tiny"].fleet.load
    assert load.load("a@1") > load.load("a@0") == 0


def test_ranks_are_unreachable_and_go_together() -> None:
    view = view_of(ranked())
    view.reached(view.targets["a@1"], False)
    assert not any(target.ready for target in view.targets.values())
    view.reached(view.targets["a@0"], True)
    assert all(target.ready for target in view.targets.values())
    assert view.targets["a@0"].siblings == BOTH
    view.records(None, registry_pb2.Removals(replicas=["a"]), now=1.0)
    assert (view.targets, view.pools) == ({}, {})


def test_an_engine_that_comes_back_with_other_ranks_leaves_nothing_of_the_old_ones() -> None:
    view = view_of(ranked(3))
    view.records(registry_pb2.Records(replicas=[ranked(epoch=2)]), now=1.0)
    assert view.targets.keys() == BOTH
    view.records(registry_pb2.Records(replicas=[ranked(1, epoch=3)]), now=2.0)
    assert view.targets.keys() == view.pools["tiny"].targets.keys() == {"a"}


def test_a_whole_snapshot_without_the_replica_removes_all_its_ranks() -> None:
    view = view_of(ranked())
    view.records(registry_pb2.Records(replicas=[replica("b", "http://b")]), now=1.0, snapshot=True, whole=True)
    assert view.targets.keys() == {"b"}


def test_a_caller_does_not_choose_the_rank() -> None:
    assert request_headers({"X-Data-Parallel-Rank": "1", "X-Other": "2"}, "r") == {
        "X-Other": "2",
        "X-Request-Id": "r",
    }


def test_the_ranks_of_one_replica_are_one_try() -> None:
    assert replicas_of({"a@0", "a@1", "b", "c@0"}) == {"a", "b", "c"}
