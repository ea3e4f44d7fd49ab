"""The planner's gRPC service: messages in, messages out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import grpc

from stoker.api.planner.v1 import planner_pb2, planner_pb2_grpc
from stoker.api.registry.v1 import records_pb2
from stoker.common.errors import Conflict, InvalidRequest, Unavailable
from stoker.planner import answers, sizing_answer
from stoker.planner.computing import Computing, Task
from stoker.planner.core.holding import Violation
from stoker.planner.core.placement import Member
from stoker.planner.core.placement.ground import Ground
from stoker.planner.core.values import Problem, Unplaced
from stoker.planner.survey import Survey
from stoker.registry.core import validation
from stoker.registry.core.validation import Limits

SERVICE = "stoker.api.planner.v1.PlannerService"

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]

_MOVES, _MOST_MOVES = 20, 1_000
_SEARCH_S = 10.0
_MOST_NAMES = 10_000


class Planning(Protocol):
    """What the service asks of the loop beside it."""

    @property
    def unplaced(self) -> tuple[Unplaced, ...]:
        """What the last plan could not place."""

    @property
    def violations(self) -> tuple[Violation, ...]:
        """What stands and no longer holds."""

    @property
    def surveyed(self) -> Survey | None:
        """The facility that was planned for last."""

    async def problem(self) -> Problem:
        """The fleet as it is known here, with its ground. May take seconds where the facility is new."""

    async def warm_tokens(self) -> dict[str, float]:
        """What each replica is estimated to hold in its KV cache, in tokens; those of which something is known."""

    async def move(self, replica: str, members: tuple[Member, ...]) -> str:
        """Has a replica moved; returns why it cannot be, or nothing."""


class PlannerServicer(planner_pb2_grpc.PlannerServiceServicer):
    """Answers for the loop, and computes beside it, one thing at a time."""

    def __init__(
        self,
        leading: Callable[[], bool],
        leader: Callable[[], records_pb2.Leader | None],
        synced: Callable[[], bool],
        planning: Planning,
        computing: Computing,
    ) -> None:
        self._leading = leading
        self._leader = leader
        self._synced = synced
        self._planning = planning
        self._computing = computing

    async def GetPlannerStatus(  # noqa: N802
        self, request: planner_pb2.GetPlannerStatusRequest, context: Context
    ) -> planner_pb2.GetPlannerStatusResponse:
        """The status; only the leader knows what is unplaced and what no longer holds."""
        leading = self._leading()
        told = planner_pb2.GetPlannerStatusResponse(leading=leading, leader=self._leader())
        survey = self._planning.surveyed
        if leading and survey is not None:
            told.facility_revision, told.facility_problem = survey.revision, survey.problem
        if leading:
            told.unplaced.extend(
                planner_pb2.Unplaced(deployment=entry.deployment, replicas=entry.replicas, reason=entry.reason)
                for entry in self._planning.unplaced
            )
            told.violations.extend(answers.violation_messages(self._planning.violations))
        return told

    async def Size(  # noqa: N802
        self, request: planner_pb2.SizeRequest, context: Context
    ) -> planner_pb2.SizeResponse:
        """What a model needs."""
        return await self._compute(context, lambda task: sizing_answer.size(request, task))

    async def Capacity(  # noqa: N802
        self, request: planner_pb2.CapacityRequest, context: Context
    ) -> planner_pb2.CapacityResponse:
        """How much a facility carries."""
        given = await self._given(request.facility)
        return await self._compute(context, lambda task: answers.capacity(given(task).facility, request, task))

    async def Place(  # noqa: N802
        self, request: planner_pb2.PlaceRequest, context: Context
    ) -> planner_pb2.PlaceResponse:
        """A placement from nothing."""
        _seconds("time_limit_s", request.time_limit_s)
        given = await self._given(request.facility)
        return await self._compute(context, lambda task: answers.place(given(task), request, task))

    async def Explain(  # noqa: N802
        self, request: planner_pb2.ExplainRequest, context: Context
    ) -> planner_pb2.ExplainResponse:
        """Reasons."""
        validation.require(validation.replica_id("name", request.name))
        unplaced = self._planning.unplaced if self._leading() else ()  # a former leader's are old
        why = {entry.deployment: entry.reason for entry in unplaced}
        problem = await self._problem()
        return await self._compute(context, lambda _: answers.explain(problem, request.name, why))

    async def WhatIf(  # noqa: N802
        self, request: planner_pb2.WhatIfRequest, context: Context
    ) -> planner_pb2.WhatIfResponse:
        """What would be."""
        _seconds("time_limit_s", request.time_limit_s)
        for field in ("without_nodes", "without_racks", "replicas"):
            if len(getattr(request, field)) > _MOST_NAMES:
                raise InvalidRequest.field(field, f"has more than {_MOST_NAMES} entries")
        problem = await self._problem()
        return await self._compute(context, lambda task: answers.what_if(problem, request, task))

    async def Validate(  # noqa: N802
        self, request: planner_pb2.ValidateRequest, context: Context
    ) -> planner_pb2.ValidateResponse:
        """What is wrong with a facility file."""
        problem = await self._problem()
        return await self._compute(context, lambda task: answers.validate(request.facility, problem, task))

    async def ProposeMoves(  # noqa: N802
        self, request: planner_pb2.ProposeMovesRequest, context: Context
    ) -> planner_pb2.ProposeMovesResponse:
        """Moves worth making."""
        _seconds("time_limit_s", request.time_limit_s)
        most = request.most or _MOVES
        if most > _MOST_MOVES:
            raise InvalidRequest.field("most", f"{most} is too many; at most {_MOST_MOVES}")
        warm = await self._planning.warm_tokens()
        problem = await self._problem()
        return await self._compute(
            context, lambda task: answers.propose(problem, most, task, warm), request.time_limit_s or _SEARCH_S
        )

    async def MoveReplica(  # noqa: N802
        self, request: planner_pb2.MoveReplicaRequest, context: Context
    ) -> planner_pb2.MoveReplicaResponse:
        """Have one replica moved."""
        validation.require(validation.replica_id("replica_id", request.replica_id))
        if not request.members:
            raise InvalidRequest.field("members", "is empty; name the node of each member, by rank")
        if len(request.members) > (most := Limits().gang_size):
            raise InvalidRequest.field("members", f"{len(request.members)} is too many; at most {most}")
        for place, member in enumerate(request.members):
            validation.require(validation.node_id(f"members[{place}].node_id", member.node_id))
        if not self._leading():
            leader = self._leader()
            by = f"{leader.candidate!r} does" if leader is not None else "nobody does yet"
            raise Conflict(f"this planner does not lead; {by}: ask that one", reason="NOT_LEADER")
        members = tuple(Member(m.node_id, tuple(m.gpu_indices)) for m in request.members)
        refused = await self._planning.move(request.replica_id, members)
        if refused:
            raise Conflict(refused, reason="MOVE_REFUSED")
        return planner_pb2.MoveReplicaResponse()

    async def _compute(self, context: Context, work: Callable[[Task], T], limit_s: float | None = None) -> T:
        return await self._computing.run(work, left_s=context.time_remaining(), limit_s=limit_s)

    async def _given(self, text: str) -> Callable[[Task], Ground]:
        """The facility that a caller gives, to be read in the computation, or the one that is planned for."""
        if text:
            return partial(answers.read, text)
        problem = await self._problem()
        return lambda _: answers.ground_of(problem)

    async def _problem(self) -> Problem:
        if not self._synced():
            raise Unavailable(
                "this planner has not heard from any registry yet", reason="NOT_READY", retry_after_s=1.0
            )
        return await self._planning.problem()


def _seconds(field: str, value: float) -> None:
    if not 0 <= value <= 86_400:  # nor is NaN
        raise InvalidRequest.field(field, f"{value:g} is not in 0 to 86400 seconds")
