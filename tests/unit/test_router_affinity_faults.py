"""Faults of other routers that show in the decision alone; docs/faults.md names them."""

from __future__ import annotations

from collections import Counter
from random import Random

from stoker.router.core import Fleet, Reason, Replica, Request, Ring, RoutingConfig, Snapshot, Tier, decide

BLOCK = 16


def fleet(*names: str, config: RoutingConfig | None = None) -> Fleet:
    made = Fleet(config)
    for name in names:
        made.put(Replica(name, block_size=BLOCK))
    return made


def hold(made: Fleet, replica: str, keys: list[int]) -> None:
    made.snapshot(replica, Snapshot(1, 1, {Tier.GPU: keys}), 0.0)


def test_misses_do_not_all_go_to_the_replica_that_holds_least() -> None:
    made = fleet(*"abcd")
    for number, replica in enumerate("abc"):
        hold(made, replica, list(range(number * 10_000, number * 10_000 + 5_000)))
    hold(made, "d", [])  # just started: its tree is the smallest for a long time
    homes = Counter(
        decide(Request([1_000_000 + key], BLOCK + 4), made, 0.0, Random(key)).replica for key in range(400)
    )
    assert set(homes) == set("abcd")
    assert homes["d"] < 200, homes


def test_one_overloaded_replica_costs_nobody_else_its_affinity() -> None:
    made = fleet(*"abcd", config=RoutingConfig(floor_tokens=2_000))
    prefixes = {replica: list(range(n * 1_000, n * 1_000 + 40)) for n, replica in enumerate("abcd")}
    for replica, keys in prefixes.items():
        hold(made, replica, keys)
    made.load.report("a", 60_000, seen_at=0.0)
    for replica in "bcd":
        decision = decide(Request(prefixes[replica], 645), made, 0.0, Random(1))
        assert (decision.replica, decision.reason) == (replica, Reason.EXACT)
    spilled = decide(Request(prefixes["a"], 645), made, 0.0, Random(1))
    assert (spilled.replica in "bcd", spilled.reason) == (True, Reason.SPILL)


def test_equal_replicas_are_home_to_about_as_many_prefixes() -> None:
    names = [f"replica-{number}" for number in range(16)]
    ring = Ring(dict.fromkeys(names, 1.0))
    shares = Counter(next(ring.order(key * 0x9E3779B97F4A7C15 % 2**64)) for key in range(16_000))
    assert min(shares[name] for name in names) > 650, shares
    assert max(shares.values()) < 1_450, shares


def test_requests_of_one_moment_spread_though_no_report_shows_them() -> None:
    made = fleet(*"abcd")
    for replica in "abcd":
        made.load.report(replica, 0, seen_at=0.0)
    chosen: Counter[str] = Counter()
    for number in range(64):
        request = Request([7, 8, *range(number * 100, number * 100 + 60)], 62 * BLOCK + 4, BLOCK)
        decision = decide(request, made, 0.0, Random(number))
        made.dispatch(request, decision, 0.0)
        chosen[decision.replica] += 1
    assert max(chosen.values()) <= 32, chosen
    assert len(chosen) == 4
