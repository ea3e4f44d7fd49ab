"""Whether a router's prefix routing works, as it finds out by itself: its commonest fault is to decay unseen."""

from __future__ import annotations

from typing import Literal

import grpc

from stoker.api.router.v1 import router_pb2, router_pb2_grpc
from stoker.common import rpc
from stoker.common.tls import Tls

_ASK_S = 3.0
_SOUND = ("ok", "pending")


async def prefix_routing(target: str, secure: Tls | None) -> tuple[Literal["ok", "warn", "fail"], str, str]:
    """Status, finding and fix for the router at `target`."""
    try:
        async with rpc.channel(target, secure) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            return verdict(await stub.GetView(router_pb2.GetViewRequest(), timeout=_ASK_S))
    except grpc.RpcError as error:
        return (
            "warn",
            f"not told: {rpc.error_from(error).message}",
            "ask a router of the same version as this command",
        )


def verdict(view: router_pb2.GetViewResponse) -> tuple[Literal["ok", "warn", "fail"], str, str]:
    """The same, from what the router says."""
    if view.decayed_models:
        models = ", ".join(view.decayed_models)
        return (
            "fail",
            f"digests do not show what was served: {models}",
            "look for lost KV events in the agents' logs; `stoker explain` shows what the router believes",
        )
    odd = [replica for replica in view.replicas if replica.parity not in _SOUND]
    if odd:
        named = "; ".join(f"{replica.replica.replica_id}: {replica.parity}" for replica in odd[:5])
        return (
            "fail",
            f"{len(odd)} of {len(view.replicas)} replicas tokenize differently, {named}",
            "give the engine the model's own tokenizer and chat template, or all replicas the same",
        )
    pending = sum(replica.parity == "pending" for replica in view.replicas)
    if pending:
        return "ok", f"{len(view.replicas)} replicas, {pending} of them not proved to tokenize alike yet", ""
    return "ok", f"{len(view.replicas)} replicas tokenize as the router does", ""
