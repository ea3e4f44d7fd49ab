"""Single plans whose cause no lawful history leads to."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from stoker.planner import facility_file
from stoker.planner.core.holding import booked, eased, violations
from stoker.planner.core.placement import Member
from stoker.planner.core.placement.ground import ground
from stoker.planner.core.plan import plan
from stoker.planner.core.siting import merged_with
from stoker.planner.core.values import (
    Assignment,
    Condition,
    Deployment,
    Desired,
    Limits,
    Node,
    Problem,
    Wanted,
)
from tests.support.facilities import hall

VLLM = frozenset({"vllm"})
CHAT = Deployment("chat", "a", "vllm", gpus_per_node=1)


def replica(name: str, node: str, gpu: int) -> Assignment:
    return Assignment(name, "chat", "a", (Member(node, (gpu,)),))


def test_of_two_on_one_gpu_the_one_that_serves_stays_and_the_other_moves() -> None:
    problem = Problem(
        nodes=[Node("n1", frozenset({0}), engines=VLLM), Node("n2", frozenset({0}), engines=VLLM)],
        deployments=[CHAT],
        desired={"chat": Desired(2)},
        assignments=[replica("chat-0", "n1", 0), replica("chat-1", "n1", 0)],
        conditions={"chat-0": Condition.NOT_READY, "chat-1": Condition.READY},
    )
    drawn = plan(problem)
    assert {(put.replica, put.wanted, put.members[0].node) for put in drawn.puts} == {
        ("chat-0", Wanted.DRAIN, "n1"),
        ("chat-2", Wanted.RUN, "n2"),
    }
    assert drawn.why["chat-0"] == "its GPUs are booked twice"


def test_a_deployment_without_a_desired_count_is_left_alone() -> None:
    node = Node("n1", frozenset({0, 1}), engines=VLLM, draining=True)
    problem = Problem(
        nodes=[node],
        deployments=[CHAT],
        assignments=[replica("chat-0", "n1", 0)],
        conditions={"chat-0": Condition.READY},
    )
    assert plan(problem).quiet


def test_a_gpu_that_its_node_no_longer_has_is_nobodys_to_give() -> None:
    problem = Problem(
        nodes=[Node("n1", frozenset({1}), engines=VLLM)],
        deployments=[CHAT],
        desired={"chat": Desired(2)},
        assignments=[replica("chat-0", "n1", 0)],
        conditions={"chat-0": Condition.READY},
    )
    drawn = plan(problem)
    assert [(put.replica, put.members) for put in drawn.puts] == [("chat-1", (Member("n1", (1,)),))]


def test_a_node_that_leads_as_many_gangs_as_it_has_ports_leads_no_more() -> None:
    nodes = [Node(name, frozenset(range(8)), engines=VLLM) for name in ("n1", "n2")]
    gang = Deployment("big", "a", "vllm", gpus_per_node=1, gang_size=2)
    limits = Limits(rendezvous_ports=range(29_500, 29_502))
    drawn = plan(Problem(nodes=nodes, deployments=[gang], desired={"big": Desired(5)}), limits)
    assert [put.rendezvous_port for put in drawn.puts] == [29_500, 29_501, 29_500, 29_501], "two gangs a leader"
    assert {put.members[0].node for put in drawn.puts[2:]} == {"n2"}, "another member leads"
    assert [entry.replicas for entry in drawn.unplaced] == [1]
    assert "widen rendezvous.ports" in drawn.unplaced[0].reason


def test_gangs_led_by_different_nodes_of_one_host_meet_at_different_ports() -> None:
    nodes = [Node(name, frozenset(), cpu_slots=1, engines=VLLM, host="10.0.0.1") for name in ("n1", "n2", "n3", "n4")]
    gang = Deployment("big", "a", "vllm", gang_size=2)
    drawn = plan(Problem(nodes=nodes, deployments=[gang], desired={"big": Desired(2)}))
    assert [put.rendezvous_port for put in drawn.puts] == [29_500, 29_501]


def test_a_small_batch_is_searched_for_where_the_first_look_leaves_something_without_a_place() -> None:
    """The small gangs would take GPUs of the smaller hosts, all three of which the large one needs."""
    nodes = [Node(f"n{number}", frozenset(range(gpus)), engines=VLLM) for number, gpus in enumerate((4, 4, 8))]
    small = Deployment("small", "x", "vllm", gpus_per_node=1, gang_size=2)
    large = Deployment("large", "x", "vllm", gpus_per_node=3, gang_size=3)
    desired = {"small": Desired(2), "large": Desired(1)}
    problem = Problem(nodes=nodes, deployments=[small, large], desired=desired)
    assert plan(problem, Limits(search_s=0.0)).unplaced
    found = plan(problem, Limits(search_s=5.0, search_least=4))
    assert not found.unplaced
    assert len(found.puts) == 3


def test_half_of_an_odd_number_outlives_any_rack_where_there_is_room_for_that() -> None:
    """Of three, two may share a rack only where there is no third with room, and then that is said."""
    chat = Deployment("chat", "x", "vllm", gpus_per_node=2)
    for third, most in ((4, 1), (1, 2)):
        facility = facility_file.parse(hall({"r1": "n1", "r2": "n2", "r3": "n3"}), "facility")
        nodes = [Node(f"n{n}", frozenset(range(gpus)), engines=VLLM) for n, gpus in ((1, 4), (2, 4), (3, third))]
        surface = ground(merged_with(facility, nodes))
        problem = Problem(nodes=nodes, deployments=[chat], desired={"chat": Desired(3)}, ground=surface, applied=True)
        drawn = plan(problem)
        assert not drawn.unplaced
        racks = Counter(surface.facility.nodes[put.members[0].node].rack for put in drawn.puts)
        assert max(racks.values()) == most
        state = booked(replace(problem, assignments=drawn.puts), surface)
        assert len(list(eased(state, "chat"))) == most - 1
        assert not [v for v in violations(replace(problem, assignments=drawn.puts), surface) if v.limit == "spread"]
