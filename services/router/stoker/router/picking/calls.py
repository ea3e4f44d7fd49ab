"""Pick and ReportPicks: proto ⇄ picker, the same by whatever transport they come."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

from stoker.api.registry.v1 import records_pb2
from stoker.api.router.v1 import router_pb2
from stoker.common.errors import InvalidRequest, StokerError
from stoker.common.headers import POLICY
from stoker.router import metrics
from stoker.router.fleet.pools import Target
from stoker.router.flights.routing import Router
from stoker.router.grpc.prompt import of_generate, of_tokenized, request_id_of
from stoker.router.picking.picker import Picked, Picker
from stoker.router.picking.picks import API, MOST_REPORTS, Event
from stoker.router.prompts.prompt import Asked

_EVENTS = {
    router_pb2.PICK_EVENT_ALIVE: Event.ALIVE,
    router_pb2.PICK_EVENT_FIRST_TOKEN: Event.FIRST_TOKEN,
    router_pb2.PICK_EVENT_MOVED: Event.MOVED,
    router_pb2.PICK_EVENT_SERVED: Event.SERVED,
    router_pb2.PICK_EVENT_FAILED: Event.FAILED,
    router_pb2.PICK_EVENT_DROPPED: Event.DROPPED,
}

_MOST_PLACES = 16_384


class PickCalls:
    """What callers of both transports ask."""

    def __init__(self, router: Router, picker: Picker) -> None:
        self._router = router
        self.picker = picker
        # Made once for each announcement of a replica: to make them anew would be half of an answer's cost.
        self._places: dict[str, tuple[records_pb2.Replica, router_pb2.Place]] = {}

    def pick(
        self, request: router_pb2.PickRequest, metadata: Mapping[str, str]
    ) -> router_pb2.PickResponse | Coroutine[Any, Any, router_pb2.PickResponse]:
        """Where a request goes that its caller sends, with a ticket: at once where nothing has to be waited for.

        Raises what a relayed request would get, as does what is to be awaited.
        """
        try:
            asked, request_id = _asked(request)
            picked = self.picker.pick(
                asked,
                self._router.tenants.caller(metadata, asked.priority),
                request_id_of(request_id),
                policy=metadata.get(POLICY, ""),
                wait_s=request.max_wait_ms / 1000 if request.HasField("max_wait_ms") else None,
                alternatives=request.alternatives if request.HasField("alternatives") else None,
                carrier=metadata,
            )
        except Exception as error:
            _count(error)
            raise
        return self._answer(picked) if isinstance(picked, Picked) else self._answer_later(picked)

    def undo(self, answer: router_pb2.PickResponse) -> None:
        """An answer that nobody gets."""
        self.picker.picks.undo(answer.pick_id)

    def report(self, request: router_pb2.ReportPicksRequest) -> router_pb2.ReportPicksResponse:
        """What became of picked requests. Raises InvalidRequest."""
        if len(request.reports) > MOST_REPORTS:
            raise InvalidRequest.field("reports", f"{len(request.reports)} at once; send at most {MOST_REPORTS}")
        for report in request.reports:
            event = _EVENTS.get(report.event)
            if event is not None:
                self.picker.picks.tell(report.pick_id, event, report.place, fault=report.fault)
        return router_pb2.ReportPicksResponse()

    async def _answer_later(self, picked: Coroutine[Any, Any, Picked]) -> router_pb2.PickResponse:
        try:
            return self._answer(await picked)
        except (Exception, asyncio.CancelledError) as error:
            _count(error)
            raise

    def _answer(self, picked: Picked) -> router_pb2.PickResponse:
        return router_pb2.PickResponse(
            pick_id=picked.pick_id,
            request_id=picked.request_id,
            places=[self._place(target) for target in picked.places],
            reason=picked.decided.decision.reason.value,
            prompt_tokens=picked.tokens,
            predicted_cached_tokens=picked.cached_tokens,
            expires_in_ms=int(1000 * picked.expires_in),
            waited_ms=int(1000 * picked.waited),
            ticket=picked.ticket,
        )

    def _place(self, target: Target) -> router_pb2.Place:
        known = self._places.get(target.id)
        if known is not None and known[0] is target.record:
            return known[1]
        if len(self._places) >= _MOST_PLACES:
            self._places.clear()
        record = target.record
        place = router_pb2.Place(
            replica_id=record.replica_id,
            agent_endpoint=record.agent_endpoint,
            http_url=target.url,
            rank=target.rank,
        )
        self._places[target.id] = record, place
        return place


def _count(error: BaseException) -> None:
    """How a pick ended that got no answer."""
    outcome = "failed"
    if isinstance(error, StokerError):
        outcome = metrics.outcome_of(error)
    elif isinstance(error, asyncio.CancelledError):
        outcome = "cancelled"
    metrics.of(metrics.REQUESTS, API, outcome).inc()


def _asked(request: router_pb2.PickRequest) -> tuple[Asked, str]:
    match request.WhichOneof("subject"):
        case "request":
            return of_generate(request.request, request.request.SerializeToString()), request.request.request_id
        case "tokenized":
            return of_tokenized(request.tokenized), request.tokenized.request_id
        case _:
            raise InvalidRequest.field("subject", "give one of request and tokenized")
