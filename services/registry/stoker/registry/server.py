"""The registry's gRPC service: messages in, messages out."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import structlog

from stoker.api.registry.v1 import registry_pb2, registry_pb2_grpc
from stoker.common.errors import FieldViolation, InvalidRequest, Unavailable
from stoker.registry.agents import AgentStream
from stoker.registry.announcers import AnnounceStream
from stoker.registry.config import RegistryConfig
from stoker.registry.core import documents, placement, records, scaling, validation
from stoker.registry.core.records import Kind
from stoker.registry.core.validation import Limits
from stoker.registry.deployments import DeploymentStore
from stoker.registry.facilities import FacilityStore
from stoker.registry.hub import Hub
from stoker.registry.leaders import LeaderStore
from stoker.registry.nodes import NodeStore

log = structlog.get_logger(__name__)

SERVICE = "stoker.api.registry.v1.RegistryService"

_HELLO_TIMEOUT_S = 5.0

Context = grpc.aio.ServicerContext[Any, Any]


class RegistryServicer(registry_pb2_grpc.RegistryServiceServicer):
    """`RegistryService` over a hub and the stores."""

    def __init__(
        self,
        hub: Hub,
        nodes: NodeStore,
        deployments: DeploymentStore,
        leaders: LeaderStore,
        facilities: FacilityStore,
        config: RegistryConfig,
        rng: random.Random,
    ) -> None:
        self._hub = hub
        self._nodes = nodes
        self._deployments = deployments
        self._leaders = leaders
        self._facilities = facilities
        self._config = config
        self._limits = Limits(engines=config.limits.engines, replicas=config.limits.replicas)
        self._rng = rng

    # Streams

    async def Report(  # noqa: N802
        self, request_iterator: AsyncIterator[registry_pb2.ReportRequest], context: Context
    ) -> AsyncIterator[registry_pb2.ReportResponse]:
        """An agent's stream."""
        self._hub.require_synced()
        hello = await _hello(request_iterator)
        validation.require(validation.hello(hello, self._limits))
        agent = AgentStream(self._hub, self._nodes, self._config, self._limits, hello, self._rng)
        self._hub.attach(agent)
        tasks = [
            asyncio.create_task(agent.listen(request_iterator), name=f"hear {agent.node_id}"),
            asyncio.create_task(agent.membership.run(), name=f"membership of {agent.node_id}"),
        ]
        for task in tasks:
            task.add_done_callback(lambda done: _end_with(agent, done))
        try:
            async with contextlib.aclosing(agent.responses()) as responses:
                async for response in responses:
                    yield response
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._hub.detach(agent)

    async def Watch(  # noqa: N802
        self, request: registry_pb2.WatchRequest, context: Context
    ) -> AsyncIterator[registry_pb2.WatchResponse]:
        """A watcher's stream."""
        self._hub.require_synced()
        validation.require(validation.watch(request))
        watcher = self._hub.open_watch(request, _host(context))
        try:
            async with contextlib.aclosing(watcher.messages()) as messages:
                async for message in messages:
                    yield message
        finally:
            self._hub.close_watch(watcher)

    async def Announce(  # noqa: N802
        self, request_iterator: AsyncIterator[registry_pb2.AnnounceRequest], context: Context
    ) -> registry_pb2.AnnounceResponse:
        """A router's stream of dispatches and demand."""
        self._hub.require_synced()
        host = _host(context)
        self._hub.open_announce(host)
        stream = AnnounceStream(self._hub)
        try:
            await context.send_initial_metadata(())
            await stream.listen(request_iterator)
        finally:
            self._hub.close_announce(host, stream)
        return registry_pb2.AnnounceResponse()

    # People and scripts

    async def GetFleet(  # noqa: N802
        self, request: registry_pb2.GetFleetRequest, context: Context
    ) -> registry_pb2.GetFleetResponse:
        """Everything at once."""
        self._hub.require_synced()
        state = self._hub.state
        return registry_pb2.GetFleetResponse(
            records=records.pack(
                (item for item in state.records.items() if item[0][0] not in (Kind.SCALING, Kind.FACILITIES)),
                state.revision,
            ),
            loads=self._hub.loads.all(),
            freshness=self._hub.freshness(),
        )

    async def PutDeployment(  # noqa: N802
        self, request: registry_pb2.PutDeploymentRequest, context: Context
    ) -> registry_pb2.PutDeploymentResponse:
        """Create or change a deployment."""
        self._hub.require_synced()
        validation.require(validation.deployment(request.spec, self._limits))
        if request.spec.HasField("scaling"):
            validation.require(scaling.policy("spec.scaling", request.spec.scaling, self._limits))
        if request.spec.HasField("placement"):
            validation.require(placement.policy("spec.placement", request.spec.placement, request.spec))
        expected = request.expected_generation if request.HasField("expected_generation") else None
        written = await self._deployments.put(request.spec, expected)
        log.info("deployment.put", deployment=request.spec.name, generation=written.generation)
        return registry_pb2.PutDeploymentResponse(deployment=written)

    async def ScaleDeployment(  # noqa: N802
        self, request: registry_pb2.ScaleDeploymentRequest, context: Context
    ) -> registry_pb2.ScaleDeploymentResponse:
        """Change a replica count."""
        self._hub.require_synced()
        validation.require(validation.scale(request.name, request.replicas, self._limits))
        written, previous = await self._deployments.scale(request.name, request.replicas)
        log.info("deployment.scaled", deployment=request.name, replicas=request.replicas, previous=previous)
        return registry_pb2.ScaleDeploymentResponse(deployment=written, previous_replicas=previous)

    async def SetScalingPolicy(  # noqa: N802
        self, request: registry_pb2.SetScalingPolicyRequest, context: Context
    ) -> registry_pb2.SetScalingPolicyResponse:
        """Change how a count is found."""
        self._hub.require_synced()
        policy = request.policy if request.HasField("policy") else None
        validation.require(scaling.set_policy(request.name, policy, self._limits))
        expected = request.expected_generation if request.HasField("expected_generation") else None
        written = await self._deployments.set_policy(request.name, policy, expected)
        log.info("deployment.policy_set", deployment=request.name, generation=written.generation)
        return registry_pb2.SetScalingPolicyResponse(deployment=written)

    async def PauseScaling(  # noqa: N802
        self, request: registry_pb2.PauseScalingRequest, context: Context
    ) -> registry_pb2.PauseScalingResponse:
        """Pause scaling, or end the pause."""
        self._hub.require_synced()
        validation.require(scaling.pause(request.name, request.note))
        written = await self._deployments.pause(request.name, request.note, resume=request.resume)
        log.info("deployment.pause", deployment=request.name, resume=request.resume, note=request.note)
        return registry_pb2.PauseScalingResponse(deployment=written)

    async def DeleteDeployment(  # noqa: N802
        self, request: registry_pb2.DeleteDeploymentRequest, context: Context
    ) -> registry_pb2.DeleteDeploymentResponse:
        """Remove a deployment."""
        self._hub.require_synced()
        validation.require(validation.name("name", request.name))
        await self._deployments.delete(request.name)
        log.info("deployment.deleted", deployment=request.name)
        return registry_pb2.DeleteDeploymentResponse()

    async def DrainNode(  # noqa: N802
        self, request: registry_pb2.DrainNodeRequest, context: Context
    ) -> registry_pb2.DrainNodeResponse:
        """Mark or unmark a node."""
        self._hub.require_synced()
        validation.require(validation.node_id("node_id", request.node_id))
        await self._nodes.drain(request.node_id, request.undo)
        log.info("node.drain", node=request.node_id, undo=request.undo)
        return registry_pb2.DrainNodeResponse(replica_ids=self._hub.state.replicas_on(request.node_id))

    async def DrainReplica(  # noqa: N802
        self, request: registry_pb2.DrainReplicaRequest, context: Context
    ) -> registry_pb2.DrainReplicaResponse:
        """Ask a replica to drain."""
        self._hub.require_synced()
        validation.require(validation.replica_id("replica_id", request.replica_id))
        assignment = await self._leaders.drain_replica(request.replica_id)
        log.info("replica.drain", replica=request.replica_id)
        return registry_pb2.DrainReplicaResponse(assignment=assignment)

    async def PutFacility(  # noqa: N802
        self, request: registry_pb2.PutFacilityRequest, context: Context
    ) -> registry_pb2.PutFacilityResponse:
        """Write the facility."""
        self._hub.require_synced()
        document = documents.unpacked(request.document_zlib, "document_zlib") if request.document_zlib else ""
        expected = request.expected_revision if request.HasField("expected_revision") else None
        written = await self._facilities.put(request.document_zlib, document, expected)
        if written is None:
            log.info("facility.removed")
            return registry_pb2.PutFacilityResponse()
        log.info("facility.put", revision=written.revision, bytes=written.document_bytes)
        written.ClearField("document_zlib")
        return registry_pb2.PutFacilityResponse(facility=written)

    async def GetFacility(  # noqa: N802
        self, request: registry_pb2.GetFacilityRequest, context: Context
    ) -> registry_pb2.GetFacilityResponse:
        """The facility as last written."""
        self._hub.require_synced()
        return registry_pb2.GetFacilityResponse(facility=await self._facilities.get())

    # Leaders

    async def SetDesired(  # noqa: N802
        self, request: registry_pb2.SetDesiredRequest, context: Context
    ) -> registry_pb2.SetDesiredResponse:
        """Write desired counts."""
        self._hub.require_synced()
        validation.require(validation.fence(request.fence, "scaler"))
        validation.require(validation.desired(request.desired, request.removed, self._limits))
        validation.require(scaling.decisions(request.desired))
        revision = await self._leaders.set_desired(request.fence, request.desired, request.removed)
        return registry_pb2.SetDesiredResponse(revision=revision)

    async def SetScalingHistory(  # noqa: N802
        self, request: registry_pb2.SetScalingHistoryRequest, context: Context
    ) -> registry_pb2.SetScalingHistoryResponse:
        """Write what the scaler keeps of the past."""
        self._hub.require_synced()
        validation.require(validation.fence(request.fence, "scaler"))
        validation.require(scaling.histories(request.histories, request.removed))
        revision = await self._leaders.set_scaling_history(request.fence, request.histories, request.removed)
        return registry_pb2.SetScalingHistoryResponse(revision=revision)

    async def ApplyAssignments(  # noqa: N802
        self, request: registry_pb2.ApplyAssignmentsRequest, context: Context
    ) -> registry_pb2.ApplyAssignmentsResponse:
        """Write and remove assignments."""
        self._hub.require_synced()
        validation.require(validation.fence(request.fence, "planner"))
        validation.require(validation.assignments(request.puts, request.deletes, self._limits))
        revision = await self._leaders.apply_assignments(
            request.fence, request.puts, request.deletes, request.decided_at
        )
        return registry_pb2.ApplyAssignmentsResponse(revision=revision)

    async def AcquireLeadership(  # noqa: N802
        self, request: registry_pb2.AcquireLeadershipRequest, context: Context
    ) -> registry_pb2.AcquireLeadershipResponse:
        """Try to lead."""
        self._hub.require_synced()
        validation.require(validation.leadership(request.role, request.candidate, request.ttl_ms))
        granted = await self._leaders.acquire(request.role, request.candidate, request.ttl_ms)
        fence = granted.fence
        log.info("leadership.granted", role=request.role, candidate=request.candidate, revision=fence.revision)
        return registry_pb2.AcquireLeadershipResponse(fence=fence, lease_id=granted.lease_id, ttl_ms=granted.ttl_ms)

    async def RenewLeadership(  # noqa: N802
        self, request: registry_pb2.RenewLeadershipRequest, context: Context
    ) -> registry_pb2.RenewLeadershipResponse:
        """Lead on."""
        self._hub.require_synced()
        validation.require(validation.fence(request.fence))
        ttl_s = await self._leaders.renew(request.fence, request.lease_id)
        return registry_pb2.RenewLeadershipResponse(ttl_ms=int(ttl_s * 1000))

    async def ResignLeadership(  # noqa: N802
        self, request: registry_pb2.ResignLeadershipRequest, context: Context
    ) -> registry_pb2.ResignLeadershipResponse:
        """Step down."""
        self._hub.require_synced()
        validation.require(validation.fence(request.fence))
        await self._leaders.resign(request.fence, request.lease_id)
        log.info("leadership.resigned", role=request.fence.role)
        return registry_pb2.ResignLeadershipResponse()


def _host(context: Context) -> str:
    """Where a call comes from, without the port: "ipv4:10.0.0.7"."""
    return str(context.peer()).rpartition(":")[0]


async def _hello(requests: AsyncIterator[registry_pb2.ReportRequest]) -> registry_pb2.Hello:
    try:
        async with asyncio.timeout(_HELLO_TIMEOUT_S):
            first = await anext(aiter(requests))
    except StopAsyncIteration:
        raise InvalidRequest.field("hello", "is missing: the stream ended; begin with Hello") from None
    except TimeoutError:
        # Not the agent's mistake, which it would take as final: either end may have been stalled.
        raise Unavailable(
            f"hello: did not come within {_HELLO_TIMEOUT_S:g} s; open another stream",
            reason="AGENT_SILENT",
            retry_after_s=0.1,
        ) from None
    if not first.HasField("hello"):
        raise InvalidRequest("hello: a stream begins with Hello", fields=(FieldViolation("hello", "must be first"),))
    return first.hello


def _end_with(agent: AgentStream, done: asyncio.Task[None]) -> None:
    """One half of a stream has ended: end the other."""
    if done.cancelled():
        agent.end(None)
        return
    error = done.exception()
    agent.end(error if isinstance(error, Exception) else None)
