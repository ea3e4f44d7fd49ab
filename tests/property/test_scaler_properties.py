"""What holds of every scaling decision, on fleets that hypothesis makes up."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.scaler.core.values import Deployment, Load, Replica, Standing
from tests.support.scaler_world import World

STEADY = settings(max_examples=100, deadline=None, derandomize=True)

counts = st.one_of(st.none(), st.integers(0, 50))


@st.composite
def worlds(draw: st.DrawFn) -> World:
    world = World(now=draw(st.floats(0, 1e6)))
    for name in draw(st.sets(st.sampled_from(["a", "b", "c"]))):
        world.deployments[name] = Deployment(name, draw(st.integers(1, 9)), draw(st.integers(0, 6)))
    for name in ["a", "b", "c"]:
        for number in range(draw(st.integers(0, 6))):
            replica = f"{name}-{number}"
            standing = draw(st.sampled_from(Standing))
            world.replicas[replica] = Replica(replica, name, standing, leaving=draw(st.booleans()))
            age = draw(st.floats(0, 30))
            world.loads[replica] = Load(world.now - age, draw(counts), draw(counts), draw(counts))
    return world


@STEADY
@given(worlds())
def test_a_round_on_its_own_outcome_writes_nothing(world: World) -> None:
    first = world.step()
    again = world.step()
    assert again.quiet
    assert again.desired == first.desired


@STEADY
@given(worlds(), st.data())
def test_counts_are_those_asked_for_whatever_is_known_of_the_replicas(world: World, data: st.DataObject) -> None:
    for _ in range(3):
        world.step()
        assert {name: d.replicas for name, d in world.desired.items()} == {
            name: deployment.replicas for name, deployment in world.deployments.items()
        }
        world.loads.clear()
        for replica in data.draw(st.lists(st.sampled_from(sorted(world.replicas) or ["none"]), unique=True)):
            world.replicas.pop(replica, None)


@STEADY
@given(worlds())
def test_victims_are_the_surplus_and_no_ready_one_goes_before_one_that_is_not(world: World) -> None:
    for desired in world.step().desired:
        staying = {r.id: r for r in world.replicas.values() if r.deployment == desired.deployment and not r.leaving}
        assert len(desired.victims) == len(set(desired.victims)) == max(0, len(staying) - desired.replicas)
        assert set(desired.victims) <= staying.keys()
        spared = [replica for name, replica in staying.items() if name not in desired.victims]
        if any(staying[name].standing is Standing.READY for name in desired.victims):
            assert all(replica.standing is Standing.READY for replica in spared)


@STEADY
@given(worlds(), st.integers(0, 100))
def test_the_busiest_of_the_ready_is_spared(world: World, backlog: int) -> None:
    for name in list(world.deployments):
        world.deployments[name] = replace(world.deployments[name], replicas=1)
    world.desired.clear()
    ready = [r for r in world.replicas.values() if r.standing is Standing.READY and not r.leaving]
    for replica in ready:
        world.loads[replica.id] = Load(world.now, 0, 0, 0)
    busiest = {replica.deployment: replica.id for replica in ready}
    for replica_id in busiest.values():
        world.loads[replica_id] = Load(world.now, 1, backlog, 0)
    for desired in world.step().desired:
        assert busiest.get(desired.deployment) not in desired.victims
