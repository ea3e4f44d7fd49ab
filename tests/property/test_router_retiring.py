"""A replica that retires: off the ring at once, and sent nothing that others would hold on to."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.common.errors import Unavailable
from stoker.router.core import (
    AdmissionQueue,
    Fleet,
    Outcome,
    Reason,
    Replica,
    Request,
    RoutingConfig,
    Snapshot,
    Tier,
    decide,
)

NOW = 100.0
SIZE = 16
RELAXED = settings(max_examples=120, deadline=None, derandomize=True)


def fleet_of(held: dict[str, list[int]], retiring: str = "", config: RoutingConfig | None = None) -> Fleet:
    fleet = Fleet(config)
    for name, keys in held.items():
        fleet.put(Replica(name, SIZE, retiring=name == retiring))
        fleet.snapshot(name, Snapshot(1, 1, {Tier.GPU: keys}), NOW)
    return fleet


def retire(fleet: Fleet, name: str, *, retiring: bool = True) -> None:
    fleet.put(replace(fleet.replicas[name], retiring=retiring))


def ask(fleet: Fleet, keys: list[int], tokens: int = 0, **fields: object) -> Request:
    return Request(keys, tokens or SIZE * len(keys), SIZE, **fields)  # type: ignore[arg-type]


def chosen(fleet: Fleet, request: Request) -> str:
    return decide(request, fleet, NOW, Random(1)).replica


@RELAXED
@given(st.integers(2, 12), st.integers(0, 2**32), st.data())
def test_only_what_was_at_home_there_moves_and_it_comes_back_when_it_is_called_back(
    replicas: int, seed: int, data: st.DataObject
) -> None:
    rng = Random(seed)
    fleet = fleet_of({f"r{number}": [] for number in range(replicas)})
    keys = [rng.getrandbits(64) for _ in range(200)]
    before = {key: fleet.ring.home(key) for key in keys}
    leaver = f"r{data.draw(st.integers(0, replicas - 1))}"
    retire(fleet, leaver)
    after = {key: fleet.ring.home(key) for key in keys}
    assert leaver not in after.values()
    assert all(after[key] == home for key, home in before.items() if home != leaver)
    retire(fleet, leaver, retiring=False)
    assert {key: fleet.ring.home(key) for key in keys} == before


@RELAXED
@given(st.integers(2, 10), st.integers(0, 2**32))
def test_a_retiring_replica_gets_only_what_it_alone_holds_and_the_bound_holds(replicas: int, seed: int) -> None:
    rng = Random(seed)
    names = [f"r{number}" for number in range(replicas)]
    prompts = [[family * 1_000 + block for block in range(1, 60)] for family in range(1, 6)]
    held = {name: [key for prompt in prompts for key in prompt[: rng.choice([0, 0, 10, 40, 59])]] for name in names}
    config = RoutingConfig(floor_tokens=rng.choice([0.0, 2_000.0, 40_960.0]), epsilon=rng.choice([0.0, 0.25, 1.0]))
    fleet = fleet_of(held, names[0], config)
    for _ in range(30):
        keys = rng.choice(prompts)[: rng.randint(1, 59)] + [
            rng.getrandbits(64) for _ in range(rng.choice([0, 0, 40]))
        ]
        request = ask(fleet, keys)
        decision = decide(request, fleet, NOW, rng, explain=True)
        fleet.dispatch(request, decision, NOW)
        depths = {name: depth_of(keys, set(held[name])) for name in names}
        best = next(each for each in decision.candidates if each.replica == decision.replica)
        assert best.open or decision.over_bound
        if decision.replica == names[0]:
            assert depths[names[0]] > max(depths[name] for name in names[1:])
            assert 2 * depths[names[0]] >= len(keys)


def depth_of(keys: list[int], held: set[int]) -> int:
    return next((at for at, key in enumerate(keys) if key not in held), len(keys))


@pytest.mark.parametrize("replicas", [3, 12])  # decided one by one, and by columns
def test_it_serves_what_it_holds_until_a_successor_does(replicas: int) -> None:
    mine = list(range(1, 41))
    others = {f"r{number}": list[int]() for number in range(1, replicas)}
    fleet = fleet_of({"r0": mine, **others}, "r0")
    decision = decide(ask(fleet, mine), fleet, NOW, Random(1))
    assert (decision.replica, decision.reason) == ("r0", Reason.EXACT)
    assert chosen(fleet, ask(fleet, [*mine, *range(900, 930)])) == "r0", "one more turn of it"
    assert chosen(fleet, ask(fleet, [*mine[:10], *range(900, 930)])) != "r0", "it holds the smaller part of that"
    assert chosen(fleet, ask(fleet, list(range(500, 540)))) != "r0"
    assert chosen(fleet, ask(fleet, [])) != "r0"
    fleet.snapshot("r2", Snapshot(1, 2, {Tier.GPU: mine}), NOW)
    assert chosen(fleet, ask(fleet, mine)) == "r2", "warmed"
    retire(fleet, "r0", retiring=False)
    assert {chosen(fleet, ask(fleet, mine)) for _ in range(3)} <= {"r0", "r2"}


def test_where_nobody_else_can_serve_it_does() -> None:
    fleet = fleet_of({"r0": [], "r1": []}, "r0")
    request = ask(fleet, list(range(1, 20)))
    assert chosen(fleet, request) == "r1"
    assert chosen(fleet, ask(fleet, list(request.keys), exclude=frozenset({"r1"}))) == "r0", "the other was tried"
    for _ in range(20):
        fleet.observe("r1", Outcome.FAULT, NOW)
    assert fleet.health.ejected("r1", NOW)
    assert chosen(fleet, request) in {"r0", "r1"}
    fleet.put(replace(fleet.replicas["r1"], ready=False))
    assert chosen(fleet, request) == "r0"
    fleet.remove("r1")
    assert fleet.ring.home(1) == "r0", "a ring of those that are left"
    fleet.remove("r0")
    assert not fleet.retiring
    with pytest.raises(Unavailable):
        chosen(fleet, request)


def test_who_has_waited_long_does_not_spill_to_it() -> None:
    fleet = fleet_of({"r0": [], "r1": []}, "r0")
    first = ask(fleet, list(range(1, 4_000)))
    fleet.dispatch(first, decide(first, fleet, NOW, Random(1)), NOW)
    assert fleet.busy("r1", NOW)
    queue = AdmissionQueue(10, fleet.fairness)
    queue.join(ask(fleet, list(range(9_001, 9_020))), fleet, NOW)
    assert queue.grant(fleet, NOW + 2.0, Random(1)) is None, "it has waited for longer than a miss costs"
    retire(fleet, "r0", retiring=False)
    grant = queue.grant(fleet, NOW + 2.0, Random(1))
    assert grant is not None
    assert grant.decision is not None
    assert grant.decision.replica == "r0"
