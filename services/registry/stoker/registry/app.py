"""The registry, wired."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from stoker.api.registry.v1 import registry_pb2_grpc
from stoker.common import metrics, rpc, service, tls
from stoker.common.errors import StokerError
from stoker.common.tls import Tls
from stoker.etcd import EtcdClient, EtcdUnavailable
from stoker.etcd import Tls as EtcdTls
from stoker.registry.config import EtcdConfig, RegistryConfig
from stoker.registry.deployments import DeploymentStore
from stoker.registry.hub import Hub
from stoker.registry.leaders import LeaderStore
from stoker.registry.nodes import NodeStore
from stoker.registry.server import SERVICE, RegistryServicer

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Registry:
    """A running registry."""

    hub: Hub
    port: int
    """Port of its gRPC server."""
    following: asyncio.Task[None]
    """Follows etcd; ends only by an error that trying again cannot help."""


@asynccontextmanager
async def running(config: RegistryConfig) -> AsyncIterator[Registry]:
    """A registry for as long as the block runs; it serves as soon as it has read etcd."""
    async with tls.following(config.tls) as secure, _serving(config, secure) as registry:
        yield registry


@asynccontextmanager
async def _serving(config: RegistryConfig, secure: Tls | None) -> AsyncIterator[Registry]:
    server = rpc.RpcServer.bind(config.listen, [SERVICE], tls=secure)
    if not config.registry_id:
        host = config.listen.rpartition(":")[0] or socket.gethostname()
        config = dataclasses.replace(config, registry_id=f"{host}:{server.port}#{os.getpid()}")
    etcd = EtcdClient(config.etcd.endpoints, tls=_etcd_tls(config.etcd), call_timeout_s=config.etcd.call_timeout_s)
    hub = Hub(etcd, config)
    servicer = RegistryServicer(
        hub,
        NodeStore(etcd, config.membership.lease_ttl_s),
        DeploymentStore(etcd),
        LeaderStore(etcd),
        config,
        random.Random(),  # noqa: S311 - jitter
    )
    registry_pb2_grpc.add_RegistryServiceServicer_to_server(servicer, server.server)
    await server.start()
    following = asyncio.create_task(_follow(etcd, hub, server), name="registry hub")
    log.info("registry.started", registry=config.registry_id, port=server.port, etcd=config.etcd.endpoints)
    try:
        yield Registry(hub, server.port, following)
    finally:
        await server.set_serving(False)
        hub.close_streams()
        await server.stop(config.drain_s)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await etcd.close()


async def serve(config: RegistryConfig, stop: asyncio.Event) -> None:
    """Run until `stop` is set."""
    with metrics.exposed(config.metrics_listen):
        async with running(config) as registry:
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait({stopping, registry.following}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if registry.following.done():
                _blame(registry.following)


def main() -> None:
    """Entry point of `stoker-registry`."""
    service.main("stoker-registry", "Owns etcd, hears the agents, tells the fleet.", RegistryConfig, serve)


async def _follow(etcd: EtcdClient, hub: Hub, server: rpc.RpcServer) -> None:
    await _connect(etcd)

    async def announce() -> None:
        await hub.synced.wait()
        await server.set_serving(True)

    async with asyncio.TaskGroup() as group:
        group.create_task(hub.run())
        group.create_task(announce())


def _blame(following: asyncio.Task[None]) -> None:
    """Raises the error that ended it as one that `main` explains."""
    error = following.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is not None:
        raise error


async def _connect(etcd: EtcdClient) -> None:
    """Wait for etcd, however long: a registry started before its etcd is not an error."""
    while True:
        try:
            return await etcd.connect()
        except EtcdUnavailable as error:
            log.warning("registry.waits_for_etcd", error=error.message)
            await asyncio.sleep(0.5)


def _etcd_tls(config: EtcdConfig) -> EtcdTls | None:
    if not config.ca:
        return None
    try:
        return EtcdTls.from_files(
            Path(config.ca),
            Path(config.certificate) if config.certificate else None,
            Path(config.key) if config.key else None,
        )
    except OSError as error:
        raise StokerError(f"etcd certificate: {error}; check the paths under `etcd`", reason="BAD_CONFIG") from error


if __name__ == "__main__":
    main()
