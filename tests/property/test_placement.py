"""Placements on random facilities: every plan is verified by a checker that shares no code with the planner."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from bench.facilities import needs, random_facility
from stoker.planner.core.facility.values import Facility, Node
from stoker.planner.core.placement import PlacementProblem, greedy, place
from stoker.planner.core.units import Watts
from tests.support.placement_checker import faults

SEEDS = st.integers(0, 10_000)


@settings(max_examples=25)
@given(SEEDS, st.floats(0.3, 1.3))
def test_no_plan_breaks_a_limit(seed: int, fill: float) -> None:
    facility = random_facility(seed, (2, 10))
    problem = PlacementProblem(facility, needs(facility, seed, fill))
    placement = greedy(problem)
    assert not faults(problem, placement.placed)
    asked = sum(need.replicas for need in problem.needs)
    assert len(placement.placed) + sum(gap.replicas for gap in placement.unplaced) == asked


@settings(max_examples=15)
@given(SEEDS, st.floats(0.3, 1.3))
def test_planning_again_moves_nothing(seed: int, fill: float) -> None:
    facility = random_facility(seed, (2, 8))
    problem = PlacementProblem(facility, needs(facility, seed, fill))
    first = greedy(problem)
    again = greedy(replace(problem, standing=first.placed))
    assert not again.moved
    assert set(first.placed) <= set(again.placed)
    assert not faults(replace(problem, standing=first.placed), again.placed)


@settings(max_examples=15)
@given(SEEDS, st.data())
def test_what_is_lost_is_placed_anew_under_its_name(seed: int, data: st.DataObject) -> None:
    facility = random_facility(seed, (3, 8))
    problem = PlacementProblem(facility, needs(facility, seed, 0.5))
    first = greedy(problem)
    lost = data.draw(st.sets(st.sampled_from(sorted(facility.nodes)), max_size=3))
    after = replace(problem, standing=first.placed, lost=frozenset(lost))
    second = greedy(after)
    assert not faults(after, second.placed)
    hit = {one.replica for one in first.placed if any(member.node in lost for member in one.members)}
    assert second.moved <= hit


@settings(max_examples=12)
@given(SEEDS, st.floats(0.5, 1.2))
def test_a_better_placement_breaks_no_limit_either(seed: int, fill: float) -> None:
    facility = random_facility(seed, (2, 6))
    problem = PlacementProblem(facility, needs(facility, seed, fill))
    quick, better = greedy(problem), place(problem, time_limit_s=1.5, seed=seed)
    assert not faults(problem, better.placed)
    assert [score.value for score in better.scores] <= [score.value for score in quick.scores]
    for score in better.scores:
        assert score.bound is None or score.bound <= score.value + 1e-6


@settings(max_examples=12)
@given(SEEDS)
def test_a_node_more_never_makes_it_infeasible(seed: int) -> None:
    """A node with the power for itself: it draws that also when nothing is on it."""
    larger = random_facility(seed, (2, 5))
    problem = PlacementProblem(larger, needs(larger, seed, 0.85))
    added = larger.nodes[sorted(larger.nodes)[seed % len(larger.nodes)]]
    smaller = replace(
        larger,
        nodes={name: node for name, node in larger.nodes.items() if name != added.name},
        links=tuple(link for link in larger.links if link.lower != added.name),
    )
    if place(replace(problem, facility=smaller), time_limit_s=2.0).feasible:
        more = replace(problem, facility=_with_power_for(larger, added))
        assert greedy(more).feasible or place(more, time_limit_s=20.0).feasible


def _with_power_for(facility: Facility, node: Node) -> Facility:
    more = facility.node_types[node.type].max_power
    feeds = {
        name: replace(feed, capacity=None if feed.capacity is None else Watts(feed.capacity + more))
        for name, feed in facility.feeds.items()
    }
    rack = facility.racks[node.rack]
    cooling = None if rack.cooling is None else Watts(rack.cooling + more)
    return replace(facility, feeds=feeds, racks={**facility.racks, node.rack: replace(rack, cooling=cooling)})
