"""Between the scaler's core and the wire."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.api.scaler.v1 import scaler_pb2, scaler_pb2_grpc
from stoker.registry.client import FleetView
from stoker.scaler.core.values import Deployment, Desired, Fleet, Load, Replica, Standing

SERVICE = "stoker.api.scaler.v1.ScalerService"

_STANDING = {
    records_pb2.STATE_READY: Standing.READY,
    records_pb2.STATE_UNHEALTHY: Standing.UNHEALTHY,
    records_pb2.STATE_DRAINING: Standing.UNHEALTHY,
    records_pb2.STATE_STARTING: Standing.STARTING,
    records_pb2.STATE_BACKOFF: Standing.FAILING,
    records_pb2.STATE_STOPPED: Standing.FAILING,
}


def fleet_of(view: FleetView, loads: Mapping[str, Load]) -> Fleet:
    """The registry's records as the core sees them."""
    return Fleet(
        deployments=[Deployment(d.spec.name, d.generation, d.spec.replicas) for d in view.deployments.values()],
        replicas=[
            Replica(
                replica.replica_id,
                replica.deployment,
                _STANDING.get(replica.state, Standing.PENDING),
                leaving=replica.wanted == records_pb2.WANTED_DRAIN,
            )
            for replica in view.replicas.values()
        ],
        desired=[
            Desired(record.deployment, record.generation, record.replicas, tuple(record.victims), record.reason)
            for record in view.desired.values()
        ],
        loads=loads,
    )


def load_of(report: registry_pb2.ReplicaLoad, now: float) -> Load:
    """A load report that arrived at `now` (monotonic seconds); what it leaves unset stays unknown."""
    return Load(
        seen_at=now - report.age_ms / 1000,
        running=report.running if report.HasField("running") else None,
        waiting=report.waiting if report.HasField("waiting") else None,
        queued_prefill_tokens=report.queued_prefill_tokens if report.HasField("queued_prefill_tokens") else None,
    )


def record_of(desired: Desired, fence: common_pb2.Fence) -> records_pb2.Desired:
    """A decision as the record to write, decided now."""
    record = records_pb2.Desired(
        deployment=desired.deployment,
        generation=desired.generation,
        replicas=desired.replicas,
        victims=desired.victims,
        reason=str(desired.reason),
        fence=fence,
    )
    record.decided_at.GetCurrentTime()
    return record


class ScalerServicer(scaler_pb2_grpc.ScalerServiceServicer):
    """Tells whether this process leads, and what it decided last."""

    def __init__(
        self,
        leading: Callable[[], bool],
        leader: Callable[[], records_pb2.Leader | None],
        decisions: Callable[[], Sequence[records_pb2.Desired]],
    ) -> None:
        self._leading = leading
        self._leader = leader
        self._decisions = decisions

    async def GetScalerStatus(  # noqa: N802
        self,
        request: scaler_pb2.GetScalerStatusRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> scaler_pb2.GetScalerStatusResponse:
        """The status; `decisions` are the persisted ones, whoever decided them."""
        return scaler_pb2.GetScalerStatusResponse(
            leading=self._leading(), leader=self._leader(), decisions=self._decisions()
        )
