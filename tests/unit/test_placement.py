"""Placing on small facilities where the right answer is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.facilities import TRAY, Shape, regular
from stoker.planner.core.facility.values import Distance, Facility, Site
from stoker.planner.core.placement import Domain, Goal, Need, Pair, Placed, Placement, PlacementProblem, greedy, place
from stoker.planner.core.placement.values import Member
from stoker.planner.core.units import BytesPerSecond, watts
from tests.support.placement_checker import faults

POD = regular(Shape(16, per_rack=2, pod=4))
GB = 10**9


def nodes_of(placement: Placement, deployment: str) -> list[str]:
    return [m.node for one in placement.placed if one.deployment == deployment for m in one.members]


def racks_of(facility: Facility, placement: Placement, deployment: str) -> set[str]:
    return {facility.nodes[node].rack for node in nodes_of(placement, deployment)}


def value(placement: Placement, goal: Goal) -> float:
    return next(score.value for score in placement.scores if score.goal is goal)


@pytest.mark.parametrize("gpus", [2, 4])
def test_a_group_takes_gpus_of_one_pcie_root_or_numa_node(gpus: int) -> None:
    """Ignoring PCIe roots halves the throughput of such groups."""
    held = Placed("x-0", "x", (Member("n0", (0,)),))
    tiny = replace(POD, nodes={"n0": POD.nodes["n0"]}, links=())
    problem = PlacementProblem(tiny, (Need("d", 1, gpus, tensor_parallel=gpus),), (held,))
    placement = greedy(problem)
    taken = placement.placed[0].members[0].gpus
    assert taken == ((2, 3) if gpus == 2 else (4, 5, 6, 7))
    assert not faults(problem, placement.placed)


def test_a_group_that_would_straddle_goes_where_it_need_not() -> None:
    held = tuple(Placed(f"x-{gpu}", "x", (Member("n0", (gpu,)),)) for gpu in (0, 2, 4, 6))
    problem = PlacementProblem(POD, (Need("d", 1, 2, tensor_parallel=2),), held)
    assert nodes_of(greedy(problem), "d") != ["n0"]
    alone = replace(problem, facility=replace(POD, nodes={"n0": POD.nodes["n0"]}, links=()))
    assert value(greedy(alone), Goal.LOCALITY) == 1  # better than no place at all


def test_a_group_over_nodes_stays_inside_one_nvlink_domain() -> None:
    racks = regular(Shape(36, per_rack=18, pod=1, node_type=TRAY))
    problem = PlacementProblem(racks, (Need("d", 2, 4, 4, tensor_parallel=16),))
    placement = greedy(problem)
    assert placement.feasible
    for one in placement.placed:
        assert len({racks.nodes[m.node].rack for m in one.members}) == 1
    assert not faults(problem, placement.placed)
    plain = PlacementProblem(POD, problem.needs)
    (gap,) = greedy(plain).unplaced
    assert "NVLink" in gap.words or "too few GPUs" in gap.words


def test_a_gang_stays_under_one_pod_of_leaves() -> None:
    problem = PlacementProblem(POD, (Need("d", 1, 8, 4, tensor_parallel=8, peer_rate=BytesPerSecond(10 * GB)),))
    placement = greedy(problem)
    assert value(placement, Goal.OVERSUBSCRIBED) == 0
    assert len(racks_of(POD, placement, "d")) == 2


def test_prefill_lives_beside_its_decode() -> None:
    pair = Pair("d", BytesPerSecond(20 * GB))
    needs = (Need("p", 2, 8, tensor_parallel=8, pair=pair), Need("d", 4, 8, tensor_parallel=8))
    placement = greedy(PlacementProblem(POD, needs))
    assert placement.feasible
    assert value(placement, Goal.ADJACENCY) == 0


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_half_of_a_deployment_outlives_any_rack(replicas: int) -> None:
    problem = PlacementProblem(POD, (Need("d", replicas, 8, tensor_parallel=8),))
    placement = greedy(problem)
    assert placement.feasible
    assert not faults(problem, placement.placed)


def test_one_source_of_power_is_a_failure_domain_where_racks_hang_on_it_alone() -> None:
    single = {n: replace(r, feeds=(r.feeds[int(n[1:]) % 2],), survives_loss=False) for n, r in POD.racks.items()}
    facility = replace(POD, racks=single)
    placement = greedy(PlacementProblem(facility, (Need("d", 4, 8, tensor_parallel=8),)))
    sources = [int(rack[1:]) % 2 for rack in (facility.nodes[n].rack for n in nodes_of(placement, "d"))]
    assert sorted(sources) == [0, 0, 1, 1]


def test_a_rack_is_not_filled_beyond_what_one_feed_carries() -> None:
    facility = regular(Shape(8, per_rack=4, pod=2, power_share=0.5))
    problem = PlacementProblem(facility, tuple(Need(f"d{n}", 1, 8, tensor_parallel=8) for n in range(8)))
    placement = place(problem, time_limit_s=2.0)
    assert not faults(problem, placement.placed)
    assert len(placement.placed) < 8
    conflict = placement.unplaced[0].conflicts[0]
    assert conflict.limit == "power"
    assert "after the loss of source" in conflict.words
    assert "W left" in conflict.words
    assert "more" in placement.unplaced[0].remedy


def test_a_rack_that_is_exactly_full_fits() -> None:
    facility = regular(Shape(4, per_rack=4, pod=1))
    problem = PlacementProblem(facility, (Need("d", 4, 8, tensor_parallel=8, largest_share=1.0),))
    assert greedy(problem).feasible


def test_words_say_which_limit_and_what_would_help() -> None:
    need = Need("d", 3, 8, tensor_parallel=8)
    two_racks = regular(Shape(8, per_rack=4, pod=2))
    (gap,) = greedy(PlacementProblem(two_racks, (need,))).unplaced
    assert gap.conflicts[0].limit == "spread"
    assert "largest_share" in gap.remedy
    (gap,) = greedy(PlacementProblem(two_racks, (replace(need, gpu_types=frozenset({"b200"})),))).unplaced
    assert gap.conflicts[0].limit == "gpu_type"
    assert "b200" in gap.words
    (gap,) = greedy(PlacementProblem(two_racks, (replace(need, members=3, replicas=9, largest_share=1.0),))).unplaced
    assert "2 of them have room" in gap.words


def test_scaling_down_and_up_again_gives_every_replica_its_gpus() -> None:
    need = Need("d", 4, 4, tensor_parallel=4)
    problem = PlacementProblem(POD, (need,))
    four = greedy(problem).placed
    two = greedy(replace(problem, needs=(replace(need, replicas=2),), standing=four[:2])).placed
    assert two == four[:2]
    again = greedy(replace(problem, standing=two)).placed
    assert len(again) == 4
    assert all(len(set(one.members[0].gpus)) == 4 for one in again)
    assert not faults(replace(problem, standing=two), again)


def test_a_replacement_is_not_booked_on_what_others_hold_when_the_topology_changes() -> None:
    """A node and some GPUs vanish from the file while replicas stand on them."""
    need = Need("d", 4, 4, tensor_parallel=4)
    before = greedy(PlacementProblem(POD, (need,))).placed
    gone, shrunk = before[0].members[0].node, before[1].members[0].node
    nodes = {name: node for name, node in POD.nodes.items() if name != gone}
    nodes[shrunk] = replace(nodes[shrunk], gpus=nodes[shrunk].gpus[4:])
    edited = replace(POD, nodes=nodes, links=tuple(link for link in POD.links if link.lower != gone))
    problem = PlacementProblem(edited, (need,), before)
    after = greedy(problem)
    assert after.feasible
    assert not faults(problem, after.placed)
    assert greedy(replace(problem, standing=after.placed)).placed == after.placed


def test_closed_nodes_keep_what_they_have_and_get_nothing() -> None:
    need = Need("d", 4, 8, tensor_parallel=8)
    standing = greedy(PlacementProblem(POD, (replace(need, replicas=2),))).placed
    closed = frozenset(name for name in POD.nodes if int(name[1:]) < 8)
    problem = PlacementProblem(POD, (need,), standing, closed=closed)
    placement = greedy(problem)
    assert standing == tuple(one for one in placement.placed if one.replica not in placement.fresh)
    assert not any(
        m.node in closed for one in placement.placed if one.replica in placement.fresh for m in one.members
    )


def test_replicas_without_gpus_share_the_slots_of_hosts_without() -> None:
    hosts = {n: replace(POD.nodes[n], gpus=()) for n in ("n0", "n2")}
    facility = replace(POD, nodes=hosts, links=())
    problem = PlacementProblem(facility, (Need("d", 5, 0),), slots={"n0": 2, "n2": 2})
    placement = greedy(problem)
    assert sorted(nodes_of(placement, "d")) == ["n0", "n0", "n2", "n2"]
    assert placement.unplaced[0].replicas == 1
    assert not faults(problem, placement.placed)


def test_regions_get_their_shares_and_nobody_goes_too_far() -> None:
    sites = {"s1": Site("s1", "eu", "own"), "s2": Site("s2", "us", "colo", cost_factor=2.0)}
    racks = {name: replace(rack, site="s2" if int(name[1:]) >= 4 else "s1") for name, rack in POD.racks.items()}
    facility = replace(POD, sites=sites, racks=racks, distances=(Distance("eu", "us", 0.045),))
    need = Need("d", 4, 8, tensor_parallel=8, regions={"eu": 0.75, "us": 0.25})
    placement = place(PlacementProblem(facility, (need,)), time_limit_s=20.0)
    sites_used = [facility.racks[facility.nodes[n].rack].site for n in nodes_of(placement, "d")]
    assert sorted(sites_used) == ["s1", "s1", "s1", "s2"]
    near = replace(need, regions={}, near="us", reach_s=0.01)
    assert {facility.racks[r].site for r in racks_of(facility, greedy(PlacementProblem(facility, (near,))), "d")} == {
        "s2"
    }
    cheap = place(PlacementProblem(facility, (replace(need, regions={}),)), time_limit_s=20.0)
    assert {facility.racks[r].site for r in racks_of(facility, cheap, "d")} == {"s1"}
    both = replace(need, regions={}, spread_over=frozenset({Domain.PROVIDER}))
    shared = greedy(PlacementProblem(facility, (both,)))
    assert {facility.racks[r].site for r in racks_of(facility, shared, "d")} == {"s1", "s2"}


def test_the_same_problem_has_the_same_answer() -> None:
    needs = tuple(Need(f"d{n}", 2, size, tensor_parallel=size) for n, size in enumerate((8, 4, 4, 2, 1, 1)))
    problem = PlacementProblem(POD, needs)
    assert place(problem, time_limit_s=30.0, seed=7) == place(problem, time_limit_s=30.0, seed=7)


def test_a_site_that_is_full_says_so() -> None:
    facility = replace(POD, sites={"s1": replace(POD.sites["s1"], supply=watts(60.0), reserved=watts(20.0))})
    placement = greedy(PlacementProblem(facility, (Need("d", 4, 8, tensor_parallel=8),)))
    assert len(placement.placed) < 4
    assert "supply of site s1" in placement.unplaced[0].words


def test_movable_replicas_make_room_for_what_has_none_and_no_more_move_than_must() -> None:
    """Four nodes, each half full: a whole one is wanted."""
    four = replace(POD, nodes={n: POD.nodes[n] for n in ("n0", "n2", "n4", "n6")})
    four = replace(four, links=tuple(x for x in POD.links if x.lower in four.nodes or x.lower in POD.switches))
    standing = tuple(
        Placed(f"s{n}-0", f"s{n}", (Member(node, (0, 1, 2, 3)),)) for n, node in enumerate(sorted(four.nodes))
    )
    needs = (*(Need(f"s{n}", 1, 4, tensor_parallel=4) for n in range(4)), Need("big", 1, 8, tensor_parallel=8))
    problem = PlacementProblem(four, needs, standing)
    assert not place(problem, time_limit_s=2.0).feasible
    loose = replace(problem, movable=frozenset(one.replica for one in standing))
    placement = place(loose, time_limit_s=20.0)
    assert placement.feasible
    assert not faults(loose, placement.placed)
    assert len(placement.moved) <= 2
    assert value(placement, Goal.MOVES) == len(placement.moved)


def test_where_nothing_is_to_be_chosen_all_is_proven() -> None:
    need = Need("d", 2, 8, tensor_parallel=8)
    standing = greedy(PlacementProblem(POD, (need,))).placed
    placement = place(PlacementProblem(POD, (need,), standing))
    assert placement.placed == standing
    assert placement.proven


def test_a_gang_larger_than_the_facility_is_told_so() -> None:
    tiny = replace(POD, nodes={"n0": POD.nodes["n0"]}, links=())
    (gap,) = greedy(PlacementProblem(tiny, (Need("d", 1, 8, 4, tensor_parallel=8),))).unplaced
    assert gap.words == "one replica asks for 8 GPUs on each of 4 nodes, and there are 1; add 3 nodes that suit d"


def test_cables_carry_what_comes_in_too() -> None:
    """What sends a little of its own KV on may be sent far more than its node's cables carry."""
    much, little = (BytesPerSecond(rate * GB) for rate in (10_000, 1))
    chain = (
        Need("a", 1, 1, pair=Pair("b", much), spread_over=frozenset()),
        Need("b", 1, 1, pair=Pair("c", little), spread_over=frozenset()),
        Need("c", 1, 1, spread_over=frozenset()),
    )
    problem = PlacementProblem(POD, chain)
    placement = greedy(problem)
    assert not faults(problem, placement.placed)
    assert {gap.deployment for gap in placement.unplaced} == {"a", "b"}


def test_a_group_lies_well_once_another_was_given_up_beside_it() -> None:
    """Of three replicas two share a rack, so one is given up: who got the last two GPUs need not straddle then."""
    two = replace(POD, nodes={name: POD.nodes[name] for name in ("n0", "n2")}, links=())
    held = (Placed("x-0", "x", (Member("n2", tuple(range(5))),)),)
    needs = (Need("a", 4, 3, tensor_parallel=3), Need("b", 1, 2, tensor_parallel=2))
    problem = PlacementProblem(two, needs, held)
    placement = greedy(problem)
    assert [gap.replicas for gap in placement.unplaced] == [2]
    assert not faults(problem, placement.placed)


def test_nothing_is_proven_by_what_a_search_cannot_know() -> None:
    """A movable replica with fewer GPUs than asked for now stays; a search that gave it all would have no place."""
    tiny = replace(POD, nodes={"n0": POD.nodes["n0"]}, links=())
    standing = (Placed("x-0", "x", (Member("n0", (0, 1)),)), Placed("d-0", "d", (Member("n0", (2, 3)),)))
    need = Need("d", 2, 8, tensor_parallel=8)
    placement = place(PlacementProblem(tiny, (need,), standing, movable=frozenset({"d-0"})), time_limit_s=2.0)
    assert placement.placed == standing[::-1]
    assert value(placement, Goal.SHORTFALL) == 1
    assert all(score.bound is None or score.bound <= score.value for score in placement.scores)
