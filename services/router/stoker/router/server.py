"""RouterService: proto ⇄ core."""

from __future__ import annotations

from typing import Any

import grpc

from stoker.api.router.v1 import router_pb2, router_pb2_grpc
from stoker.common.errors import DeadlineExceeded, InvalidRequest, NotFound
from stoker.router import core
from stoker.router.decisions.decided import Remembered
from stoker.router.decisions.recollection import Recollection
from stoker.router.fleet.pools import Target
from stoker.router.flights.routing import Router
from stoker.router.grpc.prompt import of_generate
from stoker.router.picking.calls import PickCalls
from stoker.router.workers.siblings import Siblings

SERVICE = "stoker.api.router.v1.RouterService"

_Context = grpc.aio.ServicerContext[Any, Any]


class RouterServer(router_pb2_grpc.RouterServiceServicer):
    """How the router decides and what it sees; picks for those who send for themselves."""

    def __init__(self, router: Router, picks: PickCalls, siblings: Siblings) -> None:
        self._router = router
        self._picks = picks
        self._recollection = Recollection(
            router.recent,
            siblings,
            lambda remembered: _explained(remembered, router.clock() - remembered.at),
        )

    async def Explain(  # noqa: N802 - gRPC's name
        self, request: router_pb2.ExplainRequest, context: _Context
    ) -> router_pb2.ExplainResponse:
        """Where a request would go now, or went; NOT_FOUND once a decision is forgotten."""
        subject = request.WhichOneof("subject")
        if subject == "request_id":
            found = await self._recollection.of(request.request_id)
            if found is None:
                raise NotFound(
                    f"request {request.request_id!r} is not among the last ones this router decided; "
                    "ask the router that served it, or explain the request itself",
                    reason="DECISION_FORGOTTEN",
                )
            return found
        if subject == "request":
            asked = of_generate(request.request, request.request.SerializeToString())
            plan = await self._router.draft(asked)
            return _explained(Remembered.of(self._router.choose(plan)), 0.0)
        raise InvalidRequest.field("subject", "give one of request and request_id")

    def _health(self, target: Target) -> str:
        if not target.reachable:
            return "probing"
        pool = target.pool
        ejected = pool is not None and pool.fleet.health.ejected(target.id, self._router.clock())
        return "ejected" if ejected else "healthy"

    async def Pick(  # noqa: N802 - gRPC's name
        self, request: router_pb2.PickRequest, context: _Context
    ) -> router_pb2.PickResponse:
        """Where a request goes that its caller sends, with tickets."""
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        answer = self._picks.pick(request, metadata)
        if not isinstance(answer, router_pb2.PickResponse):
            answer = await answer
        left_s = context.time_remaining()
        if left_s is not None and left_s <= 0.0:  # while this process was busy: nobody takes the answer any more
            self._picks.undo(answer)
            raise DeadlineExceeded("the pick was made after its caller's deadline; allow more time")
        return answer

    async def ReportPicks(  # noqa: N802 - gRPC's name
        self, request: router_pb2.ReportPicksRequest, context: _Context
    ) -> router_pb2.ReportPicksResponse:
        """What became of picked requests."""
        return self._picks.report(request)

    async def GetView(  # noqa: N802 - gRPC's name
        self, request: router_pb2.GetViewRequest, context: _Context
    ) -> router_pb2.GetViewResponse:
        """The fleet as this router sees it."""
        view, now = self._router.view, self._router.clock()
        ages = {
            endpoint: int((now - source.heard_at) * 1000)
            for endpoint, source in view.sources.items()
            if source.heard_at is not None
        }
        return router_pb2.GetViewResponse(
            replicas=[self._replica(target, now) for target in view.targets.values()],
            registry_age_ms=ages,
            static_view=view.synced and not any(source.connected for source in view.sources.values()),
            decayed_models=[model for model in view.pools if self._router.confirmations.alarmed(model)],
        )

    def _replica(self, target: Target, now: float) -> router_pb2.ReplicaView:
        fleet = target.pool.fleet if target.pool is not None else None
        trust = fleet.index.trust(target.id, now) if fleet is not None and not target.refused else 0.0
        known = target.load_tokens is not None and fleet is not None
        return router_pb2.ReplicaView(
            replica=target.record,
            health=self._health(target),
            in_flight=target.in_flight,
            load_tokens=int(fleet.load.load(target.id)) if known and fleet is not None else None,
            known_blocks=target.known_blocks,
            digest_credit=trust,
            parity=target.refused or target.parity,
        )


def _explained(remembered: Remembered, age_s: float) -> router_pb2.ExplainResponse:
    decision = remembered.decision
    return router_pb2.ExplainResponse(
        decision=router_pb2.Decision(
            replica_id=decision.replica,
            reason=decision.reason.value,
            predicted_cached_tokens=decision.cached_tokens,
            candidates=[_candidate(candidate) for candidate in decision.candidates],
            excluded=[router_pb2.Excluded(replica_id=name, reason=reason) for name, reason in remembered.excluded],
        ),
        prompt_tokens=remembered.tokens,
        blocks=remembered.blocks,
        policy=remembered.policy,
        age_ms=int(age_s * 1000),
        attempt=remembered.attempt,
        waited_ms=round(remembered.waited_s * 1000),
    )


def _candidate(candidate: core.Candidate) -> router_pb2.Candidate:
    matched, confidence = candidate.exact, "exact"
    if candidate.speculative > candidate.exact:
        matched, confidence = candidate.speculative, "speculative"
    return router_pb2.Candidate(
        replica_id=candidate.replica,
        cost_s=candidate.cost,
        load_tokens=int(candidate.load),
        bound_tokens=int(candidate.bound),
        open=candidate.open,
        matched_tokens=matched,
        confidence=confidence if matched else "none",
        ring_rank=candidate.ring_rank,
        adds_tokens=int(candidate.weight),
        credited_tokens=candidate.cached,
        trust=candidate.trust,
    )
