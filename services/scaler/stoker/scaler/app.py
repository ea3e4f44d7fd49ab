"""The scaler process."""

from __future__ import annotations

import asyncio

import structlog
from prometheus_client import Counter

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import registry_pb2
from stoker.api.scaler.v1 import scaler_pb2_grpc
from stoker.common import rpc, service
from stoker.control.loop import ControlLoop, pieces
from stoker.control.service import serve as serve_deciding
from stoker.registry.client import FleetEvent, FleetView, FleetWatch, LoadChanged, RecordsChanged, RegistryClient
from stoker.scaler.config import ScalerConfig
from stoker.scaler.core.decide import decide
from stoker.scaler.core.values import Load
from stoker.scaler.server import ROLE, SERVICE, ScalerServicer, fleet_of, load_of, record_of

log = structlog.get_logger(__name__)

TOPICS = (
    registry_pb2.TOPIC_DEPLOYMENTS,
    registry_pb2.TOPIC_DESIRED,
    registry_pb2.TOPIC_REPLICAS,
    registry_pb2.TOPIC_LOAD,
    registry_pb2.TOPIC_LEADERS,
)

_CHANGES = Counter("stoker_scaler_changes_total", "Desired counts written, by reason.", ["reason"])


class ScalerRound:
    """One round of scaling: the core between a view and a fenced write."""

    def __init__(self, client: RegistryClient, config: ScalerConfig) -> None:
        self.client = client
        self._config = config
        self._loads: dict[str, Load] = {}

    def hear(self, event: FleetEvent, now: float) -> None:
        """Keeps the last load of each replica."""
        if isinstance(event, LoadChanged):
            self._loads.update((load.replica_id, load_of(load, now)) for load in event.loads)
        elif isinstance(event, RecordsChanged):
            for replica in event.removals.replicas:
                self._loads.pop(replica, None)

    def begin(self) -> None:
        """Nothing to forget: loads are heard by standbys too, and all else is persisted."""

    async def run(self, view: FleetView, fence: common_pb2.Fence, now: float) -> int | None:
        """Decides all deployments and writes what changed."""
        decisions = decide(fleet_of(view, self._loads), now, load_fresh_s=self._config.load_fresh_s)
        revision = None
        for desired in decisions.changed:
            log.info(
                "scaler.decided",
                deployment=desired.deployment,
                replicas=desired.replicas,
                victims=desired.victims,
                reason=str(desired.reason),
            )
        for removed in pieces(decisions.removed):
            log.info("scaler.removed", deployments=removed)
            revision = await self.client.set_desired(fence, [], removed)
        for changed in pieces(decisions.changed):
            revision = await self.client.set_desired(fence, [record_of(desired, fence) for desired in changed])
            for desired in changed:
                _CHANGES.labels(str(desired.reason)).inc()
        return revision


async def serve(config: ScalerConfig, stop: asyncio.Event) -> None:
    """Runs a scaler until `stop`."""

    def add_servicer(server: rpc.RpcServer, loop: ControlLoop, round_: ScalerRound, watch: FleetWatch) -> None:
        servicer = ScalerServicer(lambda: loop.leading, watch.view, round_.client)
        scaler_pb2_grpc.add_ScalerServiceServicer_to_server(servicer, server.server)

    def round_of(client: RegistryClient) -> ScalerRound:
        return ScalerRound(client, config)

    await serve_deciding(ROLE, SERVICE, config, TOPICS, round_of, add_servicer, stop)


def main() -> None:
    """Entry point of `stoker-scaler`."""
    service.main("stoker-scaler", "Decides how many replicas each deployment gets.", ScalerConfig, serve)
