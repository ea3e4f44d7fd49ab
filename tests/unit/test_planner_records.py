"""The planner between records and its core."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stoker.api.common.v1 import common_pb2, placement_pb2
from stoker.api.registry.v1 import records_pb2
from stoker.control.specs import spec_key
from stoker.planner.core.loss import Presence
from stoker.planner.core.placement import Domain, Member
from stoker.planner.core.retiring import since
from stoker.planner.core.units import BytesPerSecond, Watts
from stoker.planner.core.values import Assignment, Condition, Deployment, Node, Wanted, Wishes
from stoker.planner.records import assigned_nodes, deployment_of, problem_of, record_of, retirement_times
from stoker.registry.client import FleetView
from stoker.registry.core.records import Kind, Name, Record

FENCE = common_pb2.Fence(role="planner", revision=7)


def spec(**fields: object) -> common_pb2.DeploymentSpec:
    return common_pb2.DeploymentSpec(**{"name": "chat", "model": "m", "engine": "sim", "replicas": 2, **fields})  # type: ignore[arg-type]


def view_of(*records: tuple[Kind, str, Record]) -> FleetView:
    view = FleetView()
    named: list[tuple[Name, Record]] = [((kind, name), record) for kind, name, record in records]
    view.delta(named, (), 1)
    return view


def standing(**fields: object) -> records_pb2.Assignment:
    return records_pb2.Assignment(
        **{  # type: ignore[arg-type]
            "replica_id": "chat-0",
            "deployment": "chat",
            "spec": spec(env={"a": "1", "b": "2"}),
            "generation": 3,
            "members": [
                records_pb2.GangMember(rank=1, node_id="n2", gpu_indices=[4]),
                records_pb2.GangMember(rank=0, node_id="n1", gpu_indices=[0]),
            ],
            "wanted": records_pb2.WANTED_RUN,
            "rendezvous_port": 29_500,
            "created_revision": 12,
            **fields,
        }
    )


def test_only_the_replica_count_may_change_without_another_spec_key() -> None:
    key = spec_key(spec(env={"a": "1", "b": "2"}))
    assert spec_key(spec(env={"b": "2", "a": "1"}, replicas=9)) == key
    assert spec_key(spec(env={"a": "1", "b": "3"})) != key
    assert spec_key(spec(env={"a": "1", "b": "2"}, engine_args=["--x"])) != key


def test_records_as_the_core_sees_them() -> None:
    view = view_of(
        (
            Kind.NODES,
            "n1",
            common_pb2.Node(
                node_id="n1",
                gpus=[common_pb2.Gpu(index=0), common_pb2.Gpu(index=3)],
                engines=["vllm"],
                labels={"rack": "r"},
                draining=True,
            ),
        ),
        (Kind.DEPLOYMENTS, "chat", records_pb2.Deployment(spec=spec(gpus_per_node=1), generation=4)),
        (Kind.DESIRED, "chat", records_pb2.Desired(deployment="chat", replicas=1, victims=["chat-0"])),
        (Kind.ASSIGNMENTS, "chat-0", standing()),
    )
    presence = Presence(lost=frozenset({"n2"}), settling_until={"n3": 5.0})
    problem = problem_of(view, presence, frozenset({"chat-9"}))
    assert problem.nodes == [Node("n1", frozenset({0, 3}), 0, frozenset({"vllm"}), {"rack": "r"}, draining=True)]
    assert problem.deployments == [Deployment("chat", spec_key(spec(gpus_per_node=1)), "sim", 1, 1, {})]
    assert problem.desired["chat"].victims == ("chat-0",)
    (assignment,) = problem.assignments
    assert assignment.members == (Member("n1", (0,)), Member("n2", (4,))), "the leader first"
    assert problem.lost == {"n2"}
    assert problem.settling == {"n3"}
    assert problem.replacing == {"chat-9"}
    assert assigned_nodes(view) == {"n1", "n2"}


@pytest.mark.parametrize(
    ("state", "members", "condition"),
    [
        (records_pb2.STATE_READY, [records_pb2.STATE_READY, records_pb2.STATE_READY], Condition.READY),
        (records_pb2.STATE_PENDING, [records_pb2.STATE_READY], Condition.NOT_READY),
        (records_pb2.STATE_STOPPED, [records_pb2.STATE_STOPPED, records_pb2.STATE_DRAINING], Condition.NOT_READY),
        (records_pb2.STATE_STOPPED, [records_pb2.STATE_STOPPED, records_pb2.STATE_STOPPED], Condition.GONE),
        (records_pb2.STATE_PENDING, [], Condition.GONE),
    ],
)
def test_a_gang_is_gone_only_when_every_member_has_stopped(
    state: records_pb2.State.ValueType, members: list[records_pb2.State.ValueType], condition: Condition
) -> None:
    replica = records_pb2.Replica(
        replica_id="chat-0", state=state, members=[records_pb2.MemberStatus(state=member) for member in members]
    )
    problem = problem_of(view_of((Kind.REPLICAS, "chat-0", replica)), Presence(), frozenset())
    assert problem.conditions == {"chat-0": condition}


def test_draining_changes_nothing_else_of_what_stands() -> None:
    members = (Member("n1", (0,)), Member("n2", (4,)))
    draining = Assignment("chat-0", "chat", "k", members, Wanted.DRAIN, 29_500)
    record = record_of(draining, standing(), None, FENCE)
    expected = standing(wanted=records_pb2.WANTED_DRAIN, fence=FENCE, created_revision=0)
    assert record == expected


def warmed(**fields: object) -> records_pb2.Desired:
    warmings = [
        records_pb2.Warming(leaf=71, from_replica="chat-0", to_replica="chat-2", tokens=900),
        records_pb2.Warming(leaf=72, from_replica="chat-0", to_replica="chat-1", tokens=500),
        records_pb2.Warming(leaf=73, from_replica="chat-0", to_replica="chat-2", tokens=16),
    ]
    return records_pb2.Desired(deployment="chat", replicas=2, victims=["chat-0"], warmings=warmings)


def test_a_retirement_says_what_to_compute_where_and_how_to_get_there() -> None:
    desired = problem_of(view_of((Kind.DESIRED, "chat", warmed())), Presence(), frozenset()).desired["chat"]
    members = (Member("n1", (0,)), Member("n2", (4,)))
    retires = Assignment("chat-0", "chat", "k", members, Wanted.RETIRE, 29_500, desired.warmings["chat-0"])
    agents = {"chat-1": "h1:7330", "chat-2": "h2:7330"}
    record = record_of(retires, standing(), None, FENCE, agents=agents, retire_timeout_s=30.0)
    retirement = records_pb2.Retirement(
        prefixes=[
            records_pb2.Prefix(leaf=71, successor=0, tokens=900),
            records_pb2.Prefix(leaf=72, successor=1, tokens=500),
            records_pb2.Prefix(leaf=73, successor=0, tokens=16),
        ],
        successors=[
            records_pb2.Successor(replica_id="chat-2", agent_endpoint="h2:7330"),
            records_pb2.Successor(replica_id="chat-1", agent_endpoint="h1:7330"),
        ],
        timeout_s=30.0,
    )
    expected = standing(wanted=records_pb2.WANTED_RETIRE, fence=FENCE, created_revision=0, retirement=retirement)
    assert record == expected
    alone = record_of(retires, standing(), None, FENCE, agents={"chat-1": "h1:7330"}, retire_timeout_s=30.0)
    assert [each.leaf for each in alone.retirement.prefixes] == [72], "who cannot be reached gets nothing"
    again = record_of(replace(retires, wanted=Wanted.RUN), record, None, FENCE)
    assert again == standing(wanted=records_pb2.WANTED_RUN, fence=FENCE, created_revision=0)


def test_a_replica_has_retired_when_its_leader_says_so_or_when_it_takes_too_long() -> None:
    status = records_pb2.MemberStatus(rank=0, retired=True, state=records_pb2.STATE_READY)
    replica = records_pb2.Replica(replica_id="chat-0", state=records_pb2.STATE_READY, members=[status])
    retiring = standing(
        wanted=records_pb2.WANTED_RETIRE, retirement=records_pb2.Retirement(timeout_s=12.0), replica_id="chat-3"
    )
    view = view_of((Kind.REPLICAS, "chat-0", replica), (Kind.ASSIGNMENTS, "chat-3", retiring))
    assert retirement_times(view) == {"chat-3": 12.0}
    problem = problem_of(view, Presence(), frozenset(), overdue=frozenset({"chat-3"}))
    assert problem.retired == {"chat-0", "chat-3"}
    assert problem.assignments[0].wanted is Wanted.RETIRE


def test_how_long_replicas_retire_is_counted_from_when_it_was_first_seen() -> None:
    seen = since({}, ["a"], 10.0)
    seen = since(seen, ["a", "b"], 12.0)
    assert seen == {"a": 10.0, "b": 12.0}
    assert since(seen, ["b"], 13.0) == {"b": 12.0}
    assert since({"b": 12.0}, ["a"], 14.0) == {"a": 14.0}, "called back, and told to retire once more"


def test_a_new_replica_runs_the_specification_of_the_moment() -> None:
    deployment = records_pb2.Deployment(spec=spec(gpus_per_node=1), generation=4)
    record = record_of(Assignment("chat-1", "chat", "k", (Member("n1", (2,)),)), None, deployment, FENCE)
    assert record == records_pb2.Assignment(
        replica_id="chat-1",
        deployment="chat",
        spec=deployment.spec,
        generation=4,
        members=[records_pb2.GangMember(rank=0, node_id="n1", gpu_indices=[2])],
        wanted=records_pb2.WANTED_RUN,
        fence=FENCE,
    )


def test_a_placement_restarts_nothing_and_becomes_wishes() -> None:
    placement = placement_pb2.PlacementPolicy(
        watts_per_gpu=650,
        member_bytes_per_s=2_000_000_000,
        pair="decode",
        pair_bytes_per_s=7,
        spread=placement_pb2.PlacementSpread(domains=[placement_pb2.FAILURE_DOMAIN_ROW]),
        regions=[placement_pb2.RegionShare(region="eu", share=0.6)],
        near="eu",
        reach_s=0.02,
        gpu_types=["h100-sxm"],
    )
    assert spec_key(spec(placement=placement)) == spec_key(spec())
    assert deployment_of(spec(gpus_per_node=8, placement=placement)).wishes == Wishes(
        busy_power=Watts(650),
        peer_rate=BytesPerSecond(2_000_000_000),
        pair="decode",
        pair_rate=BytesPerSecond(7),
        spread_over=frozenset({Domain.ROW}),
        regions={"eu": 0.6},
        near="eu",
        reach_s=0.02,
        gpu_types=frozenset({"h100-sxm"}),
    )
    nowhere = deployment_of(spec(placement=placement_pb2.PlacementPolicy(spread=placement_pb2.PlacementSpread())))
    assert (nowhere.wishes.spread_over, deployment_of(spec()).wishes) == (frozenset(), Wishes())


@pytest.mark.parametrize(
    ("arguments", "group"),
    [
        (["--tensor-parallel-size", "4"], 4),
        (["-tp=2"], 2),
        (["--tensor-parallel-size=4", "-tp", "2"], 2),
        (["--tensor-parallel-size", "3"], 0),
        (["--tensor-parallel-size", "x"], 0),
        (["--tensor-parallel-size"], 0),
        ([], 0),
    ],
)
def test_the_size_of_a_group_is_what_the_engine_is_told(arguments: list[str], group: int) -> None:
    assert deployment_of(spec(gpus_per_node=8, engine_args=arguments)).wishes.tensor_parallel == group


def test_every_domain_of_the_contract_is_known_to_the_placement() -> None:
    for number in placement_pb2.FailureDomain.values()[1:]:
        policy = placement_pb2.PlacementPolicy(spread=placement_pb2.PlacementSpread(domains=[number]))
        assert deployment_of(spec(placement=policy)).wishes.spread_over != frozenset()
