"""What holds of the worth of caches, of victims chosen by it, and of what is warmed elsewhere."""

from __future__ import annotations

import math
from collections.abc import Collection
from itertools import combinations
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.scaler.core import victims, warming
from stoker.scaler.core.values import Load, Replica, Standing
from stoker.scaler.core.warming import Held
from stoker.scaler.core.warmth import Warmth, WarmthConfig, Worth

STEADY = settings(max_examples=100, deadline=None, derandomize=True)
NAMES = [f"chat-{number}" for number in range(5)]
BITS = {name: 1 << place for place, name in enumerate(NAMES)}

replica = st.sampled_from(NAMES)
keys = st.lists(st.integers(0, 200), min_size=1, max_size=20)
Told = tuple[str, str, list[int]]
told: st.SearchStrategy[Told] = st.one_of(
    st.tuples(st.just("used"), st.just(""), keys),
    st.tuples(st.sampled_from(["stored", "removed"]), replica, keys),
    st.tuples(st.sampled_from(["holds", "forget"]), replica, st.just([])),
)
stories = st.lists(st.tuples(st.floats(-5, 500), told), max_size=60)
worths = st.dictionaries(st.integers(1, 31), st.floats(0, 1e6), max_size=20).map(lambda held: Worth(held, BITS))


def live(story: list[tuple[float, Told]], limit: int = 40) -> tuple[Warmth, float]:
    warmth, now = Warmth(16, WarmthConfig(sample=2, limit=limit)), 0.0
    for passed, (what, name, about) in story:
        now += passed  # a clock that goes back must do no harm
        match what:
            case "used":
                warmth.used(about, now)
            case "stored":
                warmth.stored(name, about, now)
            case "removed":
                warmth.removed(name, about, now)
            case "holds":
                warmth.holds(name, [], now)
            case _:
                warmth.forget(name)
    return warmth, now


@STEADY
@given(stories, st.floats(0.01, 1.0))
def test_whatever_is_told_worth_is_bounded_by_what_is_held(story: list[tuple[float, Told]], staying: float) -> None:
    warmth, now = live(story)
    assert len(warmth) <= 40
    worth = warmth.worth(now, staying=staying)
    held = warmth.held_by(NAMES, now, staying=staying)
    assert 0.0 <= worth.lost_with(NAMES) <= 2 * 16 * len(held) + 1e-6
    assert all(0.0 <= block.chance <= 1.0 and not block.elsewhere for block in held.values())
    assert all(0.0 <= warmth.keep_s(name, now) <= 3_600.0 for name in warmth.replicas)


@STEADY
@given(stories)
def test_what_replicas_are_said_to_hold_is_what_they_were_told_to(
    story: list[tuple[float, Told]],
) -> None:
    warmth, now = live(story, limit=1_000)
    holds: dict[str, set[int]] = {name: set() for name in NAMES}
    for _, (what, name, about) in story:
        even = {key for key in about if key % 2 == 0}
        if what == "stored":
            holds[name] |= even
        elif what == "removed":
            holds[name] -= even
        elif what in ("holds", "forget"):
            holds[name] = set()
    for name in NAMES:
        assert set(warmth.held_by([name], now)) == holds[name]


@STEADY
@given(worths, st.sets(replica), st.sets(replica))
def test_together_at_least_as_much_is_lost_as_with_each(worth: Worth, some: set[str], others: set[str]) -> None:
    both = worth.lost_with(some | others)
    assert both >= max(worth.lost_with(some), worth.lost_with(others)) - 1e-6
    assert both >= worth.lost_with(some) + worth.lost_with(others - some) - 1e-6 * (1 + both)


@STEADY
@given(worths, st.sets(replica, min_size=1), st.integers(1, 5))
def test_what_few_can_lose_is_told_as_by_all(worth: Worth, able: set[str], most: int) -> None:
    within = worth.within(able, most)
    for count in range(1, min(most, len(able)) + 1):
        for going in combinations(sorted(able), count):
            assert within.lost_with(going) == worth.lost_with(going)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[Replica], dict[str, Load], Worth]:
    racks = st.sampled_from(["", "north", "south"])
    replicas = [Replica(name, "chat", draw(st.sampled_from(Standing)), domain=draw(racks)) for name in NAMES]
    few = st.one_of(st.none(), st.integers(0, 20))
    loads = {
        name: Load(draw(st.floats(0, 20)), draw(few), draw(few), draw(few)) for name in NAMES if draw(st.booleans())
    }
    return replicas, loads, draw(worths)


@STEADY
@given(fleets(), st.integers(-1, 6), st.integers(0, 2))
def test_victims_leave_each_domain_its_minimum_and_stand_once_chosen(
    fleet: tuple[list[Replica], dict[str, Load], Worth], surplus: int, least: int
) -> None:
    replicas, loads, worth = fleet
    choose = {"fresh_s": 10.0, "worth": worth, "domain_least": least}
    choice = victims.choose(replicas, surplus, loads, 20.0, **choose)  # type: ignore[arg-type]
    assert len(set(choice.victims)) == len(choice.victims) == max(0, min(surplus, len(replicas)) - choice.kept)
    ready = [each for each in replicas if each.standing is Standing.READY]
    for domain in {each.domain for each in ready} - {""}:
        there = [each.id for each in ready if each.domain == domain]
        assert len(set(there) - set(choice.victims)) >= min(least, len(there))
    if choice.kept or any(name in choice.victims for name in (each.id for each in ready)):
        assert all(each.id in choice.victims for each in replicas if each.standing is not Standing.READY)
    again = victims.choose(replicas, surplus, {}, 20.0, before=choice.victims, **choose)  # type: ignore[arg-type]
    assert again.victims == choice.victims


@STEADY
@given(worths, st.integers(1, 4), st.integers(0, 1_000))
def test_of_few_replicas_the_cheapest_go_together(worth: Worth, count: int, seed: int) -> None:
    rng = Random(seed)
    ready = [Replica(name, "chat", Standing.READY) for name in NAMES]
    loads = {name: Load(0.0, rng.randint(0, 9), 0, 0) for name in NAMES}
    choice = victims.choose(ready, count, loads, 0.0, fresh_s=1.0, worth=worth)

    def cost_s(going: Collection[str]) -> float:
        drain_s = sum(victims.Rates().life_s * math.log1p(loads[name].running or 0) for name in going)
        return worth.lost_with(going) / victims.Rates().prefill_tokens_per_s + drain_s

    assert cost_s(choice.victims) <= min(map(cost_s, combinations(NAMES, count))) + 1e-5
    told_s = sum(cost.lost_s + (cost.drain_s or 0.0) for cost in choice.costs.values())
    assert math.isclose(told_s, cost_s(choice.victims), abs_tol=1e-5), "each is told beside those before it"


@STEADY
@given(st.integers(0, 1_000))
def test_of_many_replicas_those_go_that_are_cheap_beside_each_other(seed: int) -> None:
    rng = Random(seed)
    names = [f"chat-{number}" for number in range(200)]
    bits = {name: 1 << place for place, name in enumerate(names)}
    twins = dict(zip(rng.sample(names, 100), rng.sample(names, 100), strict=True))
    held = {bits[one] | bits[other]: 1e6 for one, other in twins.items() if one != other}
    ready = [Replica(name, "chat", Standing.READY) for name in names]
    loads = {name: Load(0.0, 1, 0, 0) for name in names}
    choice = victims.choose(ready, 60, loads, 0.0, fresh_s=1.0, worth=Worth(held, bits))
    assert len(choice.victims) == 60
    assert Worth(held, bits).lost_with(choice.victims) == 0, "of two that hold the same one stays"


def test_a_large_fleet_is_halved_soon() -> None:
    ready = [
        Replica(f"chat-{number}", "chat", Standing.READY, domain=f"rack-{number % 50}") for number in range(10_000)
    ]
    bits = {replica.id: 1 << place for place, replica in enumerate(ready)}
    held = {bits[ready[number].id] | bits[ready[-number - 1].id]: 1.0 * number for number in range(4_000)}
    loads = {replica.id: Load(0.0, place % 7, 0, 0) for place, replica in enumerate(ready)}
    choice = victims.choose(ready, 5_000, loads, 0.0, fresh_s=1.0, worth=Worth(held, bits), domain_least=120)
    assert (len(choice.victims), choice.kept) == (4_000, 1_000)


@st.composite
def holdings(draw: st.DrawFn) -> dict[int, Held]:
    count = draw(st.integers(0, 30))
    held = {}
    for key in range(1, count + 1):
        chance = draw(st.floats(0, 1))
        held[key] = Held(draw(st.integers(0, count)), chance, frozenset(draw(st.sets(replica, max_size=2))))
    return held


@STEADY
@given(holdings(), st.sets(replica), st.floats(0, 5_000))
def test_a_plan_stays_within_its_budget_and_warms_nothing_twice(
    held: dict[int, Held], successors: set[str], budget: float
) -> None:
    plans = warming.plan(held, successors, 100.0, budget)
    assert sum(plan.tokens for plan in plans) <= budget
    assert len({plan.leaf for plan in plans}) == len(plans)
    for plan in plans:
        assert plan.successor in successors
        assert not held[plan.leaf].elsewhere
        assert plan.gain >= warming.LEAST_CHANCE * plan.tokens - 1e-9
