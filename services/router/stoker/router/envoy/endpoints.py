"""The router's side of Envoy, wired together."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
from grpc_health.v1 import health_pb2

from stoker.common import rpc
from stoker.common.tls import Tls
from stoker.router.config import RouterConfig
from stoker.router.envoy import access_log, ext_proc
from stoker.router.envoy.addresses import Addresses
from stoker.router.envoy.check import Checks
from stoker.router.envoy.ext_proc import Bodies
from stoker.router.envoy.flights import Flights
from stoker.router.flights.routing import Router
from stoker.router.http.port import SPARE_CONNECTIONS, Port
from stoker.router.watching import every
from stoker.router.workers.siblings import Siblings

_SWEEP_S = 0.5


class ExtAuthz:
    """Answers the checks of an Envoy on a port of its own, and its access log on the router's gRPC port."""

    def __init__(self, config: RouterConfig, router: Router, siblings: Siblings) -> None:
        self._siblings = siblings
        self._view = router.view
        self.flights = Flights(config.envoy.silence_s, router.clock, router.move, self._refused, siblings.nonce)
        checks = Checks(router, self.flights, config.limits, Addresses(router.clock))
        self.port = Port(
            "listen.ext_authz",
            config.listen.ext_authz,
            checks.decide,
            config.limits,
            router.clock,
            example="127.0.0.1:7381",
            shared=siblings.count > 1,
        )
        self._sweeping: asyncio.Task[None] | None = None

    def add_to(self, server: grpc.aio.Server) -> None:
        """Take access logs there. Before the server starts."""
        access_log.add_to(server, self.flights, self._siblings)

    async def start(self) -> None:
        """Listen. Raises StokerError when the address is taken or none."""
        await self.port.start()
        self._sweeping = asyncio.create_task(
            every(_SWEEP_S, self.flights.sweep, self.port.sweep), name="envoy flights"
        )

    async def close(self) -> None:
        """Stop at once, and release all flights."""
        self.port.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeping
        self.flights.close()

    def _refused(self, replica: str) -> None:
        target = self._view.targets.get(replica)
        if target is not None:
            self._view.reached(target, False)


class ExtProc:
    """Serves the endpoint-picker protocol on a gRPC port of its own."""

    def __init__(
        self, config: RouterConfig, router: Router, secure: Tls | None = None, *, shared: bool = False
    ) -> None:
        """`shared`: with other processes, on the same port."""
        self._shared = shared
        self._listen = config.listen.ext_proc
        self._secure = secure
        self._router = router
        # A stream that ends says so: nothing is ever silent.
        self.flights = Flights(float("inf"), router.clock, router.move)
        checks = Checks(router, self.flights, config.limits, Addresses(router.clock))
        bodies = Bodies(config.limits.max_body_bytes)
        self._processor = ext_proc.ExternalProcessor(checks, self.flights, bodies, config.limits.request_s)
        self._most = config.limits.max_in_flight + SPARE_CONNECTIONS
        self._rpc: rpc.RpcServer | None = None

    async def start(self) -> None:
        """Listen, alive and not ready. Raises StokerError when the address is taken or none."""
        services = (ext_proc.SERVICE, ext_proc.READINESS)
        self._rpc = rpc.RpcServer.bind(
            self._listen, services, tls=self._secure, max_concurrent_rpcs=self._most, shared=self._shared
        )
        self._processor.add_to(self._rpc.server)
        await self._rpc.start()
        await self._rpc.health.set(ext_proc.LIVENESS, health_pb2.HealthCheckResponse.SERVING)

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._rpc is not None  # noqa: S101
        return self._rpc.port

    async def set_serving(self, serving: bool) -> None:
        """Say whether requests are welcome."""
        if self._rpc is not None:
            await self._rpc.set_serving(serving)

    async def close(self) -> None:
        """Stop at once, and release all flights."""
        if self._rpc is not None:
            await self._rpc.stop(0)
        self.flights.close()
