"""The router's core against simulated replicas: the rates that must not regress."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stoker.bench.replay import Hardware, Outcome, pooled_hit_rate, replay
from stoker.bench.traces import common_prefix_trace, mooncake_trace, workload_jobs
from stoker.bench.workloads import WORKLOADS
from stoker.router.core import RoutingConfig

CHECKOUT = Path(__file__).parents[2]
TRACE = Path(os.environ.get("STOKER_TRACES", CHECKOUT.parent / "shared" / "data")) / "mooncake_synthetic_trace.jsonl"
PREFILL_ONLY = RoutingConfig(kv_weight=0.0)
SMALL = Hardware(
    block_size=32,
    kv_blocks=300,
    prefill_rate=2_000.0,
    request_s=0.005,
    decode_s=0.02,
    batching=True,
    cores=2,
)


def serve(workload: str, policy: str, seed: int, routers: int = 1) -> Outcome:
    jobs = workload_jobs(WORKLOADS[workload](seed))
    return replay(jobs, replicas=3, hardware=SMALL, policy=policy, clients=6, routers=routers, seed=seed)


@pytest.mark.skipif(not TRACE.exists(), reason=f"no {TRACE}; set STOKER_TRACES to the folder that has it")
@pytest.mark.parametrize(("blocks", "hit_rate", "wait_s"), [(2_560, 0.47, 1.3), (640, 0.22, 1.8)])
def test_the_mooncake_trace(blocks: int, hit_rate: float, wait_s: float) -> None:
    outcome = replay(mooncake_trace(TRACE), replicas=7, hardware=Hardware(kv_blocks=blocks), config=PREFILL_ONLY)
    assert outcome.hit_rate >= hit_rate
    assert outcome.wait(0.99) <= wait_s


def test_one_long_system_prompt_does_not_send_everything_to_one_replica() -> None:
    jobs = common_prefix_trace(1, conversations=350, seconds=500.0)
    routed = replay(jobs, replicas=7, hardware=Hardware(), config=PREFILL_ONLY)
    baseline = replay(jobs, replicas=7, hardware=Hardware(), policy="round_robin", config=PREFILL_ONLY)
    assert routed.hit_rate >= 0.95 * pooled_hit_rate(jobs, 7 * 2_560)
    assert routed.wait(0.99) <= baseline.wait(0.99) / 5
    assert max(routed.served.values()) <= 2 * len(jobs) / 7


@pytest.mark.parametrize(
    ("workload", "hit_rate", "speed", "ttft"), [("shared", 0.45, 1.25, 1.0), ("chat", 0.48, 1.2, 0.75)]
)
def test_workloads_with_shared_prefixes(workload: str, hit_rate: float, speed: float, ttft: float) -> None:
    routed = [serve(workload, "stoker", seed) for seed in range(3)]
    baseline = [serve(workload, "round_robin", seed) for seed in range(3)]
    assert sum(outcome.hit_rate for outcome in routed) / 3 >= hit_rate
    faster = sum(outcome.requests_per_s for outcome in routed) / sum(o.requests_per_s for o in baseline)
    assert faster >= speed
    assert sum(o.ttft(0.5) for o in routed) <= ttft * sum(o.ttft(0.5) for o in baseline)


def test_unique_prompts_lose_nothing() -> None:
    routed = [serve("unique", "stoker", seed) for seed in range(3)]
    baseline = [serve("unique", "round_robin", seed) for seed in range(3)]
    assert sum(o.requests_per_s for o in routed) >= 0.97 * sum(o.requests_per_s for o in baseline)


def test_two_routers_that_share_nothing_but_reports_on_chat() -> None:
    one = sum(serve("chat", "stoker", seed).hit_rate for seed in range(4)) / 4
    two = sum(serve("chat", "stoker", seed, routers=2).hit_rate for seed in range(4)) / 4
    assert two >= one - 0.03


def test_two_routers_on_an_open_trace() -> None:
    jobs = common_prefix_trace(2, conversations=250, seconds=360.0)
    one, two = (
        replay(jobs, replicas=7, hardware=Hardware(), config=PREFILL_ONLY, routers=routers) for routers in (1, 2)
    )
    assert two.hit_rate >= one.hit_rate - 0.03


def test_a_replay_follows_from_its_seed() -> None:
    first, second = (serve("shared", "stoker", 7) for _ in range(2))
    assert (first.hit_rate, first.ttfts) == (second.hit_rate, second.ttfts)
