"""Reports of routers and agents as the core takes them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.registry.client import FleetView
from stoker.scaler.core.observing import Asked, Report
from stoker.scaler.core.starts import Start
from stoker.scaler.core.values import Deployment, Desired, Fleet, Load, Replica, Standing

_STANDING = {
    records_pb2.STATE_READY: Standing.READY,
    records_pb2.STATE_UNHEALTHY: Standing.UNHEALTHY,
    records_pb2.STATE_DRAINING: Standing.UNHEALTHY,
    records_pb2.STATE_STARTING: Standing.STARTING,
    records_pb2.STATE_BACKOFF: Standing.FAILING,
    records_pb2.STATE_STOPPED: Standing.FAILING,
}
_RACK = "rack"
_COUNTED = ("generation_tokens", "prompt_tokens", "itl_sum_s", "itl_count", "prefill_sum_s")


def fleet_of(
    view: FleetView,
    loads: Mapping[str, Load],
    since: Mapping[str, float | None] | None = None,
    moving: Collection[str] = (),
) -> Fleet:
    """The registry's records as the core sees them; `since` is when each replica came to stand as it does, `moving`
    those that are replaced."""
    stood = since or {}
    return Fleet(
        deployments=[Deployment(d.spec.name, d.generation, d.spec.replicas) for d in view.deployments.values()],
        replicas=[
            replica_of(view, replica, stood.get(replica.replica_id), moving=replica.replica_id in moving)
            for replica in view.replicas.values()
        ],
        desired=[
            Desired(record.deployment, record.generation, record.replicas, tuple(record.victims), record.reason)
            for record in view.desired.values()
        ],
        loads=loads,
    )


def replica_of(
    view: FleetView, replica: records_pb2.Replica, since: float | None = None, *, moving: bool = False
) -> Replica:
    """One record as the core sees it."""
    return Replica(
        replica.replica_id,
        replica.deployment,
        standing_of(replica),
        leaving=replica.wanted in (records_pb2.WANTED_DRAIN, records_pb2.WANTED_RETIRE),
        since=since,
        domain=_rack(view, replica),
        moving=moving,
    )


def _rack(view: FleetView, replica: records_pb2.Replica) -> str:
    node = view.nodes.get(replica.node_id)
    return node.labels.get(_RACK, "") if node is not None else ""


def standing_of(replica: records_pb2.Replica) -> Standing:
    """How far a replica is from serving."""
    return _STANDING.get(replica.state, Standing.PENDING)


def load_of(report: registry_pb2.ReplicaLoad, now: float) -> Load:
    """A load report that arrived at `now` (monotonic seconds); what it leaves unset stays unknown."""
    return Load(
        seen_at=now - report.age_ms / 1000,
        running=report.running if report.HasField("running") else None,
        waiting=report.waiting if report.HasField("waiting") else None,
        queued_prefill_tokens=report.queued_prefill_tokens if report.HasField("queued_prefill_tokens") else None,
    )


class Loads(Mapping[str, Load]):
    """The newest load report of each replica, with when it came (monotonic seconds), read as it is looked at: of a
    large fleet's reports a round needs few."""

    def __init__(self, reports: Mapping[str, tuple[registry_pb2.ReplicaLoad, float]]) -> None:
        self._reports = reports

    def __getitem__(self, replica: str) -> Load:
        return load_of(*self._reports[replica])

    def __iter__(self) -> Iterator[str]:
        return iter(self._reports)

    def __len__(self) -> int:
        return len(self._reports)


def report_of(report: registry_pb2.ReplicaLoad) -> Report:
    """The same report as signals are made of it."""
    counts: dict[str, float] = {name: getattr(report, name) for name in _COUNTED if report.HasField(name)}  # type: ignore[arg-type]
    if report.HasField("cached_prompt_tokens") and report.HasField("prompt_tokens"):
        counts |= {"looked_up": report.prompt_tokens, "found": report.cached_prompt_tokens}
        counts["cached_tokens"] = report.cached_prompt_tokens
    elif report.HasField("cache_query_tokens") and report.HasField("cache_hit_tokens"):
        counts |= {"looked_up": report.cache_query_tokens, "found": report.cache_hit_tokens}
        counts["cached_tokens"] = report.cache_hit_tokens
    rate = report.prefill_tokens_per_s
    return Report(
        life=report.epoch,
        counts=counts,
        running=report.running if report.HasField("running") else None,
        waiting=report.waiting if report.HasField("waiting") else None,
        kv_usage=report.kv_usage if report.HasField("kv_usage") else None,
        prefill_tokens_per_s=rate if report.HasField("prefill_tokens_per_s") else None,
    )


def asked_of(demand: registry_pb2.Demand) -> Asked:
    """What one router has seen of one model."""
    return Asked(
        model=demand.model,
        deployments=tuple(demand.deployments),
        counts={
            "arrivals": demand.arrivals,
            "prompt_tokens": demand.prompt_tokens,
            "prompt_tokens_squared": demand.prompt_tokens_squared,
            "judged": demand.judged,
            "within_slo": demand.within_slo,
            "ttft_s": demand.ttft.sum_s,
            "ttfts": sum(demand.ttft.counts),
            "itl_s": demand.itl.sum_s,
            "itls": sum(demand.itl.counts),
        },
        queued=demand.queued,
        oldest_s=demand.oldest_queued_s,
    )


def start_of(replica: records_pb2.Replica) -> tuple[int, Start | None]:
    """Which life of its engine is told of, and how long that took to start where it is known: gangs by their
    slowest."""
    took = [member for member in replica.members if member.HasField("startup_s")]
    if not took:
        return replica.epoch, None
    slowest = max(took, key=lambda member: member.startup_s)
    return replica.epoch, Start(slowest.startup_s, slowest.first_start if slowest.HasField("first_start") else None)
