"""What holds of every policy and every limit, on demands that hypothesis makes up."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from stoker.scaler.core import policies
from stoker.scaler.core.limits import overdue_s
from stoker.scaler.core.policy import Bounds, Caps, Concurrency, Kind, Pace, Policy, Price, Slo
from stoker.scaler.core.signals import Capacity, History, Minute, Sample, Startup, Wanted
from stoker.scaler.core.values import Decision, Deployment, Desired, Reason, Replica, Standing
from tests.support.scaler_world import MONDAY_S, Known, World

STEADY = settings(
    max_examples=40, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate, Phase.shrink)
)
NOW = 10_000.0
KINDS = [kind for kind in Kind if kind is not Kind.FIXED]

shares = st.floats(0.0, 1.0)
rates = st.floats(0.0, 200.0)
numbers = st.one_of(st.none(), st.floats(0.0, 500.0))


@st.composite
def samples(draw: st.DrawFn, *, known: bool = False) -> tuple[Sample, ...]:
    """Some seconds of a demand that stays or changes once."""

    def maybe(values: st.SearchStrategy[float]) -> float | None:
        return draw(values if known else st.one_of(st.none(), values))

    def one(ready: int) -> Sample:
        arrivals = draw(rates)
        return Sample(
            0.0,
            ready=ready,
            starting=draw(st.integers(0, 4)),
            running=maybe(st.floats(0.0, 300.0)),
            waiting=maybe(st.floats(0.0, 300.0)),
            queued=maybe(st.floats(0.0, 300.0)),
            arrivals_per_s=arrivals if known else draw(st.one_of(st.none(), st.just(arrivals))),
            prefill_tokens_per_s=arrivals * draw(st.floats(10.0, 9_000.0)) if arrivals else 0.0,
            prompt_scv=maybe(st.floats(0.0, 8.0)),
            decode_tokens_per_s=maybe(st.floats(0.0, 9_000.0)),
            kv_usage=maybe(shares),
            hit_rate=maybe(shares),
            within_slo=None if known else draw(st.one_of(st.none(), shares)),
        )

    ready = draw(st.integers(1 if known else 0, 20))
    first, second = one(ready), one(ready)
    turn, count = draw(st.integers(0, 60)), draw(st.integers(2, 60))
    age = draw(st.floats(0.0, 10.0))
    return tuple(
        replace(second if back < turn else first, at=NOW - age - 2.0 * back) for back in range(count - 1, -1, -1)
    )


@st.composite
def histories(draw: st.DrawFn, *, known: bool = False) -> History:
    seen = draw(samples(known=known))
    wanted = [
        Wanted(NOW - 2.0 * back, draw(st.floats(0.0, 30.0)), draw(st.floats(0.7, 1.6)))
        for back in range(draw(st.integers(0, 40)), 0, -1)
    ]
    minutes = [
        Minute(MONDAY_S + NOW - 60.0 * back, rate, 1_000.0 * rate, 100.0 * rate, 0.5)
        for back, rate in enumerate(draw(st.lists(rates, max_size=40)), 1)
    ][::-1]
    measured = [draw(st.one_of(st.none(), values)) for values in (st.floats(500.0, 50_000.0), st.floats(0.001, 0.1))]
    capacity = Capacity(
        prefill_tokens_per_s=measured[0] or (10_000.0 if known else None),
        step_s=measured[1] or (0.02 if known else None),
        sequence_s=draw(st.floats(0.0, 0.01)),
        kv_tokens=draw(st.one_of(st.none(), st.floats(1e4, 1e6))),
        max_seqs=draw(st.one_of(st.none(), st.integers(1, 512))),
    )
    startup = draw(st.sampled_from([Startup(), Startup(10.0, 20.0), Startup(90.0, 150.0), Startup(600.0, 900.0)]))
    changed_at = draw(st.one_of(st.none(), st.floats(NOW - 2_000.0, NOW)))
    return History(seen, minutes, wanted, capacity, startup, changed_at, MONDAY_S + NOW)


@st.composite
def a_policy(draw: st.DrawFn) -> Policy:
    least = draw(st.integers(0, 6))
    return Policy(
        kind=draw(st.sampled_from(KINDS)),
        concurrency=Concurrency(target=draw(st.floats(1.0, 50.0)), weighted=draw(st.booleans())),
        slo=Slo(ttft_s=draw(st.floats(0.05, 10.0)), attainment=draw(st.floats(0.5, 0.999))),
        bounds=Bounds(least, least + draw(st.integers(0, 30)), idle_s=draw(st.sampled_from([10.0, 600.0]))),
        pace=Pace(
            up_replicas=draw(st.integers(1, 50)),
            up_factor=draw(st.floats(1.0, 10.0)),
            up_cooldown_s=draw(st.sampled_from([0.0, 60.0])),
            down_replicas=draw(st.integers(1, 50)),
            down_factor=draw(shares),
            down_cooldown_s=draw(st.sampled_from([0.0, 60.0])),
            settle_s=draw(st.sampled_from([0.0, 20.0, 120.0])),
            margin=draw(st.floats(0.0, 0.9)),
        ),
        price=Price(draw(st.floats(0.0, 5.0)), draw(st.floats(0.0, 900.0))),
        paused=draw(st.integers(0, 9)) == 0,
    )


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """One or two groups of deployments, in any state."""
    world = World(now=NOW)
    for name in draw(st.sampled_from([["a"], ["a", "b"], ["a", "b", "c"]])):
        world.deployments[name] = Deployment(name, 1, draw(st.integers(0, 9)))
        policy = replace(draw(a_policy()), group=draw(st.sampled_from(["", "group"])))
        caps = Caps(*(draw(st.one_of(st.none(), st.floats(0.0, 9_000.0))) for _ in range(2)))
        history = draw(histories())
        if draw(st.booleans()):
            world.desired[name] = Desired(name, 1, draw(st.integers(0, 40)))
        world.known[name] = Known(
            replace(policy, caps=caps),
            list(history.samples),
            list(history.minutes),
            list(history.wanted),
            history.changed_at,
            history.capacity,
            history.startup,
        )
        for number in range(draw(st.integers(0, 12))):
            standing = draw(st.sampled_from(Standing))
            since = draw(st.one_of(st.none(), st.floats(NOW - 3_000.0, NOW)))
            world.replicas[f"{name}-{number}"] = Replica(
                f"{name}-{number}", name, standing, draw(st.booleans()), since
            )
    return world


def only(world: World) -> Decision:
    """The decision of a deployment that shares nothing."""
    for known in world.known.values():
        known.policy = replace(known.policy, group="", caps=Caps())
    return world.step().made[0]


def ready(world: World, name: str) -> int:
    mine = [r for r in world.replicas.values() if r.deployment == name and not r.leaving]
    return sum(replica.standing is Standing.READY for replica in mine)


@STEADY
@given(worlds())
def test_a_round_on_its_own_outcome_is_quiet(world: World) -> None:
    first = world.step()
    again = world.step()
    assert again.quiet, [(decision.before, decision.replicas, decision.because) for decision in again.made]
    assert again.desired == first.desired


@STEADY
@given(worlds())
def test_the_same_is_decided_from_the_same_and_everything_has_its_reason(world: World) -> None:
    policy = {name: known.policy for name, known in world.known.items()}
    fleet, histories_ = world.fleet(), world.histories()
    first = world.step()
    again = World(NOW, world.deployments, world.replicas, {d.deployment: d for d in fleet.desired}, {}, world.known)
    for name, known in again.known.items():
        known.policy = policy[name]
        known.wanted, known.changed_at = list(histories_[name].wanted), histories_[name].changed_at
    assert again.step() == first
    for decision in first.made:
        assert decision.because
        for because in decision.because:
            assert all(value is None or math.isfinite(value) for value in because.numbers.values()), because


@STEADY
@given(worlds())
def test_bounds_and_caps_are_never_exceeded(world: World) -> None:
    made = {decision.deployment: decision for decision in world.step().made}
    groups: dict[str, list[str]] = {}
    for name, known in world.known.items():
        groups.setdefault(known.policy.group or f"alone {name}", []).append(name)
        bounds = known.policy.bounds
        if not known.policy.paused:
            assert made[name].replicas <= bounds.most
            capped = any(b.reason in {Reason.CAP_COST, Reason.CAP_POWER} for b in made[name].because)
            assert made[name].replicas >= bounds.least or capped
    for names in groups.values():
        members = [world.known[name].policy for name in names]
        if any(policy.paused for policy in members):
            continue
        costs = [policy.caps.per_hour for policy in members if policy.caps.per_hour is not None]
        powers = [policy.caps.power_w for policy in members if policy.caps.power_w is not None]
        pairs = [(world.known[name].policy.price, made[name].replicas) for name in names]
        assert sum(price.per_hour * count for price, count in pairs) <= min(costs, default=math.inf) * (1 + 1e-6)
        assert sum(price.power_w * count for price, count in pairs) <= min(powers, default=math.inf) * (1 + 1e-6)


@STEADY
@given(worlds(), st.sampled_from(["none", "old", "blank"]))
def test_what_is_unknown_never_shrinks(world: World, how: str) -> None:
    for known in world.known.values():
        known.policy = replace(known.policy, caps=Caps())
        if how == "none":
            known.samples = []
        elif how == "old":
            known.samples = [replace(sample, at=sample.at - 100.0) for sample in known.samples]
        else:
            known.samples = [Sample(sample.at, sample.ready, sample.starting) for sample in known.samples]
            assume(all(sample.ready for sample in known.samples))
    for decision in world.step().made:
        if decision.before is not None and decision.before <= world.known[decision.deployment].policy.bounds.most:
            assert decision.replicas >= decision.before


@STEADY
@given(worlds())
def test_the_pace_is_kept(world: World) -> None:
    assume("a" in world.desired)
    decision, known = only(world), world.known["a"]
    pace, bounds, before, serving = known.policy.pace, known.policy.bounds, decision.before, ready(world, "a")
    assert before is not None
    start = before if known.policy.paused else min(max(before, bounds.least), bounds.most)
    if decision.replicas > start:
        assert not known.policy.paused
        history = world.histories()["a"]
        settled = known.changed_at == NOW or known.changed_at is None
        base = max(serving, start) if settled or NOW - (known.changed_at or 0.0) > overdue_s(history) else serving
        woken = any(because.reason is Reason.WOKEN for because in decision.because)
        limit = max(base + 1, min(base + pace.up_replicas, math.ceil(pace.up_factor * max(1, base))))
        assert decision.replicas <= max(limit, 1 if woken else 0)
    if decision.replicas < start:
        lowest = max(math.ceil(pace.down_factor * serving), serving - pace.down_replicas)
        assert decision.replicas >= min(start, lowest if serving > 1 else 0)


@STEADY
@given(worlds())
def test_after_a_change_the_cooldowns_hold(world: World) -> None:
    assume("a" in world.desired)
    known = world.known["a"]
    known.changed_at = NOW - 30.0
    known.policy = replace(known.policy, pace=replace(known.policy.pace, up_cooldown_s=60.0, down_cooldown_s=60.0))
    decision, bounds = only(world), known.policy.bounds
    if decision.before is not None and bounds.least <= decision.before <= bounds.most and decision.before:
        assert decision.replicas == decision.before


@STEADY
@given(a_policy(), histories(known=True), st.floats(1.0, 3.0))
def test_more_demand_needs_no_fewer(policy: Policy, history: History, factor: float) -> None:
    history = replace(history, minutes=())  # what is expected beyond now is another's claim

    def more(sample: Sample) -> Sample:
        grown = {
            name: factor * getattr(sample, name)
            for name in ("running", "waiting", "queued", "arrivals_per_s", "prefill_tokens_per_s")
        }
        decode = factor * (sample.decode_tokens_per_s or 0.0)
        return replace(sample, **grown, decode_tokens_per_s=decode, kv_usage=factor * (sample.kv_usage or 0.0))

    less = policies.need(policy, history, NOW)
    need = policies.need(policy, replace(history, samples=[more(sample) for sample in history.samples]), NOW)
    assume(less.replicas is not None)
    assert need.replicas is not None
    assert less.replicas is not None
    assert need.replicas >= less.replicas * (1.0 - 2e-3) - 1e-9
