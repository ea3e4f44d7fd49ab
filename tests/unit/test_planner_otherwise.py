"""Placements as they might be, and what leads from one to another."""

from __future__ import annotations

import pytest

from bench.facilities import Shape, regular
from stoker.planner.core import placement
from stoker.planner.core.changes import Kind, changes
from stoker.planner.core.otherwise import alternatives, first_difference, nodes_named, one_more, with_nodes
from stoker.planner.core.placement import Domain, Goal, Member, Need, Placed, PlacementProblem, Score
from stoker.planner.core.placement.ground import ground

FACILITY = regular(Shape(nodes=8, pod=1))
GROUND = ground(FACILITY)


def at(replica: str, node: str, *gpus: int, deployment: str = "chat") -> Placed:
    return Placed(replica, deployment, (Member(node, gpus),))


def test_nodes_and_racks_can_be_named() -> None:
    assert nodes_named(FACILITY, ["n0", "r1"]) == {"n0", "n4", "n5", "n6", "n7"}
    with pytest.raises(KeyError, match="r9"):
        nodes_named(FACILITY, ["r9"])


def test_an_added_node_is_cabled_and_laid_out_like_the_one_beside_it() -> None:
    more = with_nodes(FACILITY, "dgx-h100", "r1", 2)
    new = [node for name, node in more.nodes.items() if name not in FACILITY.nodes]
    assert [(node.name, node.rack) for node in new] == [("r1-new1", "r1"), ("r1-new2", "r1")]
    like = FACILITY.nodes["n4"]
    assert [(g.index, g.rail, g.numa, g.pcie_root) for g in new[0].gpus] == [
        (g.index, g.rail, g.numa, g.pcie_root) for g in like.gpus
    ]
    assert {gpu.scale_up for gpu in new[0].gpus} == {"r1-new1"}, "NVLink of its own"
    leaves = {link.upper for link in more.links if link.lower == "n4"}
    assert {link.upper for link in more.links if link.lower == "r1-new1"} == leaves


def test_a_tray_is_added_to_the_domain_of_its_rack() -> None:
    from bench.facilities import TRAY

    trays = regular(Shape(nodes=4, node_type=TRAY))
    more = with_nodes(trays, TRAY.name, "r0", 1)
    assert {gpu.scale_up for gpu in more.nodes["r0-new1"].gpus} == {gpu.scale_up for gpu in trays.nodes["n0"].gpus}


def test_other_places_are_on_other_nodes_and_the_rest_stays() -> None:
    problem = PlacementProblem(FACILITY, (Need("chat", 2, 8, spread_over=frozenset({Domain.RACK})),))
    placed = placement.greedy(problem).placed
    found = alternatives(problem, placed, placed[0], GROUND, 2)
    assert len(found.found) == 2
    nodes = [place.members[0].node for place in found.found]
    assert len({*nodes, placed[0].members[0].node, placed[1].members[0].node}) == 4
    racks = {FACILITY.nodes[node].rack for node in nodes}
    assert FACILITY.nodes[placed[1].members[0].node].rack not in racks, "half of them at most in one rack"


def test_where_nothing_else_is_possible_the_reason_is_told() -> None:
    full = tuple(at(f"chat-{number}", f"n{number}", *range(8)) for number in range(8))
    problem = PlacementProblem(FACILITY, (Need("chat", 8, 8, spread_over=frozenset()),))
    found = alternatives(problem, full, full[0], GROUND, 3)
    assert not found.found
    assert found.conflicts[0].limit == "gpus"
    more = one_more(problem, full, "chat", GROUND)
    assert not more.found
    assert more.conflicts


def test_one_more_has_a_place_where_there_is_room() -> None:
    problem = PlacementProblem(FACILITY, (Need("chat", 1, 4),))
    more = one_more(problem, (at("chat-0", "n0", 0, 1, 2, 3),), "chat", GROUND)
    assert len(more.found) == 1
    assert not more.conflicts


def test_the_first_goal_that_differs_is_found() -> None:
    one = (Score(Goal.SHORTFALL, 0), Score(Goal.SPREAD, 3), Score(Goal.COST, 1.0))
    other = (Score(Goal.SHORTFALL, 0), Score(Goal.SPREAD, 2), Score(Goal.COST, 5.0))
    assert first_difference(one, other) == (one[1], other[1])
    assert first_difference(one, one) is None


def test_who_stays_moves_starts_and_stops() -> None:
    before = (at("chat-0", "n0", 0), at("chat-1", "n1", 0), at("chat-2", "n2", 0))
    after = (at("chat-0", "n0", 0), at("chat-1", "n4", 0), at("chat-9", "n5", 0))
    found = changes(before, after, {"chat-1": 1_000.0, "chat-2": 500.0})
    assert found.stay == 1
    assert [(change.kind, change.replica) for change in found.changes] == [
        (Kind.MOVE, "chat-1"),
        (Kind.STOP, "chat-2"),
        (Kind.START, "chat-9"),
    ]
    assert found.warm_tokens == 1_500


def test_another_name_in_the_same_place_is_no_change() -> None:
    found = changes((at("chat-3", "n0", 0),), (at("chat-0", "n0", 0),))
    assert (found.stay, found.changes) == (1, ())
    assert found.warm_tokens == 0


def test_the_same_name_of_another_deployment_is_another_replica() -> None:
    found = changes((at("x-0", "n0", 0),), (at("x-0", "n0", 0, deployment="code"),))
    assert sorted(change.kind.value for change in found.changes) == ["start", "stop"]


def test_a_cache_that_nobody_knows_makes_the_sum_unknown() -> None:
    before = (at("chat-0", "n0", 0), at("chat-1", "n1", 0))
    assert changes(before, (), {"chat-0": 10.0}).warm_tokens is None
