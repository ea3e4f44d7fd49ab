"""`/metrics` as load: what is there, what is missing, what is nonsense."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from stoker.node_agent.engine import metrics
from stoker.node_agent.engine.metrics import CacheConfig
from stoker.node_agent.engine.protocol import EngineLoad, Histogram

PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 2.0
vllm:num_requests_running{engine="1",model_name="tiny"} 3.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 0.25
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 64.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.5",model_name="tiny"} 1.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="tiny"} 2.0
vllm:time_to_first_token_seconds_bucket{engine="1",le="0.5",model_name="tiny"} 1.0
vllm:time_to_first_token_seconds_bucket{engine="1",le="+Inf",model_name="tiny"} 1.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="tiny"} 2.0
vllm:time_to_first_token_seconds_count{engine="1",model_name="tiny"} 1.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="tiny"} 1.5
vllm:time_to_first_token_seconds_sum{engine="1",model_name="tiny"} 0.25
vllm:cache_config_info{block_size="32",cache_dtype="auto",enable_prefix_caching="True",num_gpu_blocks="500"} 1.0
vllm:cache_config_info{block_size="32",cache_dtype="auto",enable_prefix_caching="True",num_gpu_blocks="500"} 1.0
http_requests_total{handler="/v1/models"} 9.0
"""


def test_ranks_are_summed_usage_is_averaged_and_histograms_merge() -> None:
    load = metrics.load(metrics.parse(PAGE))
    assert (load.running, load.waiting, load.kv_cache_usage) == (5, 0, 0.375)
    assert load.prefix_cache_hits == 64
    assert load.ttft_seconds == Histogram(1.75, 3, ((0.5, 2), (math.inf, 3)))


def test_one_rank_s_load_is_its_own() -> None:
    load = metrics.load(metrics.parse(PAGE).of_rank(1))
    assert (load.running, load.waiting, load.kv_cache_usage) == (3, None, 0.25)
    assert load.ttft_seconds == Histogram(0.25, 1, ((0.5, 1), (math.inf, 1)))


def test_what_is_missing_is_unknown_not_zero() -> None:
    load = metrics.load(metrics.parse(PAGE))
    assert load.prefix_cache_queries is None
    assert load.preemptions is None
    assert load.itl_seconds is None
    assert metrics.load(metrics.parse("")) == EngineLoad()


def test_cache_constants() -> None:
    assert metrics.cache_config(metrics.parse(PAGE)) == CacheConfig(32, 500, "auto", True)
    assert metrics.cache_config(metrics.parse("")) == CacheConfig()
    without = PAGE.replace('num_gpu_blocks="500"', 'num_gpu_blocks="None"')
    assert metrics.cache_config(metrics.parse(without)).blocks is None


def test_nonsense_is_unknown() -> None:
    page = "vllm:num_requests_running NaN\nvllm:num_requests_waiting what\nvllm:num_preemptions_total{ 1\n"
    load = metrics.load(metrics.parse(page))
    assert (load.running, load.waiting, load.preemptions) == (None, None, None)


def test_labels_may_hold_anything() -> None:
    page = 'vllm:num_requests_running{model_name="a\\"b} c,d=\\"e"} 4.0\n'
    assert metrics.load(metrics.parse(page)).running == 4


@given(st.text(max_size=300))
def test_no_text_raises(text: str) -> None:
    metrics.load(metrics.parse("vllm:num_requests_running" + text))
    metrics.cache_config(metrics.parse(text, prefix=""))
