"""Which way a client's request goes, before routers and nodes that do as they are told: by real gRPC."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from stoker.api.inference.v1 import inference_pb2, inference_pb2_grpc
from stoker.api.router.v1 import router_pb2, router_pb2_grpc
from stoker.client import AsyncClient, ClientSettings, Interrupted
from stoker.client.connections import Nodes
from stoker.common.channels import Channels
from stoker.common.errors import Code, Exhausted, StokerError, Unavailable
from stoker.common.rpc import RpcServer
from stoker.common.tickets import TicketRefused
from tests.support.etcd import free_port
from tests.support.waiting import eventually, forever

PICK = router_pb2.PickEvent.Name

# Their other methods answer UNIMPLEMENTED, which is what tests want of them.
_Inference: Any = inference_pb2_grpc.InferenceServiceServicer
_Router: Any = router_pb2_grpc.RouterServiceServicer


@dataclass
class Node(_Inference):  # type: ignore[misc]
    """Says so many words, then fails, if it shall."""

    words: int = 3
    failure: StokerError | None = None
    asked: list[tuple[inference_pb2.GenerateRequest, dict[str, str]]] = field(default_factory=list)
    endpoint: str = ""

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.asked.append((request, dict(context.invocation_metadata())))
        yield inference_pb2.GenerateResponse(
            started=inference_pb2.Started(replica_id=request.replica_id or "relayed")
        )
        for _ in range(self.words):
            yield inference_pb2.GenerateResponse(delta=inference_pb2.Delta(text="x"))
        if self.failure is not None:
            raise self.failure
        yield inference_pb2.GenerateResponse(finished=inference_pb2.Finished())


@dataclass
class Router(_Router):  # type: ignore[misc]
    """Picks the places it is given."""

    places: list[router_pb2.Place] = field(default_factory=list)
    failure: StokerError | None = None
    asked: list[tuple[router_pb2.PickRequest, dict[str, str]]] = field(default_factory=list)
    told: list[tuple[str, int, bool]] = field(default_factory=list)
    deaf_to: int = 0
    """So many reports arrive and are never answered, nor heard."""
    unheard: int = 0

    async def Pick(self, request: router_pb2.PickRequest, context: Any) -> router_pb2.PickResponse:
        self.asked.append((request, dict(context.invocation_metadata())))
        if self.failure is not None:
            raise self.failure
        return router_pb2.PickResponse(
            pick_id="p", request_id="r", places=self.places, reason="ring", ticket="a ticket"
        )

    async def ReportPicks(
        self, request: router_pb2.ReportPicksRequest, context: Any
    ) -> router_pb2.ReportPicksResponse:
        if self.unheard < self.deaf_to:
            self.unheard += 1
            await forever()
        self.told += [(PICK(r.event).removeprefix("PICK_EVENT_"), r.place, r.fault) for r in request.reports]
        return router_pb2.ReportPicksResponse()

    async def has_been_told(self, *events: tuple[str, int, bool]) -> None:
        await eventually(lambda: len(self.told) >= len(events), f"{events}; told {self.told}")
        assert self.told == list(events)


@contextlib.asynccontextmanager
async def serving(inference: Node, router: Router | None = None) -> AsyncIterator[str]:
    server = RpcServer.bind("127.0.0.1:0", ())
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(inference, server.server)
    if router is not None:
        router_pb2_grpc.add_RouterServiceServicer_to_server(router, server.server)
    await server.start()
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.stop(0)


@dataclass
class World:
    nodes: list[Node]
    router: Router
    relay: Node
    client: AsyncClient

    async def ask(self) -> Any:
        return await self.client.generate("m", "x", max_tokens=3)


@contextlib.asynccontextmanager
async def world(*nodes: Node, router: Router | None = None, **settings: Any) -> AsyncIterator[World]:
    async with contextlib.AsyncExitStack() as stack:
        told = router or Router()
        relay = Node()
        for number, node in enumerate(nodes):
            node.endpoint = node.endpoint or await stack.enter_async_context(serving(node))
            told.places.append(
                router_pb2.Place(replica_id=f"m-{number}", agent_endpoint=node.endpoint, rank=number or None)
            )
        address = await stack.enter_async_context(serving(relay, told))
        client = await stack.enter_async_context(AsyncClient([address], ClientSettings(**settings)))
        yield World(list(nodes), told, relay, client)


def dead() -> Node:
    return Node(endpoint=f"127.0.0.1:{free_port()}")


def failing(reason: str, code: Code = Code.UNAVAILABLE, words: int = 0) -> Node:
    return Node(words, StokerError("told to", reason=reason, code=code))


async def test_the_node_gets_the_ticket_and_the_router_hears_the_end() -> None:
    async with world(Node(), metadata={"x-stoker-tenant": "acme"}) as here:
        answer = await here.ask()
        assert (answer.text, answer.served.replica_id, answer.served.reason) == ("xxx", "m-0", "ring")
        request, metadata = here.nodes[0].asked[0]
        assert (request.replica_id, request.request_id) == ("m-0", "r")
        assert metadata["x-stoker-ticket"] == "a ticket"
        assert "x-stoker-tenant" not in metadata
        assert "x-data-parallel-rank" not in metadata
        assert here.router.asked[0][1]["x-stoker-tenant"] == "acme"
        assert here.router.asked[0][0].alternatives == 2
        await here.router.has_been_told(("FIRST_TOKEN", 0, False), ("SERVED", 0, False))


@pytest.mark.parametrize("direct", [True, False])
async def test_the_callers_trace_goes_along(direct: bool) -> None:
    with TracerProvider().get_tracer("test").start_as_current_span("ask") as span:
        async with world(Node(), direct=direct) as here:
            await here.ask()
    trace = f"{span.get_span_context().trace_id:032x}"
    asked = [here.router.asked[0], here.nodes[0].asked[0]] if direct else [here.relay.asked[0]]
    assert all(trace in metadata["traceparent"] for _, metadata in asked)


@pytest.mark.parametrize(
    ("first", "fault"),
    [
        (failing("ENGINE_DIED"), True),
        (failing("RELAY_FULL", Code.RESOURCE_EXHAUSTED), False),
        (failing("REPLICA_DRAINING"), False),
        (failing("TICKET_STALE", Code.PERMISSION_DENIED), False),
        (dead(), False),
    ],
    ids=lambda value: value.failure.reason if isinstance(value, Node) and value.failure else str(value)[:9],
)
async def test_before_the_first_token_the_next_place_takes_over(first: Node, fault: bool) -> None:
    async with world(first, Node()) as here:
        answer = await here.ask()
        assert (answer.served.replica_id, answer.served.reason, answer.served.relayed) == (
            "m-1",
            "alternative",
            False,
        )
        assert here.nodes[1].asked[0][1]["x-data-parallel-rank"] == "1"
        await here.router.has_been_told(("MOVED", 1, fault), ("FIRST_TOKEN", 0, False), ("SERVED", 0, False))


async def test_after_the_first_token_nothing_is_repeated() -> None:
    async with world(failing("ENGINE_DIED", words=2), Node()) as here:
        with pytest.raises(Interrupted) as broken:
            await here.ask()
        assert broken.value.text == {0: "xx"}
        assert not here.nodes[1].asked
        await here.router.has_been_told(("FIRST_TOKEN", 0, False), ("FAILED", 0, False))


async def test_what_the_request_did_wrong_moves_and_blames_nobody() -> None:
    async with world(failing("INVALID_REQUEST", Code.INVALID_ARGUMENT), Node()) as here:
        with pytest.raises(StokerError):
            await here.ask()
        assert not here.nodes[1].asked
        await here.router.has_been_told(("DROPPED", 0, False))


async def test_what_is_on_its_way_when_a_client_closes_is_told_again() -> None:
    router = Router(deaf_to=1)
    async with world(Node(), router=router) as made:
        await made.ask()
        await eventually(lambda: router.unheard == 1, "the report is under way")
    assert ("SERVED", 0, False) in router.told


async def test_a_failing_fleet_is_not_hammered() -> None:
    async with world(failing("ENGINE_DIED"), failing("ENGINE_DIED"), failing("ENGINE_DIED")) as here:
        for _ in range(40):
            with pytest.raises(Unavailable):
                await here.ask()
        tries = sum(len(node.asked) for node in here.nodes)
        assert 40 + 10 <= tries <= 40 + 10 + 0.2 * 40
        assert not here.relay.asked


async def test_by_the_router_where_no_node_is_reached_and_then_at_once() -> None:
    async with world(dead(), dead()) as here:
        for _ in range(3):
            assert (await here.ask()).served.relayed
        assert len(here.router.asked) == 1, "for a while nothing else is tried"
        await here.router.has_been_told(("MOVED", 1, False), ("DROPPED", 0, False))


async def test_by_the_router_where_no_node_takes_the_ticket() -> None:
    refusing = [failing("TICKET_EXPIRED", Code.PERMISSION_DENIED) for _ in range(2)]
    async with world(*refusing) as here:
        assert (await here.ask()).served.relayed
    async with world(failing("TICKET_EXCEEDED", Code.PERMISSION_DENIED)) as here:
        with pytest.raises(TicketRefused):
            await here.ask()


async def test_by_a_router_that_does_not_know_picks() -> None:
    async with world(Node(), router=Router(failure=StokerError("?", code=Code.UNIMPLEMENTED))) as here:
        assert (await here.ask()).served.relayed


async def test_a_refusal_says_when_to_come_back() -> None:
    async with world(Node(), router=Router(failure=Exhausted("full", reason="HELD", retry_after_s=1.5))) as here:
        with pytest.raises(Exhausted) as held:
            await here.ask()
        assert (held.value.reason, held.value.retry_after_s) == ("HELD", 1.5)
        assert not here.relay.asked


async def test_channels_to_nodes_are_few() -> None:
    channels = Channels()
    nodes = Nodes(channels, ("router:1",), most=2)
    channels.to("router:1")
    with nodes.to("a:1") as streaming:
        for endpoint in ("b:1", "c:1", "d:1"):
            with nodes.to(endpoint):
                pass
        assert sorted(channels._channels) == ["a:1", "d:1", "router:1"], "a stream keeps its channel"
        assert channels.to("a:1") is streaming
    await channels.close()


async def test_without_direct_no_pick_is_asked_for() -> None:
    async with world(Node(), direct=False) as here:
        assert (await here.ask()).served.relayed
        assert not here.router.asked
