"""What holds for every fleet, load and request."""

from __future__ import annotations

import math
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.common.blocks import block_keys, pack_keys, unpack_keys, xor_digest
from stoker.router.core import (
    BlockIndex,
    Delta,
    Fleet,
    LoadLedger,
    Replica,
    Request,
    Ring,
    RoutingConfig,
    Snapshot,
    Speculation,
    Sync,
    Tier,
    decide,
)

names = st.lists(st.sampled_from([f"r{number}" for number in range(12)]), min_size=1, max_size=8, unique=True)
prompts = st.integers(0, 12).flatmap(lambda family: st.integers(1, 60).map(lambda depth: prompt(family, depth)))


def prompt(family: int, depth: int) -> Request:
    """A prompt that shares its first blocks with others of its family, and five with all."""
    keys = [*range(1, 6), *(1_000 * (family + 1) + number for number in range(depth))]
    return Request(keys, 16 * len(keys) + 7, output_tokens=family)


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    config = RoutingConfig(
        epsilon=draw(st.floats(0.0, 3.0)),
        floor_tokens=draw(st.sampled_from([0.0, 500.0, 5_000.0])),
        home_credit=draw(st.floats(0.0, 1.0)),
    )
    fleet = Fleet(config)
    for name in draw(names):
        capacity, ready_at = draw(st.sampled_from([0.5, 1.0, 2.0])), draw(st.sampled_from([None, None, 0.0, -12.0]))
        fleet.put(Replica(name, capacity=capacity, ready_at=ready_at))
        fleet.load.report(name, draw(st.integers(0, 20_000)), seen_at=0.0)
        if draw(st.booleans()):
            fleet.snapshot(name, Snapshot(1, 1, {Tier.GPU: draw(prompts).keys}), 0.0)
    return fleet


def warmths(fleet: Fleet, now: float) -> dict[str, float]:
    """How much of its part of the bound each replica may take, beside the one that is ready longest."""
    begun = {name: replica.ready_at for name, replica in fleet.replicas.items()}
    warm = {name: 1.0 if at is None else min(1.0, 0.25 + 0.75 * (now - at) / 30.0) for name, at in begun.items()}
    return {name: each / max(warm.values()) for name, each in warm.items()}


@settings(max_examples=150, deadline=None)
@given(fleets(), st.lists(prompts, min_size=1, max_size=12), st.integers(0, 2**32))
def test_no_decision_exceeds_the_bound_unless_all_do(fleet: Fleet, requests: list[Request], seed: int) -> None:
    rng = Random(seed)
    for step, request in enumerate(requests):
        decision = decide(request, fleet, float(step), rng, explain=True)
        total = sum(fleet.load.load(name) for name in fleet.replicas)
        warmth = warmths(fleet, float(step))
        capacity = sum(replica.capacity * warmth[replica.id] for replica in fleet.replicas.values())
        opened = []
        for candidate in decision.candidates:
            # The rule, spelt out again rather than taken from the decision.
            warm = warmth[candidate.replica]
            share = fleet.replicas[candidate.replica].capacity * warm / capacity
            limit = (1.0 + fleet.config.epsilon) * (total + candidate.weight) * share
            bound = max(fleet.config.floor_tokens * warm, math.ceil(limit - 1e-6))
            if fleet.load.load(candidate.replica) + candidate.weight <= bound:
                opened.append(candidate.replica)
            assert candidate.open == (candidate.replica in opened), candidate
        assert decision.over_bound == (not opened)
        assert decision.over_bound or decision.replica in opened
        fleet.dispatch(request, decision, float(step))


many = st.lists(st.sampled_from([f"r{number}" for number in range(14)]), min_size=1, max_size=14, unique=True)
Facts = list[tuple[Replica, int, Request | None]]
facts: st.SearchStrategy[Facts] = many.flatmap(
    lambda chosen: st.tuples(
        *(
            st.tuples(
                st.builds(
                    Replica,
                    st.just(name),
                    capacity=st.sampled_from([0.7, 1.0, 1.9]),
                    prefill_rate=st.sampled_from([None, 1_000.0, 12_345.6]),
                    ready_at=st.sampled_from([None, 90.0]),
                ),
                st.sampled_from([0, 0, 0, 700, 20_000]),
                st.none() | prompts,
            )
            for name in chosen
        )
    ).map(list)
)


def told(known: Facts) -> Fleet:
    """A router that heard these facts, in this order: each replica, its load, and what it holds."""
    fleet = Fleet(RoutingConfig(floor_tokens=5_000.0))
    for replica, load, held in known:
        fleet.put(replica)
        fleet.load.report(replica.id, load, seen_at=99.0)
        if held is not None:
            fleet.snapshot(replica.id, Snapshot(1, 1, {Tier.GPU: held.keys}), 99.0)
    return fleet


@settings(max_examples=200, deadline=None)
@given(facts, st.data(), prompts, st.integers(0, 2**32), st.integers(0, 2**32))
def test_two_routers_with_the_same_view_agree(
    known: Facts, data: st.DataObject, request: Request, one: int, other: int
) -> None:
    routers = told(known), told(data.draw(st.permutations(known)))
    decisions = [
        decide(request, fleet, 100.0, Random(seed), explain=True)
        for fleet, seed in zip(routers, (one, other), strict=True)
    ]
    assert decisions[0] == decisions[1]


@settings(max_examples=100, deadline=None)
@given(fleets(), st.lists(prompts, max_size=10), st.data())
def test_no_path_leaks_load(fleet: Fleet, requests: list[Request], data: st.DataObject) -> None:
    before = {name: fleet.load.load(name) for name in fleet.replicas}
    flights = [fleet.dispatch(request, decide(request, fleet, 1.0, Random(0)), 1.0) for request in requests]
    gone = data.draw(st.none() | st.sampled_from(sorted(fleet.replicas)))
    for step, flight in enumerate(data.draw(st.permutations(flights + flights))):
        if step == len(flights) and gone is not None and len(before) > 1:
            fleet.remove(gone)
            del before[gone]
        if data.draw(st.booleans()):
            fleet.first_token(flight, 2.0)
        fleet.release(flight, 3.0)
    assert fleet.load.in_flight == 0
    for name, load in before.items():
        assert math.isclose(fleet.load.load(name), load, abs_tol=1e-6)


@settings(max_examples=50, deadline=None)
@given(names, st.sampled_from([f"new{number}" for number in range(5)]))
def test_adding_a_replica_moves_keys_only_to_it(members: list[str], newcomer: str) -> None:
    before = Ring(dict.fromkeys(members, 1.0))
    after = Ring({**dict.fromkeys(members, 1.0), newcomer: 1.0})
    moved = 0
    for key in range(200):
        order = list(after.order(key))
        assert [name for name in order if name != newcomer] == list(before.order(key))
        moved += order[0] == newcomer
    assert moved <= 200 * 3 / (len(members) + 1)


weights = st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from((0.5, 1.0, 2.0)), max_size=8)


@settings(max_examples=100, deadline=None)
@given(st.lists(weights, min_size=1, max_size=6), st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20))
def test_a_ring_does_not_tell_how_it_came_to_be(turns: list[dict[str, float]], keys: list[int]) -> None:
    ring = Ring({}, vnodes=16)
    for members in turns:
        ring = ring.turned_to(members)
        fresh = Ring(members, vnodes=16)
        for key in keys:
            assert list(ring.order(key)) == list(fresh.order(key))
            assert ring.home(key) == fresh.home(key)


@settings(max_examples=60, deadline=None)
@given(names.filter(lambda chosen: len(chosen) > 1), st.booleans(), st.data())
def test_prompts_move_only_to_a_newcomer_and_only_from_one_who_left(
    members: list[str], sighted: bool, data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(members))
    empty = Request((), 0)
    all_of, rest = (
        told([(Replica(name), 0, empty if sighted else None) for name in members if name != left])
        for left in (None, gone)
    )
    moved = 0
    for family in range(60):
        keys = [1_000 * (family + 1) + number for number in range(1 + family % 40)]
        request = Request(keys, 16 * len(keys) + 7)
        before, after = (decide(request, fleet, 100.0, Random(1)).replica for fleet in (all_of, rest))
        assert before in (after, gone)
        moved += before == gone
    assert moved <= 60 * 3 / len(members)


key_sets = st.sets(st.integers(1, 40))


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(st.sampled_from("abc"), key_sets),
    st.lists(st.tuples(st.sampled_from("abc"), key_sets, key_sets, st.sampled_from(Tier)), max_size=15),
)
def test_snapshot_and_deltas_are_set_algebra(
    start: dict[str, set[int]], steps: list[tuple[str, set[int], set[int], Tier]]
) -> None:
    index = BlockIndex()
    model: dict[str, dict[Tier, set[int]]] = {}
    sequences = {(replica, tier): 1 for replica in start for tier in Tier}
    for replica, keys in start.items():
        index.snapshot(replica, Snapshot(1, 1, {Tier.GPU: list(keys), Tier.CPU: [], Tier.STORAGE: []}), 0.0)
        model[replica] = {tier: set(keys) if tier is Tier.GPU else set() for tier in Tier}
    for replica, stored, removed, tier in steps:
        if replica not in model:
            assert index.delta(replica, Delta(1, 2, {}, {}), 0.0) is Sync.RESYNC
            continue
        held = model[replica][tier] = (model[replica][tier] - removed) | stored
        step = sequences[replica, tier] = sequences[replica, tier] + 1
        message = Delta(1, step, {tier: list(stored)}, {tier: list(removed)}, {tier: xor_digest(held)})
        assert index.delta(replica, message, 0.0) is Sync.APPLIED
    found = index.depths(list(range(1, 41)))
    for replica, tiers in model.items():
        union: set[int] = set()
        expected = []
        for tier in Tier:
            union |= tiers[tier]
            expected.append(next(depth for depth in range(41) if depth + 1 not in union))
        assert found.get(replica, (0, 0, 0)) == tuple(expected)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=10))
def test_every_lost_or_reordered_delta_is_noticed(order: list[int]) -> None:
    index = BlockIndex()
    index.snapshot("a", Snapshot(1, 0, {}), 0.0)
    expected, broken = 1, False
    for sequence in order:
        result = index.delta("a", Delta(1, sequence, {Tier.GPU: [sequence]}, {}), 0.0)
        if broken or sequence > expected:
            broken = True
            assert result is Sync.RESYNC
        elif sequence < expected:
            assert result is Sync.STALE
        else:
            assert result is Sync.APPLIED
            expected += 1


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 12)),
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 12), st.integers(0, 12)), max_size=6),
)
def test_speculation_extends_exactly_what_is_known(known: dict[str, int], sent: list[tuple[str, int, int]]) -> None:
    speculation = Speculation()
    keys = list(range(100, 112))
    believed = {replica: set(keys[:depth]) for replica, depth in known.items()}
    for replica, start, end in sent:
        speculation.add(replica, keys[start:end], 0.0)
        believed.setdefault(replica, set()).update(keys[start:end])
    reached = speculation.extend(keys, known)
    for replica, held in believed.items():
        depth = next((number for number, key in enumerate(keys) if key not in held), len(keys))
        assert reached.get(replica, 0) == depth


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 500), st.floats(0, 100)), max_size=40))
def test_load_is_never_below_what_this_router_has_in_flight(steps: list[tuple[bool, int, float]]) -> None:
    ledger, own, now = LoadLedger(), {}, 0.0
    for is_report, tokens, wait in steps:
        now += wait
        if is_report:
            ledger.report("a", tokens, seen_at=now - wait / 2)
        else:
            own[ledger.dispatch("a", tokens, 0.0, now)] = tokens
        assert ledger.load("a") >= sum(own.values()) - 1e-6
    for flight in own:
        ledger.release(flight, now)
    assert ledger.own("a") == 0.0


@given(st.lists(st.integers(0, 2**64 - 1), max_size=50))
def test_digests_survive_the_wire(keys: list[int]) -> None:
    assert list(unpack_keys(pack_keys(keys))) == keys


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=80), st.integers(1, 9), st.integers(0, 2**64 - 1))
def test_prompts_share_keys_exactly_as_far_as_they_share_blocks(tokens: list[int], size: int, root: int) -> None:
    keys = block_keys(tokens, size, root)
    assert len(keys) == len(tokens) // size
    for cut in range(0, len(tokens), size):
        changed = [*tokens[:cut], (tokens[cut] + 1) % 2**32, *tokens[cut + 1 :]]
        other = block_keys(changed, size, root)
        assert other[: cut // size] == keys[: cut // size]
        assert not set(other[cut // size :]) & set(keys[cut // size :])
