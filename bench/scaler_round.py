"""What one round of scaling costs, and how that grows with replicas and with deployments.

    python bench/scaler_round.py [-o json] [--draw docs/img] [--rounds 5] [--quick]

The whole fleet is decided at once, in one thread: every deployment with two minutes of samples each two seconds and
three days of minutes, a quarter of them each with the concurrency, saturation, SLO and forecast policy, some in
groups of two variants. Milliseconds of CPU, median of the rounds. The bound: 10,000 replicas of 200 deployments in
one second; it holds for the dearest round, too: the one after a minute, where all of them forecast anew.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from random import Random
from statistics import median
from time import process_time

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.svg import drawn
from stoker.scaler.core.decide import decide
from stoker.scaler.core.past import Past
from stoker.scaler.core.policy import Bounds, Kind, Policy, Price
from stoker.scaler.core.signals import Capacity, History, Minute, Sample, Startup, Wanted
from stoker.scaler.core.values import Deployment, Desired, Fleet, Load, Replica, Standing

NOW, WALL = 1e6, 1.7e9
SAMPLES, MINUTES = 70, 3 * 1_440
BOUND_MS = 1_000.0
KINDS = (Kind.CONCURRENCY, Kind.SATURATION, Kind.SLO, Kind.FORECAST)
PER_REPLICA = 2.0  # requests a second

Lines = dict[str, list[tuple[float, float]]]


@dataclass(frozen=True)
class Case:
    """A fleet and all that is known of it."""

    fleet: Fleet
    policies: dict[str, Policy]
    histories: dict[str, History]

    def minute_ended(self) -> None:
        """The past is another one, of which nothing is remembered."""
        for name, known in self.histories.items():
            self.histories[name] = replace(known, minutes=Past(*Past.of(known.minutes).columns))

    def decide(self) -> int:
        made = decide(self.fleet, NOW, policies=self.policies, histories=self.histories).made
        return sum(decision.replicas for decision in made)


def case(deployments: int, replicas: int, kinds: Iterable[Kind] = KINDS) -> Case:
    """So many replicas, spread evenly; every tenth deployment is a second variant of the one before it."""
    rng, each, kinds = Random(1), replicas // deployments, tuple(kinds)
    fleet: list[Replica] = []
    policies, histories, loads = {}, {}, {}
    for number in range(deployments):
        name = f"model{number:03}"
        group = f"group{number // 10}" if number % 10 in (0, 1) else ""
        kind = kinds[number // 10 % len(kinds)] if group else kinds[number % len(kinds)]
        policies[name] = Policy(kind=kind, group=group, bounds=Bounds(1, 10_000), price=Price(1.0 + number % 10))
        histories[name] = history(rng, each)
        for ordinal in range(each):
            standing = Standing.STARTING if ordinal % 50 == 49 else Standing.READY
            fleet.append(Replica(f"{name}-{ordinal}", name, standing, since=NOW - 30.0))
            loads[f"{name}-{ordinal}"] = Load(NOW - 1.0, rng.randrange(20), rng.randrange(3))
    desired = [Desired(name, 1, each) for name in policies]
    return Case(Fleet([Deployment(name, 1, each) for name in policies], fleet, desired, loads), policies, histories)


def history(rng: Random, replicas: int) -> History:
    """A day's wave, seen around its height."""
    rate = PER_REPLICA * replicas
    samples = []
    for back in range(SAMPLES, 0, -1):
        now = rng.gauss(rate, math.sqrt(rate / 2.0))
        samples.append(
            Sample(
                NOW - 2.0 * back + 1.0,
                ready=replicas,
                running=4.0 * replicas,
                waiting=0.2 * replicas,
                queued=0.0,
                arrivals_per_s=now,
                prefill_tokens_per_s=4_000.0 * now,
                prompt_scv=1.2,
                decode_tokens_per_s=200.0 * now,
                kv_usage=0.6,
                hit_rate=0.5,
                within_slo=0.97,
            )
        )
    wanted = [Wanted(NOW - 2.0 * back, 0.9 * replicas) for back in range(SAMPLES, 0, -1)]
    capacity = Capacity(15_000.0, 0.02, 0.0003, 700_000.0, 256)
    return History(samples, days(replicas), wanted, capacity, Startup(90.0, 150.0), NOW - 600.0, WALL)


@lru_cache
def days(replicas: int) -> Past:
    rng, rate, minutes = Random(2), PER_REPLICA * replicas, []
    for back in range(MINUTES, 0, -1):
        wave = rate * (1.0 + 0.5 * math.cos(2 * math.pi * back / 1_440)) * rng.uniform(0.95, 1.05) / 1.5
        minutes.append(Minute(WALL - 60.0 * back, wave, 4_000.0 * wave, 200.0 * wave, 0.5))
    return Past.of(minutes)


def milliseconds(measured: Case, rounds: int, *, after_a_minute: bool = False) -> float:
    measured.decide()
    times = []
    for _ in range(rounds):
        if after_a_minute:
            measured.minute_ended()
        begun = process_time()
        measured.decide()
        times.append(1e3 * (process_time() - begun))
    return round(median(times), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="only the bound")
    parser.add_argument("--draw", type=Path, help="folder for the drawings")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    options = parser.parse_args()

    whole = milliseconds(case(200, 10_000), options.rounds)
    dearest = milliseconds(case(200, 10_000, [Kind.FORECAST]), options.rounds, after_a_minute=True)
    lines: Lines = {}
    if not options.quick:
        lines["replicas, 200 deployments"] = [
            (replicas, milliseconds(case(200, replicas), options.rounds)) for replicas in (200, 1_000, 4_000, 10_000)
        ]
        lines["replicas, 20 deployments"] = [
            (replicas, milliseconds(case(20, replicas), options.rounds)) for replicas in (200, 1_000, 4_000, 10_000)
        ]
        for kind in KINDS:
            lines[f"{kind}, 200 deployments"] = [(10_000, milliseconds(case(200, 10_000, [kind]), options.rounds))]
    if options.draw:
        options.draw.mkdir(parents=True, exist_ok=True)
        curves = {name: line for name, line in lines.items() if len(line) > 1}
        notes = {"bound at 10,000 and 200": BOUND_MS}
        picture = drawn("A round of scaling", "replicas", "milliseconds of CPU, median", curves, notes)
        (options.draw / "scaler-round.svg").write_text(picture)
    if options.output == "json":
        print(json.dumps({"whole_ms": whole, "dearest_ms": dearest, "bound_ms": BOUND_MS, "lines": lines}, indent=2))
        return
    print(f"{'10,000 replicas, 200 deployments':<36}{whole:>10,.1f} ms of CPU; the bound is {BOUND_MS:,.0f}")
    print(f"{'after a minute, all forecast anew':<36}{dearest:>10,.1f}")
    for name, line in lines.items():
        print(f"{name:<36}" + "".join(f"{x:>9,.0f}: {y:>8,.1f}" for x, y in line))


if __name__ == "__main__":
    main()
