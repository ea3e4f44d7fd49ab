"""What registries keep and tell of routers' demand: the newest, while its stream lasts, and within bounds."""

from __future__ import annotations

import math
from typing import Any

import pytest

from stoker.api.registry.v1 import registry_pb2
from stoker.common import log_buckets
from stoker.registry.core import validation
from stoker.registry.core.demand import DemandMerge, DemandStore
from stoker.registry.core.outflow import Interest, Outflow


def report(
    router: str, sequence: int, *, began: int = 1, gone: bool = False, age_ms: int = 0, **arrivals: int
) -> registry_pb2.RouterDemand:
    return registry_pb2.RouterDemand(
        router_id=router,
        began_ns=began,
        sequence=sequence,
        gone=gone,
        age_ms=age_ms,
        demand=[registry_pb2.Demand(model=m, deployments=[m], arrivals=count) for m, count in arrivals.items()],
    )


def models(count: int) -> Any:
    return {f"m{n}": n for n in range(count)}


def counts(store: DemandStore) -> dict[tuple[str, str], int]:
    return {(told.router_id, each.model): each.arrivals for told in store.all(0.0) for each in told.demand}


def outflow(*deployments: str) -> Outflow:
    request = registry_pb2.WatchRequest(topics=[registry_pb2.TOPIC_DEMAND], deployments=deployments)
    return Outflow(Interest.of(request))


def told(flow: Outflow, now: float = 0.0) -> list[registry_pb2.RouterDemand]:
    return [message.demand for message in flow.take_soft(now)]


def test_the_newest_of_each_router_and_model_is_kept() -> None:
    store = DemandStore()
    assert store.offer(report("a", 1, chat=1, code=1), 0.0) is not None
    assert store.offer(report("a", 3, chat=3), 1.0) is not None
    assert store.offer(report("a", 2, chat=2), 1.5) is None, "old news"
    store.offer(report("b", 1, chat=9), 2.0)
    assert counts(store) == {("a", "chat"): 3, ("a", "code"): 1, ("b", "chat"): 9}


def test_a_router_that_began_anew_counts_anew() -> None:
    store = DemandStore()
    store.offer(report("a", 7, chat=5, code=5), 0.0)
    assert store.offer(report("a", 1, began=2, chat=1), 1.0) is not None
    assert counts(store) == {("a", "chat"): 1}
    assert store.offer(report("a", 9, began=1, chat=99), 1.0) is None, "of the life before"


def test_what_a_router_counted_goes_with_its_stream() -> None:
    store = DemandStore()
    store.offer(report("a", 7, chat=5), 0.0)
    gone = store.gone("a")
    assert gone is not None
    assert (gone.router_id, gone.gone, gone.began_ns) == ("a", True, 1)
    assert not counts(store)
    assert store.gone("a") is None


def test_models_are_bounded_for_one_router_and_for_all() -> None:
    store = DemandStore(most=5, most_of_one=3)
    first = store.offer(report("a", 1, m1=1, m2=1, m3=1, m4=1), 0.0)
    assert first is not None
    assert [each.model for each in first.demand] == ["m1", "m2", "m3"]
    store.offer(report("b", 1, m1=1, m2=1, m3=1), 0.0)
    assert len(counts(store)) == 5
    store.offer(report("a", 2, m1=2, m9=2), 0.0)
    assert counts(store)["a", "m1"] == 2, "what is known goes on"
    assert len(counts(store)) == 5
    store.offer(report("a", 1, began=2, m9=1), 0.0)
    assert len(counts(store)) == 3, "a new beginning frees what was before"
    store.gone("a")
    store.offer(report("b", 2, m3=1), 0.0)
    assert len(counts(store)) == 3


def test_a_large_router_is_told_in_pieces() -> None:
    store = DemandStore()
    store.offer(report("a", 1, **models(600)), 10.0)
    pieces = list(store.all(12.5))
    assert [len(piece.demand) for piece in pieces] == [256, 256, 88]
    assert {(piece.sequence, piece.age_ms) for piece in pieces} == {(1, 2500)}


def test_a_watcher_that_waits_hears_the_newest_once() -> None:
    flow = outflow()
    assert not flow
    flow.demand(report("a", 1, chat=1, code=1), 0.0)
    flow.demand(report("a", 2, chat=2), 1.0)
    assert flow
    (one,) = told(flow, 1.5)
    assert {each.model: each.arrivals for each in one.demand} == {"chat": 2, "code": 1}
    assert (one.sequence, one.age_ms) == (2, 500)
    assert not flow


def test_a_router_that_has_nothing_new_lives() -> None:
    flow = outflow("chat")
    assert flow.demand(report("a", 1), 0.0)
    (one,) = told(flow)
    assert (one.router_id, list(one.demand), one.gone) == ("a", [], False)


def test_what_a_router_counted_last_is_told_with_its_end() -> None:
    flow = outflow()
    flow.demand(report("a", 1, chat=1), 0.0)
    flow.demand(report("a", 1, gone=True), 0.0)
    (one,) = told(flow)
    assert one.gone
    assert [each.arrivals for each in one.demand] == [1]
    flow.demand(report("a", 2, gone=True), 0.0)
    flow.demand(report("a", 3, chat=3), 0.0)
    (back,) = told(flow)
    assert not back.gone, "it came back before the watcher heard that it went"


def test_a_watcher_of_some_deployments_hears_of_those() -> None:
    flow = outflow("chat")
    assert not flow.demand(report("a", 1, code=1), 0.0)
    assert flow.demand(report("a", 2, code=1, chat=1), 0.0)
    (one,) = told(flow)
    assert [each.model for each in one.demand] == ["chat"]
    nobody = Outflow(Interest.of(registry_pb2.WatchRequest(topics=[registry_pb2.TOPIC_LOAD])))
    assert not nobody.demand(report("a", 1, chat=1), 0.0)


def test_the_end_of_a_stream_counts_only_where_the_router_speaks() -> None:
    merge = DemandMerge()
    assert merge.offer("one", report("a", 5, chat=1))
    assert merge.offer("two", report("a", 6, chat=2)), "it moved"
    assert not merge.offer("one", report("a", 5, chat=1)), "an earlier registry's last word"
    assert not merge.offer("one", report("a", 5, gone=True))
    assert merge.offer("two", report("a", 6, code=2)), "another piece of the same report"
    assert merge.offer("two", report("a", 6, gone=True))
    assert not merge.offer("two", report("a", 6, gone=True)), "once"
    assert merge.offer("one", report("a", 7, chat=3)), "it is back"


def test_what_a_watch_remembers_of_routers_is_bounded() -> None:
    merge = DemandMerge(most=2)
    for name in "abc":
        merge.offer("one", report(name, 1, chat=1))
    assert not merge.offer("one", report("a", 1, gone=True)), "forgotten as the longest silent"
    assert merge.offer("one", report("c", 1, gone=True))


# Validation


def sound() -> registry_pb2.Demand:
    times = registry_pb2.LogHistogram(counts=[1] * log_buckets.BUCKETS, sum_s=2.0)
    return registry_pb2.Demand(model="org/Chat-7B", deployments=["chat"], arrivals=3, queued=1, ttft=times, itl=times)


def test_sound_demand_passes() -> None:
    assert not list(validation.demand("demand", sound()))


@pytest.mark.parametrize("field", [f.name for f in registry_pb2.Demand.DESCRIPTOR.fields])
def test_every_figure_of_demand_is_bounded(field: str) -> None:
    """What is not bounded would start replicas without end."""
    broken = sound()
    descriptor = registry_pb2.Demand.DESCRIPTOR.fields_by_name[field]
    if field == "model":
        broken.model = "x" * 513
    elif field == "deployments":
        broken.deployments.append("No name")
    elif field in {"ttft", "itl"}:
        getattr(broken, field).counts.append(1)
    elif descriptor.cpp_type == descriptor.CPPTYPE_DOUBLE:
        setattr(broken, field, math.nan)
    else:
        setattr(broken, field, 2**63 if descriptor.cpp_type == descriptor.CPPTYPE_UINT64 else 2**31)
    assert next(v.field for v in validation.demand("demand", broken)).startswith(f"demand.{field}")


def test_histograms_hold_nothing_absurd() -> None:
    broken = sound()
    broken.ttft.sum_s = -1.0
    broken.itl.counts[0] = 2**63
    assert [v.field for v in validation.demand("demand", broken)] == ["demand.ttft", "demand.itl"]


def test_a_report_says_when_its_counters_began() -> None:
    request = registry_pb2.AnnounceRequest(router_id="r", demand=registry_pb2.RouterDemand())
    assert [v.field for v in validation.announcement(request, "")] == ["demand.began_ns"]
    request.demand.CopyFrom(report("", 1, age_ms=60_001, **models(257)))
    assert [v.field for v in validation.announcement(request, "")] == ["demand.demand", "demand.age_ms"]
