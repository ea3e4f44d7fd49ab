"""What the routing core costs on this machine: decisions, hashing, index updates, memory.

python bench/decide.py [-o json] [--replicas 10 100 1000]
"""

from __future__ import annotations

import argparse
import json
import tracemalloc
from collections.abc import Callable
from random import Random
from statistics import median
from time import perf_counter

from stoker.common.blocks import block_keys, root_key
from stoker.router.core import BlockIndex, Delta, Fleet, Replica, Request, Snapshot, Tier, decide

BLOCKS = 512


def fleet_of(replicas: int, rng: Random) -> tuple[Fleet, list[Request]]:
    """A warm fleet: 8 blocks common to all, and each conversation's prefix on one or two replicas."""
    fleet = Fleet()
    common = [rng.getrandbits(64) for _ in range(8)]
    prompts = [[*common, *(rng.getrandbits(64) for _ in range(BLOCKS - 8))] for _ in range(64)]
    for number in range(replicas):
        name = f"replica-{number:04}"
        fleet.put(Replica(name))
        held = [key for prompt in rng.sample(prompts, 2) for key in prompt[: rng.randint(8, BLOCKS)]]
        fleet.snapshot(name, Snapshot(1, 1, {Tier.GPU: held}), 0.0)
        fleet.load.report(name, rng.randint(0, 20_000), seen_at=0.0)
    return fleet, [Request(prompt, 16 * BLOCKS + 5) for prompt in prompts]


def measure(action: Callable[[int], object], rounds: int) -> dict[str, float]:
    """Quantiles in microseconds of one call."""
    times = []
    for number in range(rounds):
        begun = perf_counter()
        action(number)
        times.append(1e6 * (perf_counter() - begun))
    times.sort()
    return {"p50_us": round(median(times), 1), "p99_us": round(times[int(0.99 * len(times))], 1)}


def decisions(replicas: int) -> dict[str, object]:
    rng = Random(1)
    fleet, requests = fleet_of(replicas, rng)
    fleet.ring  # noqa: B018 (built once per change of membership)
    cost = measure(lambda number: decide(requests[number % 64], fleet, 1.0, rng), 2_000)
    return {"what": f"decide, {replicas} replicas x {BLOCKS} blocks", **cost}


def hashing() -> dict[str, object]:
    rng = Random(1)
    tokens = [rng.randrange(150_000) for _ in range(32_768)]
    root = root_key("bench")
    return {"what": "hash 32,768 tokens, blocks of 16", **measure(lambda _: block_keys(tokens, 16, root), 300)}


def index(replicas: int = 100, blocks: int = 20_000) -> list[dict[str, object]]:
    rng = Random(1)
    sets = [[rng.getrandbits(64) for _ in range(blocks)] for _ in range(replicas)]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    held = BlockIndex()
    for number, keys in enumerate(sets):
        # Keys come off the wire: count their memory with the index that keeps them alive.
        held.snapshot(str(number), Snapshot(1, 1, {Tier.GPU: [key ^ 1 for key in keys]}), 0.0)
    memory = (tracemalloc.get_traced_memory()[0] - before) / 2**20
    tracemalloc.stop()
    begun, changed = perf_counter(), 0
    for number, keys in enumerate(sets):
        gone = [key ^ 1 for key in keys[:5_000]]
        held.delta(str(number), Delta(1, 2, {Tier.GPU: keys[:5_000]}, {Tier.GPU: gone}), 0.0)
        changed += 10_000
    rate = changed / (perf_counter() - begun)
    return [
        {"what": f"index of {replicas * blocks:,} blocks, {replicas} replicas", "MiB": round(memory)},
        {"what": "index updates", "per_s": round(rate)},
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[10, 100, 1_000])
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    options = parser.parse_args()
    rows = [*map(decisions, options.replicas), hashing(), *index()]
    if options.output == "json":
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(f"{row.pop('what'):<45}", "  ".join(f"{name} {value:,}" for name, value in row.items()))


if __name__ == "__main__":
    main()
