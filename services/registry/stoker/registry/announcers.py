"""One router's stream of dispatches, and of the demand it sees."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import structlog

from stoker.api.registry.v1 import registry_pb2
from stoker.common.errors import FieldViolation, Unavailable
from stoker.registry import metrics
from stoker.registry.core import validation

if TYPE_CHECKING:
    from stoker.registry.hub import Hub

log = structlog.get_logger(__name__)


class AnnounceStream:
    """Checks what a router announces and passes it on."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self.router_id = ""
        """Empty before its first message."""
        self._refused = 0

    async def listen(self, requests: AsyncIterator[registry_pb2.AnnounceRequest]) -> None:
        """Take announcements until the router ends, or the registry stops (raises Unavailable).

        Raises InvalidRequest for a batch that is none; a malformed dispatch costs itself alone.
        """
        hearing = asyncio.create_task(self._hear(requests))
        stopping = asyncio.create_task(self._hub.stopping.wait())
        try:
            await asyncio.wait({hearing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not hearing.done():
                raise Unavailable("the registry stops", reason="STOPPING", retry_after_s=0.1)
            hearing.result()
        finally:
            for task in (hearing, stopping):
                task.cancel()
            await asyncio.gather(hearing, stopping, return_exceptions=True)

    async def _hear(self, requests: AsyncIterator[registry_pb2.AnnounceRequest]) -> None:
        async for request in requests:
            validation.require(validation.announcement(request, self.router_id))
            self.router_id = request.router_id
            good = [dispatch for dispatch in request.dispatches if self._sound(dispatch)]
            metrics.DISPATCHES.inc(len(good))
            if good:
                self._hub.pass_on(registry_pb2.Dispatches(router_id=request.router_id, dispatches=good))
            if request.HasField("demand"):
                self._take(request.demand)

    def _take(self, report: registry_pb2.RouterDemand) -> None:
        good = [demand for demand in report.demand if self._counts(demand)]
        if len(good) < len(report.demand):
            del report.demand[:]
            report.demand.extend(good)
        report.router_id, report.gone = self.router_id, False
        self._hub.take_demand(self, report)

    def _sound(self, dispatch: registry_pb2.Dispatch) -> bool:
        wrong = next(validation.dispatch("dispatches", dispatch), None)
        if wrong is not None:
            metrics.DISPATCHES_REFUSED.inc()
            self._say("dispatch.refused", wrong)
        return wrong is None

    def _counts(self, demand: registry_pb2.Demand) -> bool:
        wrong = next(validation.demand("demand", demand), None)
        if wrong is not None:
            metrics.DEMAND_REFUSED.inc()
            self._say("demand.refused", wrong)
        return wrong is None

    def _say(self, event: str, wrong: FieldViolation) -> None:
        if not self._refused:  # said once a stream: there may be thousands a second
            log.warning(event, router=self.router_id, field=wrong.field, error=wrong.description)
        self._refused += 1
