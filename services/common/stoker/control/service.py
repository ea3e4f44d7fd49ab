"""A deciding service from start to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import structlog

from stoker.api.registry.v1 import registry_pb2
from stoker.common import metrics, rpc, tls
from stoker.common.tls import TlsConfig
from stoker.control.config import LoopConfig
from stoker.control.loop import ControlLoop, Round, candidate_name
from stoker.registry.client import FleetWatch, Leadership, RegistryClient

log = structlog.get_logger(__name__)

R = TypeVar("R", bound=Round)

STOP_GRACE_S = 1.0
"""Time for running status calls to finish, seconds."""


class DecidingConfig(Protocol):
    """What the settings of every deciding service have in common."""

    @property
    def listen(self) -> str:
        """host:port of the gRPC server."""

    @property
    def metrics_listen(self) -> str:
        """host:port of /metrics, or empty."""

    @property
    def registries(self) -> tuple[str, ...]:
        """host:port of every registry."""

    @property
    def tls(self) -> TlsConfig:
        """Its certificates."""

    @property
    def loop(self) -> LoopConfig:
        """How it leads and looks."""


async def serve(
    role: str,
    service_name: str,
    config: DecidingConfig,
    topics: Sequence[registry_pb2.Topic.ValueType],
    round_of: Callable[[RegistryClient, FleetWatch], R],
    add_servicer: Callable[[rpc.RpcServer, ControlLoop, R, FleetWatch], None],
    stop: asyncio.Event,
) -> None:
    """Runs the service until `stop`, then resigns, so that a standby leads at once.

    It reports SERVING once it has seen the whole state, leading or not.
    """
    candidate = candidate_name(config.loop)
    with metrics.exposed(config.metrics_listen) as metrics_port:
        async with (
            tls.following(config.tls) as secure,
            RegistryClient(config.registries, timeout_s=config.loop.write_timeout_s, tls=secure) as client,
            FleetWatch(config.registries, topics, watcher=candidate, tls=secure) as watch,
        ):
            server = rpc.RpcServer.bind(config.listen, [service_name], tls=secure)
            leadership = Leadership(client, role, candidate, config.loop.leader_ttl_s)
            round_ = round_of(client, watch)
            loop = ControlLoop(role, config.loop, watch, leadership, round_)
            add_servicer(server, loop, round_, watch)
            await server.start()
            log.info("control.started", role=role, port=server.port, metrics_port=metrics_port, candidate=candidate)
            try:
                await _until(stop, loop, leadership, watch, server)
            finally:
                await server.stop(STOP_GRACE_S)
    log.info("control.stopped", role=role)


async def _until(
    stop: asyncio.Event, loop: ControlLoop, leadership: Leadership, watch: FleetWatch, server: rpc.RpcServer
) -> None:
    running = asyncio.create_task(loop.run())
    stopping = asyncio.create_task(stop.wait())
    ready = asyncio.create_task(_serving_once_synced(watch, server))
    await leadership.start()
    try:
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (running, stopping, ready):
            task.cancel()
        # The loop first: a round must not write after this process has stepped down.
        results = await asyncio.gather(running, stopping, ready, return_exceptions=True)
        await leadership.resign()
    if isinstance(results[0], Exception):
        raise results[0]


async def _serving_once_synced(watch: FleetWatch, server: rpc.RpcServer) -> None:
    await watch.synced.wait()
    await server.set_serving(True)
