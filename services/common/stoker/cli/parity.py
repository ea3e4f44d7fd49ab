"""Which replicas tokenize as the routers do, as these found out. Routers know; registries do not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import grpc

from stoker.api.router.v1 import router_pb2, router_pb2_grpc
from stoker.common import rpc
from stoker.common.tls import Tls

OK, PENDING = "ok", "pending"
_ASK_S = 1.0


async def parity(routers: Sequence[str], tls: Tls | None) -> dict[str, str]:
    """By replica: "ok", "pending", or what differs, as the router with the worst to say (host:port each) has it.

    Empty where no router answers.
    """
    answers = await asyncio.gather(*(_ask(target, tls) for target in routers))
    return worst(answer for answer in answers if answer is not None)


def worst(views: Iterable[router_pb2.GetViewResponse]) -> dict[str, str]:
    """The same, of what routers say. A replica's ranks count as one."""
    found: dict[str, str] = {}
    for view in views:
        for said in view.replicas:
            name = said.replica.replica_id
            found[name] = max(found.get(name, OK), said.parity, key=_badness)
    return found


def _badness(verdict: str) -> int:
    return {OK: 0, PENDING: 1}.get(verdict, 2)


async def _ask(target: str, tls: Tls | None) -> router_pb2.GetViewResponse | None:
    async with rpc.channel(target, tls) as channel:
        try:
            answer: router_pb2.GetViewResponse = await router_pb2_grpc.RouterServiceStub(channel).GetView(
                router_pb2.GetViewRequest(), timeout=_ASK_S
            )
        except grpc.RpcError:
            return None
    return answer
