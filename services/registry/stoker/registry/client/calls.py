"""Unary calls to the registry: one client over all its processes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc
import structlog

from stoker.api.common.v1 import common_pb2, scaling_pb2
from stoker.api.registry.v1 import records_pb2, registry_pb2, registry_pb2_grpc
from stoker.common import rpc
from stoker.common.backoff import Backoff
from stoker.common.channels import Channels
from stoker.common.errors import Code, DeadlineExceeded, InvalidRequest, StokerError
from stoker.common.tls import Tls
from stoker.registry.core import documents

log = structlog.get_logger(__name__)

R = TypeVar("R")

# Another registry may do better. Everything here may be repeated: the registry makes each write idempotent.
_ELSEWHERE = {Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.ABORTED, Code.CANCELLED}


class RegistryClient:
    """Calls to the registry with failover over `endpoints` ("host:port"), in plain text without `tls`.

    `timeout_s` bounds a call over all its tries, `attempt_timeout_s` one try at one registry. Every method
    raises StokerError: what the registry refused, or UNAVAILABLE / DEADLINE_EXCEEDED when none answered.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        timeout_s: float = 10.0,
        attempt_timeout_s: float = 6.0,
        tls: Tls | None = None,
        rng: random.Random | None = None,
    ) -> None:
        if not endpoints:
            raise InvalidRequest.field("endpoints", "give at least one registry as host:port")
        self._endpoints = tuple(endpoints)
        self._timeout_s = timeout_s
        self._attempt_timeout_s = attempt_timeout_s
        self._rng = rng or random.Random()  # noqa: S311 - jitter
        self._backoff = Backoff(first_s=0.05, max_s=1.0)
        self._channels = Channels(tls)
        self._current = self._rng.randrange(len(self._endpoints))

    async def get_fleet(self) -> registry_pb2.GetFleetResponse:
        """Everything at once, as one registry sees it: records, and the loads reported to that registry."""
        return await self._call(lambda stub: stub.GetFleet, registry_pb2.GetFleetRequest())

    async def put_deployment(
        self, spec: common_pb2.DeploymentSpec, *, expected_generation: int | None = None
    ) -> records_pb2.Deployment:
        """Create or change a deployment. `expected_generation` 0 means it must be new; None overwrites.

        An unchanged specification keeps its generation. GENERATION_MISMATCH when someone else was faster.
        """
        request = registry_pb2.PutDeploymentRequest(spec=spec, expected_generation=expected_generation)
        return (await self._call(lambda stub: stub.PutDeployment, request)).deployment

    async def scale_deployment(self, name: str, replicas: int) -> registry_pb2.ScaleDeploymentResponse:
        """Set the replica count of a deployment; returns it with the count before."""
        request = registry_pb2.ScaleDeploymentRequest(name=name, replicas=replicas)
        return await self._call(lambda stub: stub.ScaleDeployment, request)

    async def set_scaling_policy(
        self, name: str, policy: scaling_pb2.ScalingPolicy | None, *, expected_generation: int | None = None
    ) -> records_pb2.Deployment:
        """Change how the count of a deployment is found; None: it is the specification's."""
        request = registry_pb2.SetScalingPolicyRequest(
            name=name, policy=policy, expected_generation=expected_generation
        )
        return (await self._call(lambda stub: stub.SetScalingPolicy, request)).deployment

    async def pause_scaling(self, name: str, *, resume: bool = False, note: str = "") -> records_pb2.Deployment:
        """Let the count of a deployment stand, or end that; `note` says why, to people."""
        request = registry_pb2.PauseScalingRequest(name=name, resume=resume, note=note)
        return (await self._call(lambda stub: stub.PauseScaling, request)).deployment

    async def delete_deployment(self, name: str) -> None:
        """Remove a deployment; its replicas drain."""
        await self._call(lambda stub: stub.DeleteDeployment, registry_pb2.DeleteDeploymentRequest(name=name))

    async def drain_node(self, node_id: str, *, undo: bool = False) -> tuple[str, ...]:
        """Mark a node as draining, or usable again; returns the replicas it runs."""
        request = registry_pb2.DrainNodeRequest(node_id=node_id, undo=undo)
        return tuple((await self._call(lambda stub: stub.DrainNode, request)).replica_ids)

    async def drain_replica(self, replica_id: str) -> records_pb2.Assignment:
        """Ask one replica to drain; returns its assignment as written."""
        request = registry_pb2.DrainReplicaRequest(replica_id=replica_id)
        return (await self._call(lambda stub: stub.DrainReplica, request)).assignment

    async def put_facility(self, document: str, *, expected_revision: int | None = None) -> records_pb2.Facility:
        """Write the facility file; returns its record without the document. None overwrites, 0 means that there must
        be none yet.

        FACILITY_CHANGED when someone else was faster; INVALID_REQUEST when it is too large.
        """
        small = documents.packed(document)
        request = registry_pb2.PutFacilityRequest(document_zlib=small, expected_revision=expected_revision)
        return (await self._call(lambda stub: stub.PutFacility, request)).facility

    async def remove_facility(self, *, expected_revision: int | None = None) -> None:
        """Take the facility away; planners go by what agents report."""
        request = registry_pb2.PutFacilityRequest(expected_revision=expected_revision)
        await self._call(lambda stub: stub.PutFacility, request)

    async def get_facility(self) -> records_pb2.Facility:
        """The facility as last written; `documents.unpacked` has its file. NOT_FOUND where none was."""
        return (await self._call(lambda stub: stub.GetFacility, registry_pb2.GetFacilityRequest())).facility

    async def set_desired(
        self, fence: common_pb2.Fence, desired: Sequence[records_pb2.Desired], removed: Sequence[str] = ()
    ) -> int:
        """Write desired counts as the leader; returns the etcd revision. FENCED when it leads no more."""
        request = registry_pb2.SetDesiredRequest(fence=fence, desired=desired, removed=removed)
        return (await self._call(lambda stub: stub.SetDesired, request)).revision

    async def set_scaling_history(
        self, fence: common_pb2.Fence, histories: Sequence[records_pb2.ScalingHistory], removed: Sequence[str] = ()
    ) -> int:
        """Write what the scaler keeps of the past as the leader; returns the etcd revision.

        FENCED when it leads no more; INVALID_REQUEST above 64 KiB a record, 1 MiB or 100 records.
        """
        request = registry_pb2.SetScalingHistoryRequest(fence=fence, histories=histories, removed=removed)
        return (await self._call(lambda stub: stub.SetScalingHistory, request)).revision

    async def apply_assignments(
        self,
        fence: common_pb2.Fence,
        puts: Sequence[records_pb2.Assignment],
        deletes: Sequence[str] = (),
        *,
        decided_at: int = 0,
    ) -> int:
        """Write and remove assignments as the leader, as one step; returns the etcd revision.

        `decided_at` is the revision of the view it was decided on; CONFLICT when one of them was changed since.
        FENCED when it leads no more; INVALID_REQUEST when there are more than 100 of them.
        """
        request = registry_pb2.ApplyAssignmentsRequest(fence=fence, puts=puts, deletes=deletes, decided_at=decided_at)
        return (await self._call(lambda stub: stub.ApplyAssignments, request)).revision

    async def acquire_leadership(
        self, role: str, candidate: str, ttl_s: float
    ) -> registry_pb2.AcquireLeadershipResponse:
        """Try to lead `role`. NOT_LEADER, with the holder in metadata["leader"], when another does."""
        request = registry_pb2.AcquireLeadershipRequest(role=role, candidate=candidate, ttl_ms=round(ttl_s * 1000))
        return await self._call(lambda stub: stub.AcquireLeadership, request, timeout_s=ttl_s)

    async def renew_leadership(self, fence: common_pb2.Fence, lease_id: int, *, timeout_s: float) -> float:
        """Lead on; returns seconds to live from the moment of sending. NOT_LEADER when it is over."""
        request = registry_pb2.RenewLeadershipRequest(fence=fence, lease_id=lease_id)
        response = await self._call(lambda stub: stub.RenewLeadership, request, timeout_s=timeout_s)
        return response.ttl_ms / 1000

    async def resign_leadership(self, fence: common_pb2.Fence, lease_id: int) -> None:
        """Step down, so that another can lead at once."""
        request = registry_pb2.ResignLeadershipRequest(fence=fence, lease_id=lease_id)
        await self._call(lambda stub: stub.ResignLeadership, request)

    async def close(self) -> None:
        """Close all channels; calls in flight fail."""
        await self._channels.close()

    async def __aenter__(self) -> RegistryClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _call(
        self,
        method: Callable[[registry_pb2_grpc.RegistryServiceAsyncStub], Callable[..., Awaitable[R]]],
        request: Any,
        *,
        timeout_s: float | None = None,
    ) -> R:
        loop = asyncio.get_running_loop()
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = loop.time() + timeout_s
        attempt = 0
        while True:
            endpoint = self._endpoints[self._current]
            left = deadline - loop.time()
            try:
                return await method(self._stub(endpoint))(request, timeout=min(left, self._attempt_timeout_s))
            except grpc.aio.AioRpcError as error:
                failure = rpc.error_from(error)
            if failure.code not in _ELSEWHERE:
                raise failure
            log.info("registry.call_failed", endpoint=endpoint, reason=failure.reason, error=failure.message)
            self._current = (self._current + 1) % len(self._endpoints)
            attempt += 1
            # A whole round without luck: pause before the next.
            rounds, rest = divmod(attempt, len(self._endpoints))
            pause = 0.0 if rest else self._backoff.delay_s(rounds - 1, self._rng)
            if loop.time() + pause >= deadline:
                raise _gave_up(failure, self._endpoints, timeout_s) from failure
            await asyncio.sleep(pause)

    def _stub(self, endpoint: str) -> registry_pb2_grpc.RegistryServiceAsyncStub:
        return registry_pb2_grpc.RegistryServiceStub(self._channels.to(endpoint))


def _gave_up(last: StokerError, endpoints: Sequence[str], timeout_s: float) -> StokerError:
    message = f"no registry of {', '.join(endpoints)} did it within {timeout_s:.1f} s; the last said: {last.message}"
    if last.code is Code.DEADLINE_EXCEEDED:
        return DeadlineExceeded(message, retry_after_s=1.0)
    return StokerError(message, code=Code.UNAVAILABLE, reason=last.reason, retry_after_s=last.retry_after_s or 1.0)
