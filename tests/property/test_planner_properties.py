"""What holds of every plan, on fleets and histories that hypothesis makes up. `World.step` checks each plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.planner import facility_file
from stoker.planner.core.placement import Member
from stoker.planner.core.plan import plan
from stoker.planner.core.units import Watts
from stoker.planner.core.values import Condition, Deployment, Desired, Node, Wanted, Warming, Wishes
from tests.support.facilities import hall
from tests.support.planner_world import World

RELAXED = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

names = st.sampled_from(["a", "b", "c"])


# With 5 kW a rack carries less than its idle hosts and any GPU; n5 is in no facility, n6 in one and not there.
facilities = st.sampled_from(
    [None, None]
    + [
        facility_file.parse(hall({"r1": "n[0-2]", "r2": "n[3-4]", "r3": "n6"}, rack_kw=kw), "facility")
        for kw in (5, 9, 100)
    ]
)


@st.composite
def nodes(draw: st.DrawFn, name: str) -> Node:
    gpus = draw(st.sampled_from([0, 1, 2, 4, 8]))
    return Node(
        name,
        gpus=frozenset(range(gpus)),
        cpu_slots=draw(st.integers(0, 3)),
        engines=draw(st.sampled_from([frozenset({"vllm"}), frozenset({"sim"}), frozenset({"vllm", "sim"})])),
        labels={"rack": draw(st.sampled_from(["r1", "r2"]))},
        draining=draw(st.sampled_from([False, False, False, True])),
    )


@st.composite
def deployments(draw: st.DrawFn, name: str) -> Deployment:
    return Deployment(
        name,
        spec=draw(st.sampled_from("xyz")),
        engine=draw(st.sampled_from(["vllm", "sim"])),
        gpus_per_node=draw(st.sampled_from([0, 1, 2, 4])),
        gang_size=draw(st.sampled_from([1, 1, 2, 3])),
        wishes=draw(st.sampled_from([Wishes(), Wishes(), Wishes(busy_power=Watts(500)), Wishes(largest_share=1.0)])),
        node_selector=draw(st.sampled_from([{}, {}, {"rack": "r1"}])),
    )


@st.composite
def warmings(draw: st.DrawFn, victims: Sequence[str], assigned: Sequence[str]) -> dict[str, tuple[Warming, ...]]:
    heirs = st.lists(st.sampled_from([*assigned, "gone-0"]), max_size=3)
    return {name: tuple(Warming(leaf, heir, 100) for leaf, heir in enumerate(draw(heirs))) for name in victims}


@st.composite
def worlds(draw: st.DrawFn) -> World:
    world = World()
    for number in range(draw(st.integers(0, 6))):
        world.nodes[f"n{number}"] = draw(nodes(f"n{number}"))
    world.facility = draw(facilities)
    for name in draw(st.sets(names)):
        world.deployments[name] = draw(deployments(name))
        world.desired[name] = Desired(draw(st.integers(0, 5)))
    return world


_KINDS = ["facility", "move", "spec", "scale", "retired", "drain", "lose", "return", "condition", "undeploy"]


def disturb(world: World, data: st.DataObject) -> None:
    """One thing happens to the fleet."""
    kind = data.draw(st.sampled_from([*_KINDS, "drain-replica", "time"]))
    present, away = sorted(world.nodes), sorted(world.absent)
    known, assigned = sorted(world.deployments), sorted(world.assignments)
    if kind == "spec" and known:
        name = data.draw(st.sampled_from(known))
        world.deployments[name] = data.draw(deployments(name))
    elif kind == "scale":
        name = data.draw(names)
        victims = tuple(data.draw(st.lists(st.sampled_from(assigned), unique=True, max_size=3))) if assigned else ()
        world.deployments.setdefault(name, data.draw(deployments(name)))
        world.desired[name] = Desired(data.draw(st.integers(0, 5)), victims, data.draw(warmings(victims, assigned)))
    elif kind == "retired" and assigned:
        world.retired |= {data.draw(st.sampled_from(assigned))}
    elif kind == "drain" and present:
        node = data.draw(st.sampled_from(present))
        world.nodes[node] = replace(world.nodes[node], draining=not world.nodes[node].draining)
    elif kind == "lose" and present:
        world.lose(data.draw(st.sampled_from(present)))
    elif kind == "return" and away:
        node = data.draw(st.sampled_from(away))
        world.nodes[node] = world.absent.pop(node)
    elif kind == "condition" and assigned:
        world.conditions[data.draw(st.sampled_from(assigned))] = data.draw(st.sampled_from(Condition))
    elif kind == "undeploy" and known:
        name = data.draw(st.sampled_from(known))
        del world.deployments[name]
        world.desired.pop(name, None)
    elif kind == "drain-replica" and assigned:
        name = data.draw(st.sampled_from(assigned))
        world.assignments[name] = replace(world.assignments[name], wanted=Wanted.DRAIN)
    elif kind == "time":
        world.now += data.draw(st.sampled_from([1.0, 30.0, 400.0]))
    else:
        _operate(world, data, kind)


def _operate(world: World, data: st.DataObject, kind: str) -> None:
    """An operator edits the facility, or moves a replica."""
    if kind == "facility":
        world.facility = data.draw(facilities)
    elif kind == "move" and world.assignments and world.nodes:
        there = Member(data.draw(st.sampled_from(sorted(world.nodes))))
        world.moves = {data.draw(st.sampled_from(sorted(world.assignments))): (there,)}


@RELAXED
@given(worlds(), st.data())
def test_every_plan_of_any_history_is_lawful_and_comes_to_rest(world: World, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(1, 12))):
        disturb(world, data)
        if data.draw(st.booleans()):
            world.settle()
        else:
            world.step()
    world.finish()


@RELAXED
@given(worlds())
def test_replanning_an_unchanged_problem_moves_nothing(world: World) -> None:
    world.settle()
    before = dict(world.assignments)
    again = plan(world.problem(), world.limits)
    assert again.quiet
    assert again == plan(world.problem(), world.limits), "the same problem, another plan"
    world.step()
    assert world.assignments == before


@RELAXED
@given(worlds(), st.data())
def test_adding_a_node_never_unplaces(world: World, data: st.DataObject) -> None:
    rested = world.finish()
    without = {entry.deployment: entry.replicas for entry in rested.unplaced}
    before = dict(world.assignments)
    name = data.draw(st.sampled_from(["m", "n9", "a0"]))
    world.nodes[name] = replace(data.draw(nodes(name)), draining=False)
    drawn = world.finish()
    for deployment, replicas in {entry.deployment: entry.replicas for entry in drawn.unplaced}.items():
        assert replicas <= without.get(deployment, 0)
    draining = {node.id for node in world.nodes.values() if node.draining}
    for replica, assignment in before.items():
        if not draining & {member.node for member in assignment.members}:
            assert world.assignments[replica] == assignment, "what was well placed has moved"


@RELAXED
@given(worlds(), st.data())
def test_a_new_specification_never_costs_more_than_one_ready_replica(world: World, data: st.DataObject) -> None:
    for name, node in world.nodes.items():
        world.nodes[name] = replace(node, draining=False)
    world.finish()
    placed = {name: len(world.running(name)) for name in world.deployments}
    for name, deployment in world.deployments.items():
        if placed[name] == world.desired[name].replicas:
            world.deployments[name] = replace(deployment, spec="new")
    floor = {name: count - 1 for name, count in placed.items() if count == world.desired[name].replicas}
    for _ in range(100):
        world.step()
        for name, least in floor.items():
            assert world.ready(name) >= least
        pending = [r for r, a in world.assignments.items() if _ready(world, r) is not (a.wanted is Wanted.RUN)]
        if not pending:
            break
        replica = data.draw(st.sampled_from(sorted(pending)))
        wanted = world.assignments[replica].wanted
        world.conditions[replica] = Condition.READY if wanted is Wanted.RUN else Condition.GONE
    for name in floor:
        assert all(a.spec == "new" for a in world.running(name)) or world.desired[name].replicas == 0


def _ready(world: World, replica: str) -> bool:
    return world.conditions[replica] is Condition.READY


@RELAXED
@given(worlds(), st.integers(0, 5))
def test_a_drained_node_is_emptied_where_there_is_room_and_never_at_the_cost_of_ready_ones(
    world: World, index: int
) -> None:
    world.nodes = {name: replace(node, draining=False) for name, node in world.nodes.items()}
    world.finish()
    if not world.nodes:
        return
    ready = {name: world.ready(name) for name in world.deployments}
    node = sorted(world.nodes)[index % len(world.nodes)]
    world.nodes[node] = replace(world.nodes[node], draining=True)
    for _ in range(60):
        world.step()
        for name, count in ready.items():
            assert world.ready(name) >= min(count, world.desired[name].replicas)
        world.obey()
    left = {a.deployment for a in world.assignments.values() if any(m.node == node for m in a.members)}
    assert left <= {entry.deployment for entry in world.step().unplaced}, "stays without a word"


@RELAXED
@given(st.integers(1, 8), st.lists(st.integers(0, 8), min_size=1, max_size=6))
def test_scaling_up_and_down_loses_no_gpu(gpus: int, counts: list[int]) -> None:
    world = World(nodes={"n": Node("n", frozenset(range(gpus)), engines=frozenset({"vllm"}))})
    world.deployments["a"] = Deployment("a", "x", "vllm", gpus_per_node=1)
    for count in counts:
        world.desired["a"] = Desired(count)
        world.finish()
        assert len(world.running("a")) == min(count, gpus)
        used = [gpu for a in world.assignments.values() for member in a.members for gpu in member.gpus]
        assert len(used) == len(set(used)) == min(count, gpus)
