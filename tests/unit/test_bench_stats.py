"""From requests to figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stoker.bench.routing import parse_counters
from stoker.bench.stats import CacheCounters, Sample, TenantFigures, figures, order, over_rounds, quantile
from stoker.common.errors import StokerError


def test_quantiles_are_observed_values() -> None:
    values = [float(v) for v in range(1, 101)]
    assert quantile(values, 0.5) == 50
    assert quantile(values, 0.99) == 99
    assert quantile([7.0], 0.99) == 7
    assert quantile([], 0.5) is None


def test_figures_count_failures_by_kind_and_leave_them_out_of_times() -> None:
    samples = [
        Sample("http", 0.0, ttft_s=0.1, total_s=0.2, replica="a"),
        Sample("grpc", 0.0, ttft_s=0.3, total_s=0.4, replica="b"),
        Sample("http", 0.0, total_s=60.0, error="http_503"),
    ]
    got = figures("stoker", samples, wall_s=2.0, hit_rate=0.5)
    assert (got.ttft_p50_ms, got.ttft_p99_ms) == (100, 300)
    assert got.requests_per_s == 1.0
    assert (got.requests, got.errors, got.errors_by_kind) == (3, 1, {"http_503": 1})
    assert got.requests_by_replica == {"a": 1, "b": 1}


def test_no_success_is_unknown_not_zero() -> None:
    got = figures("stoker", [Sample("http", 0.0, error="TimeoutError")], wall_s=1.0, hit_rate=None)
    assert got.ttft_p50_ms is None
    assert got.hit_rate is None
    assert got.requests_per_s == 0


def test_rounds_are_drawn_together_by_their_medians() -> None:
    rounds = [
        figures("p", [Sample("http", 0.0, ttft_s=t, total_s=t, replica="a")], wall_s=1.0, hit_rate=h)
        for t, h in ((0.1, 0.2), (0.5, 0.4), (9.0, None))
    ]
    got = over_rounds(rounds)
    assert got.ttft_p50_ms == 500
    assert got.hit_rate == pytest.approx(0.3)
    assert got.requests == 3
    assert got.requests_by_replica == {"a": 3}


def test_each_tenant_has_times_of_its_own() -> None:
    samples = [Sample("http", 0.0, ttft_s=t, tenant=name) for name, t in (("a", 0.1), ("a", 0.3), ("b", 2.0))]
    run = figures("p", [*samples, Sample("http", 0.0, error="http_503", tenant="c")], wall_s=1.0, hit_rate=None)
    assert run.by_tenant == {"a": TenantFigures(2, 100, 300, 300), "b": TenantFigures(1, 2000, 2000, 2000)}
    slower = replace(run, by_tenant={"a": TenantFigures(2, 300, 500, 500)})
    assert over_rounds([run, slower]).by_tenant == {
        "a": TenantFigures(4, 200, 400, 400),
        "b": TenantFigures(1, 2000, 2000, 2000),
    }


def test_every_other_round_is_reversed() -> None:
    assert [order(["a", "b"], n) for n in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]


def test_hit_rate_is_of_the_run_alone() -> None:
    assert CacheCounters(300, 120).since(CacheCounters(100, 20)) == 0.5
    assert CacheCounters(100, 20).since(CacheCounters(100, 20)) is None


METRICS = """\
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 100.0
vllm:prefix_cache_queries_total{engine="1",model_name="tiny"} 50.0
# TYPE vllm:prefix_cache_queries_created gauge
vllm:prefix_cache_queries_created{engine="0",model_name="tiny"} 1.7e+09
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 25.0
vllm:prefix_cache_hits_total{engine="1",model_name="tiny"} 5.0
"""


def test_counters_are_summed_over_ranks_and_nothing_else() -> None:
    assert parse_counters(METRICS) == CacheCounters(queries=150, hits=30)


def test_an_engine_without_cache_counters_is_told() -> None:
    with pytest.raises(StokerError, match="prefix caching on"):
        parse_counters("# TYPE up gauge\nup 1\n")
