"""What the relay does around a generation: when it speaks, and what it keeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from aiohttp import web

from stoker.api.inference.v1 import inference_pb2
from stoker.common.errors import InvalidRequest
from stoker.node_agent.config import RelayConfig
from stoker.node_agent.relay import InFlight, Relay


class Engine:
    """Generates one token, once it may; remembers its clients' ports."""

    def __init__(self) -> None:
        self.ports: list[int] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.status = 200
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        assert request.transport is not None
        self.ports.append(request.transport.get_extra_info("peername")[1])
        await self.may_answer.wait()
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"choices":[{"index":0,"text":"a"}]}\n\ndata: [DONE]\n\n')
        await self.may_end.wait()
        return response


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[Engine]:
    told = Engine()
    app = web.Application()
    app.router.add_post("/", told.handle)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    told.url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    yield told
    await runner.cleanup()


@pytest_asyncio.fixture
async def relay() -> AsyncIterator[Relay]:
    made = Relay(InFlight(limit=8), RelayConfig())
    yield made
    await made.close()


def ask(relay: Relay, engine: Engine) -> AsyncIterator[inference_pb2.GenerateResponse]:
    started = inference_pb2.Started(request_id="r", replica_id="r-0")
    return relay.stream("r-0", engine.url, {"prompt": "x"}, {}, started, 10.0)


async def test_a_connection_serves_one_generation_after_the_other(relay: Relay, engine: Engine) -> None:
    for _ in range(3):
        engine.may_end.clear()
        events = []
        async for response in ask(relay, engine):
            events.append(response.WhichOneof("event"))
            if events[-1] == "finished":  # before the end of the body, which comes apart from [DONE]
                engine.may_end.set()
        assert events == ["started", "delta", "finished"]
    assert len(set(engine.ports)) == 1, "a new connection each time costs a round trip"


async def test_started_goes_out_while_the_engine_works(relay: Relay, engine: Engine) -> None:
    engine.may_answer.clear()
    stream = ask(relay, engine)
    async with asyncio.timeout(5):
        first = await anext(stream)
        assert first.WhichOneof("event") == "started"
        engine.may_answer.set()
        assert [response.WhichOneof("event") async for response in stream] == ["delta", "finished"]


async def test_a_refusal_follows_started(relay: Relay, engine: Engine) -> None:
    engine.status = 400
    stream = ask(relay, engine)
    assert (await anext(stream)).WhichOneof("event") == "started"
    with pytest.raises(InvalidRequest, match="no"):
        await anext(stream)
