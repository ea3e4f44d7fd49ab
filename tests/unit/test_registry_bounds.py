"""What one host, one agent and one candidate may do to a registry."""

from __future__ import annotations

import math
from typing import Any

import pytest

from stoker.api.registry.v1 import registry_pb2
from stoker.registry.core import validation
from stoker.registry.core.shares import Shares


def test_one_host_cannot_take_what_others_need() -> None:
    shares = Shares(total=5, by_host=3)
    for _ in range(3):
        assert shares.refusal("ipv4:10.0.0.1") == ""
        shares.take("ipv4:10.0.0.1")
    assert "3 from ipv4:10.0.0.1 are open" in shares.refusal("ipv4:10.0.0.1")
    for _ in range(2):
        assert shares.refusal("ipv4:10.0.0.2") == ""
        shares.take("ipv4:10.0.0.2")
    assert "5 are open" in shares.refusal("ipv4:10.0.0.3"), "all together are bounded too"
    shares.give_back("ipv4:10.0.0.1")
    assert shares.refusal("ipv4:10.0.0.1") == ""


def test_hosts_that_hold_nothing_are_forgotten() -> None:
    shares = Shares(total=5, by_host=3)
    for host in map(str, range(1000)):
        shares.take(host)
        shares.give_back(host)
    assert not shares._held


@pytest.mark.parametrize(
    ("name", "figure"),
    [
        ("kv_usage", math.nan),
        ("kv_usage", -0.1),
        ("kv_usage", 1.5),
        ("prefill_tokens_per_s", math.nan),
        ("prefill_tokens_per_s", math.inf),
        ("prefill_tokens_per_s", -1.0),
        ("prefill_tokens_per_s", 1e12),
        ("ttft_sum_s", -math.inf),
        ("running", 2**32 - 1),
        ("waiting", 2**31),
        ("relayed", 2**31),
        ("active_tokens", 2**64 - 1),
        ("queued_prefill_tokens", 2**63),
        ("requests", 2**64 - 1),
        ("age_ms", 2**32 - 1),
    ],
)
def test_a_load_that_no_engine_has_is_refused_by_its_field(name: str, figure: float) -> None:
    given: dict[str, Any] = {name: figure}
    wrong = list(validation.load("load", registry_pb2.ReplicaLoad(replica_id="chat-0", **given)))
    assert [violation.field for violation in wrong] == [f"load.{name}"]


def test_a_load_is_fine_where_it_is_unknown_or_at_its_ends() -> None:
    assert not list(validation.load("load", registry_pb2.ReplicaLoad(replica_id="chat-0")))
    full = registry_pb2.ReplicaLoad(
        kv_usage=1.0, running=0, waiting=10_000, prefill_tokens_per_s=0.0, generation_tokens=10**14, ttft_sum_s=1e9
    )
    assert not list(validation.load("load", full))


def test_every_figure_of_a_load_has_a_bound() -> None:
    figures = {field.name for field in registry_pb2.ReplicaLoad.DESCRIPTOR.fields} - {
        *("replica_id", "epoch", "sequence", "age_ms", "ranks")
    }
    assert validation._LOAD_BOUNDS.keys() == figures
    assert {field.name for field in registry_pb2.RankLoad.DESCRIPTOR.fields} <= figures


def test_a_rank_s_load_is_bounded_like_a_replica_s() -> None:
    ranks = [registry_pb2.RankLoad(), registry_pb2.RankLoad(prefill_tokens_per_s=math.nan)]
    wrong = validation.load("load", registry_pb2.ReplicaLoad(replica_id="chat-0", ranks=ranks))
    assert [violation.field for violation in wrong] == ["load.ranks[1].prefill_tokens_per_s"]


@pytest.mark.parametrize(
    ("role", "ttl_ms", "field"),
    [("baker", 5_000, "role"), ("", 5_000, "role"), ("scaler", 0, "ttl_ms"), ("planner", 60_001, "ttl_ms")],
)
def test_there_is_no_more_to_lead_than_there_is_and_not_for_ever(role: str, ttl_ms: int, field: str) -> None:
    assert [wrong.field for wrong in validation.leadership(role, "me", ttl_ms)] == [field]
