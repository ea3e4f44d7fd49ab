"""Overheard load against its definition, over every history."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.router.core import Dispatched, Fleet, LoadLedger, Replica, RoutingConfig
from stoker.router.core.rates import ASSUMED_RATE

steps = st.lists(
    st.tuples(
        st.sampled_from(["overhear", "report", "dispatch", "release"]),
        st.floats(0.0, 1.0),  # time that passes before
        st.floats(0.0, 3.0),  # age of what is told
        st.integers(0, 1_000),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(steps)
def test_overheard_load_is_what_no_report_has_and_has_not_aged(history: list[tuple[str, float, float, int]]) -> None:
    ledger, alone = LoadLedger(), LoadLedger()  # the second hears the same, but no other router
    told: list[tuple[float, int]] = []
    flights: list[tuple[int, int]] = []
    now, reported_at = 10.0, float("-inf")
    for step, pause, age, tokens in history:
        now += pause
        match step:
            case "overhear":
                ledger.overhear("a", tokens, now - age, now)
                if now - age > reported_at:
                    told.append((now - age, tokens))
            case "report":
                reported_at = max(reported_at, now - age)
                for each in (ledger, alone):
                    each.report("a", tokens, now - age)
                told = [(at, held) for at, held in told if at > reported_at]
            case "dispatch":
                flights.append((ledger.dispatch("a", tokens, 0, now), alone.dispatch("a", tokens, 0, now)))
            case "release" if flights:
                one, other = flights.pop()
                ledger.release(one, now)
                alone.release(other, now)
        expected = sum(held for at, held in told if at > now - 2.0)
        assert math.isclose(ledger.load("a", now), alone.load("a", now) + expected, abs_tol=1e-6)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 30), st.integers(1, 20)), max_size=20))
def test_routers_that_overhear_each_other_hold_the_same_view(sent: list[tuple[str, int, int]]) -> None:
    """Whoever of two routers sends, both believe the same of prefixes and of load."""
    fleets = [Fleet(RoutingConfig()), Fleet(RoutingConfig())]
    for fleet in fleets:
        for name in "ab":
            fleet.put(Replica(name))
    keys = list(range(1, 60))
    for number, (replica, start, count) in enumerate(sent):
        told = Dispatched(replica, keys[start : start + count], 16 * count, 16 * count)
        sender, hearer = fleets[number % 2], fleets[1 - number % 2]
        sender.speculation.add(replica, told.keys, 1.0)
        kv = sender.config.kv_weight * told.kv_tokens
        sender.load.dispatch(replica, told.prefill_tokens, kv, 1.0, step=sender.config.step_s * ASSUMED_RATE)
        hearer.overhear(told, at=1.0, now=1.04)
    for start in range(0, 50, 7):
        assert fleets[0].speculation.extend(keys[start:], {}) == fleets[1].speculation.extend(keys[start:], {})
    for one, other in ((fleets[0].load.load(name, 1.1), fleets[1].load.load(name, 1.1)) for name in "ab"):
        assert math.isclose(one, other, abs_tol=1e-6)
