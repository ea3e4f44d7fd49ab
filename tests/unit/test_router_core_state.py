"""Load, speculation, health, retry and the ring: the state a decision rests on."""

from __future__ import annotations

import pytest

from stoker.router.core import (
    Fleet,
    Health,
    HealthConfig,
    LoadLedger,
    Outcome,
    Replica,
    RetryBudget,
    Ring,
    Speculation,
)

FLEET = ("a", "b", "c", "d", "e", "f")


def test_load_counts_own_dispatches_until_released() -> None:
    ledger = LoadLedger()
    flight = ledger.dispatch("a", 1_000, 50, 0.0)
    assert ledger.load("a") == 1_050
    ledger.first_token(flight, 1.0)
    ledger.first_token(flight, 1.1)
    assert ledger.load("a") == 50
    ledger.release(flight, 2.0)
    ledger.release(flight, 2.1)
    ledger.first_token(flight, 2.2)
    assert (ledger.load("a"), ledger.in_flight) == (0, 0)


def test_a_report_counts_what_others_sent_and_own_changes_since() -> None:
    ledger = LoadLedger()
    early = ledger.dispatch("a", 100, 0, 1.0)
    ledger.report("a", 700, seen_at=2.0)  # 100 of it is ours
    assert ledger.load("a") == 700
    late = ledger.dispatch("a", 50, 0, 3.0)
    assert ledger.load("a") == 750
    ledger.release(early, 4.0)
    assert ledger.load("a") == 650
    ledger.release(late, 5.0)
    assert ledger.load("a") == 600


def test_a_burst_between_two_reports_is_seen() -> None:
    ledger = LoadLedger()
    ledger.report("a", 0, seen_at=0.0)
    for number in range(10_000):
        ledger.dispatch("a", 10, 0, 0.001 * number)
    assert ledger.load("a") == pytest.approx(100_000)


def test_a_report_that_misses_our_requests_cannot_hide_them() -> None:
    ledger = LoadLedger()
    ledger.dispatch("a", 100, 0, 1.0)
    ledger.report("a", 0, seen_at=2.0)
    assert ledger.load("a") == 100


def test_reports_out_of_order_are_ignored() -> None:
    ledger = LoadLedger()
    ledger.report("a", 100, seen_at=2.0)
    ledger.report("a", 900, seen_at=1.0)
    assert ledger.load("a") == 100


def test_a_flight_to_a_replica_that_left_may_still_be_released() -> None:
    ledger = LoadLedger()
    flight = ledger.dispatch("a", 100, 0, 0.0)
    ledger.forget("a")
    ledger.release(flight, 1.0)
    assert (ledger.load("a"), ledger.in_flight) == (0, 0)


def test_a_replica_that_comes_back_owes_nothing_for_its_former_life() -> None:
    ledger = LoadLedger()
    before = ledger.dispatch("a", 100, 10, 0.0)
    ledger.forget("a")
    now = ledger.dispatch("a", 50, 0, 1.0)
    ledger.first_token(before, 2.0)
    ledger.release(before, 3.0)
    assert (ledger.load("a"), ledger.own("a")) == (50, 50)
    ledger.release(now, 4.0)
    assert (ledger.load("a"), ledger.in_flight) == (0, 0)


def test_speculation_continues_a_known_prefix() -> None:
    speculation = Speculation()
    speculation.add("a", [3, 4], 0.0)
    assert speculation.extend([1, 2, 3, 4, 5], {"a": 2, "b": 1}) == {"a": 4, "b": 1}
    assert speculation.extend([1, 2, 3, 4, 5], {"a": 1}) == {"a": 1}
    assert speculation.extend([3, 4, 5], {}) == {"a": 2}


def test_speculation_expires() -> None:
    speculation = Speculation(ttl_s=10.0)
    speculation.add("a", [1], 100.0)
    speculation.expire(109.0)
    assert speculation.extend([1], {}) == {"a": 1}
    speculation.expire(110.0)
    speculation.expire(120.0)
    assert speculation.extend([1], {}) == {}


def test_speculation_is_bounded_and_withdrawn_by_evictions() -> None:
    speculation = Speculation(limit=100)
    for start in range(0, 10_000, 50):
        speculation.add("a", range(start, start + 50), 1.0)
    assert len(speculation) <= 200
    speculation.discard("a", [9_960])
    assert speculation.extend(range(9_950, 10_000), {}) == {"a": 10}


def test_a_forgotten_replicas_speculation_is_not_inherited() -> None:
    speculation = Speculation()
    speculation.add("a", [1, 2], 0.0)
    speculation.forget("a")
    speculation.add("b", [9], 0.0)
    assert speculation.extend([1, 2], {}) == {}


def test_consecutive_faults_eject_and_a_success_clears() -> None:
    health = Health(HealthConfig(failures=3, pause_s=5.0))
    assert [health.observe("a", Outcome.FAULT, FLEET, 0.0) for _ in range(3)] == [False, False, True]
    assert health.ejected("a", 4.9)
    assert not health.ejected("a", 5.0)
    # One fault after the pause is a relapse: out again, for twice as long.
    assert health.observe("a", Outcome.FAULT, FLEET, 6.0)
    assert health.ejected("a", 15.9)
    health.observe("a", Outcome.OK, FLEET, 16.0)
    assert not health.observe("a", Outcome.FAULT, FLEET, 17.0)


def test_a_callers_mistakes_never_eject() -> None:
    health = Health()
    for _ in range(100):
        health.observe("a", Outcome.CALLER, FLEET, 0.0)
    assert not health.ejected("a", 0.0)


def test_a_replica_that_has_left_is_not_blamed_when_it_returns_under_its_name() -> None:
    fleet = Fleet()
    for name in ("a", "b", "c"):
        fleet.put(Replica(name, 16))
    fleet.remove("a")
    for _ in range(3):
        fleet.observe("a", Outcome.FAULT, 1.0)
    assert fleet.health.quiet
    fleet.put(Replica("a", 16))
    assert not fleet.health.ejected("a", 1.0)


def test_ejection_is_capped_at_a_share_of_the_fleet() -> None:
    health = Health(HealthConfig(failures=1, max_share=0.34))
    out = [replica for replica in FLEET if health.observe(replica, Outcome.FAULT, FLEET, 0.0)]
    assert len(out) == 2
    assert not Health(HealthConfig(failures=1)).observe("a", Outcome.FAULT, ("a",), 0.0)


def test_retries_stay_within_a_fifth_of_requests() -> None:
    budget = RetryBudget(ratio=0.2, burst=10.0)
    granted = 0
    for _ in range(1_000):
        budget.request()
        granted += budget.take()
    assert granted <= 0.2 * 1_000 + 10
    assert granted >= 200


def test_the_ring_meets_every_replica_once_and_follows_capacity() -> None:
    ring = Ring({"a": 1.0, "b": 1.0, "c": 2.0})
    assert sorted(ring.order(5)) == ["a", "b", "c"]
    homes = [next(ring.order(key)) for key in range(4_000)]
    assert 0.4 < homes.count("c") / len(homes) < 0.6
    assert list(Ring({}).order(1)) == []
