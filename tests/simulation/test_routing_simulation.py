"""The router's core against simulated replicas: the rates that must not regress."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from stoker.bench.published import mooncake_prompts
from stoker.bench.replay import Delays, Hardware, Job, Outcome, pooled_hit_rate, replay
from stoker.bench.traces import common_prefix_trace, workload_jobs
from stoker.bench.workloads import WORKLOADS
from stoker.router.core import RoutingConfig

CHECKOUT = Path(__file__).parents[2]
TRACES = Path(os.environ.get("STOKER_TRACES", CHECKOUT.parent / "shared" / "data"))
PUBLISHED = TRACES / "mooncake_synthetic_trace.jsonl"
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


AT_ONCE = RoutingConfig(hold_s=float("inf"))
"""Nobody waits in a router: what is decided is sent."""


def serve(
    workload: str,
    policy: str,
    seed: int,
    *,
    routers: int = 1,
    delays: Delays | None = None,
    clients: int = 6,
    config: RoutingConfig | None = None,
) -> Outcome:
    jobs = workload_jobs(WORKLOADS[workload](seed))
    return replay(
        jobs,
        replicas=3,
        hardware=SMALL,
        policy=policy,
        delays=delays,
        clients=clients,
        routers=routers,
        seed=seed,
        config=config,
    )


def traces() -> list[tuple[str, int, float, float]]:
    """Traces to replay, with KV blocks a replica and what must be reached; the published one where it is at hand.

    Whoever names a folder of traces (STOKER_TRACES) gets it replayed, and a failure where it is not there.
    """
    found = [("generated", 2_560, 0.78, 0.92), ("generated", 640, 0.48, 1.8)]
    if PUBLISHED.exists() or "STOKER_TRACES" in os.environ:
        found += [("published", 2_560, 0.47, 1.3), ("published", 640, 0.22, 1.8)]
    return found


@pytest.mark.parametrize(("trace", "blocks", "hit_rate", "wait_s"), traces())
def test_a_trace_over_seven_replicas(trace: str, blocks: int, hit_rate: float, wait_s: float) -> None:
    jobs = mooncake_prompts(PUBLISHED) if trace == "published" else common_prefix_trace(1)
    outcome = replay(jobs, replicas=7, hardware=Hardware(kv_blocks=blocks), config=PREFILL_ONLY)
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
    ("workload", "hit_rate", "speed", "ttft"), [("shared", 0.48, 1.25, 0.8), ("chat", 0.52, 1.2, 0.65)]
)
def test_workloads_with_shared_prefixes(workload: str, hit_rate: float, speed: float, ttft: float) -> None:
    routed = [serve(workload, "stoker", seed) for seed in range(3)]
    baseline = [serve(workload, "round_robin", seed) for seed in range(3)]
    assert sum(outcome.hit_rate for outcome in routed) / 3 >= hit_rate
    faster = sum(outcome.requests_per_s for outcome in routed) / sum(o.requests_per_s for o in baseline)
    assert faster >= speed
    assert sum(o.ttft(0.5) for o in routed) <= ttft * sum(o.ttft(0.5) for o in baseline)


@pytest.mark.parametrize("workload", ["shared", "chat"])
def test_with_many_clients_waiting_in_the_router_beats_one_pooled_cache(workload: str) -> None:
    jobs = [workload_jobs(WORKLOADS[workload](seed)) for seed in range(3)]
    held = [serve(workload, "stoker", seed, clients=24) for seed in range(3)]
    sent = [serve(workload, "stoker", seed, clients=24, config=AT_ONCE) for seed in range(3)]
    assert sum(o.hit_rate for o in held) > sum(pooled_hit_rate(j, 3 * SMALL.kv_blocks) for j in jobs)
    assert sum(o.ttft(0.5) for o in held) <= 0.7 * sum(o.ttft(0.5) for o in sent)
    assert sum(o.ttft(0.99) for o in held) <= sum(o.ttft(0.99) for o in sent)
    assert sorted(held[0].ttfts_by_tenant[""]) == sorted(held[0].ttfts)


def test_one_hot_prefix_uses_the_whole_fleet() -> None:
    jobs = [
        Job(at=number / 20, keys=(*range(80), *range(1_000 * number, 1_000 * number + 6)), prompt_tokens=86 * 32)
        for number in range(1, 301)
    ]  # more than one replica can do, less than three
    hardware = replace(SMALL, kv_blocks=3_000, cores=0)
    held = replay(jobs, replicas=3, hardware=hardware)
    sent = replay(jobs, replicas=3, hardware=hardware, config=AT_ONCE)
    assert held.requests_per_s >= 0.8 * sent.requests_per_s
    assert min(held.served.values()) >= len(jobs) / 6


def test_unique_prompts_lose_nothing() -> None:
    routed = [serve("unique", "stoker", seed) for seed in range(3)]
    baseline = [serve("unique", "round_robin", seed) for seed in range(3)]
    assert sum(o.requests_per_s for o in routed) >= 0.97 * sum(o.requests_per_s for o in baseline)


@pytest.mark.parametrize("workload", ["shared", "chat"])
def test_two_routers_come_within_three_points_of_one(workload: str) -> None:
    one, two = (sum(serve(workload, "stoker", seed, routers=n).hit_rate for seed in range(4)) / 4 for n in (1, 2))
    assert two >= one - 0.03


def test_announced_dispatches_are_what_closes_the_gap() -> None:
    told, silent = (
        sum(serve("shared", "stoker", seed, routers=2, delays=delays, config=AT_ONCE).hit_rate for seed in range(4))
        / 4
        for delays in (Delays(), Delays(announce_s=None))
    )
    assert told >= silent + 0.03


def test_two_routers_do_not_pile_up_on_one_replica() -> None:
    one, two = (sum(serve("unique", "stoker", seed, routers=n).ttft(0.99) for seed in range(4)) / 4 for n in (1, 2))
    assert two <= 1.1 * one


def test_hearing_of_each_other_keeps_routers_from_piling_up_where_nobody_waits() -> None:
    told, silent = (
        sum(
            serve("unique", "stoker", seed, routers=2, delays=delays, config=AT_ONCE).ttft(0.99) for seed in range(12)
        )
        for delays in (Delays(), Delays(announce_s=None))
    )
    assert told <= 0.92 * silent


def test_two_routers_on_a_generated_trace() -> None:
    jobs = common_prefix_trace(2, conversations=250, seconds=360.0)
    one, two = (
        replay(jobs, replicas=7, hardware=Hardware(), config=PREFILL_ONLY, routers=routers) for routers in (1, 2)
    )
    assert two.hit_rate >= one.hit_rate - 0.01
    assert two.wait(0.99) <= 1.5 * one.wait(0.99)


def test_a_replay_follows_from_its_seed() -> None:
    first, second = (serve("shared", "stoker", 7) for _ in range(2))
    assert (first.hit_rate, first.ttfts) == (second.hit_rate, second.ttfts)
