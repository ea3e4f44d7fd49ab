"""Steps out of a node, in an order that never takes a deployment below its least; and what it costs to tidy up."""

from __future__ import annotations

from dataclasses import replace

from bench.facilities import Shape, regular
from stoker.planner.core.placement import Need, Placed, PlacementProblem, greedy
from stoker.planner.core.placement.moves import defragmented, drain, replacements
from stoker.planner.core.placement.values import Member
from tests.support.placement_checker import faults

POD = regular(Shape(8, per_rack=2, pod=4))
WHOLE = tuple(range(8))


def test_a_drain_places_successors_first() -> None:
    problem = PlacementProblem(POD, (Need("d", 3, 8, tensor_parallel=8),))
    standing = greedy(problem).placed
    problem = replace(problem, standing=standing)
    found = drain(problem, {standing[0].members[0].node})
    assert [(step.replica, step.overlap) for step in found.steps] == [(standing[0].replica, True)]
    after = tuple(
        Placed(one.replica, "d", found.steps[0].after) if one.replica == found.steps[0].replica else one
        for one in standing
    )
    assert not faults(replace(problem, movable=frozenset({standing[0].replica})), after)


def test_a_drain_without_room_stops_one_first_only_if_it_may() -> None:
    full = tuple(Placed(f"d-{n}", "d", (Member(f"n{n}", WHOLE),)) for n in range(7))
    other = (Placed("x-0", "x", (Member("n7", (0, 1, 2, 3)),)),)
    problem = PlacementProblem(POD, (Need("d", 7, 8, tensor_parallel=8), Need("x", 1, 4)), full + other)
    stuck = drain(problem, {"n0"})
    assert not stuck.steps
    assert "8 GPUs" in stuck.stuck[0].words
    assert not drain(problem, {"n7"}).steps
    roomy = drain(replace(problem, standing=full), {"n0"}, least={"d": 6})
    assert [step.overlap for step in roomy.steps] == [True]


def test_what_cannot_overlap_stops_first_down_to_the_least() -> None:
    """The only room is what the replica itself holds elsewhere: a gang of two that shares one of its nodes."""
    gang = Placed("g-0", "g", (Member("n0", WHOLE), Member("n2", WHOLE)))
    spare = frozenset(f"n{n}" for n in (1, 3, 4, 5, 6))
    problem = PlacementProblem(POD, (Need("g", 1, 8, 2, tensor_parallel=8),), (gang,), closed=spare)
    assert not drain(problem, {"n0"}).steps
    (step,) = drain(problem, {"n0"}, least={"g": 0}).steps
    assert not step.overlap
    assert {member.node for member in step.after} == {"n2", "n7"}


def test_what_a_lost_node_held_is_replaced_and_the_rest_stays() -> None:
    problem = PlacementProblem(POD, (Need("d", 3, 8, tensor_parallel=8),))
    standing = greedy(problem).placed
    lost = standing[1].members[0].node
    (step,) = replacements(replace(problem, standing=standing, lost=frozenset({lost})))
    assert step.replica == standing[1].replica
    assert step.after[0].node not in {lost, *(one.members[0].node for one in standing)}


def test_tidying_up_names_its_price_in_warm_cache() -> None:
    scattered = tuple(Placed(f"d{n}-0", f"d{n}", (Member(f"n{n}", (0, 1, 2, 3)),)) for n in range(4))
    problem = PlacementProblem(POD, tuple(Need(f"d{n}", 1, 4, tensor_parallel=4) for n in range(4)), scattered)
    warm = {f"d{n}-0": 100_000 * (n + 1) for n in range(4)}
    found = defragmented(problem, warm_tokens=warm, prefill_s_per_token=0.0001)
    assert [(proposal.node, proposal.cost_s) for proposal in found] == [("n0", 10.0), ("n2", 30.0)] or [
        (proposal.node, proposal.cost_s) for proposal in found
    ] == [("n0", 10.0), ("n1", 20.0)]
    moved = {step.replica: step.after for proposal in found for step in proposal.steps}
    after = tuple(Placed(one.replica, one.deployment, moved.get(one.replica, one.members)) for one in scattered)
    assert not faults(replace(problem, movable=frozenset(moved)), after)
    assert len({member.node for one in after for member in one.members}) == 2
    assert not defragmented(replace(problem, standing=after), warm_tokens=warm, prefill_s_per_token=0.0001)
