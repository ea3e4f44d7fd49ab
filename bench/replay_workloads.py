"""Replay the routing workloads over three replicas with small caches, in simulated time.

    python bench/replay_workloads.py [-o json] [--clients 6] [--at-once] [--routers 2 [--silent]] [--blind]
    python bench/replay_workloads.py --clients 24 --tenants [--at-once]

As in the end-to-end run: 300 blocks of 32 tokens a replica, 6 closed-loop clients, continuous batching,
two cores under three replicas. One token a word; `--rate` is one replica's prefill speed on a free core. With
`--silent` routers do not announce their dispatches to each other; with `--at-once` nobody waits in a router;
with `--blind` no replica tells what it holds. `--tenants` gives the first half of a workload's prefixes or
conversations, in shared the popular ones, to one tenant and a quarter each to two others, and shows each one's times.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import replace
from statistics import mean

from stoker.bench.replay import Delays, Hardware, pooled_hit_rate, replay
from stoker.bench.replicas import quantile
from stoker.bench.traces import workload_jobs
from stoker.bench.workloads import TENANTS, WORKLOADS, by_tenants
from stoker.router.core import RoutingConfig

REPLICAS, BLOCKS = 3, 300


def hardware(rate: float) -> Hardware:
    return Hardware(
        block_size=32,
        kv_blocks=BLOCKS,
        prefill_rate=rate,
        request_s=0.005,
        decode_s=0.02,
        batching=True,
        chunk_tokens=2_048,
        cores=2,
    )


def delays(options: argparse.Namespace) -> Delays:
    told = Delays(announce_s=None) if options.silent else Delays()
    return replace(told, digest_s=None) if options.blind else told


def figures(workload: str, policy: str, options: argparse.Namespace) -> dict[str, object]:
    config = RoutingConfig(hold_s=float("inf")) if options.at_once else RoutingConfig()
    outcomes, pooled = [], []
    for seed in range(options.seeds):
        jobs = workload_jobs(WORKLOADS[workload](seed))
        pooled.append(pooled_hit_rate(jobs, REPLICAS * BLOCKS))
        outcomes.append(
            replay(
                jobs,
                replicas=REPLICAS,
                hardware=hardware(options.rate),
                policy=policy,
                config=config,
                delays=delays(options),
                clients=options.clients,
                routers=options.routers,
                seed=seed,
            )
        )
    return {
        "workload": workload,
        "policy": policy,
        "hit_rate": round(mean(outcome.hit_rate for outcome in outcomes), 3),
        "pooled": round(mean(pooled), 3),
        "ttft_p50_ms": round(1e3 * mean(outcome.ttft(0.5) for outcome in outcomes)),
        "ttft_p99_ms": round(1e3 * mean(outcome.ttft(0.99) for outcome in outcomes)),
        "requests_per_s": round(mean(outcome.requests_per_s for outcome in outcomes), 3),
    }


def tenants(workload: str, options: argparse.Namespace) -> list[dict[str, object]]:
    """What each of three tenants gets: requests and times to the first token, of all seeds together."""
    config = RoutingConfig(hold_s=float("inf")) if options.at_once else RoutingConfig()
    ttfts: dict[str, list[float]] = defaultdict(list)
    for seed in range(options.seeds):
        outcome = replay(
            workload_jobs(by_tenants(WORKLOADS[workload](seed))),
            replicas=REPLICAS,
            hardware=hardware(options.rate),
            config=config,
            delays=delays(options),
            clients=options.clients,
            routers=options.routers,
            seed=seed,
        )
        for tenant, times in outcome.ttfts_by_tenant.items():
            ttfts[tenant] += times
    return [
        {
            "workload": workload,
            "tenant": tenant,
            "requests": len(ttfts[tenant]),
            "ttft_p50_ms": round(1e3 * quantile(ttfts[tenant], 0.5)),
            "ttft_p99_ms": round(1e3 * quantile(ttfts[tenant], 0.99)),
            "longest_ms": round(1e3 * max(ttfts[tenant])),
        }
        for tenant in TENANTS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=2_000.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--at-once", action="store_true", help="send every request as soon as it is decided")
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--silent", action="store_true", help="routers do not announce dispatches to each other")
    parser.add_argument("--blind", action="store_true", help="replicas tell no digests")
    parser.add_argument("--tenants", action="store_true", help="shared and chat by three tenants: each one's times")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    options = parser.parse_args()
    if options.tenants:
        rows = [row for workload in ("shared", "chat") for row in tenants(workload, options)]
    else:
        rows = [figures(workload, policy, options) for workload in WORKLOADS for policy in ("round_robin", "stoker")]
    if options.output == "json":
        print(json.dumps(rows, indent=2))
        return
    print("".join(f"{name:>16}" for name in rows[0]))
    for row in rows:
        print("".join(f"{value:>16}" for value in row.values()))


if __name__ == "__main__":
    main()
