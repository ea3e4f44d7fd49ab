"""Core values ⇄ the registry's and the node's messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf import timestamp_pb2
from google.protobuf.message import Message

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.common.blocks import pack_keys
from stoker.common.errors import InvalidRequest
from stoker.node_agent.core.digest import Delta, Piece
from stoker.node_agent.core.gang import Peer, State
from stoker.node_agent.core.lifecycle import Member
from stoker.node_agent.core.load import Load
from stoker.node_agent.core.task import Prefix, Retirement, Task
from stoker.node_agent.engine.protocol import EngineInfo

_SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_MOST_PREFIXES = 1_024
_LONGEST_RETIREMENT_S = 3_600.0
_TIERS = {"GPU": common_pb2.TIER_GPU, "CPU": common_pb2.TIER_CPU, "STORAGE": common_pb2.TIER_STORAGE}


def tasks_of(
    assignment: records_pb2.Assignment,
    node_id: str,
    hosts: Mapping[str, str],
    *,
    startup_timeout_s: float,
    drain_timeout_s: float,
) -> list[Task]:
    """What this node shall run of an assignment; `hosts` are addresses by node id.

    Raises InvalidRequest naming the field that makes no sense.
    """
    if not _SAFE_ID.fullmatch(assignment.replica_id):
        raise InvalidRequest.field("replica_id", f"{assignment.replica_id[:80]!r} is not made of A-Z a-z 0-9 . _ -")
    spec, members = assignment.spec, assignment.members
    if sorted(member.rank for member in members) != list(range(len(members))):
        raise InvalidRequest.field("members", f"ranks of {assignment.replica_id} are not 0 to {len(members) - 1}")
    head = next((member.node_id for member in members if member.rank == 0), "")
    return [
        Task(
            replica_id=assignment.replica_id,
            deployment=assignment.deployment,
            revision=assignment.created_revision,
            model=spec.model,
            served_model_name=spec.served_model_name or spec.name or assignment.deployment,
            engine=spec.engine or "vllm",
            rank=member.rank,
            size=len(members),
            engine_args=tuple(spec.engine_args),
            env=dict(spec.env),
            gpu_indices=tuple(member.gpu_indices),
            gpus_per_node=spec.gpus_per_node,
            head_host=hosts.get(head, ""),
            rendezvous_port=assignment.rendezvous_port,
            lora_adapters=tuple((adapter.name, adapter.path) for adapter in spec.lora_adapters),
            startup_timeout_s=spec.startup_timeout_s or startup_timeout_s,
            drain_timeout_s=spec.drain_timeout_s or drain_timeout_s,
            max_output_tokens=spec.max_output_tokens,
            drain=assignment.wanted == records_pb2.WANTED_DRAIN,
            retirement=_retirement(assignment) if assignment.wanted == records_pb2.WANTED_RETIRE else None,
        )
        for member in members
        if member.node_id == node_id
    ]


def _retirement(assignment: records_pb2.Assignment) -> Retirement:
    asked = assignment.retirement
    heirs = [heir.replica_id for heir in asked.successors]
    return Retirement(
        prefixes=tuple(
            Prefix(each.leaf, heirs[each.successor], each.tokens)
            for each in asked.prefixes[:_MOST_PREFIXES]
            if each.successor < len(heirs)
        ),
        agents={heir.replica_id: heir.agent_endpoint for heir in asked.successors},
        timeout_s=min(_LONGEST_RETIREMENT_S, asked.timeout_s) if asked.timeout_s > 0 else 0.0,
    )


def peers_of(statuses: Iterable[records_pb2.MemberStatus], task: Task) -> dict[int, Peer]:
    """What the other members of a task's gang last said of this very assignment."""
    return {
        status.rank: Peer(status.rank, state_from(status.state), status.attempt, running=status.pid > 0)
        for status in statuses
        if status.replica_id == task.replica_id
        and status.rank != task.rank
        and status.assignment_revision == task.revision
    }


def state_from(value: records_pb2.State.ValueType) -> State:
    """The state a message names; one that this version does not know counts as PENDING."""
    name = records_pb2.State.Name(value).removeprefix("STATE_") if value in records_pb2.State.values() else ""
    return State[name] if name in State.__members__ else State.PENDING


def engine_info(
    info: EngineInfo, *, http_url: str, kind: str, tokenizer_sha256: str, max_num_seqs: int, data_parallel: int
) -> records_pb2.EngineInfo:
    """An engine as others need to know it."""
    return records_pb2.EngineInfo(
        http_url=http_url,
        model_names=[info.model, *info.lora_adapters],
        block_size=info.block_size or 0,
        total_blocks=info.kv_blocks or 0,
        max_model_len=info.max_model_len or 0,
        tokenizer_sha256=tokenizer_sha256,
        kind=kind,
        version=info.version or "",
        max_num_seqs=max_num_seqs,
        data_parallel=data_parallel,
    )


def status_of(
    member: Member,
    *,
    node_id: str,
    incarnation: int,
    pid: int,
    since_wall_s: float,
    engine: records_pb2.EngineInfo | None,
    last_error: str,
    retired: bool = False,
    warmed_tokens: int = 0,
) -> records_pb2.MemberStatus:
    """A member's status as reported."""
    since = timestamp_pb2.Timestamp()
    since.FromMicroseconds(int(since_wall_s * 1e6))
    task = member.task
    return records_pb2.MemberStatus(
        replica_id=task.replica_id,
        deployment=task.deployment,
        rank=task.rank,
        node_id=node_id,
        incarnation=incarnation,
        assignment_revision=task.revision,
        state=records_pb2.State.Value(f"STATE_{member.state.value}"),
        attempt=member.attempt,
        epoch=member.epoch,
        pid=pid,
        engine=engine if task.leads else None,
        last_error=last_error,
        exit_code=member.exit_code,
        since=since,
        startup_s=member.startup_s,
        first_start=member.first_start,
        retired=retired,
        warmed_tokens=warmed_tokens,
    )


def load_of(
    replica_id: str, epoch: int, sequence: int, load: Load, ranks: Iterable[Load], *, relayed: int, now: float
) -> registry_pb2.ReplicaLoad:
    """A replica's load as reported, and that of each rank where it has several; unknown fields stay unset."""
    known = _known(load, registry_pb2.ReplicaLoad)
    return registry_pb2.ReplicaLoad(
        replica_id=replica_id,
        epoch=epoch,
        sequence=sequence,
        relayed=relayed,
        age_ms=max(0, round((now - load.at) * 1000)),
        ranks=[registry_pb2.RankLoad(**_known(rank, registry_pb2.RankLoad)) for rank in ranks],
        **known,
    )


def _known(load: Load, message: type[Message]) -> dict[str, Any]:
    """What is known of the fields that a load and a message have in common: names and types are the same."""
    names = message.DESCRIPTOR.fields_by_name.keys() & Load.__dataclass_fields__.keys()
    return {name: value for name in names if (value := getattr(load, name)) is not None}


def delta_of(replica_id: str, dp_rank: int, delta: Delta) -> registry_pb2.DigestUpdate:
    """A change of a digest."""
    return registry_pb2.DigestUpdate(
        replica_id=replica_id,
        epoch=delta.epoch,
        sequence=delta.sequence,
        tier=_TIERS[delta.tier],
        added=pack_keys(delta.added),
        removed=pack_keys(delta.removed),
        xor_digest=delta.xor,
        dp_rank=dp_rank,
        count=delta.count,
    )


def piece_of(replica_id: str, dp_rank: int, piece: Piece) -> registry_pb2.DigestUpdate:
    """A part of a digest's snapshot."""
    return registry_pb2.DigestUpdate(
        replica_id=replica_id,
        epoch=piece.epoch,
        sequence=piece.sequence,
        tier=_TIERS[piece.tier],
        snapshot=True,
        more=piece.more,
        added=pack_keys(piece.keys),
        xor_digest=piece.xor,
        dp_rank=dp_rank,
        count=piece.count,
    )
