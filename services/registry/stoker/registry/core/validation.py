"""What the registry refuses, each bad field named with its fix."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.common import log_buckets
from stoker.common.errors import FieldViolation, InvalidRequest
from stoker.registry.core.demand import MAX_MODELS
from stoker.registry.core.dispatches import MAX_AGE_MS, MAX_DISPATCHES, MAX_KEYS, MAX_TOKENS

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_REPLICA = re.compile(r"[a-z0-9][a-z0-9-]{0,78}")
_NODE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_ENV = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ENDPOINT = re.compile(r"\S+:\d{1,5}")

MAX_LAST_ERROR_BYTES = 4096
_MAX_TIER = 15
_MAX_RANKS = 256
"""Data-parallel ranks of one replica."""
MAX_WRITES = 100
"""Assignments, or desired counts, in one call: etcd takes 128 operations in a transaction."""


@dataclass(frozen=True)
class Limits:
    """Bounds of what may be asked for."""

    engines: tuple[str, ...] = ("vllm", "sim")
    replicas: int = 10_000
    gang_size: int = 64
    gpus_per_node: int = 64
    record_bytes: int = 128 * 1024
    members_per_node: int = 60
    """Written in one transaction with the node, together with as many removals."""
    keys_per_update: int = 1_000_000


ROLES = ("planner", "scaler")
"""What there is to lead."""

MAX_LOAD_AGE_MS = 3_600_000
_MAX_MODEL_BYTES = 512
_MAX_DEPLOYMENTS = 64

# Far above what one replica can have, far below what spoils a sum. Counters go on for years.
_REQUESTS, _TOKENS, _EVER = 1e6, 1e9, 1e15
_LOAD_BOUNDS: Mapping[Any, float] = {
    "running": _REQUESTS,
    "waiting": _REQUESTS,
    "relayed": _REQUESTS,
    "kv_usage": 1.0,
    "active_tokens": _TOKENS,
    "queued_prefill_tokens": _TOKENS,
    "prefill_tokens_per_s": _TOKENS,
    "cache_query_tokens": _EVER,
    "cache_hit_tokens": _EVER,
    "prompt_tokens": _EVER,
    "generation_tokens": _EVER,
    "requests": _EVER,
    "ttft_sum_s": _EVER,
    "ttft_count": _EVER,
    "itl_sum_s": _EVER,
    "itl_count": _EVER,
    "queue_sum_s": _EVER,
    "queue_count": _EVER,
    "prefill_sum_s": _EVER,
    "prefill_count": _EVER,
    "cached_prompt_tokens": _EVER,
    "preemptions": _EVER,
}

_DEMAND_BOUNDS: Mapping[str, float] = {
    "arrivals": _EVER,
    "prompt_tokens": _EVER,
    "predicted_cached_tokens": _EVER,
    "compared_tokens": _EVER,
    "cached_tokens": _EVER,
    "output_tokens": _EVER,
    "finished": _EVER,
    "failed": _EVER,
    "refused": _EVER,
    "cancelled": _EVER,
    "judged": _EVER,
    "within_slo": _EVER,
    "queued": _REQUESTS,
    "held": _REQUESTS,
    "in_flight": _REQUESTS,
    "oldest_queued_s": _EVER,
    "prompt_tokens_squared": _EVER * _EVER,
}

Violations = Iterator[FieldViolation]


def require(violations: Iterable[FieldViolation]) -> None:
    """Raises InvalidRequest that names every field at fault, if there is one."""
    fields = tuple(violations)
    if fields:
        raise InvalidRequest("; ".join(f"{f.field}: {f.description}" for f in fields), fields=fields)


def deployment(spec: common_pb2.DeploymentSpec, limits: Limits) -> Violations:
    """What is wrong with a specification."""
    yield from name("spec.name", spec.name)
    if not spec.model.strip():
        yield FieldViolation("spec.model", "is empty; give a path on the hosts or a Hugging Face id")
    elif "\0" in spec.model:
        yield FieldViolation("spec.model", "holds a NUL byte, which no process can be given")
    if spec.engine not in limits.engines:
        yield FieldViolation("spec.engine", f"{spec.engine!r} is unknown; use one of {', '.join(limits.engines)}")
    yield from _at_most("spec.replicas", spec.replicas, limits.replicas)
    yield from _at_most("spec.gang_size", spec.gang_size, limits.gang_size)
    yield from _at_most("spec.gpus_per_node", spec.gpus_per_node, limits.gpus_per_node)
    yield from _at_most("spec.startup_timeout_s", spec.startup_timeout_s, 86_400)
    yield from _at_most("spec.drain_timeout_s", spec.drain_timeout_s, 86_400)
    if spec.role not in common_pb2.Role.values():
        yield FieldViolation("spec.role", f"{spec.role} is unknown to this registry; use BOTH, PREFILL or DECODE")
    for key, value in spec.env.items():
        if not _ENV.fullmatch(key):
            yield FieldViolation(f"spec.env[{key!r}]", "is no name of an environment variable")
        if "\0" in value:
            yield FieldViolation(f"spec.env[{key!r}]", "holds a NUL byte, which no process can be given")
    for place, argument in enumerate(spec.engine_args):
        if "\0" in argument:
            yield FieldViolation(f"spec.engine_args[{place}]", "holds a NUL byte, which no process can be given")
    yield from _adapters(spec.lora_adapters)
    if spec.ByteSize() > limits.record_bytes:
        yield FieldViolation("spec", f"is {spec.ByteSize()} bytes; at most {limits.record_bytes} are kept")


def _adapters(adapters: Sequence[common_pb2.LoraAdapter]) -> Violations:
    seen = set()
    for place, adapter in enumerate(adapters):
        if not adapter.name or not adapter.path:
            yield FieldViolation(f"spec.lora_adapters[{place}]", "needs both a name and a path")
        if adapter.name in seen:
            yield FieldViolation(f"spec.lora_adapters[{place}].name", f"{adapter.name!r} is there twice; rename one")
        seen.add(adapter.name)


def scale(deployment_name: str, replicas: int, limits: Limits) -> Violations:
    """What is wrong with a wish to scale."""
    yield from name("name", deployment_name)
    yield from _at_most("replicas", replicas, limits.replicas)


def desired(puts: Sequence[records_pb2.Desired], removed: Sequence[str], limits: Limits) -> Violations:
    """What is wrong with a batch of desired counts."""
    yield from batch("desired", [put.deployment for put in puts], removed)
    for place, put in enumerate(puts):
        yield from name(f"desired[{place}].deployment", put.deployment)
        yield from _at_most(f"desired[{place}].replicas", put.replicas, limits.replicas)
        if put.ByteSize() > limits.record_bytes:
            yield FieldViolation(
                f"desired[{place}]", f"is {put.ByteSize()} bytes; at most {limits.record_bytes} are kept"
            )


def name(field: str, value: str) -> Violations:
    """What is wrong with the name of a deployment, or of a role."""
    if not _NAME.fullmatch(value):
        yield FieldViolation(
            field, f"{value[:80]!r} is no name; use 1 to 63 of a-z, 0-9 and -, with - neither first nor last"
        )


def replica_id(field: str, value: str) -> Violations:
    """What is wrong with a replica's id."""
    if not _REPLICA.fullmatch(value):
        yield FieldViolation(field, f"{value[:80]!r} is no replica id; it is a deployment's name, - and an ordinal")


def node_id(field: str, value: str) -> Violations:
    """What is wrong with a node's id."""
    if not _NODE.fullmatch(value):
        yield FieldViolation(field, f"{value[:80]!r} is no node id; use 1 to 253 letters, digits, -, _ and .")


def hello(message: registry_pb2.Hello, limits: Limits) -> Violations:
    """What is wrong with an agent's introduction."""
    node = message.node
    yield from node_id("hello.node.node_id", node.node_id)
    if node.incarnation <= 0:
        yield FieldViolation("hello.node.incarnation", "must be positive: the time of the agent's start in ns")
    if not _ENDPOINT.fullmatch(node.grpc_endpoint):
        yield FieldViolation("hello.node.grpc_endpoint", f"{node.grpc_endpoint[:80]!r} is not host:port")
    if node.ByteSize() > limits.record_bytes:
        yield FieldViolation("hello.node", f"is {node.ByteSize()} bytes; at most {limits.record_bytes} are kept")
    if len(message.members) > limits.members_per_node:
        yield FieldViolation(
            "hello.members", f"{len(message.members)} members; a node runs at most {limits.members_per_node}"
        )
    for place, status in enumerate(message.members):
        yield from member(f"hello.members[{place}]", status, node, limits)


def member(field: str, status: records_pb2.MemberStatus, node: common_pb2.Node, limits: Limits) -> Violations:
    """What is wrong with a status that `node` reports."""
    yield from replica_id(f"{field}.replica_id", status.replica_id)
    if (status.node_id, status.incarnation) != (node.node_id, node.incarnation):
        yield FieldViolation(
            f"{field}.node_id", f"speaks for {status.node_id!r} ({status.incarnation}); an agent speaks for itself"
        )
    yield from _at_most(f"{field}.rank", status.rank, limits.gang_size - 1)
    yield from _at_most(f"{field}.engine.data_parallel", status.engine.data_parallel, _MAX_RANKS)
    if len(status.last_error.encode()) > MAX_LAST_ERROR_BYTES:
        yield FieldViolation(f"{field}.last_error", f"is longer than {MAX_LAST_ERROR_BYTES} bytes; send its end")
    if status.ByteSize() > limits.record_bytes:
        yield FieldViolation(field, f"is {status.ByteSize()} bytes; at most {limits.record_bytes} are kept")


def load(field: str, value: registry_pb2.ReplicaLoad) -> Violations:
    """What is wrong with a replica's load: figures that no engine has would send all requests to it, or none."""
    yield from _figures(field, value, value.replica_id)
    yield from _at_most(f"{field}.age_ms", value.age_ms, MAX_LOAD_AGE_MS)
    yield from _at_most(f"{field}.ranks", len(value.ranks), _MAX_RANKS)
    for number, rank in enumerate(value.ranks):
        yield from _figures(f"{field}.ranks[{number}]", rank, value.replica_id)


def _figures(field: str, value: registry_pb2.ReplicaLoad | registry_pb2.RankLoad, replica_id: str) -> Violations:
    for descriptor, figure in value.ListFields():
        bound = _LOAD_BOUNDS.get(descriptor.name)
        if bound is not None and not 0 <= figure <= bound:  # nor is NaN
            yield FieldViolation(
                f"{field}.{descriptor.name}", f"{figure} of {replica_id[:80]!r} is not in 0 to {bound:g}"
            )


def digest(update: registry_pb2.DigestUpdate, limits: Limits) -> Violations:
    """What is wrong with a digest update."""
    for field, packed in (("added", update.added), ("removed", update.removed)):
        if len(packed) % 8:
            yield FieldViolation(f"digest.{field}", f"{len(packed)} bytes are not a whole number of 8-byte keys")
        yield from _at_most(f"digest.{field}", len(packed) // 8, limits.keys_per_update)
    # Tiers of later versions pass; each is a series of its own, so there may not be any number.
    if not 0 <= update.tier <= _MAX_TIER:
        yield FieldViolation("digest.tier", f"must be from 0 to {_MAX_TIER}, is {update.tier}")
    yield from _at_most("digest.dp_rank", update.dp_rank, _MAX_RANKS - 1)
    if update.snapshot and update.removed:
        yield FieldViolation("digest.removed", "a snapshot removes nothing; leave it empty")


def fence(value: common_pb2.Fence, writer: str = "") -> Violations:
    """What is wrong with the right to write. `writer` is the one role that may; empty for any."""
    yield from name("fence.role", value.role)
    if writer and value.role != writer:
        yield FieldViolation("fence.role", f"{value.role[:80]!r} does not write this; only {writer!r} does")
    if value.revision <= 0:
        yield FieldViolation("fence.revision", "is missing; acquire leadership first")


def assignments(puts: Sequence[records_pb2.Assignment], deletes: Sequence[str], limits: Limits) -> Violations:
    """What is wrong with a batch of assignments."""
    yield from batch("puts", [put.replica_id for put in puts], deletes)
    for place, put in enumerate(puts):
        field = f"puts[{place}]"
        yield from replica_id(f"{field}.replica_id", put.replica_id)
        yield from name(f"{field}.deployment", put.deployment)
        if put.replica_id.rpartition("-")[0] != put.deployment:
            yield FieldViolation(f"{field}.replica_id", f"{put.replica_id!r} is not {put.deployment}-<ordinal>")
        if [m.rank for m in put.members] != list(range(max(1, put.spec.gang_size))):
            yield FieldViolation(
                f"{field}.members", f"needs ranks 0 to {max(1, put.spec.gang_size) - 1}, in order, as gang_size says"
            )
        for m in put.members:
            yield from node_id(f"{field}.members[{m.rank}].node_id", m.node_id)
        if put.ByteSize() > limits.record_bytes:
            yield FieldViolation(field, f"is {put.ByteSize()} bytes; at most {limits.record_bytes} are kept")


def batch(field: str, puts: Sequence[str], deletes: Sequence[str]) -> Violations:
    """What is wrong with a batch of writes, by name."""
    total = len(puts) + len(deletes)
    if total == 0:
        yield FieldViolation(field, "is empty, and nothing is to be removed: there is nothing to write")
    if total > MAX_WRITES:
        yield FieldViolation(field, f"{total} writes in one call; at most {MAX_WRITES} fit in one transaction, split")
    counts: Mapping[str, int] = {n: [*puts, *deletes].count(n) for n in [*puts, *deletes][: MAX_WRITES + 1]}
    for n, count in counts.items():
        if count > 1:
            yield FieldViolation(field, f"{n!r} is written {count} times; once each")


def watch(request: registry_pb2.WatchRequest) -> Violations:
    """What is wrong with a wish to watch."""
    known = set(registry_pb2.Topic.values()) - {registry_pb2.TOPIC_UNSPECIFIED}
    if not request.topics:
        yield FieldViolation("topics", "is empty; name at least one")
    for place, topic in enumerate(request.topics):
        if topic not in known:
            yield FieldViolation(f"topics[{place}]", f"{topic} is unknown to this registry; leave it out")
    if len(request.deployments) > 1000:
        yield FieldViolation("deployments", f"{len(request.deployments)} names; at most 1000, or none for all")
    if len(request.watcher) > 253:
        yield FieldViolation("watcher", "is longer than 253 characters")


def announcement(request: registry_pb2.AnnounceRequest, router_id: str) -> Violations:
    """What is wrong with a batch of dispatches as such; `router_id` is the stream's, empty before it is known."""
    if not 1 <= len(request.router_id.encode()) <= 253:
        yield FieldViolation("router_id", "needs 1 to 253 bytes, unique per process")
    elif router_id and request.router_id != router_id:
        yield FieldViolation("router_id", "a stream speaks for one router; open another")
    yield from _at_most("dispatches", len(request.dispatches), MAX_DISPATCHES)
    if request.HasField("demand"):
        yield from _at_most("demand.demand", len(request.demand.demand), MAX_MODELS)
        yield from _at_most("demand.age_ms", request.demand.age_ms, MAX_AGE_MS)
        if request.demand.began_ns <= 0:
            yield FieldViolation("demand.began_ns", "must be positive: when the counters began, in ns since 1970")


def dispatch(field: str, value: registry_pb2.Dispatch) -> Violations:
    """What is wrong with one dispatch."""
    yield from replica_id(f"{field}.replica_id", value.replica_id)
    for part, packed in (("keys", value.keys), ("touched", value.touched)):
        if len(packed) % 8:
            yield FieldViolation(f"{field}.{part}", f"{len(packed)} bytes are not a whole number of 8-byte keys")
        yield from _at_most(f"{field}.{part}", len(packed) // 8, MAX_KEYS)
    yield from _at_most(f"{field}.dp_rank", value.dp_rank, _MAX_RANKS - 1)
    # Load that is not there would turn requests away until it ages.
    yield from _at_most(f"{field}.prefill_tokens", value.prefill_tokens, MAX_TOKENS)
    yield from _at_most(f"{field}.kv_tokens", value.kv_tokens, MAX_TOKENS)
    yield from _at_most(f"{field}.age_ms", value.age_ms, MAX_AGE_MS)


def demand(field: str, value: registry_pb2.Demand) -> Violations:
    """What is wrong with the demand for one model: figures that nobody sees would start replicas without end."""
    if not 1 <= len(value.model.encode()) <= _MAX_MODEL_BYTES:
        yield FieldViolation(f"{field}.model", f"needs 1 to {_MAX_MODEL_BYTES} bytes")
    yield from _at_most(f"{field}.deployments", len(value.deployments), _MAX_DEPLOYMENTS)
    for deployment_name in value.deployments[:_MAX_DEPLOYMENTS]:
        yield from name(f"{field}.deployments", deployment_name)
    # Thousands a second come: this is short rather than general.
    for figure_name, bound in _DEMAND_BOUNDS.items():
        if not 0 <= (figure := getattr(value, figure_name)) <= bound:  # nor is NaN
            yield FieldViolation(f"{field}.{figure_name}", f"{figure} is not in 0 to {bound:g}")
    for histogram, times in (("ttft", value.ttft), ("itl", value.itl)):
        if len(times.counts) > log_buckets.BUCKETS:
            yield from _at_most(f"{field}.{histogram}.counts", len(times.counts), log_buckets.BUCKETS)
        elif not 0 <= times.sum_s <= _EVER or max(times.counts, default=0) > _EVER:
            yield FieldViolation(f"{field}.{histogram}", f"holds a figure that is not in 0 to {_EVER:g}")


def leadership(role: str, candidate: str, ttl_ms: int) -> Violations:
    """What is wrong with a wish to lead."""
    if role not in ROLES:
        yield FieldViolation("role", f"{role[:80]!r} is none; it is one of {', '.join(ROLES)}")
    if not candidate or len(candidate) > 253:
        yield FieldViolation("candidate", "needs 1 to 253 characters, unique per process")
    if not 1_000 <= ttl_ms <= 60_000:
        yield FieldViolation("ttl_ms", f"{ttl_ms} is not in 1000 to 60000")


def _at_most(field: str, value: int, bound: int) -> Violations:
    if value > bound:
        yield FieldViolation(field, f"{value} is too large; at most {bound}")
