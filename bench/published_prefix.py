"""The field's published setting, simulated: seven replicas of Llama-3.1-70B, on eight H100 each.

    python bench/published_prefix.py [-o json] [--seeds 3] [--only short medium long]

The fleet of Amazon's announcement of prefix-aware routing for SageMaker HyperPod ("Managed Tiered KV Cache and
Intelligent Routing", 2025-11): seven ml.p5.48xlarge, steady load, medium and long contexts. For such a fleet a hit
rate of 0.82 is quoted where round-robin hits about 0.25, a TTFT P50 71 to 77 % lower, 15 to 16 % more throughput,
and a routing overhead of 1.3 to 1.9 ms; the workload behind these figures is not known.

The router's core is real (`stoker.bench.replay`); what it costs to hash a prompt and to decide is measured on this
machine, for the blocks of the replay and for vLLM's default of 16 tokens. The replicas are a model; its parameters
stand in `stoker.simulate.hardware`, each with its source. Where a source leaves room, the choice is the one that
makes prefix routing look worse: computing is at its fastest, decoding at its slowest.
"""

from __future__ import annotations

import argparse
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import mean, median
from time import perf_counter

from stoker.bench.replay import Job, Outcome, pooled_hit_rate, replay
from stoker.common.blocks import block_keys, pack_tokens, root_key
from stoker.router.core import Fleet, Replica, Request, Snapshot, Tier, decide
from stoker.router.fleet.remembered_keys import RememberedKeys
from stoker.simulate.hardware import llama_70b

REPLICAS = 7
ROOT = root_key("llama-3.1-70b")
BLOCK = 64  # tokens; as in llm-d's guide (guides/precise-prefix-cache-routing)

# The model, the machine, and their sources are in stoker.simulate.hardware; the chunk is vLLM's default
# max_num_batched_tokens when it serves on an H100.
HARDWARE = llama_70b(8, block_size=BLOCK, chunk_tokens=8_192)


@dataclass(frozen=True)
class Scenario:
    """Questions about documents that others ask about too: every document is as popular as any other.

    Question and answer are those of llm-d's shared-prefix profile (guides/precise-prefix-cache-routing: 1,200 and
    1,000 tokens), for short contexts Oracle's chat profile. `documents` is how many it takes for round-robin to hit
    about 0.25, which is the published condition. Rates are requests/s of the whole fleet, arrivals are Poisson.
    """

    name: str
    context: int
    question: int
    answer: int
    documents: int
    rates: tuple[float, ...]
    seconds: float


SCENARIOS = (
    Scenario("long", 64_000, 1_200, 1_000, documents=72, rates=(1.0, 1.5, 2.0), seconds=600.0),
    Scenario("medium", 8_000, 1_200, 1_000, documents=520, rates=(6.0, 9.0, 12.0), seconds=600.0),
    Scenario("short", 256, 224, 300, documents=520, rates=(20.0, 40.0), seconds=120.0),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=[scenario.name for scenario in SCENARIOS])
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    costs: list[dict[str, object]] = []
    for scenario in SCENARIOS:
        if options.only and scenario.name not in options.only:
            continue
        for rate in scenario.rates:
            rows += compared(scenario, rate, range(1, options.seeds + 1))
        costs += [overhead(scenario, block) for block in (BLOCK, 16)]
    if options.output == "json":
        print(json.dumps({"replay": rows, "overhead": costs}, indent=2))
        return
    for table in (rows, costs):
        print("  ".join(f"{name:>11}" for name in table[0]))
        for row in table:
            print("  ".join(f"{value if value is not None else '':>11}" for value in row.values()))


def compared(scenario: Scenario, rate: float, seeds: Sequence[int]) -> list[dict[str, object]]:
    """One row for each policy: means over seeds; the second one says how it compares."""
    outcomes: dict[str, list[Outcome]] = {"round_robin": [], "stoker": []}
    pooled: list[float] = []
    for seed in seeds:
        jobs = arrivals(scenario, rate, seed)
        pooled.append(pooled_hit_rate(jobs, REPLICAS * HARDWARE.kv_blocks))
        for policy, of_policy in outcomes.items():
            of_policy.append(replay(jobs, replicas=REPLICAS, hardware=HARDWARE, policy=policy, seed=seed))
    rows = []
    for policy, of_policy in outcomes.items():
        figures = {
            "hit_rate": mean(outcome.hit_rate for outcome in of_policy),
            "pooled": mean(pooled),
            "ttft_p50_s": mean(outcome.ttft(0.5) for outcome in of_policy),
            "ttft_p99_s": mean(outcome.ttft(0.99) for outcome in of_policy),
            "requests_s": mean(outcome.requests_per_s for outcome in of_policy),
        }
        rows.append({"context": scenario.name, "rate": rate, "policy": policy, **rounded(figures)})
    baseline, ours = rows
    return [
        {**baseline, "ttft_p50_%": None, "requests_%": None},
        {
            **ours,
            "ttft_p50_%": change(ours, baseline, "ttft_p50_s"),
            "requests_%": change(ours, baseline, "requests_s"),
        },
    ]


def overhead(scenario: Scenario, block: int, rounds: int = 200) -> dict[str, object]:
    """What keys and decision take, in real time, once every document was asked about and lies on some replica.

    `new_ms` is hashing alone, of a prompt whose document was never seen.
    """
    rng = Random(1)
    fleet, remembered = Fleet(), RememberedKeys()
    documents = [tokens(scenario.context, rng) for _ in range(2 * REPLICAS)]
    for number in range(REPLICAS):
        held = [key for document in documents[number::REPLICAS] for key in block_keys(document, block, ROOT)]
        fleet.put(Replica(f"replica-{number}", block, prefill_rate=HARDWARE.prefill_rate))
        fleet.snapshot(f"replica-{number}", Snapshot(1, 1, {Tier.GPU: held}), 0.0)
    new: list[float] = []
    hashed: list[float] = []
    decided: list[float] = []
    for number in range(rounds):
        prompt = documents[number % len(documents)] + tokens(scenario.question, rng)
        begun = perf_counter()
        keys = remembered.of(pack_tokens(prompt), block, ROOT)
        midway = perf_counter()
        decide(Request(keys, len(prompt), block, scenario.answer), fleet, 1.0, rng)
        (hashed if number >= len(documents) else new).append(midway - begun)
        decided.append(perf_counter() - midway)
    figures = {"new_ms": median(new), "hash_ms": median(hashed), "decide_ms": median(decided)}
    figures["both_ms"] = figures["hash_ms"] + figures["decide_ms"]
    return {"context": scenario.name, "block": block, **rounded({name: 1e3 * s for name, s in figures.items()})}


def rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in figures.items()}


def change(ours: dict[str, object], baseline: dict[str, object], figure: str) -> float:
    value, before = ours[figure], baseline[figure]
    assert isinstance(value, float)
    assert isinstance(before, float)
    return round(100 * (value / before - 1), 1)


def arrivals(scenario: Scenario, rate: float, seed: int) -> list[Job]:
    """The requests of a run."""
    rng = Random(f"{seed} {scenario.name}")
    documents = [block_keys(tokens(scenario.context, rng), BLOCK, ROOT) for _ in range(scenario.documents)]
    jobs, at = [], rng.expovariate(rate)
    while at < scenario.seconds:
        document = rng.choice(documents)
        question = block_keys(tokens(scenario.question, rng), BLOCK, document[-1])
        jobs.append(Job(at, (*document, *question), scenario.context + scenario.question, scenario.answer))
        at += rng.expovariate(rate)
    return jobs


def tokens(count: int, rng: Random) -> array[int]:
    return array("I", rng.choices(range(128_256), k=count))


if __name__ == "__main__":
    main()
