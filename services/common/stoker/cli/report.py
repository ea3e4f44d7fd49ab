"""What `stoker status` shows: one plain value, and tables made of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.cli.fleet import Fleet, last_error, state_name
from stoker.cli.output import or_dash
from stoker.cli.parity import OK, PENDING
from stoker.cli.scaler_report import kind_name
from stoker.local.state import StackState

_COLOURS = {
    "ready": "green",
    "starting": "yellow",
    "retiring": "cyan",
    "draining": "cyan",
    "backoff": "red",
    "unhealthy": "red",
}


def as_json(
    fleet: Fleet, parity: Mapping[str, str], local: StackState | None = None, only: str = ""
) -> dict[str, Any]:
    """The fleet as plain values, `parity` by replica. What is unknown is null, which is not zero."""
    records = fleet.records
    deployments = [d for d in records.deployments if not only or d.spec.name == only]
    names = {d.spec.name for d in deployments}
    replicas = [r for r in records.replicas if not only or r.deployment in names]
    desired = {d.deployment: d for d in records.desired}
    return {
        "nodes": [_node(n, records) for n in sorted(records.nodes, key=lambda n: n.node_id)],
        "deployments": [
            _deployment(d, desired.get(d.spec.name), replicas) for d in sorted(deployments, key=lambda d: d.spec.name)
        ],
        "replicas": [
            _replica(r, fleet.loads.get(r.replica_id), parity.get(r.replica_id))
            for r in sorted(replicas, key=lambda r: r.replica_id)
        ],
        "unplaced": _unplaced(fleet, names),
        "leaders": [{"role": x.role, "candidate": x.candidate, "revision": x.revision} for x in records.leaders],
        "registry": {
            "id": fleet.freshness.registry_id,
            "etcd_staleness_ms": fleet.freshness.etcd_staleness_ms,
            "stale": fleet.freshness.stale,
            "unreachable": list(fleet.unreachable),
        },
        "local_stack": _local(local),
    }


def _node(node: Any, records: registry_pb2.Records) -> dict[str, Any]:
    return {
        "node": node.node_id,
        "endpoint": node.grpc_endpoint,
        "gpus": [g.name for g in node.gpus],
        "cpu_slots": node.cpu_slots,
        "engines": list(node.engines),
        "labels": dict(node.labels),
        "draining": node.draining,
        "version": node.version,
        "replicas": sorted({m.replica_id for r in records.replicas for m in r.members if m.node_id == node.node_id}),
    }


def _deployment(
    deployment: records_pb2.Deployment, desired: records_pb2.Desired | None, replicas: list[records_pb2.Replica]
) -> dict[str, Any]:
    own = [r for r in replicas if r.deployment == deployment.spec.name]
    return {
        "deployment": deployment.spec.name,
        "model": deployment.spec.model,
        "served_model_name": deployment.spec.served_model_name or deployment.spec.name,
        "engine": deployment.spec.engine,
        "generation": deployment.generation,
        "wanted": deployment.spec.replicas,
        "desired": desired.replicas if desired is not None else None,
        "desired_reason": desired.reason if desired is not None else None,
        "policy": kind_name(deployment.spec.scaling),
        "paused": deployment.HasField("pause"),
        "pause_note": deployment.pause.note or None,
        "ready": sum(r.state == records_pb2.STATE_READY for r in own),
    }


def _replica(
    replica: records_pb2.Replica, load: registry_pb2.ReplicaLoad | None, parity: str | None
) -> dict[str, Any]:
    head = next((m for m in replica.members if m.rank == 0), None)
    return {
        "replica": replica.replica_id,
        "deployment": replica.deployment,
        "node": replica.node_id,
        "state": state_name(replica.state),
        "since_s": _age_s(head.since) if head is not None and head.HasField("since") else None,
        "attempt": head.attempt if head is not None else None,
        "pid": head.pid if head is not None else None,
        "url": replica.engine.http_url or None,
        "draining": replica.wanted == records_pb2.WANTED_DRAIN,
        "retiring": replica.wanted == records_pb2.WANTED_RETIRE,
        "running": _known(load, "running"),
        "waiting": _known(load, "waiting"),
        "kv_usage": _known(load, "kv_usage"),
        "hit_rate": _hit_rate(load),
        "parity": parity,
        "last_error": last_error(replica) or None,
    }


def _unplaced(fleet: Fleet, names: set[str]) -> list[dict[str, Any]] | None:
    if fleet.unplaced is None:
        return None
    return [
        {"deployment": entry.deployment, "replicas": entry.replicas, "reason": entry.reason}
        for entry in fleet.unplaced
        if entry.deployment in names
    ]


def _known(load: registry_pb2.ReplicaLoad | None, field: str) -> Any:
    return getattr(load, field) if load is not None and load.HasField(field) else None  # type: ignore[arg-type]


def _hit_rate(load: registry_pb2.ReplicaLoad | None) -> float | None:
    queried, hit = _known(load, "cache_query_tokens"), _known(load, "cache_hit_tokens")
    return hit / queried if queried and hit is not None else None


def _age_s(since: Timestamp) -> float:
    return round(max(0.0, time.time() - since.ToNanoseconds() / 1e9), 1)


def _local(state: StackState | None) -> dict[str, Any] | None:
    if state is None:
        return None
    return {
        "phase": state.phase,
        "services": [
            {
                "service": s.name,
                "status": s.status,
                "pid": s.process.pid if s.process else None,
                "restarts": s.restarts,
                "log": s.log,
            }
            for s in state.services
        ],
    }


# --- tables ------------------------------------------------------------------------------------------------


def as_tables(value: dict[str, Any]) -> list[RenderableType]:
    """The same value for people."""
    shown: list[RenderableType] = []
    table = _table("deployment", "model", "engine", "ready", "desired", "policy", "generation")
    for d in value["deployments"]:
        wanted = d["desired"] if d["desired"] is not None else d["wanted"]
        ready = Text(f"{d['ready']}/{wanted}", style="green" if d["ready"] >= wanted else "yellow")
        desired = or_dash(d["desired"]) + (f" ({d['desired_reason']})" if d["desired_reason"] else "")
        policy = Text(f"{d['policy']}, paused", style="yellow") if d["paused"] else Text(d["policy"])
        table.add_row(d["deployment"], Text(d["model"]), d["engine"], ready, desired, policy, str(d["generation"]))
    shown.append(table if value["deployments"] else "no deployments; create one with `stoker deploy -f FILE`")
    shown += _waiting(value)
    if value["replicas"]:
        shown.append(_replica_table(value["replicas"]))
        shown += _unlike(value["replicas"])
    table = _table("node", "endpoint", "GPUs", "CPU slots", "replicas", "")
    for n in value["nodes"]:
        state = Text("draining", style="cyan") if n["draining"] else Text("")
        table.add_row(
            n["node"], n["endpoint"], str(len(n["gpus"])), str(n["cpu_slots"]), ", ".join(n["replicas"]) or "–", state
        )
    shown.append(table if value["nodes"] else "no nodes: no agent has reported to the registry")
    shown.append(_footer(value))
    return shown


def _waiting(value: dict[str, Any]) -> list[RenderableType]:
    """What has no place, or must leave its place and cannot, and why."""
    if value["unplaced"] is not None:
        return [
            Text(f"{x['deployment']}: {x['replicas']} waiting for a place: {x['reason']}", style="yellow")
            for x in value["unplaced"]
        ]
    placed = Counter(r["deployment"] for r in value["replicas"])
    return [
        Text(
            f"{d['deployment']}: {d['desired'] - placed[d['deployment']]} waiting for a place; to see why, name the "
            "planners (--planner HOST:PORT[,…] or STOKER_PLANNER): the one that leads knows",
            style="yellow",
        )
        for d in value["deployments"]
        if d["desired"] is not None and d["desired"] > placed[d["deployment"]]
    ]


def _replica_table(replicas: list[dict[str, Any]]) -> Table:
    table = _table("replica", "node", "state", "since", "running", "waiting", "KV use", "hit rate", "last error")
    for r in replicas:
        state = "retiring" if r["retiring"] and r["state"] == "ready" else r["state"]
        table.add_row(
            r["replica"],
            r["node"] or "–",
            Text(state, style=_COLOURS.get(state, "")),
            or_dash(r["since_s"], "{:.0f} s"),
            or_dash(r["running"]),
            or_dash(r["waiting"]),
            or_dash(r["kv_usage"], "{:.0%}"),
            or_dash(r["hit_rate"], "{:.0%}"),
            Text((r["last_error"] or "").strip().splitlines()[0][:80] if r["last_error"] else "", style="red"),
        )
    return table


def _unlike(replicas: list[dict[str, Any]]) -> list[RenderableType]:
    """Replicas that prefix routing does without, and why."""
    said: list[RenderableType] = []
    for r in replicas:
        if r["parity"] == PENDING and r["state"] == "ready":
            said.append(Text(f"{r['replica']}: not proved yet to tokenize as the router does", style="yellow"))
        elif r["parity"] not in (None, OK, PENDING):
            what = (
                f"{r['replica']}: tokenizes otherwise than the router, {r['parity']}; it is routed to by load alone"
            )
            said.append(Text(what, style="red"))
    return said


def _footer(value: dict[str, Any]) -> Text:
    leaders = ", ".join(f"{x['role']} {x['candidate']}" for x in value["leaders"]) or "none"
    registry = value["registry"]
    text = Text(f"leaders: {leaders}\nregistry {registry['id']}: etcd seen {registry['etcd_staleness_ms']} ms ago")
    if registry["stale"]:
        text.append(" (STALE: etcd is lost or frozen; this is the last known state)", style="bold red")
    if registry["unreachable"]:
        text.append(f"\nunreachable registries: {', '.join(registry['unreachable'])}", style="red")
    local = value["local_stack"]
    for s in local["services"] if local else ():
        if s["status"] != "ready" or s["restarts"]:
            text.append(
                f"\n{s['service']}: {s['status']}, restarted {s['restarts']} times; log: {s['log']}", "yellow"
            )
    return text


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
