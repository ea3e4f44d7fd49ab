"""A grant asks for few decisions, and gives what asking for all would give."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.router.core import (
    AdmissionQueue,
    Decision,
    Dispatched,
    Fairness,
    Fleet,
    Replica,
    Request,
    Snapshot,
    Tier,
    decide,
)

NOW = 50.0


def prompt(rng: Random) -> Request:
    family, depth = rng.randrange(4), rng.choice([1, 10, 60])
    keys = [1_000 * family + number for number in range(depth)]
    return Request(keys, 16 * depth + 5, adapter=rng.choice(["", "", "poet"]))


def a_fleet(rng: Random) -> Fleet:
    fleet = Fleet()
    for number in range(rng.randint(1, 6)):
        name = f"r{number}"
        fleet.put(Replica(name, prefill_rate=1_000.0, adapters=frozenset({"poet"} if number % 2 == 0 else ())))
        fleet.snapshot(name, Snapshot(1, 1, {Tier.GPU: prompt(rng).keys}), NOW)
        fleet.overhear(Dispatched(name, (), rng.choice([0, 0, 500, 3_000]), 0), NOW, NOW)
    return fleet


def asking_all(waiting: dict[int, tuple[Request, float]], fleet: Fleet) -> tuple[int, Decision] | None:
    """Whose turn it is, by the rule: of those whose replica has room, who has least to compute less its age."""
    found: list[tuple[float, int, Decision]] = []
    for ticket, (request, since) in waiting.items():
        decision = decide(request, fleet, NOW, Random(0))
        if not fleet.busy(decision.replica, NOW):
            seconds = decision.prefill_tokens / fleet.rates[decision.replica]
            found.append((seconds - fleet.config.aging * (NOW - since), ticket, decision))
    return min(found, key=lambda each: each[0])[1:] if found else None


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 12))
def test_a_grant_is_what_asking_all_would_give(seed: int, count: int) -> None:
    rng = Random(seed)
    fleet, queue = a_fleet(rng), AdmissionQueue(64, Fairness(0.0))
    waiting: dict[int, tuple[Request, float]] = {}
    for _ in range(count):
        request, since = prompt(rng), NOW - rng.choice([0.0, 0.1, 3.0, 20.0])
        waiting[queue.join(request, fleet, NOW, since=since)] = (request, since)
    while (grant := queue.grant(fleet, NOW, Random(0))) is not None:
        assert grant.decision is not None
        wanted = asking_all(waiting, fleet)
        if wanted is None:
            return  # what no replica with room is wanted for may spill
        assert (grant.ticket, grant.decision) == wanted
        request, _ = waiting.pop(grant.ticket)
        fleet.dispatch(request, grant.decision, NOW)
    assert asking_all(waiting, fleet) is None
