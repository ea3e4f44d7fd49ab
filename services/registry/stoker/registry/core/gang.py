"""A replica out of the states of its members."""

from __future__ import annotations

from collections.abc import Mapping

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import records_pb2

# Worst first. A member that never spoke counts as PENDING.
_WORST_FIRST = (
    records_pb2.STATE_BACKOFF,
    records_pb2.STATE_UNHEALTHY,
    records_pb2.STATE_STOPPED,
    records_pb2.STATE_PENDING,
    records_pb2.STATE_STARTING,
    records_pb2.STATE_DRAINING,
    records_pb2.STATE_READY,
)
_BADNESS = {state: place for place, state in enumerate(_WORST_FIRST)}


def obeys(status: records_pb2.MemberStatus, assignment: records_pb2.Assignment) -> bool:
    """Whether a status is about this assignment, not an earlier one with the same id or another node."""
    return status.assignment_revision == assignment.created_revision and any(
        member.rank == status.rank and member.node_id == status.node_id for member in assignment.members
    )


def replica_of(
    assignment: records_pb2.Assignment,
    statuses: Mapping[int, records_pb2.MemberStatus],
    nodes: Mapping[str, common_pb2.Node],
) -> records_pb2.Replica:
    """The replica as the fleet sees it. `statuses` are by rank; those that do not obey are left out."""
    members = [status for _, status in sorted(statuses.items()) if obeys(status, assignment)]
    leader = next((status for status in members if status.rank == 0), None)
    leader_node = next((member.node_id for member in assignment.members if member.rank == 0), "")
    replica = records_pb2.Replica(
        replica_id=assignment.replica_id,
        deployment=assignment.deployment,
        state=_state(assignment, members, leader),
        node_id=leader_node,
        agent_endpoint=nodes[leader_node].grpc_endpoint if leader_node in nodes else "",
        role=assignment.spec.role,
        members=members,
        wanted=assignment.wanted,
        generation=assignment.generation,
    )
    if leader is not None:
        replica.epoch = leader.epoch
        if leader.HasField("engine"):
            replica.engine.CopyFrom(leader.engine)
    return replica


def _state(
    assignment: records_pb2.Assignment,
    members: list[records_pb2.MemberStatus],
    leader: records_pb2.MemberStatus | None,
) -> records_pb2.State.ValueType:
    if leader is None or len(members) < len(assignment.members):
        known = [member.state for member in members]
        return _worst([*known, records_pb2.STATE_PENDING])
    worst = _worst([member.state for member in members])
    # Ready members of different starts are not one gang.
    if worst == records_pb2.STATE_READY and any(member.attempt != leader.attempt for member in members):
        return records_pb2.STATE_STARTING
    return worst


def _worst(states: list[records_pb2.State.ValueType]) -> records_pb2.State.ValueType:
    known = [state if state in _BADNESS else records_pb2.STATE_PENDING for state in states]
    return min(known, key=_BADNESS.__getitem__)
