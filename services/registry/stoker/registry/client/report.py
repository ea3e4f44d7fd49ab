"""An agent's stream to the registry."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import AsyncIterator, Sequence

import grpc
import structlog

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import records_pb2, registry_pb2, registry_pb2_grpc
from stoker.common import rpc
from stoker.common.backoff import Backoff
from stoker.common.errors import Code, Conflict, InvalidRequest, StokerError, Unavailable
from stoker.common.tls import Tls
from stoker.registry.client.events import AgentEvent, AssignmentsChanged, Connected, Disconnected, ResyncWanted
from stoker.registry.core import rendezvous
from stoker.registry.core.outbox import Outbox
from stoker.registry.core.places import Places

log = structlog.get_logger(__name__)

_HELLO_TIMEOUT_S = 5.0
_HEALTH_S = 3.0

# In heartbeat intervals, each a third of the lease. Beats come early enough to be heard before every renewal.
# Each is answered, so silence means that the registry is gone or stuck; half the lease is left to move.
_BEAT = 0.7
_SILENCE = 1.5


class Superseded(Conflict):
    """A newer incarnation of this node's agent took over: this one must stop."""

    reason = "SUPERSEDED"


class _Ended(Unavailable):
    """The registry ended the stream, without an error."""


class ReportSession:
    """Keeps one registry of `endpoints` informed about `node`, whichever is alive.

    Publishing never blocks and never fails: what is published goes out when a registry hears, the newest value
    of each member and load, every step of each digest. After a change of registry all members are told again
    and `ResyncWanted` asks for a snapshot of each digest ever published. It returns to the registry that comes
    first for this node once that serves again, and looks after `return_s` to three times as many seconds. Use it as
    an async context manager; iterate `events()` from one task. Ends without farewell, so that the node outlives a
    restart of its agent; `goodbye` says farewell first.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        node: common_pb2.Node,
        *,
        lease_id: int = 0,
        return_s: float = 60.0,
        tls: Tls | None = None,
        rng: random.Random | None = None,
    ) -> None:
        if not endpoints:
            raise InvalidRequest.field("endpoints", "give at least one registry as host:port")
        self.node = node
        """What a Hello says of the node; `update_node` changes it."""
        self.lease_id = lease_id
        """Lease of the node; 0 before the first Welcome."""
        self.connected = asyncio.Event()
        """Set while a registry has admitted this agent."""
        self._endpoints = rendezvous.order(node.node_id, endpoints)
        self._places = Places(len(self._endpoints))
        self._return_s = return_s
        self._tls = tls
        self._rng = rng or random.Random()  # noqa: S311 - jitter
        self._backoff = Backoff(first_s=0.1, max_s=3.0)
        self._outbox = Outbox()
        self._wake = asyncio.Event()
        self._heartbeat_s = 3.0
        self._leaving = False
        self._left = asyncio.Event()
        self._rehello = False
        # To the owner: bounded because assignments and resyncs are kept by their newest value.
        self._assignments: registry_pb2.NodeAssignments | None = None
        self._resyncs: dict[str, None] = {}
        self._links: deque[Connected | Disconnected] = deque(maxlen=64)
        self._inbox = asyncio.Event()
        self._fatal: StokerError | None = None
        self._task: asyncio.Task[None] | None = None

    # What the agent publishes

    def publish_member(self, status: records_pb2.MemberStatus) -> None:
        """A member's state changed. The session keeps the message: do not change it afterwards."""
        self._outbox.member(status)
        self._wake.set()

    def member_gone(self, replica_id: str, rank: int) -> None:
        """A member exists no more."""
        self._outbox.member_gone(replica_id, rank)
        self._wake.set()

    def publish_load(self, loads: Sequence[registry_pb2.ReplicaLoad]) -> None:
        """Newest load of some replicas."""
        self._outbox.load(loads)
        self._wake.set()

    def publish_digest(self, update: registry_pb2.DigestUpdate) -> None:
        """The next step, or a piece of a snapshot, of a digest; dropped while no registry hears.

        Sequences count per replica and tier. Keep pieces of a snapshot below 4 MiB.
        """
        for replica_id in self._outbox.digest(update):
            self._want_resync(replica_id)
        self._wake.set()

    def update_node(self, node: common_pb2.Node) -> None:
        """The node itself changed (its `draining`, say): it is introduced again, without a break."""
        self.node = node
        self._rehello = True
        self._wake.set()

    # What the agent hears

    async def events(self) -> AsyncIterator[AgentEvent]:
        """Links, assignments and resync wishes, for ever; of assignments only the newest.

        Raises Superseded when a newer incarnation took over, and InvalidRequest when the registry refuses what
        the node says of itself.
        """
        while True:
            while self._links:
                yield self._links.popleft()
            if self._assignments is not None:
                assignments, self._assignments = self._assignments, None
                yield AssignmentsChanged(assignments)
            while self._resyncs:
                replica_id = next(iter(self._resyncs))
                del self._resyncs[replica_id]
                yield ResyncWanted(replica_id)
            if self._fatal is not None:
                raise self._fatal
            if not self._links and self._assignments is None:
                self._inbox.clear()
                await self._inbox.wait()

    # Life

    async def start(self) -> None:
        """Look for a registry."""
        self._task = asyncio.create_task(self._run(), name=f"report of {self.node.node_id}")

    async def goodbye(self, timeout_s: float = 2.0) -> None:
        """Leave the fleet at once rather than at the lease's end, then close."""
        self._leaving = True
        self._wake.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._left.wait()
        await self.close()

    async def close(self) -> None:
        """End the stream. The node lives on until its lease ends."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def __aenter__(self) -> ReportSession:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self) -> None:
        while self._fatal is None and not self._left.is_set():
            endpoint, homeward = self._endpoints[self._places.at], False
            try:
                async with rpc.channel(endpoint, self._tls) as channel:
                    homeward = await self._stream(endpoint, channel)
                because = "the registry of its own serves again" if homeward else "it said goodbye"
                if not homeward:
                    self._left.set()
            except grpc.aio.AioRpcError as error:
                failure = rpc.error_from(error)
                because = failure.message
                self._judge(failure)
            except TimeoutError:
                because = "it is silent"
            except StokerError as error:
                because = error.message
            except Exception as error:  # an agent that stays silent would lose its node
                log.exception("report.failed", endpoint=endpoint)
                because = repr(error)
            served = self.connected.is_set()
            if served:
                self.connected.clear()
                self._tell(Disconnected(endpoint, because))
            if homeward:
                log.info("report.returns", endpoint=endpoint, because=because)
                self._places.go_home()
                continue
            log.warning("report.lost", endpoint=endpoint, because=because)
            rounds = self._places.lost(served=served)
            if rounds and self._fatal is None:
                await asyncio.sleep(self._backoff.delay_s(rounds - 1, self._rng))

    def _judge(self, failure: StokerError) -> None:
        """Some refusals are final."""
        if failure.reason == Superseded.reason:
            self._fatal = Superseded(failure.message, metadata=failure.metadata)
        elif failure.code is Code.INVALID_ARGUMENT:
            self._fatal = InvalidRequest(failure.message, reason=failure.reason, fields=failure.fields)
        self._inbox.set()

    async def _stream(self, endpoint: str, channel: grpc.aio.Channel) -> bool:
        """Report to one registry. False at its end after a goodbye, True to go home; raises why it ended else."""
        stub: registry_pb2_grpc.RegistryServiceAsyncStub = registry_pb2_grpc.RegistryServiceStub(channel)
        call = stub.Report()
        try:
            resyncs = self._outbox.reconnected()
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                await call.write(registry_pb2.ReportRequest(hello=self._hello()))
                response = await _read(call)
            if response.WhichOneof("message") != "welcome":
                raise Unavailable(f"registry {endpoint} did not answer Hello with Welcome")
            self._welcomed(response.welcome)
            self.connected.set()
            self._tell(Connected(endpoint, response.welcome.registry_id))
            for replica_id in resyncs:
                self._want_resync(replica_id)
            log.info("report.admitted", endpoint=endpoint, lease=f"{self.lease_id:x}")
            return await self._converse(call)
        finally:
            call.cancel()

    async def _converse(self, call: _Call) -> bool:
        reader = asyncio.create_task(self._read_all(call))
        writer = asyncio.create_task(self._write_all(call))
        homeward = asyncio.create_task(self._until_home_serves())
        tasks = (reader, writer, homeward)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if homeward.done() and not (reader.done() or writer.done() or self._leaving):
                homeward.result()
                return True
            if not reader.done():
                await writer
            # Its error says why the stream ended; the writer only knows that it has.
            await reader
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return False

    async def _until_home_serves(self) -> None:
        """Returns when this registry is not the one preferred, and that one serves; looks seldom, not in step."""
        if self._places.at == 0:
            await asyncio.Event().wait()
        while True:
            await asyncio.sleep(self._return_s * (1 + 2 * self._rng.random()))
            if await rpc.wait_serving(self._endpoints[0], _HEALTH_S, self._tls):
                return

    def _hello(self) -> registry_pb2.Hello:
        return registry_pb2.Hello(node=self.node, lease_id=self.lease_id, members=self._outbox.members.values())

    def _welcomed(self, welcome: registry_pb2.Welcome) -> None:
        # A registry that has lost etcd admits without a lease; it says Welcome again when it has one.
        self.lease_id = welcome.lease_id
        self._heartbeat_s = welcome.heartbeat_interval_ms / 1000 or self._heartbeat_s

    async def _read_all(self, call: _Call) -> None:
        while True:
            async with asyncio.timeout(_SILENCE * self._heartbeat_s):
                try:
                    response = await _read(call)
                except _Ended:
                    if self._leaving:
                        return
                    raise
            match response.WhichOneof("message"):
                case "welcome":
                    self._welcomed(response.welcome)
                case "assignments":
                    self._assignments = response.assignments
                    self._inbox.set()
                case "resync":
                    self._want_resync(response.resync.replica_id)

    async def _write_all(self, call: _Call) -> None:
        now = asyncio.get_running_loop().time
        beat_at = now()
        try:
            while not self._leaving:
                if self._rehello:
                    self._rehello = False
                    await call.write(registry_pb2.ReportRequest(hello=self._hello()))
                for request in self._outbox.take():
                    await call.write(request)
                if now() >= beat_at:
                    beat_at = now() + _BEAT * self._heartbeat_s
                    await call.write(registry_pb2.ReportRequest(heartbeat=registry_pb2.Heartbeat()))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(beat_at):
                        await self._wake.wait()
                self._wake.clear()
            for request in self._outbox.take():
                await call.write(request)
            await call.write(registry_pb2.ReportRequest(goodbye=registry_pb2.Goodbye()))
            await call.done_writing()
        except asyncio.InvalidStateError:
            log.debug("report.write_after_end", node=self.node.node_id)

    def _tell(self, event: Connected | Disconnected) -> None:
        self._links.append(event)
        self._inbox.set()

    def _want_resync(self, replica_id: str) -> None:
        self._resyncs[replica_id] = None
        self._inbox.set()


_Call = grpc.aio.StreamStreamCall[registry_pb2.ReportRequest, registry_pb2.ReportResponse]


async def _read(call: _Call) -> registry_pb2.ReportResponse:
    """The next message; raises the call's error, or Unavailable at a clean end."""
    response = await call.read()
    if isinstance(response, registry_pb2.ReportResponse):
        return response
    raise _Ended("the registry ended the stream")
