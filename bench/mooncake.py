"""Replay a Mooncake trace through the router's core in simulated time.

    python bench/mooncake.py PATH/mooncake_synthetic_trace.jsonl [-o json] [--routers 2] [--at-once] [--blind]
    python bench/mooncake.py PATH/mooncake_synthetic_trace.jsonl --front [--svg out.svg]

Seven replicas serve first come, first served, at 15,000 uncached prompt tokens/s plus 20 ms a request.
`--generated` replays seeded conversations that all begin with one long system prompt instead of a trace.
With `--blind` no replica tells what it holds.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.front import Point, drawn
from stoker.bench.published import mooncake_prompts
from stoker.bench.replay import Delays, Hardware, Job, Outcome, pooled_hit_rate, replay
from stoker.bench.traces import common_prefix_trace
from stoker.router.core import RoutingConfig

REPLICAS = 7
# The replicas of this trace decode nothing: only prefill is load.
CONFIG = RoutingConfig(kv_weight=0.0)
EPSILONS = (0.25, 1.0, 4.0)
FLOORS = (8_192, 24_576, 40_960, 65_536)
SETTINGS = ((2_560, 1.0), (640, 1.0), (2_560, 2.0))  # KV blocks each, arrival speed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path, help="mooncake_synthetic_trace.jsonl")
    parser.add_argument("--generated", action="store_true", help="one long system prompt before everything")
    parser.add_argument("--front", action="store_true", help="hit rate against wait over epsilon and floor")
    parser.add_argument("--svg", type=Path, help="with --front: draw it into this file")
    parser.add_argument("--blind", action="store_true", help="replicas tell no digests")
    parser.add_argument("--at-once", action="store_true", help="nobody waits in a router")
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    options = parser.parse_args()
    if not options.generated and options.trace is None:
        parser.error("name a trace, or use --generated")
    jobs = common_prefix_trace(options.seed) if options.generated else mooncake_prompts(options.trace)
    rows = front(jobs, options) if options.front else compare(jobs, options)
    if options.front and options.svg is not None:
        options.svg.write_text(drawn(points(rows)))
    if options.output == "json":
        print(json.dumps(rows, indent=2))
        return
    print("".join(f"{name:>15}" for name in rows[0]))
    for row in rows:
        print("".join(f"{value:>15}" for value in row.values()))


def compare(jobs: list[Job], options: argparse.Namespace) -> list[dict[str, object]]:
    rows = []
    for blocks, speed in SETTINGS:
        faster = [replace(job, at=job.at / speed) for job in jobs]
        for policy in ("round_robin", "stoker"):
            outcome = _run(faster, blocks, policy, CONFIG, options)
            setting = {"kv_blocks": blocks, "speed": speed, "policy": policy}
            rows.append({**setting, **_figures(outcome, faster, blocks)})
    return rows


def front(jobs: list[Job], options: argparse.Namespace) -> list[dict[str, object]]:
    rows = []
    for (blocks, speed), epsilon, floor in product(SETTINGS, EPSILONS, FLOORS):
        faster = [replace(job, at=job.at / speed) for job in jobs]
        config = replace(CONFIG, epsilon=epsilon, floor_tokens=float(floor))
        outcome = _run(faster, blocks, "stoker", config, options)
        setting = {"kv_blocks": blocks, "speed": speed, "epsilon": epsilon, "floor": floor}
        rows.append({**setting, **_figures(outcome, faster, blocks)})
    return rows


def points(rows: list[dict[str, object]]) -> list[Point]:
    chosen = CONFIG.epsilon, CONFIG.floor_tokens
    found = []
    for row in rows:
        blocks, speed, epsilon, floor, rate, wait_s = (
            float(str(row[name])) for name in ("kv_blocks", "speed", "epsilon", "floor", "hit_rate", "wait_p99_s")
        )
        setting = f"{blocks:,.0f} blocks each, speed ×{speed:g}"
        found.append(Point(setting, epsilon, int(floor), rate, wait_s, (epsilon, floor) == chosen))
    return found


def _run(jobs: list[Job], blocks: int, policy: str, config: RoutingConfig, options: argparse.Namespace) -> Outcome:
    if options.at_once:
        config = replace(config, hold_s=float("inf"))
    return replay(
        jobs,
        replicas=REPLICAS,
        hardware=Hardware(kv_blocks=blocks),
        policy=policy,
        config=config,
        delays=Delays(digest_s=None) if options.blind else None,
        routers=options.routers,
        seed=options.seed,
    )


def _figures(outcome: Outcome, jobs: list[Job], blocks: int) -> dict[str, object]:
    return {
        "hit_rate": round(outcome.hit_rate, 4),
        "pooled": round(pooled_hit_rate(jobs, REPLICAS * blocks), 4),
        "wait_p50_s": round(outcome.wait(0.5), 3),
        "wait_p99_s": round(outcome.wait(0.99), 3),
        "over_bound": outcome.over_bound,
        "requests": len(outcome.waits),
    }


if __name__ == "__main__":
    main()
