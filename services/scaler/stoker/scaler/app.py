"""The scaler process."""

from __future__ import annotations

import asyncio

from stoker.api.registry.v1 import registry_pb2
from stoker.api.scaler.v1 import scaler_pb2_grpc
from stoker.common import rpc, service
from stoker.control.loop import ControlLoop
from stoker.control.service import serve as serve_deciding
from stoker.registry.client import FleetWatch, RegistryClient
from stoker.scaler.config import ScalerConfig
from stoker.scaler.rounds import ScalerRound
from stoker.scaler.server import ROLE, SERVICE, ScalerServicer
from stoker.scaler.watching import Watching

TOPICS = (
    registry_pb2.TOPIC_NODES,
    registry_pb2.TOPIC_DEPLOYMENTS,
    registry_pb2.TOPIC_DESIRED,
    registry_pb2.TOPIC_ASSIGNMENTS,
    registry_pb2.TOPIC_REPLICAS,
    registry_pb2.TOPIC_LOAD,
    registry_pb2.TOPIC_LEADERS,
    registry_pb2.TOPIC_DEMAND,
    registry_pb2.TOPIC_SCALING,
    registry_pb2.TOPIC_DIGESTS,
    registry_pb2.TOPIC_DISPATCHES,
)


async def serve(config: ScalerConfig, stop: asyncio.Event) -> None:
    """Runs a scaler until `stop`."""

    def round_of(client: RegistryClient, watch: FleetWatch) -> ScalerRound:
        return ScalerRound(client, watch.view, Watching(watch.view, config.sample_s), config)

    def add_servicer(server: rpc.RpcServer, loop: ControlLoop, round_: ScalerRound, watch: FleetWatch) -> None:
        servicer = ScalerServicer(loop, watch, round_, round_.client)
        scaler_pb2_grpc.add_ScalerServiceServicer_to_server(servicer, server.server)

    await serve_deciding(ROLE, SERVICE, config, TOPICS, round_of, add_servicer, stop)


def main() -> None:
    """Entry point of `stoker-scaler`."""
    service.main("stoker-scaler", "Decides how many replicas each deployment gets.", ScalerConfig, serve)
