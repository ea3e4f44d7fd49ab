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

import structlog

from stoker.api.registry.v1 import registry_pb2_grpc
from stoker.common import metrics, rpc, service, tls
from stoker.common.tls import Tls, TlsConfig
from stoker.etcd import EtcdClient, EtcdUnavailable
from stoker.etcd import Tls as EtcdTls
from stoker.registry.config import RegistryConfig
from stoker.registry.deployments import DeploymentStore
from stoker.registry.facilities import FacilityStore
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
    files = config.etcd
    to_etcd = TlsConfig(certificate=files.certificate, key=files.key, ca=files.ca)
    async with (
        tls.following(config.tls) as secure,
        tls.following(to_etcd, "etcd", serves=False) as secure_etcd,
        _serving(config, secure, secure_etcd) as registry,
    ):
        yield registry


@asynccontextmanager
async def _serving(config: RegistryConfig, secure: Tls | None, secure_etcd: Tls | None) -> AsyncIterator[Registry]:
    server = rpc.RpcServer.bind(config.listen, [SERVICE], tls=secure)
    if not config.registry_id:
        host = config.listen.rpartition(":")[0] or socket.gethostname()
        config = dataclasses.replace(config, registry_id=f"{host}:{server.port}#{os.getpid()}")
    etcd = EtcdClient(
        config.etcd.endpoints,
        tls=_for_etcd(secure_etcd) if secure_etcd is not None else None,
        call_timeout_s=config.etcd.call_timeout_s,
    )
    if secure_etcd is not None:
        secure_etcd.on_renewal(lambda renewed: etcd.renew(_for_etcd(renewed)))
    hub = Hub(etcd, config)
    servicer = RegistryServicer(
        hub,
        NodeStore(etcd, config.membership.lease_ttl_s),
        DeploymentStore(etcd),
        LeaderStore(etcd),
        FacilityStore(etcd),
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


def _for_etcd(secure: Tls) -> EtcdTls:
    ca, certificate, key = secure.client_pem()
    return EtcdTls(ca, certificate, key)


if __name__ == "__main__":
    main()
