"""What the routing core costs on this machine: decisions, grants, hashing, index updates, memory.

python bench/decide.py [-o json] [--replicas 10 100 1000]
"""

from __future__ import annotations

import argparse
import json
import os
import tracemalloc
from collections.abc import Callable
from random import Random
from statistics import median
from time import perf_counter

from stoker.api.registry.v1 import records_pb2
from stoker.common.blocks import block_keys, root_key
from stoker.router.config import RecordConfig
from stoker.router.core import (
    AdmissionQueue,
    BlockIndex,
    Delta,
    Dispatched,
    Fleet,
    Outcome,
    Replica,
    Request,
    Snapshot,
    Tier,
    decide,
)
from stoker.router.decisions.decided import Decided, Recent, told
from stoker.router.decisions.recorder import Ended, Recorder
from stoker.router.fleet.pools import Pool, Target
from stoker.router.prompts.plan import TOKENS, Plan

BLOCKS = 512
PROMPTS = 64
NOW = 1.0


def fleet_of(replicas: int, rng: Random, blocks: int = BLOCKS, common: int = 8) -> tuple[Fleet, list[Request]]:
    """A warm fleet: its first blocks common to all, and each conversation's prefix on one or two replicas."""
    fleet = Fleet()
    system = keys(common, rng)
    prompts = [system + keys(blocks - common, rng) for _ in range(PROMPTS)]
    for number in range(replicas):
        name = f"replica-{number:04}"
        fleet.put(Replica(name))
        held = [key for prompt in rng.sample(prompts, 2) for key in prompt[: rng.randint(common, blocks)]]
        fleet.snapshot(name, Snapshot(1, 1, {Tier.GPU: held}), 0.0)
        fleet.load.report(name, rng.randint(0, 20_000), seen_at=0.0)
    fleet.ring  # noqa: B018 (built once per change of membership)
    return fleet, [Request(prompt, 16 * blocks + 5) for prompt in prompts]


def keys(count: int, rng: Random) -> list[int]:
    return [rng.getrandbits(64) for _ in range(count)]


def speculate(fleet: Fleet, requests: list[Request], rng: Random) -> None:
    """Fill speculation to its limit with dispatches, the last of them those of the requests to come."""
    names, system = list(fleet.replicas), list(requests[0].keys[: BLOCKS // 2])
    for _ in range(fleet.config.speculation_limit // BLOCKS):
        fleet.speculation.add(rng.choice(names), system + keys(BLOCKS // 2, rng), NOW)
    for request in requests:
        fleet.speculation.add(rng.choice(names), request.keys, NOW)


def measure(action: Callable[[int], object], rounds: int) -> dict[str, float]:
    """Quantiles in microseconds of one call."""
    times = []
    for number in range(rounds):
        begun = perf_counter()
        action(number)
        times.append(1e6 * (perf_counter() - begun))
    times.sort()
    return {"p50_us": round(median(times), 1), "p99_us": round(times[int(0.99 * len(times))], 1)}


def decisions(replicas: int, blocks: int = BLOCKS, *, explain: bool = False) -> dict[str, object]:
    rng = Random(1)
    fleet, requests = fleet_of(replicas, rng, blocks)
    what = f"decide{' and explain' if explain else ''}, {replicas} replicas x {blocks} blocks"
    return {"what": what, **deciding(fleet, requests, rng, explain=explain)}


def deciding(fleet: Fleet, requests: list[Request], rng: Random, *, explain: bool = False) -> dict[str, float]:
    return measure(lambda number: decide(requests[number % PROMPTS], fleet, NOW, rng, explain=explain), 2_000)


def shared(replicas: int) -> dict[str, object]:
    """Half of each prompt is on every replica, and speculation is full of recent dispatches."""
    rng = Random(1)
    fleet, requests = fleet_of(replicas, rng, common=BLOCKS // 2)
    speculate(fleet, requests, rng)
    return {"what": f"decide, {replicas} x {BLOCKS}, half shared, all speculated", **deciding(fleet, requests, rng)}


def grants(replicas: int, idle: int) -> dict[str, object]:
    """32 requests wait, for a fleet in which few replicas have room."""
    rng = Random(1)
    fleet, requests = fleet_of(replicas, rng)
    for name in list(fleet.replicas)[idle:]:
        fleet.overhear(Dispatched(name, (), 50_000, 0), NOW, NOW)
    queue = AdmissionQueue(64, fleet.fairness)
    for request in requests[:32]:
        queue.join(request, fleet, NOW)

    def grant(number: int) -> None:
        if queue.grant(fleet, NOW, rng) is not None:
            queue.join(requests[number % PROMPTS], fleet, NOW)

    what = f"grant, 32 waiting, {idle} of {replicas} replicas with room"
    return {"what": what, **measure(grant, 300)}


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


def telling(replicas: int = 100) -> list[dict[str, object]]:
    """What a request pays, beside its decision, for being told of it, for Explain, and for a record."""
    rng = Random(1)
    fleet, requests = fleet_of(replicas, rng)
    pool = Pool("chat", fleet)
    for name in fleet.replicas:
        pool.targets[name] = Target(records_pb2.Replica(replica_id=name), pool=pool)
    taken = []
    for request in requests:
        plan = Plan(pool, request, "stoker", TOKENS, tokens=request.prompt_tokens)
        decision = decide(request, fleet, NOW, rng, explain=True)
        taken.append(Decided(plan, decision, pool.targets[decision.replica], NOW, NOW))
    recent, recorder = Recent(), Recorder(RecordConfig(path=os.devnull, queue=1_000_000), clock=lambda: NOW)
    replica = next(iter(fleet.replicas.values()))

    def record(number: int) -> None:
        recorder.tell(Ended(taken[number % PROMPTS], replica, Outcome.OK, NOW, NOW, 0, 1))

    # The thread is not begun: in its place the loop's part alone is measured.
    return [
        {"what": "tell a caller what was decided", **measure(lambda number: told(taken[number % PROMPTS]), 2_000)},
        {
            "what": f"remember it for Explain, {replicas} replicas",
            **measure(lambda number: recent.note(str(number), taken[number % PROMPTS]), 2_000),
        },
        {"what": "queue it to be recorded", **measure(record, 1_000)},
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[10, 100, 1_000])
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    options = parser.parse_args()
    rows = [
        *map(decisions, options.replicas),
        *(decisions(100, blocks) for blocks in (32, 8_192)),
        decisions(100, explain=True),
        *map(shared, options.replicas),
        *(grants(100, idle) for idle in (0, 1, 10)),
        hashing(),
        *index(),
        *telling(),
    ]
    if options.output == "json":
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(f"{row.pop('what'):<55}", "  ".join(f"{name} {value:,}" for name, value in row.items()))


if __name__ == "__main__":
    main()
