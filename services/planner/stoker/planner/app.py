"""The planner process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog
from prometheus_client import Counter, Gauge

from stoker.api.common.v1 import common_pb2
from stoker.api.planner.v1 import planner_pb2_grpc
from stoker.api.registry.v1 import registry_pb2
from stoker.common import rpc, service
from stoker.control.loop import ControlLoop, fitting, pieces
from stoker.control.service import serve as serve_deciding
from stoker.planner.config import PlannerConfig
from stoker.planner.core import retiring
from stoker.planner.core.loss import Presence, look
from stoker.planner.core.plan import plan
from stoker.planner.core.values import Limits, Plan, Unplaced
from stoker.planner.server import (
    SERVICE,
    PlannerServicer,
    assigned_nodes,
    problem_of,
    record_of,
    retirement_times,
)
from stoker.registry.client import FleetEvent, FleetView, FleetWatch, RegistryClient

log = structlog.get_logger(__name__)

ROLE = "planner"

TOPICS = (
    registry_pb2.TOPIC_NODES,
    registry_pb2.TOPIC_DEPLOYMENTS,
    registry_pb2.TOPIC_DESIRED,
    registry_pb2.TOPIC_ASSIGNMENTS,
    registry_pb2.TOPIC_REPLICAS,
    registry_pb2.TOPIC_LEADERS,
)

_CHANGES = Counter("stoker_planner_changes_total", "Assignments written and deleted.", ["kind"])
_UNPLACED = Gauge("stoker_planner_unplaced_replicas", "Replicas wanted that have no place, as the leader sees it.")


class PlannerRound:
    """One round of planning: the core between a view and fenced writes."""

    def __init__(self, client: RegistryClient, config: PlannerConfig) -> None:
        self._client = client
        ports = config.rendezvous
        self._limits = Limits(
            rendezvous_ports=range(ports.first_port, ports.first_port + ports.ports),
            grace_s=config.loss.grace_s,
            mass_share=config.loss.mass_share,
            mass_grace_s=config.loss.mass_grace_s,
            settle_s=config.loss.settle_s,
        )
        self._retire = config.retire
        self._presence = Presence()
        self._replacing: frozenset[str] = frozenset()
        self._retiring_since: dict[str, float] = {}
        self._unplaced: tuple[Unplaced, ...] = ()

    @property
    def unplaced(self) -> Sequence[Unplaced]:
        """What the last plan could not place."""
        return self._unplaced

    def hear(self, event: FleetEvent, now: float) -> bool:
        """Plans from records alone."""
        return False

    def begin(self) -> None:
        """Absences seen in an earlier time of leading say nothing now."""
        self._presence, self._replacing, self._unplaced = Presence(), frozenset(), ()
        self._retiring_since = {}

    async def run(self, view: FleetView, fence: common_pb2.Fence, now: float) -> int | None:
        """Plans and writes, deletions first: a later piece may need what an earlier one freed."""
        seen = view.revision
        self._presence = look(self._presence, view.nodes.keys(), assigned_nodes(view), now, self._limits)
        standing, deployments = dict(view.assignments), dict(view.deployments)
        agents = {name: replica.agent_endpoint for name, replica in view.replicas.items()}
        problem = problem_of(view, self._presence, self._replacing, self._overdue(view, now))
        # In a thread: a large plan must not keep this process from renewing its leadership.
        drawn = await asyncio.to_thread(plan, problem, self._limits)
        self._note(drawn)
        puts = [
            record_of(
                put,
                standing.get(put.replica),
                deployments.get(put.deployment),
                fence,
                agents=agents,
                retire_timeout_s=self._retire.timeout_s,
            )
            for put in drawn.puts
        ]
        revision = None
        for deletes in pieces(drawn.deletes):
            revision = await self._client.apply_assignments(fence, [], deletes, decided_at=seen)
            _CHANGES.labels("delete").inc(len(deletes))
        for some in fitting(puts):
            revision = await self._client.apply_assignments(fence, some, decided_at=seen)
            _CHANGES.labels("put").inc(len(some))
        self._replacing = drawn.replacing
        return revision

    def _overdue(self, view: FleetView, now: float) -> frozenset[str]:
        """Replicas whose agents have not said in time that they have retired: older ones never will."""
        allowed_s = retirement_times(view)
        self._retiring_since = retiring.since(self._retiring_since, allowed_s.keys(), now)
        grace_s = self._retire.grace_s
        return frozenset(
            name for name, since in self._retiring_since.items() if now - since >= allowed_s[name] + grace_s
        )

    def _note(self, drawn: Plan) -> None:
        for assignment in drawn.puts:
            log.info(
                "planner.put",
                replica=assignment.replica,
                wanted=assignment.wanted.value,
                nodes=[member.node for member in assignment.members],
                because=drawn.why[assignment.replica],
            )
        for replica in drawn.deletes:
            log.info("planner.delete", replica=replica, because=drawn.why[replica])
        if drawn.unplaced != self._unplaced:
            for entry in drawn.unplaced:
                log.warning(
                    "planner.unplaced", deployment=entry.deployment, replicas=entry.replicas, reason=entry.reason
                )
        self._unplaced = drawn.unplaced
        _UNPLACED.set(sum(entry.replicas for entry in drawn.unplaced))


async def serve(config: PlannerConfig, stop: asyncio.Event) -> None:
    """Runs a planner until `stop`."""

    def round_of(client: RegistryClient, _: FleetWatch) -> PlannerRound:
        return PlannerRound(client, config)

    def add_servicer(server: rpc.RpcServer, loop: ControlLoop, round_: PlannerRound, watch: FleetWatch) -> None:
        servicer = PlannerServicer(
            lambda: loop.leading,
            lambda: watch.view.leaders.get(ROLE),
            lambda: round_.unplaced if loop.leading else (),
        )
        planner_pb2_grpc.add_PlannerServiceServicer_to_server(servicer, server.server)

    await serve_deciding(ROLE, SERVICE, config, TOPICS, round_of, add_servicer, stop)


def main() -> None:
    """Entry point of `stoker-planner`."""
    service.main("stoker-planner", "Decides where each replica runs.", PlannerConfig, serve)
