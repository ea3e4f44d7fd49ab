"""The planner process."""

from __future__ import annotations

import asyncio

from stoker.api.planner.v1 import planner_pb2_grpc
from stoker.api.registry.v1 import registry_pb2
from stoker.common import rpc, service
from stoker.control.loop import ControlLoop
from stoker.control.service import serve as serve_deciding
from stoker.planner.computing import Computing
from stoker.planner.config import PlannerConfig
from stoker.planner.rounds import PlannerRound
from stoker.planner.server import SERVICE, PlannerServicer
from stoker.registry.client import FleetWatch, RegistryClient

ROLE = "planner"

TOPICS = (
    registry_pb2.TOPIC_NODES,
    registry_pb2.TOPIC_DEPLOYMENTS,
    registry_pb2.TOPIC_DESIRED,
    registry_pb2.TOPIC_ASSIGNMENTS,
    registry_pb2.TOPIC_REPLICAS,
    registry_pb2.TOPIC_LEADERS,
    registry_pb2.TOPIC_FACILITY,
)


async def serve(config: PlannerConfig, stop: asyncio.Event) -> None:
    """Runs a planner until `stop`."""

    def round_of(client: RegistryClient, watch: FleetWatch) -> PlannerRound:
        return PlannerRound(client, watch.view, config)

    def add_servicer(server: rpc.RpcServer, loop: ControlLoop, round_: PlannerRound, watch: FleetWatch) -> None:
        servicer = PlannerServicer(
            lambda: loop.leading,
            lambda: watch.view.leaders.get(ROLE),
            watch.synced.is_set,
            round_,
            Computing(config.search.answer_s),
        )
        planner_pb2_grpc.add_PlannerServiceServicer_to_server(servicer, server.server)

    await serve_deciding(ROLE, SERVICE, config, TOPICS, round_of, add_servicer, stop)


def main() -> None:
    """Entry point of `stoker-planner`."""
    service.main("stoker-planner", "Decides where each replica runs.", PlannerConfig, serve)
