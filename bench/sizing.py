"""Predictions of `stoker plan size` beside what was published, as the tables of docs/sizing.md.

python bench/sizing.py            rates and memory
python bench/sizing.py --simulate replicas by the queueing model against the simulator
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

from stoker.planner import catalogue, machines, model_config
from stoker.planner.checking import replay
from stoker.planner.core.sizing.measured import predicted_s
from stoker.planner.core.sizing.memory import Engine, memory
from stoker.planner.core.sizing.published import MEMORY, RATES
from stoker.planner.core.sizing.rates import Rates
from stoker.planner.core.sizing.search import Limits, Sizing
from stoker.planner.core.sizing.workload import Slo, Workload
from stoker.planner.core.units import Bytes

MODELS = Path(__file__).resolve().parents[1] / "examples" / "models"
GIB = 2**30
CASES = (
    ("llama-3.1-8b", "h100-sxm", (20, 4_000, 500), (500, 40)),
    ("llama-3.1-8b", "h100-sxm", (20, 1_000, 1_000), (500, 60)),
    ("llama-3.1-70b", "h100-sxm", (5, 2_000, 300), (1_000, 40)),
    ("llama-3.1-70b", "h200-sxm", (6, 8_000, 200), (2_000, 50)),
    ("qwen3-30b-a3b", "h100-sxm", (30, 2_000, 500), (500, 30)),
    ("mistral-small-24b", "l40s", (4, 1_000, 200), (1_500, 80)),
    ("deepseek-v3", "h200-sxm", (10, 3_000, 800), (1_500, 50)),
    ("gemma-3-27b", "h100-sxm", (8, 2_000, 400), (1_000, 50)),
)


def rates() -> None:
    known = catalogue.load()
    print("| what | model | GPUs | published | predicted | error | engine, source |")
    print("|---|---|---|---|---|---|---|")
    logs: dict[str, list[float]] = {"prefill": [], "decode": []}
    for measured, source, engine, date in RATES:
        host = machines.machine_of(known, measured.gpu)
        model = model_config.read(MODELS / f"{measured.model}.json")
        predicted = predicted_s(measured, Rates(model, measured.layout, host), 8_192)
        kind = "decode" if measured.sequences else "prefill"
        logs[kind].append(math.log(measured.seconds / predicted))
        what = f"prefill of {measured.tokens:,.0f}"
        if measured.sequences:
            what = f"token, {measured.sequences:g} × {measured.context:,.0f}"
            if measured.prefills_per_s:
                what += f", beside {measured.prefills_per_s:g}/s of {measured.tokens:,.0f}"
        where = f"{measured.model} | {measured.layout.gpus} × {measured.gpu}"
        times = (
            f"{1e3 * measured.seconds:.1f} ms | {1e3 * predicted:.1f} ms | {predicted / measured.seconds - 1:+.0%}"
        )
        print(f"| {what} | {where} | {times} | {engine}, {source}, {date} |")
    for kind, values in logs.items():
        mean = sum(values) / len(values)
        rms = math.sqrt(sum(value * value for value in values) / len(values))
        print(f"\n{kind}: {len(values)} points, mean {mean:+.3f}, root mean square {rms:.3f} of the logarithm")


def memories() -> None:
    known = catalogue.load()
    print("\n| model | GPUs | weights logged | predicted | for KV logged | predicted | tokens | predicted | source |")
    print("|---|---|---|---|---|---|---|---|---|")
    for each in MEMORY:
        gpu = replace(machines.machine_of(known, each.gpu).gpu, memory=Bytes(round(each.gpu_gib * GIB)))
        engine = Engine(each.utilization, 16, each.batched_tokens, each.max_seqs)
        held = memory(model_config.read(MODELS / f"{each.model}.json"), each.layout, gpu, engine)
        logged = f"{each.weights_gib:.2f} GiB" if each.weights_gib else "–"
        tokens = f"{each.tokens:,} | {held.tokens:,}" if each.tokens else "– | –"
        print(
            f"| {each.model} | {each.layout.gpus} × {each.gpu} | {logged} | {held.weights.total / GIB:.2f} GiB | "
            f"{each.kv_gib:.2f} GiB | {held.kv / GIB:.2f} GiB | {tokens} | {each.source}, {each.date} |"
        )


def simulated() -> None:
    known = catalogue.load()
    print("| model | GPU | load, SLO | pool | replicas | within, by the formula | simulated | needed |")
    print("|---|---|---|---|---|---|---|---|")
    for name, gpu, (rps, isl, osl), (ttft_ms, itl_ms) in CASES:
        for disaggregated in (False, True):
            question = Sizing(
                model_config.read(MODELS / f"{name}.json"),
                (machines.machine_of(known, gpu),),
                Workload(rps, isl, osl),
                Slo(ttft_ms / 1e3, itl_ms / 1e3),
                Limits(16, disaggregated),
            )
            best = question.answer().best
            if best is None or best.disaggregated != disaggregated:
                continue
            for pool in best.pools:
                for replicas in filter(None, (pool.replicas, pool.replicas - 1)):
                    found = [replay(pool, replicas, seed=seed, requests=3_000).attainment for seed in (1, 2, 3)]
                    state = pool.serving.state(replicas)
                    print(
                        f"| {name} | {gpu} | {rps}/s of {isl:,} + {osl:,}, {ttft_ms} and {itl_ms} ms | "
                        f"{pool.layout.name} {pool.role.value} | {replicas} | {1 - state.late:.1%} | "
                        f"{min(found):.1%} to {max(found):.1%} | {1 - pool.serving.may_miss:.1%} |"
                    )


if __name__ == "__main__":
    if "--simulate" in sys.argv[1:]:
        simulated()
    else:
        rates()
        memories()
