"""`stoker explain --request-id`: every router is asked, whoever decided; and what people are shown."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from rich.console import Console

from stoker.api.router.v1 import router_pb2
from stoker.cli.explain import as_json, as_tables, recalled
from stoker.common import rpc
from stoker.common.errors import NotFound, StokerError

ANSWER = router_pb2.ExplainResponse(
    decision=router_pb2.Decision(
        replica_id="b",
        reason="spill",
        predicted_cached_tokens=64,
        candidates=[
            router_pb2.Candidate(
                replica_id="b",
                cost_s=0.0314,
                load_tokens=10,
                adds_tokens=5,
                bound_tokens=40960,
                open=True,
                matched_tokens=64,
                credited_tokens=64.0,
                confidence="exact",
                trust=0.5,
            )
        ],
        excluded=[router_pb2.Excluded(replica_id="a", reason="already_tried")],
    ),
    prompt_tokens=100,
    blocks=3,
    policy="stoker",
    age_ms=1500,
    attempt=2,
    waited_ms=40,
)


class Remembers:
    def __init__(self, *ids: str, age_ms: int = 1500) -> None:
        self.ids, self.age_ms = ids, age_ms

    async def Explain(
        self, request: router_pb2.ExplainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> router_pb2.ExplainResponse:
        if request.request_id not in self.ids:
            raise NotFound("not here", reason="DECISION_FORGOTTEN")
        answer = router_pb2.ExplainResponse()
        answer.CopyFrom(ANSWER)
        answer.age_ms = self.age_ms
        return answer


@contextlib.asynccontextmanager
async def routers(*services: Remembers) -> AsyncIterator[list[str]]:
    async with contextlib.AsyncExitStack() as held:
        targets = []
        for service in services:
            server = rpc.RpcServer.bind("127.0.0.1:0", ())
            explain: Any = grpc.unary_unary_rpc_method_handler(
                service.Explain,
                request_deserializer=router_pb2.ExplainRequest.FromString,
                response_serializer=router_pb2.ExplainResponse.SerializeToString,
            )
            served: Any = grpc.method_handlers_generic_handler(
                "stoker.api.router.v1.RouterService", {"Explain": explain}
            )
            server.server.add_generic_rpc_handlers((served,))
            await server.start()
            held.push_async_callback(server.stop, 0)
            targets.append(f"127.0.0.1:{server.port}")
        yield targets


async def test_whoever_decided_is_found() -> None:
    async with routers(Remembers(), Remembers("mine"), Remembers()) as targets:
        found = await recalled("mine", targets, None)
    assert found.decision.replica_id == "b"


async def test_of_several_decisions_the_latest_counts() -> None:
    async with routers(Remembers("mine", age_ms=900), Remembers("mine", age_ms=20)) as targets:
        assert (await recalled("mine", targets, None)).age_ms == 20


async def test_who_cannot_be_asked_is_named_and_keeps_no_answer_back() -> None:
    nobody = "127.0.0.1:1"
    async with routers(Remembers("mine")) as targets:
        assert (await recalled("mine", [nobody, *targets], None)).policy == "stoker"
        with pytest.raises(NotFound, match=f"{targets[0]} decided; {nobody} cannot be asked") as forgotten:
            await recalled("other", [nobody, *targets], None)
        assert forgotten.value.reason == "DECISION_FORGOTTEN"
    with pytest.raises(StokerError, match=f"nothing answers at {nobody}") as silent:
        await recalled("mine", [nobody], None)
    assert silent.value.reason == "UNREACHABLE"


def test_people_read_the_reasons_in_words() -> None:
    console = Console(width=160)
    with console.capture() as said:
        for shown in as_tables(as_json(ANSWER)):
            console.print(shown)
    text = said.get()
    for part in (
        "→ b (spill, policy stoker); prompt: 100 tokens, 3 full blocks, 64 expected in the cache",
        "because a better match, or the prefix's home, is full or costs more",
        "decided 1.5 s ago, after 40 ms in the router, attempt 2",
        "31.4 ms",
        "10 + 5 / 40960",
        "exact, trust 0.50",
        "no candidate: a (already_tried: it failed this request before)",
    ):
        assert part in text, text
