"""The decision, case by case."""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from stoker.common.errors import Unavailable
from stoker.router.core import (
    ROUND_ROBIN,
    Fleet,
    HealthConfig,
    Outcome,
    Reason,
    Replica,
    Request,
    Role,
    RoutingConfig,
    Snapshot,
    Tier,
    alternatives,
    decide,
)

KEYS = list(range(1_000, 1_040))
REQUEST = Request(KEYS, 645)


def fleet(*names: str, config: RoutingConfig | None = None, **fields: object) -> Fleet:
    made = Fleet(config)
    for name in names or ("a", "b", "c"):
        made.put(Replica(name, **fields))  # type: ignore[arg-type]
    return made


def hold(made: Fleet, replica: str, keys: list[int], tier: Tier = Tier.GPU) -> None:
    made.snapshot(replica, Snapshot(1, 1, {tier: keys}), 0.0)


def test_the_longest_reported_prefix_wins() -> None:
    made = fleet()
    hold(made, "b", KEYS)
    hold(made, "c", KEYS[:20])
    decision = decide(REQUEST, made, 0.0, Random(1), explain=True)
    assert (decision.replica, decision.reason) == ("b", Reason.EXACT)
    assert (decision.cached_tokens, decision.prefill_tokens) == (640, 5)
    retried = decide(replace(REQUEST, exclude=frozenset({"b"})), made, 0.0, Random(1))
    assert (retried.replica, retried.cached_tokens) == ("c", 320), "where a retry goes"
    assert {candidate.replica: candidate.exact for candidate in decision.candidates} == {"a": 0, "b": 640, "c": 320}


def test_an_explanation_tells_a_digest_without_a_match_from_no_digest() -> None:
    made = fleet()
    hold(made, "b", [1, 2, 3])
    decision = decide(REQUEST, made, 0.0, Random(1), explain=True)
    assert {candidate.replica: candidate.trust for candidate in decision.candidates} == {"a": 0.0, "b": 1.0, "c": 0.0}
    assert all(candidate.open for candidate in decision.candidates)


def test_a_prompt_without_keys_goes_where_its_session_went() -> None:
    made = fleet(*"abcdefgh")
    chosen = {
        session: {decide(Request((), 40, session=session), made, 0.0, Random(seed)).replica for seed in range(20)}
        for session in range(1, 40)
    }
    assert all(len(replicas) == 1 for replicas in chosen.values())
    assert len(set.union(*chosen.values())) > 4, "sessions spread"
    without = {decide(Request((), 40), made, 0.0, Random(seed)).replica for seed in range(40)}
    assert len(without) > 4


def test_a_digest_in_doubt_beside_many_without_any() -> None:
    names = [f"r{number}" for number in range(200)]
    made = fleet(*names)
    hold(made, "r3", KEYS)
    decision = decide(REQUEST, made, 37.5, Random(1), explain=True)
    trust = {candidate.replica: candidate.trust for candidate in decision.candidates}
    assert (decision.replica, decision.cached_tokens) == ("r3", 320)
    assert trust == dict.fromkeys(names, 0.0) | {"r3": 0.5}


def test_a_seat_is_inherited_without_what_its_holder_left() -> None:
    made = fleet("a", "b")
    hold(made, "b", KEYS)
    made.load.report("b", 9_000, seen_at=0.0)
    only = replace(REQUEST, exclude=frozenset({"a"}))
    made.dispatch(only, decide(only, made, 0.0, Random(1)), 0.0)
    made.remove("b")
    made.put(Replica("c"))
    candidates = decide(REQUEST, made, 0.0, Random(1), explain=True).candidates
    assert {(each.replica, each.load, each.cached, each.trust) for each in candidates} == {
        ("a", 0.0, 0.0, 0.0),
        ("c", 0.0, 0.0, 0.0),
    }


def test_an_explanation_does_not_change_with_the_fleet() -> None:
    made = fleet()
    decision = decide(REQUEST, made, 0.0, Random(1), explain=True)
    before = list(decision.candidates)
    made.dispatch(REQUEST, decision, 0.0)
    hold(made, "b", KEYS)
    made.load.report("c", 5_000, seen_at=1.0)
    assert list(decision.candidates) == before
    assert decision.candidates[0].replica == decision.replica


def test_a_fully_cached_prompt_still_computes_its_last_token() -> None:
    made = fleet()
    hold(made, "b", KEYS)
    assert decide(Request(KEYS, 640), made, 0.0, Random(1)).prefill_tokens == 1


def test_a_dispatch_is_known_before_any_digest() -> None:
    made = fleet()
    first = decide(REQUEST, made, 0.0, Random(1))
    made.dispatch(REQUEST, first, 0.0)
    second = decide(REQUEST, made, 0.01, Random(2))
    assert (second.replica, second.reason) == (first.replica, Reason.SPECULATIVE)


def test_an_unknown_prefix_goes_home_on_the_ring() -> None:
    made = fleet()
    homes = {decide(Request([key], 20), made, 0.0, Random(key)).replica for key in range(60)}
    assert homes == {"a", "b", "c"}
    decision = decide(REQUEST, made, 0.0, Random(1))
    assert decision.reason is Reason.RING
    assert decision.replica == next(made.ring.order(KEYS[0]))


def test_a_system_prompt_common_to_all_does_not_choose_the_home() -> None:
    made = fleet()
    for replica in "abc":
        hold(made, replica, KEYS)
    homes = {decide(Request([*KEYS, tail], 660), made, 0.0, Random(1)).replica for tail in range(60)}
    assert homes == {"a", "b", "c"}


def test_a_full_replica_spills_and_says_so() -> None:
    made = fleet(config=RoutingConfig(floor_tokens=2_000))
    hold(made, "b", KEYS)
    made.load.report("b", 50_000, seen_at=0.0)
    decision = decide(REQUEST, made, 0.0, Random(1))
    assert decision.replica != "b"
    assert decision.reason is Reason.SPILL


def test_with_all_over_the_bound_the_least_over_takes_it() -> None:
    made = fleet(config=RoutingConfig(floor_tokens=0.0, epsilon=0.0))
    for replica, load in zip("abc", (900, 500, 700), strict=True):
        made.load.report(replica, load, seen_at=0.0)
    decision = decide(Request([], 10_000), made, 0.0, Random(1))
    assert (decision.replica, decision.over_bound, decision.reason) == ("b", True, Reason.LEAST_LOADED)


def test_a_quiet_fleet_is_never_over_its_bound() -> None:
    made = fleet()
    assert not decide(Request([], 8_000), made, 0.0, Random(1)).over_bound


@pytest.mark.parametrize(
    "change",
    [{"ready": False}, {"draining": True}, {"role": Role.DECODE}],
)
def test_unfit_replicas_are_left_out(change: dict[str, object]) -> None:
    made = fleet("b", "c")
    made.put(Replica("a", **change))  # type: ignore[arg-type]
    hold(made, "a", KEYS)
    request = Request(KEYS, 645, role=Role.PREFILL)
    assert decide(request, made, 0.0, Random(1)).replica != "a"


def test_only_a_replica_with_the_adapter_serves_it() -> None:
    made = fleet()
    made.put(Replica("c", adapters=frozenset({"poet"})))
    assert decide(Request([], 10, adapter="poet"), made, 0.0, Random(1)).replica == "c"
    with pytest.raises(Unavailable, match="adapter 'cook'") as caught:
        decide(Request([], 10, adapter="cook"), made, 0.0, Random(1))
    assert caught.value.reason == "NO_REPLICA"


def test_nothing_to_route_to_is_said_with_a_delay() -> None:
    with pytest.raises(Unavailable) as caught:
        decide(REQUEST, Fleet(), 0.0, Random(1))
    assert caught.value.retry_after_s


def test_replicas_already_tried_are_left_out() -> None:
    made = fleet()
    hold(made, "b", KEYS)
    assert decide(Request(KEYS, 645, exclude=frozenset("b")), made, 0.0, Random(1)).replica != "b"


def test_an_ejected_replica_is_left_out_until_its_pause_is_over() -> None:
    made = fleet("a", "b", "c", "d")
    hold(made, "b", KEYS)
    for _ in range(3):
        made.observe("b", Outcome.FAULT, 0.0)
    assert decide(REQUEST, made, 1.0, Random(1)).replica != "b"
    assert decide(REQUEST, made, 6.0, Random(1)).replica == "b"


def test_panic_routes_to_all_when_too_few_are_left() -> None:
    made = fleet("a", "b")
    for _ in range(3):
        made.observe("a", Outcome.FAULT, 0.0)
    made.put(Replica("b", draining=True))
    assert decide(REQUEST, made, 0.0, Random(1)).reason is Reason.PANIC


def test_panic_begins_where_less_than_half_are_left() -> None:
    made = Fleet(health=HealthConfig(max_share=1.0))
    for name in "abcde":
        made.put(Replica(name))
    for name, panics in (("a", False), ("b", False), ("c", True), ("d", True)):
        for _ in range(3):
            made.observe(name, Outcome.FAULT, 0.0)
        assert (decide(REQUEST, made, 0.0, Random(1)).reason is Reason.PANIC) == panics, name


def test_a_digest_too_old_to_trust_gives_no_credit() -> None:
    made = fleet()
    hold(made, "b", KEYS)
    decision = decide(REQUEST, made, 1_000.0, Random(1))
    assert decision.cached_tokens == 0
    assert decision.reason is not Reason.EXACT


def test_own_dispatches_count_beside_a_digest_too_old_to_trust() -> None:
    made = fleet()
    hold(made, "b", KEYS)
    first = decide(REQUEST, made, 0.0, Random(1))
    made.dispatch(REQUEST, first, 1_000.0)
    assert decide(REQUEST, made, 1_000.0, Random(1)).cached_tokens > 600


def test_slower_tiers_are_worth_less() -> None:
    made = fleet("a", "b")
    hold(made, "a", KEYS, Tier.STORAGE)
    hold(made, "b", KEYS, Tier.CPU)
    decision = decide(REQUEST, made, 0.0, Random(1))
    assert decision.replica == "b"
    assert 400 < decision.cached_tokens < 500


def test_another_block_size_earns_no_credit() -> None:
    made = fleet("a", "c")
    made.put(Replica("b", block_size=32))
    hold(made, "b", KEYS)
    assert decide(REQUEST, made, 0.0, Random(1)).cached_tokens == 0


def test_round_robin_takes_turns() -> None:
    made = fleet()
    hold(made, "a", KEYS)
    chosen = [decide(REQUEST, made, 0.0, Random(1), policy=ROUND_ROBIN).replica for _ in range(6)]
    assert chosen == ["a", "b", "c"] * 2


def test_the_slower_machine_gets_less() -> None:
    made = Fleet()
    made.put(Replica("a", prefill_rate=10_000.0))
    made.put(Replica("b", prefill_rate=1_000.0))
    made.put(Replica("c", prefill_rate=1_000.0))
    assert decide(Request([], 5_000), made, 0.0, Random(1)).replica == "a"


def test_removing_a_replica_forgets_all_of_it() -> None:
    made = fleet()
    hold(made, "b", KEYS)
    made.remove("b")
    made.put(Replica("b"))
    assert decide(REQUEST, made, 0.0, Random(1)).cached_tokens == 0


def test_noise_between_measured_rates_does_not_move_prefixes() -> None:
    made = Fleet()
    made.put(Replica("a", prefill_rate=10_000.0))
    made.put(Replica("b", prefill_rate=6_000.0))
    made.put(Replica("c", prefill_rate=18_000.0))
    assert set(made.rates.values()) == {10_000.0}
    made.put(Replica("c", prefill_rate=60_000.0))
    made.put(Replica("b", prefill_rate=1_000.0))
    assert dict(made.rates) == {"a": 10_000.0, "b": 2_000.0, "c": 30_000.0}
    made.remove("a")
    made.put(Replica("b", prefill_rate=60_000.0))
    assert set(made.rates.values()) == {60_000.0}


def test_a_replica_that_was_not_measured_counts_as_the_median() -> None:
    made = fleet()
    assert len(set(made.rates.values())) == 1
    made.put(Replica("b", prefill_rate=900.0))
    assert dict(made.rates) == {"a": 900.0, "b": 900.0, "c": 900.0}
    made.put(Replica("c", prefill_rate=9_000.0))
    assert made.rates["a"] == 4_950.0
    assert made.rates["b"] == 1_800.0


def test_a_restarted_engine_has_lost_what_was_sent_to_it() -> None:
    made = fleet("b")
    hold(made, "b", [])
    made.dispatch(REQUEST, decide(REQUEST, made, 0.0, Random(1)), 0.0)
    assert decide(REQUEST, made, 0.1, Random(1)).cached_tokens > 600
    made.snapshot("b", Snapshot(2, 1, {}), 0.2)
    assert decide(REQUEST, made, 0.3, Random(1)).cached_tokens == 0


@pytest.mark.parametrize("explain", [True, False])
def test_the_next_best_are_others_and_only_those_inside_the_bound_where_it_is_known(explain: bool) -> None:
    made = fleet("a", "b", "c", "d", config=RoutingConfig(floor_tokens=1000))
    hold(made, "b", KEYS)
    made.load.report("d", 50_000, 0.0)
    chosen = decide(REQUEST, made, 0.0, Random(1), explain=explain)
    assert chosen.replica == "b"
    names = alternatives(REQUEST, chosen, made, 0.0, 3)
    assert set(names[:2]) == {"a", "c"}, "the loaded one comes last, or not at all"
    assert names[2:] == ([] if explain else ["d"])
