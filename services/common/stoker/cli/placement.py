"""Why replicas have no place. Only the planner that leads knows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc

from stoker.api.planner.v1 import planner_pb2, planner_pb2_grpc
from stoker.common import rpc
from stoker.common.tls import Tls

_ASK_S = 1.0

Unplaced = planner_pb2.Unplaced


async def unplaced(planners: Sequence[str], tls: Tls | None) -> tuple[Unplaced, ...] | None:
    """What the leading planner, if it is one of `planners` (host:port), could not place; None if none says so."""
    answers = await asyncio.gather(*(_ask(endpoint, tls) for endpoint in planners))
    return next((tuple(answer.unplaced) for answer in answers if answer is not None and answer.leading), None)


async def _ask(endpoint: str, tls: Tls | None) -> planner_pb2.GetPlannerStatusResponse | None:
    async with rpc.channel(endpoint, tls) as channel:
        stub = planner_pb2_grpc.PlannerServiceStub(channel)
        try:
            answer: planner_pb2.GetPlannerStatusResponse = await stub.GetPlannerStatus(
                planner_pb2.GetPlannerStatusRequest(), timeout=_ASK_S
            )
        except grpc.RpcError:
            return None
    return answer
