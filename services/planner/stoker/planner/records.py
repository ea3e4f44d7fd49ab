"""Between the registry's records and the planner's core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from stoker.api.common.v1 import common_pb2, placement_pb2
from stoker.api.registry.v1 import records_pb2
from stoker.control.specs import spec_key
from stoker.planner.core.loss import Presence
from stoker.planner.core.placement import Domain, Member
from stoker.planner.core.units import BytesPerSecond, Watts
from stoker.planner.core.values import (
    Assignment,
    Condition,
    Deployment,
    Desired,
    Node,
    Problem,
    Wanted,
    Warming,
    Wishes,
)
from stoker.registry.client import FleetView

_TO_RECORD = {
    Wanted.RUN: records_pb2.WANTED_RUN,
    Wanted.RETIRE: records_pb2.WANTED_RETIRE,
    Wanted.DRAIN: records_pb2.WANTED_DRAIN,
}
_FROM_RECORD = {value: wanted for wanted, value in _TO_RECORD.items()}

_DOMAINS = {placement_pb2.FailureDomain.Value(f"FAILURE_DOMAIN_{domain.name}"): domain for domain in Domain}
_GROUP_SIZE = ("--tensor-parallel-size", "-tp")


def problem_of(
    view: FleetView,
    presence: Presence,
    replacing: frozenset[str],
    overdue: frozenset[str] = frozenset(),
    moves: Mapping[str, tuple[Member, ...]] | None = None,
) -> Problem:
    """The registry's records as the core sees them; `overdue` are replicas that have retired for too long, `moves`
    what an operator moves."""
    return Problem(
        nodes=[_node(node) for node in view.nodes.values()],
        deployments=[deployment_of(deployment.spec) for deployment in view.deployments.values()],
        desired={name: _desired(record) for name, record in view.desired.items()},
        assignments=[assignment_of(record) for record in view.assignments.values()],
        conditions={name: _condition(replica) for name, replica in view.replicas.items()},
        settling=presence.settling,
        lost=presence.lost,
        replacing=replacing,
        retired=overdue | {name for name, replica in view.replicas.items() if _has_retired(replica)},
        moves=moves or {},
    )


def retirement_times(view: FleetView) -> dict[str, float]:
    """Replicas that are to retire, with the longest time that may take, in seconds."""
    return {
        name: record.retirement.timeout_s
        for name, record in view.assignments.items()
        if record.wanted == records_pb2.WANTED_RETIRE
    }


def _has_retired(replica: records_pb2.Replica) -> bool:
    return any(member.rank == 0 and member.retired for member in replica.members)


def _desired(record: records_pb2.Desired) -> Desired:
    warmings: dict[str, list[Warming]] = {}
    for each in record.warmings:
        warmings.setdefault(each.from_replica, []).append(Warming(each.leaf, each.to_replica, each.tokens))
    return Desired(record.replicas, tuple(record.victims), {name: tuple(theirs) for name, theirs in warmings.items()})


def assigned_nodes(view: FleetView) -> frozenset[str]:
    """All nodes that some assignment names."""
    return frozenset(member.node_id for record in view.assignments.values() for member in record.members)


def record_of(
    assignment: Assignment,
    standing: records_pb2.Assignment | None,
    deployment: records_pb2.Deployment | None,
    fence: common_pb2.Fence,
    agents: Mapping[str, str] | None = None,
    retire_timeout_s: float = 0.0,
) -> records_pb2.Assignment:
    """An assignment as the record to write: what stands keeps what it runs, a new one runs its deployment's
    specification. One of `standing` and `deployment` must be there.

    `agents` are host:port by replica, for those that take over the prompts of one that retires within
    `retire_timeout_s`.
    """
    record = records_pb2.Assignment()
    if standing is not None:
        record.CopyFrom(standing)
        record.created_revision = 0
    elif deployment is not None:
        record.replica_id, record.deployment = assignment.replica, assignment.deployment
        record.spec.CopyFrom(deployment.spec)
        record.generation = deployment.generation
        record.rendezvous_port = assignment.rendezvous_port
        for rank, member in enumerate(assignment.members):
            record.members.add(rank=rank, node_id=member.node, gpu_indices=member.gpus)
    else:
        raise ValueError(f"{assignment.replica} is new, and its deployment is not there")
    record.wanted = _TO_RECORD[assignment.wanted]
    record.ClearField("retirement")
    if assignment.wanted is Wanted.RETIRE:
        record.retirement.CopyFrom(_retirement(assignment.warmings, agents or {}, retire_timeout_s))
    record.fence.CopyFrom(fence)
    return record


def _retirement(warmings: Sequence[Warming], agents: Mapping[str, str], timeout_s: float) -> records_pb2.Retirement:
    known = [warming for warming in warmings if agents.get(warming.successor)]
    places = {name: place for place, name in enumerate(dict.fromkeys(warming.successor for warming in known))}
    return records_pb2.Retirement(
        prefixes=[
            records_pb2.Prefix(leaf=each.leaf, successor=places[each.successor], tokens=each.tokens) for each in known
        ],
        successors=[records_pb2.Successor(replica_id=name, agent_endpoint=agents[name]) for name in places],
        timeout_s=timeout_s,
    )


def _node(node: common_pb2.Node) -> Node:
    return Node(
        id=node.node_id,
        gpus=frozenset(gpu.index for gpu in node.gpus),
        cpu_slots=node.cpu_slots,
        engines=frozenset(node.engines),
        labels=dict(node.labels),
        draining=node.draining,
        host=node.host,
    )


def deployment_of(spec: common_pb2.DeploymentSpec) -> Deployment:
    """A specification as the core sees it."""
    return Deployment(
        name=spec.name,
        spec=spec_key(spec),
        engine=spec.engine,
        gpus_per_node=spec.gpus_per_node,
        gang_size=max(1, spec.gang_size),
        node_selector=dict(spec.node_selector),
        wishes=_wishes(spec),
    )


def _wishes(spec: common_pb2.DeploymentSpec) -> Wishes:
    placement = spec.placement
    spread = placement.spread
    return Wishes(
        tensor_parallel=placement.tensor_parallel or _group_size(spec),
        busy_power=Watts(placement.watts_per_gpu) if placement.HasField("watts_per_gpu") else None,
        peer_rate=BytesPerSecond(placement.member_bytes_per_s),
        pair=placement.pair,
        pair_rate=BytesPerSecond(placement.pair_bytes_per_s),
        spread_over=(
            frozenset(_DOMAINS[domain] for domain in spread.domains if domain in _DOMAINS)
            if placement.HasField("spread")
            else None
        ),
        largest_share=spread.largest_share if spread.HasField("largest_share") else None,
        regions={each.region: each.share for each in placement.regions},
        near=placement.near,
        reach_s=placement.reach_s if placement.HasField("reach_s") else None,
        gpu_types=frozenset(placement.gpu_types),
        weight=max(1, placement.weight),
    )


def _group_size(spec: common_pb2.DeploymentSpec) -> int:
    """What the engine's arguments say, where a member's GPUs can be so divided; 0 where they say nothing."""
    words = [word for argument in spec.engine_args for word in argument.split("=", 1)]
    said = [value for name, value in pairwise(words) if name in _GROUP_SIZE and value.isascii() and value.isdigit()]
    size = int(said[-1][:6]) if said else 0
    return size if size and spec.gpus_per_node % size == 0 else 0


def assignment_of(record: records_pb2.Assignment) -> Assignment:
    """An assignment as the core sees it, its members in order of rank."""
    members = sorted(record.members, key=lambda member: member.rank)
    return Assignment(
        replica=record.replica_id,
        deployment=record.deployment,
        spec=spec_key(record.spec),
        members=tuple(Member(member.node_id, tuple(member.gpu_indices)) for member in members),
        wanted=_FROM_RECORD.get(record.wanted, Wanted.RUN),
        rendezvous_port=record.rendezvous_port,
    )


def _condition(replica: records_pb2.Replica) -> Condition:
    if all(member.state == records_pb2.STATE_STOPPED for member in replica.members):
        return Condition.GONE
    return Condition.READY if replica.state == records_pb2.STATE_READY else Condition.NOT_READY
