"""Wires the node agent together. `stoker-node-agent` starts here."""

from __future__ import annotations

import asyncio
import importlib.metadata
import socket
import time
from collections.abc import Coroutine
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import structlog

from stoker.api.common.v1 import common_pb2
from stoker.api.inference.v1 import inference_pb2_grpc
from stoker.api.node.v1 import node_pb2_grpc
from stoker.common import metrics, otel, service, ticket_keys, tls
from stoker.common.rpc import RpcServer
from stoker.common.ticket_keys import KeyFile
from stoker.common.tls import Tls
from stoker.node_agent import gpus
from stoker.node_agent.config import AgentConfig
from stoker.node_agent.gate import Gate
from stoker.node_agent.ports import Ports
from stoker.node_agent.relay import InFlight, Relay
from stoker.node_agent.reports import Unheard
from stoker.node_agent.server import InferenceServer, NodeServer
from stoker.node_agent.state_files import StateDir
from stoker.node_agent.supervisor import Supervisor
from stoker.node_agent.surroundings import Surroundings, policy_of
from stoker.registry.client import AssignmentsChanged, ReportSession, ResyncWanted, Superseded

log = structlog.get_logger(__name__)

_SERVICES = ("stoker.api.inference.v1.InferenceService", "stoker.api.node.v1.NodeService")
_WILDCARDS = {"", "0.0.0.0", "::", "[::]"}  # noqa: S104
# Engines close an idle connection after 5 s: none is used just then.
_KEEPALIVE_S = 4.0


def main() -> None:
    """`stoker-node-agent`: runs engines on this host and reports their load and KV blocks."""
    service.main("stoker-node-agent", "Runs engines on one host for the fleet.", AgentConfig, serve)


async def serve(config: AgentConfig, stop: asyncio.Event) -> None:
    """Runs the agent until `stop`. Raises Superseded when a newer agent of this node took over."""
    state = StateDir(Path(config.state_dir))
    state.open()
    try:
        with (
            metrics.exposed(config.metrics_listen),
            otel.traced("stoker-node-agent", config.otlp_endpoint, config.otlp_sample),
        ):
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
            async with (
                tls.following(config.tls) as secure,
                ticket_keys.following(config.tickets.keys) as keys,
                aiohttp.ClientSession(connector=connector) as session,
            ):
                server = RpcServer.bind(config.listen, _SERVICES, tls=secure)
                await _serve(config, stop, state, server, session, secure, keys)
    finally:
        state.close()


async def _serve(
    config: AgentConfig,
    stop: asyncio.Event,
    state: StateDir,
    server: RpcServer,
    session: aiohttp.ClientSession,
    secure: Tls | None,
    keys: KeyFile,
) -> None:
    node = describe(config, server.port, _incarnation(state))
    rng = Random()  # noqa: S311 - jitter and ports
    registry = ReportSession(config.registries, node, tls=secure, rng=rng) if config.registries else None
    in_flight = InFlight(config.relay.max_streams)
    supervisor = Supervisor(
        Surroundings(
            config=config,
            policy=policy_of(config.lifecycle),
            node=node,
            state=state,
            ports=Ports(rng),
            session=session,
            reports=registry or Unheard(),
            relayed=in_flight,
            rng=rng,
            tls=secure,
            keys=keys,
        )
    )
    relay = Relay(in_flight, config.relay)
    inference = InferenceServer(supervisor, relay, session, config.relay.max_choices, Gate(config.tickets, keys))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(inference, server.server)
    connected = registry.connected.is_set if registry is not None else bool
    node_pb2_grpc.add_NodeServiceServicer_to_server(NodeServer(node, supervisor, connected), server.server)
    log.info("agent.starting", node=node.node_id, endpoint=node.grpc_endpoint, gpus=len(node.gpus))
    await relay.start()
    await supervisor.adopt()
    await server.start()
    await server.set_serving(True)
    superseded = False
    try:
        await _until(stop, _listen(registry, supervisor) if registry is not None else None)
    except Superseded:
        superseded = True
        raise
    finally:
        await _stop(config, server, relay, supervisor, registry, drain=config.on_stop == "drain" and not superseded)


async def _listen(registry: ReportSession, supervisor: Supervisor) -> None:
    """Obey the registry for ever. Raises Superseded when a newer agent of this node took over."""
    await registry.start()
    async for event in registry.events():
        match event:
            case AssignmentsChanged():
                await supervisor.assign(event.assignments)
            case ResyncWanted():
                supervisor.resync(event.replica_id)


async def _until(stop: asyncio.Event, work: Coroutine[Any, Any, None] | None) -> None:
    """Until `stop`, or until `work` fails."""
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(stop.wait())]
    if work is not None:
        tasks.append(asyncio.create_task(work))
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _stop(
    config: AgentConfig,
    server: RpcServer,
    relay: Relay,
    supervisor: Supervisor,
    registry: ReportSession | None,
    *,
    drain: bool,
) -> None:
    await server.set_serving(False)
    if drain:
        supervisor.drain_all()
        await supervisor.wait_gone()
        if registry is not None:
            await registry.goodbye()
    await server.stop(config.stop_grace_s)
    await relay.close()
    await supervisor.stop()
    if registry is not None:
        await registry.close()


def _incarnation(state: StateDir) -> int:
    now = time.time_ns()
    try:
        return state.next_incarnation(now)
    except OSError as error:  # a full disk costs the memory of it, not the agent
        log.warning("agent.incarnation_unwritten", error=str(error))
        return now


def describe(config: AgentConfig, port: int, incarnation: int) -> common_pb2.Node:
    """This host as the fleet knows it."""
    host, explicit_port = _public_host(config)
    return common_pb2.Node(
        node_id=config.node_id or socket.gethostname(),
        incarnation=incarnation,
        grpc_endpoint=f"{host}:{explicit_port or port}",
        host=host,
        gpus=gpus.inventory(),
        cpu_slots=config.cpu_slots,
        engines=config.engines,
        labels=config.labels,
        version=importlib.metadata.version("stoker"),
    )


def _public_host(config: AgentConfig) -> tuple[str, str]:
    host, sep, port = config.advertise.partition(":")
    if host:
        return host, port if sep else ""
    host = config.listen.rpartition(":")[0]
    return (socket.gethostname() if host in _WILDCARDS else host), ""
