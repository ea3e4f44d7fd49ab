"""`stoker doctor` on prefix routing: it says what the router found out, and what to do."""

from __future__ import annotations

import pytest

from stoker.api.registry.v1 import records_pb2
from stoker.api.router.v1 import router_pb2
from stoker.cli.doctor_routing import prefix_routing, verdict


def view(*parity: str, decayed: tuple[str, ...] = ()) -> router_pb2.GetViewResponse:
    replicas = [
        router_pb2.ReplicaView(replica=records_pb2.Replica(replica_id=f"r-{number}"), parity=each)
        for number, each in enumerate(parity)
    ]
    return router_pb2.GetViewResponse(replicas=replicas, decayed_models=decayed)


@pytest.mark.parametrize(
    ("said", "status", "words"),
    [
        (view("ok", "ok"), "ok", "2 replicas tokenize as the router does"),
        (view("ok", "pending"), "ok", "1 of them not proved"),
        (view("ok", "chat: token 3 differs"), "fail", "r-1: chat: token 3 differs"),
        (view("ok", "tokenizer_mismatch"), "fail", "1 of 2"),
        (view("ok", decayed=("tiny",)), "fail", "do not show what was served: tiny"),
    ],
)
def test_it_says_what_is_wrong_and_what_to_do(said: router_pb2.GetViewResponse, status: str, words: str) -> None:
    found = verdict(said)
    assert found[0] == status
    assert words in found[1]
    assert bool(found[2]) == (status != "ok")


async def test_a_router_that_does_not_tell_is_no_failure() -> None:
    status, _, fix = await prefix_routing("127.0.0.1:9", None)
    assert (status, bool(fix)) == ("warn", True)
