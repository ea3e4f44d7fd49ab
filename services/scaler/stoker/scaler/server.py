"""Between the scaler's core and the wire."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import grpc

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.api.scaler.v1 import scaler_pb2, scaler_pb2_grpc
from stoker.common.errors import InvalidRequest, NotFound
from stoker.registry.client import FleetView, RegistryClient
from stoker.scaler.core.policy import Kind
from stoker.scaler.core.values import Deployment, Desired, Fleet, Load, Reason, Replica, Standing
from stoker.scaler.policy_messages import message_of, policy_from, policy_of

ROLE = "scaler"
SERVICE = "stoker.api.scaler.v1.ScalerService"

Context = grpc.aio.ServicerContext[Any, Any]

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
                leaving=replica.wanted in (records_pb2.WANTED_DRAIN, records_pb2.WANTED_RETIRE),
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
    """Tells whether this process leads, and what was decided last; passes operators' wishes on to the registry."""

    def __init__(self, leading: Callable[[], bool], view: FleetView, client: RegistryClient) -> None:
        self._leading = leading
        self._view = view
        self._client = client

    async def GetScalerStatus(  # noqa: N802
        self, request: scaler_pb2.GetScalerStatusRequest, context: Context
    ) -> scaler_pb2.GetScalerStatusResponse:
        """The status; `decisions` are the persisted ones, whoever decided them."""
        return scaler_pb2.GetScalerStatusResponse(
            leading=self._leading(),
            leader=self._view.leaders.get(ROLE),
            decisions=[record for _, record in sorted(self._view.desired.items())],
        )

    async def WhyDeployment(  # noqa: N802
        self, request: scaler_pb2.WhyDeploymentRequest, context: Context
    ) -> scaler_pb2.WhyDeploymentResponse:
        """What stands."""
        deployment = self._deployment(request.deployment)
        return scaler_pb2.WhyDeploymentResponse(
            standing=self._view.desired.get(request.deployment),
            policy=message_of(policy_of(deployment.spec)),
            pause=deployment.pause if deployment.HasField("pause") else None,
        )

    async def DryRun(  # noqa: N802
        self, request: scaler_pb2.DryRunRequest, context: Context
    ) -> scaler_pb2.DryRunResponse:
        """What a policy would decide."""
        deployment = self._deployment(request.deployment)
        policy = policy_from(request.policy if request.HasField("policy") else deployment.spec.scaling)
        if policy.kind is not Kind.FIXED:
            raise InvalidRequest.field("policy.kind", f"{policy.kind} is not offered here; use fixed")
        decision = records_pb2.Desired(
            deployment=request.deployment, replicas=deployment.spec.replicas, reason=str(Reason.FIXED)
        )
        standing = self._view.desired.get(request.deployment)
        return scaler_pb2.DryRunResponse(decision=decision, standing=standing, policy=message_of(policy))

    async def SetPolicy(  # noqa: N802
        self, request: scaler_pb2.SetPolicyRequest, context: Context
    ) -> scaler_pb2.SetPolicyResponse:
        """Change how a count is found."""
        written = await self._client.set_scaling_policy(
            request.deployment,
            request.policy if request.HasField("policy") else None,
            expected_generation=request.expected_generation if request.HasField("expected_generation") else None,
        )
        return scaler_pb2.SetPolicyResponse(deployment=written)

    async def Pause(  # noqa: N802
        self, request: scaler_pb2.PauseRequest, context: Context
    ) -> scaler_pb2.PauseResponse:
        """Let a count stand."""
        written = await self._client.pause_scaling(request.deployment, note=request.note)
        return scaler_pb2.PauseResponse(deployment=written)

    async def Resume(  # noqa: N802
        self, request: scaler_pb2.ResumeRequest, context: Context
    ) -> scaler_pb2.ResumeResponse:
        """End a pause."""
        written = await self._client.pause_scaling(request.deployment, resume=True)
        return scaler_pb2.ResumeResponse(deployment=written)

    def _deployment(self, name: str) -> records_pb2.Deployment:
        deployment = self._view.deployments.get(name)
        if deployment is None:
            raise NotFound(f"deployment {name!r} does not exist; `stoker status` lists the deployments")
        return deployment
