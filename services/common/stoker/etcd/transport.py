"""Channels to every endpoint, and one rule for moving between them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc
import structlog

from stoker.common.backoff import Backoff
from stoker.etcd import wire
from stoker.etcd.core.endpoints import Endpoints
from stoker.etcd.core.failure import Failure, judge
from stoker.etcd.errors import Ambiguous, EtcdError, EtcdUnavailable, to_error

T = TypeVar("T")
log = structlog.get_logger(__name__)

# A response larger than this is refused. Ranges are read in pages and watches in fragments, well below it.
MAX_MESSAGE_BYTES = 32 * 1024 * 1024

_CALLS_END_S = 30.0
_AVOIDED = Backoff(0.2, 5.0)
"""How long an endpoint that failed is avoided."""

_OPTIONS: list[tuple[str, Any]] = [
    # A half-open connection is dead within 13 s, also between calls.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted server is found again within 1 s; the minimum is how long one attempt to connect may take.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Whether to send a write twice is decided here, never below.
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]


@dataclass(frozen=True)
class Tls:
    """Certificates in PEM: the authority to trust, and the client's own pair where etcd asks for one.

    `server_name` replaces the endpoint's host in the check of the server's certificate.
    """

    ca: bytes
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    server_name: str | None = None

    @classmethod
    def from_files(
        cls,
        ca: Path,
        certificate: Path | None = None,
        key: Path | None = None,
        server_name: str | None = None,
    ) -> Self:
        """Read the PEM files; OSError names the one that cannot be read."""
        return cls(
            ca.read_bytes(),
            certificate.read_bytes() if certificate else None,
            key.read_bytes() if key else None,
            server_name,
        )


class Connection:
    """One endpoint: its channel and its stubs."""

    def __init__(self, address: str, tls: Tls | None) -> None:
        self.address = address
        self.replaced = False
        """Whether another, with newer certificates, has taken its place: streams on it are to move there."""
        self.idle = asyncio.Event()
        """Set while no stream is open on it."""
        self.idle.set()
        self._streams = 0
        if tls is None:
            self.channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        else:
            credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)
            name = [("grpc.ssl_target_name_override", tls.server_name)] if tls.server_name else []
            self.channel = grpc.aio.secure_channel(address, credentials, options=[*_OPTIONS, *name])
        self.kv = wire.stubs.KVStub(self.channel)
        self.lease = wire.stubs.LeaseStub(self.channel)
        self.watch = wire.stubs.WatchStub(self.channel)
        self.maintenance = wire.stubs.MaintenanceStub(self.channel)

    def stream_opened(self) -> None:
        """A stream uses this connection; `stream_ended` must follow."""
        self._streams += 1
        self.idle.clear()

    def stream_ended(self) -> None:
        """A stream uses it no more."""
        self._streams -= 1
        if not self._streams:
            self.idle.set()


class CallFailed(Exception):
    """One try at one endpoint failed; internal to the layer, which turns it into an EtcdError."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure

    @classmethod
    def of(cls, error: grpc.aio.AioRpcError) -> Self:
        """Judge what gRPC raised."""
        return cls(judge(error.code().name, error.details() or ""))

    @classmethod
    def timeout(cls, text: str) -> Self:
        """No answer in the time that was given."""
        return cls(judge("DEADLINE_EXCEEDED", text))


async def unary(method: Callable[..., Awaitable[Any]], request: Any, timeout: float) -> Any:
    """One unary call with a deadline; raises CallFailed."""
    try:
        return await method(request, timeout=timeout, metadata=wire.HAS_LEADER)
    except grpc.aio.AioRpcError as error:
        raise CallFailed.of(error) from error


class Transport:
    """Connections to all endpoints; calls go to one that works.

    `attempt_timeout_s` bounds one try of a repeatable call, so that a frozen member costs that and no more.
    """

    def __init__(
        self, endpoints: Sequence[str], tls: Tls | None, *, attempt_timeout_s: float, rng: random.Random
    ) -> None:
        self._addresses = tuple(endpoints)
        self._connections = [Connection(address, tls) for address in endpoints]
        self._closing: dict[asyncio.Task[None], Connection] = {}
        self._endpoints = Endpoints(len(endpoints), rng.randrange(len(endpoints)))
        self.attempt_timeout_s = attempt_timeout_s
        self._rng = rng

    def pick(self) -> Connection:
        """The endpoint to use now."""
        return self._connections[self._endpoints.pick(_now())]

    def renew(self, tls: Tls) -> None:
        """Connect with other certificates from now on; what is under way on the old connections ends in peace."""
        replaced, self._connections = self._connections, [Connection(address, tls) for address in self._addresses]
        for connection in replaced:
            connection.replaced = True
            task = asyncio.create_task(_close_in_peace(connection), name=f"close {connection.address}")
            self._closing[task] = connection
            task.add_done_callback(self._closing.pop)

    def failed(self, connection: Connection, failure: Failure) -> None:
        """Avoid this endpoint for a while."""
        if connection.replaced:
            return
        index = self._connections.index(connection)
        before = self._endpoints.failures(index)
        if not before:
            log.warning("etcd endpoint failed", endpoint=connection.address, cause=failure.text)
        wait = _AVOIDED.delay_s(before, self._rng)
        self._endpoints.failed(index, _now() + wait)

    def worked(self, connection: Connection) -> None:
        """Trust this endpoint again."""
        if connection.replaced:
            return
        index = self._connections.index(connection)
        if self._endpoints.failures(index):
            log.info("etcd endpoint works again", endpoint=connection.address)
        self._endpoints.succeeded(index)

    def pause(self, attempt: int, cap_s: float = 2.0) -> float:
        """Seconds to wait before the next try: none while another endpoint is good."""
        if self._endpoints.has_good(_now()):
            return 0.0
        return Backoff(max_s=cap_s).delay_s(attempt, self._rng)

    async def call(
        self,
        what: str,
        attempt: Callable[[Connection, float], Awaitable[T]],
        *,
        timeout: float,
        idempotent: bool,
    ) -> T:
        """Run `attempt(connection, seconds)` until it gives a result, moving on from endpoints that fail.

        Raises Ambiguous when a write that must not be repeated may have happened, EtcdUnavailable when the
        `timeout` (seconds, over all tries) is used up, and at once what trying again cannot help.
        """
        deadline = _now() + timeout
        tries = 0
        while True:
            connection = self.pick()
            left = deadline - _now()
            try:
                result = await attempt(connection, min(left, self.attempt_timeout_s) if idempotent else left)
            except CallFailed as error:
                failure = error.failure
                if failure.passing:
                    self.failed(connection, failure)
                if failure.maybe_applied and not idempotent:
                    raise Ambiguous(
                        f"etcd {what} at {connection.address}: the answer was lost ({failure.text}); "
                        "read, then write again only with a comparison to what was read"
                    ) from error
                if not failure.passing:
                    raise to_error(what, failure, connection.address) from error
                wait = self.pause(tries)
                if _now() + wait >= deadline:
                    raise _gave_up(what, failure, connection, timeout) from error
                tries += 1
                await asyncio.sleep(wait)
            else:
                self.worked(connection)
                return result

    async def close(self) -> None:
        """Close every channel; calls in flight fail."""
        for task in self._closing:
            task.cancel()
        every = [*self._connections, *self._closing.values()]
        await asyncio.gather(*(connection.channel.close() for connection in every))


async def _close_in_peace(connection: Connection) -> None:
    # Longer than any single call; streams move at their next sign of life.
    await asyncio.sleep(_CALLS_END_S)
    await connection.idle.wait()
    await connection.channel.close()


def _gave_up(what: str, failure: Failure, connection: Connection, timeout: float) -> EtcdError:
    error = to_error(what, failure, connection.address)
    kind = type(error) if isinstance(error, EtcdUnavailable) else EtcdUnavailable
    return kind(
        f"etcd {what}: no endpoint answered within {timeout:g} s; the last tried, {connection.address}, "
        f"said: {failure.text}",
        retry_after_s=1.0,
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
