"""One agent's stream: what it says goes to etcd and to watchers, what concerns it comes back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING

import structlog

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import registry_pb2
from stoker.common.errors import InvalidRequest, Unavailable
from stoker.etcd import EtcdError
from stoker.registry import metrics
from stoker.registry.config import RegistryConfig
from stoker.registry.core import validation
from stoker.registry.core.digests import Outcome, Resyncs, Series
from stoker.registry.core.validation import Limits
from stoker.registry.membership import Membership
from stoker.registry.nodes import NodeStore

if TYPE_CHECKING:
    from stoker.registry.hub import Hub

log = structlog.get_logger(__name__)


class AgentStream:
    """What one agent says and is told. Everything that waits to be told is kept by its newest value."""

    def __init__(
        self,
        hub: Hub,
        store: NodeStore,
        config: RegistryConfig,
        limits: Limits,
        hello: registry_pb2.Hello,
        rng: random.Random,
    ) -> None:
        self.node_id = hello.node.node_id
        self.incarnation = hello.node.incarnation
        self._hub = hub
        self._limits = limits
        self._ttl_s = config.membership.lease_ttl_s
        self._registry_id = config.registry_id
        self.membership = Membership(
            store, config.membership, hello, lambda: hub.state.members_of(self.node_id), self._admit, rng
        )
        self._welcome: registry_pb2.Welcome | None = None
        self._admitted = False
        self._assignments_due = True
        self._resyncs: dict[str, None] = {}
        self._asked = Resyncs(rng)
        self._ack_due = False
        self._refused: set[str] = set()
        self._wake = asyncio.Event()
        self._error: Exception | None = None
        self._ended = False

    # From the hub

    def tell_assignments(self) -> None:
        """The node's assignments, or its gangs' peers, changed."""
        self._assignments_due = True
        self._wake.set()

    def end(self, error: Exception | None) -> None:
        """End the stream."""
        self._error = self._error or error
        self._ended = True
        self._wake.set()

    # To the agent

    async def responses(self) -> AsyncGenerator[registry_pb2.ReportResponse, None]:
        """What the agent is told, until the stream ends; raises why."""
        while True:
            if self._welcome is not None:
                welcome, self._welcome, self._admitted = self._welcome, None, True
                yield registry_pb2.ReportResponse(welcome=welcome)
            if self._admitted and self._assignments_due:
                self._assignments_due = False
                yield registry_pb2.ReportResponse(assignments=self._hub.state.assignments_of(self.node_id))
            while self._admitted and self._resyncs:
                replica_id = next(iter(self._resyncs))
                del self._resyncs[replica_id]
                yield registry_pb2.ReportResponse(resync=registry_pb2.DigestResync(replica_id=replica_id))
            if self._admitted and self._ack_due:
                self._ack_due = False
                yield registry_pb2.ReportResponse(ack=registry_pb2.HeartbeatAck())
            if self._ended:
                if self._error is not None:
                    raise self._error
                return
            await self._wake.wait()
            self._wake.clear()

    def _admit(self, lease_id: int) -> None:
        self._welcome = registry_pb2.Welcome(
            lease_id=lease_id,
            lease_ttl_ms=self._ttl_s * 1000,
            heartbeat_interval_ms=self._ttl_s * 1000 // 3,
            registry_id=self._registry_id,
        )
        self._wake.set()

    # From the agent

    async def listen(self, requests: AsyncIterator[registry_pb2.ReportRequest]) -> None:
        """Take reports until the agent ends, says goodbye or falls silent."""
        iterator = aiter(requests)
        while True:
            try:
                async with asyncio.timeout(self._ttl_s):
                    request = await anext(iterator)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise Unavailable(
                    f"node {self.node_id!r}: nothing heard for {self._ttl_s} s; send heartbeats",
                    reason="AGENT_SILENT",
                ) from None
            self.membership.heard()
            if request.HasField("goodbye"):
                await self._leave()
                return
            try:
                self._take(request)
            except InvalidRequest as error:
                # A bad report costs itself alone.
                self._refuse(request.WhichOneof("report") or "none", error)

    def _refuse(self, kind: str, error: InvalidRequest) -> None:
        metrics.REPORTS_REFUSED.labels(kind).inc()
        if kind not in self._refused:  # said once a stream: there may be hundreds a second
            self._refused.add(kind)
            log.warning("report.refused", node=self.node_id, kind=kind, error=error.message)

    async def _leave(self) -> None:
        try:
            await self.membership.leave()
        except EtcdError as error:
            log.warning("membership.leave_failed", node=self.node_id, error=error.message)

    def _take(self, request: registry_pb2.ReportRequest) -> None:
        membership = self.membership
        match request.WhichOneof("report"):
            case "hello":
                self._reintroduce(request.hello)
            case "member":
                validation.require(validation.member("member", request.member, membership.node, self._limits))
                self._require_room(request)
                membership.member(request.member)
            case "member_gone":
                gone = request.member_gone
                validation.require(validation.replica_id("member_gone.replica_id", gone.replica_id))
                membership.member_gone((gone.replica_id, gone.rank))
                if gone.rank == 0:
                    self._asked.forget(gone.replica_id)
                    self._hub.forget_replica(gone.replica_id)
            case "load":
                self._hub.take_loads([load for load in request.load.loads if self._sound(load)])
            case "digest":
                self._digest(request.digest)
            case "heartbeat":
                self._ack_due = True
                self._wake.set()

    def _reintroduce(self, hello: registry_pb2.Hello) -> None:
        validation.require(validation.hello(hello, self._limits))
        if (hello.node.node_id, hello.node.incarnation) != (self.node_id, self.incarnation):
            raise InvalidRequest.field("hello.node", "a stream speaks for one node and one incarnation; open another")
        self.membership.introduce(hello)

    def _digest(self, update: registry_pb2.DigestUpdate) -> None:
        validation.require(validation.digest(update, self._limits))
        self._require_ours("digest.replica_id", update.replica_id)
        if update.tier == common_pb2.TIER_UNSPECIFIED:
            update.tier = common_pb2.TIER_GPU
        series = Series.of(update)
        match self._hub.take_digest(update):
            case Outcome.RESYNC:
                delay_s = self._asked.wrong(series, again=update.snapshot)
                if delay_s is not None:
                    metrics.DIGEST_RESYNCS.inc()
                    asyncio.get_running_loop().call_later(delay_s, self._ask, update.replica_id)
            case Outcome.APPLIED if update.snapshot:
                self._asked.right(series)

    def _sound(self, load: registry_pb2.ReplicaLoad) -> bool:
        try:
            self._require_ours("load.replica_id", load.replica_id)
            validation.require(validation.load("load", load))
        except InvalidRequest as error:
            self._refuse("load", error)
            return False
        return True

    def _ask(self, replica_id: str) -> None:
        self._resyncs[replica_id] = None
        self._wake.set()

    def _require_ours(self, field: str, replica_id: str) -> None:
        if (replica_id, 0) not in self.membership.members:
            raise InvalidRequest.field(field, f"{replica_id[:80]!r} is not led by this node; report its member first")

    def _require_room(self, request: registry_pb2.ReportRequest) -> None:
        key = (request.member.replica_id, request.member.rank)
        members = self.membership.members
        if key not in members and len(members) >= self._limits.members_per_node:
            raise InvalidRequest.field("member", f"a node runs at most {self._limits.members_per_node} members")
