"""Faults that routers are known for, replayed or told step by step. Each test fails without the rule it names."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from stoker.bench.replay import Delays, Hardware, Job, Outcome, replay
from stoker.bench.traces import common_prefix_trace
from stoker.router.core import Fleet, Replica, Request, RoutingConfig, Snapshot, Tier, decide

PREFILL_ONLY = RoutingConfig(kv_weight=0.0)
BLIND = Delays(digest_s=None)
TOOLS = 60
"""Blocks of 512 tokens that a hot prefix has: 2 s of prefill. A tail of six takes a tenth of that."""


def hot(demand: float, seconds: float = 60.0) -> list[Job]:
    """Requests under one prefix, as many as keep `demand` replicas busy once they hold it."""
    rng = Random(1)
    count = int(seconds * demand / (6 * 512 / 15_000 + 0.02))
    times = sorted(rng.random() * seconds for _ in range(count))
    return [
        Job(at, (*range(TOOLS), *(rng.getrandbits(60) | 1 << 60 for _ in range(6))), (TOOLS + 6) * 512)
        for at in times
    ]


def served(demand: float) -> Outcome:
    return replay(hot(demand), replicas=10, hardware=Hardware(), config=PREFILL_ONLY)


def test_without_digests_a_long_system_prompt_does_not_choose_the_home_of_all() -> None:
    jobs = common_prefix_trace(1, conversations=350, seconds=500.0)
    depths, once = (
        replay(jobs, replicas=7, hardware=Hardware(), delays=BLIND, config=replace(PREFILL_ONLY, ring_credit=credit))
        for credit in (PREFILL_ONLY.ring_credit, 0.0)
    )
    told = replay(jobs, replicas=7, hardware=Hardware(), config=PREFILL_ONLY)
    assert depths.hit_rate >= told.hit_rate - 0.05
    assert depths.hit_rate >= once.hit_rate


def test_routers_without_digests_or_each_other_agree_by_the_ring() -> None:
    """Nothing is shared but membership: later turns still find the replica that served the earlier ones."""
    fleets = [Fleet(), Fleet()]
    for fleet in fleets:
        for number in range(7):
            fleet.put(Replica(f"r{number}"))
    system, homes = list(range(1, 9)), Counter[str]()
    for conversation in range(100):
        keys = [*system, *(1_000 * (conversation + 1) + number for number in range(40))]
        chosen = [decide(Request(keys[:depth], 16 * depth), fleets[depth % 2], 0.0, Random(depth)).replica
                  for depth in (33, 38, 42, 47)]  # fmt: skip
        assert len(set(chosen)) == 1, "all have the home of their first 32 blocks"
        homes[chosen[0]] += 1
    assert max(homes.values()) <= 2 * 100 / 7, "and not that of the system prompt"


@pytest.mark.parametrize(("demand", "least", "most"), [(0.5, 1, 2), (1.0, 2, 3), (2.0, 3, 6), (4.0, 5, 9)])
def test_a_hot_prefix_is_held_by_as_many_as_its_load_needs(demand: float, least: int, most: int) -> None:
    outcome = served(demand)
    assert least <= len(outcome.served) <= most, outcome.served
    assert outcome.wait(0.5) <= 0.5, "a copy takes 2.2 s, and nobody waits for one once it is there"


def test_routers_that_do_not_hear_each_other_put_the_next_copy_on_the_same_replica() -> None:
    prefix, names = list(range(1, 201)), [f"r{number}" for number in range(8)]
    copies: list[str] = []
    for router in range(6):
        fleet = Fleet()
        for name in names:
            fleet.put(Replica(name))
            fleet.snapshot(name, Snapshot(1, 1, {Tier.GPU: prefix if name == "r3" else []}), 0.0)
        fleet.load.report("r3", 60_000, seen_at=0.0)
        request = Request([*prefix, 10_000 + router, 20_000 + router], 16 * 202)
        copies.append(decide(request, fleet, 0.0, Random(router)).replica)
    assert len(set(copies)) == 1
    assert copies[0] != "r3"


def burst(ready_at: float | None, now: float, count: int = 40) -> Counter[str]:
    """Where prompts go that nobody holds, all at once: three replicas are at work, one is idle."""
    fleet = Fleet()
    for name in ("a", "b", "c"):
        fleet.put(Replica(name))
        fleet.load.report(name, 30_000, seen_at=0.0)
    fleet.put(Replica("new", ready_at=ready_at))
    chosen = Counter[str]()
    for number in range(count):
        request = Request(range(1_000 * number, 1_000 * number + 125), 2_000)
        decision = decide(request, fleet, now, Random(number))
        fleet.dispatch(request, decision, now)
        chosen[decision.replica] += 1
    return chosen


def test_a_new_replica_is_neither_flooded_nor_starved() -> None:
    at_once, halfway, warm = burst(0.0, 0.0)["new"], burst(0.0, 15.0)["new"], burst(None, 0.0)["new"]
    assert 1 <= at_once < halfway <= warm
    assert at_once <= 0.75 * warm


def bounds(*ready_at: float | None) -> list[float]:
    fleet = Fleet()
    for number, at in enumerate(ready_at):
        fleet.put(Replica(f"r{number}", ready_at=at))
    views = decide(Request(range(1, 1_000), 30_000), fleet, 1.0, Random(1), explain=True).candidates
    return [view.bound for view in sorted(views, key=lambda view: view.replica)]


def test_replicas_that_begin_together_are_not_held_back() -> None:
    assert bounds(0.0, 0.0, 0.0) == bounds(None, None, None)
    assert bounds(0.0, 0.0, -9.0)[2] >= bounds(None, None, None)[2]


def test_without_digests_a_full_home_spills_to_the_home_of_half_the_prefix() -> None:
    keys, spilled = list(range(1, 41)), []
    fleet = Fleet()
    for number in range(12):
        fleet.put(Replica(f"r{number}"))
    for _ in range(2):
        decision = decide(Request(keys, 645), fleet, 0.0, Random(1))
        fleet.load.report(decision.replica, 90_000, seen_at=0.0)
        spilled.append(decision.replica)
    assert spilled == [fleet.ring.home(keys[31]), fleet.ring.home(keys[15])]
