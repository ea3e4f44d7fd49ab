"""Between the planner's core and the wire."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc

from stoker.api.common.v1 import common_pb2
from stoker.api.planner.v1 import planner_pb2, planner_pb2_grpc
from stoker.api.registry.v1 import records_pb2
from stoker.planner.core.loss import Presence
from stoker.planner.core.values import (
    Assignment,
    Condition,
    Deployment,
    Desired,
    Member,
    Node,
    Problem,
    Unplaced,
    Wanted,
    Warming,
)
from stoker.registry.client import FleetView

_TO_RECORD = {
    Wanted.RUN: records_pb2.WANTED_RUN,
    Wanted.RETIRE: records_pb2.WANTED_RETIRE,
    Wanted.DRAIN: records_pb2.WANTED_DRAIN,
}
_FROM_RECORD = {value: wanted for wanted, value in _TO_RECORD.items()}

SERVICE = "stoker.api.planner.v1.PlannerService"


def spec_key(spec: common_pb2.DeploymentSpec) -> str:
    """A name for what a replica runs: equal for specifications that differ in nothing but how many replicas."""
    bare = common_pb2.DeploymentSpec()
    bare.CopyFrom(spec)
    bare.replicas = 0
    bare.ClearField("scaling")
    bare.ClearField("placement")
    return hashlib.sha256(bare.SerializeToString(deterministic=True)).hexdigest()[:16]


def problem_of(
    view: FleetView, presence: Presence, replacing: frozenset[str], overdue: frozenset[str] = frozenset()
) -> Problem:
    """The registry's records as the core sees them; `overdue` are replicas that have retired for too long."""
    return Problem(
        nodes=[_node(node) for node in view.nodes.values()],
        deployments=[_deployment(deployment.spec) for deployment in view.deployments.values()],
        desired={name: _desired(record) for name, record in view.desired.items()},
        assignments=[_assignment(record) for record in view.assignments.values()],
        conditions={name: _condition(replica) for name, replica in view.replicas.items()},
        settling=presence.settling,
        lost=presence.lost,
        replacing=replacing,
        retired=overdue | {name for name, replica in view.replicas.items() if _has_retired(replica)},
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
    )


def _deployment(spec: common_pb2.DeploymentSpec) -> Deployment:
    return Deployment(
        name=spec.name,
        spec=spec_key(spec),
        engine=spec.engine,
        gpus_per_node=spec.gpus_per_node,
        gang_size=max(1, spec.gang_size),
        node_selector=dict(spec.node_selector),
    )


def _assignment(record: records_pb2.Assignment) -> Assignment:
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


class PlannerServicer(planner_pb2_grpc.PlannerServiceServicer):
    """Tells whether this process leads, and what it could not place."""

    def __init__(
        self,
        leading: Callable[[], bool],
        leader: Callable[[], records_pb2.Leader | None],
        unplaced: Callable[[], Sequence[Unplaced]],
    ) -> None:
        self._leading = leading
        self._leader = leader
        self._unplaced = unplaced

    async def GetPlannerStatus(  # noqa: N802
        self,
        request: planner_pb2.GetPlannerStatusRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> planner_pb2.GetPlannerStatusResponse:
        """The status; only the leader knows what is unplaced."""
        return planner_pb2.GetPlannerStatusResponse(
            leading=self._leading(),
            leader=self._leader(),
            unplaced=[
                planner_pb2.Unplaced(deployment=entry.deployment, replicas=entry.replicas, reason=entry.reason)
                for entry in self._unplaced()
            ],
        )
