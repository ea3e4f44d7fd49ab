"""However a generation ends, its connection is closed and its place is given back."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.api.inference.v1 import inference_pb2
from stoker.common.errors import StokerError
from stoker.node_agent import telemetry
from stoker.node_agent.config import RelayConfig
from stoker.node_agent.relay import InFlight, Relay
from tests.support.waiting import forever


@dataclass(frozen=True)
class Story:
    """What an engine and a caller do."""

    status: int
    chunks: int
    ending: str
    """How the engine ends: done, cut, error, rubbish, silence."""
    leaves_after: int | None
    """Messages after which the caller is gone; None: it stays."""
    deadline_s: float | None


stories = st.builds(
    Story,
    status=st.sampled_from([200, 200, 200, 200, 400, 503]),
    chunks=st.integers(0, 4),
    ending=st.sampled_from(["done", "cut", "error", "rubbish", "silence"]),
    leaves_after=st.one_of(st.none(), st.integers(0, 4)),
    deadline_s=st.sampled_from([0.05, 0.3]),
)


class Engine:
    """Answers as the story says, and counts who is still connected."""

    def __init__(self) -> None:
        self.connected = 0
        self.idle = asyncio.Event()
        self.idle.set()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        story = Story(**json.loads(await request.read())["story"])
        if story.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=story.status)
        self.connected += 1
        self.idle.clear()
        try:
            return await self._stream(request, story)
        finally:
            self.connected -= 1
            if not self.connected:
                self.idle.set()

    async def _stream(self, request: web.Request, story: Story) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for at in range(story.chunks):
            await response.write(b'data: {"choices":[{"index":0,"text":"%d"}]}\n\n' % at)
            await asyncio.sleep(0)
        match story.ending:
            case "done":
                await response.write(b"data: [DONE]\n\n")
            case "error":
                await response.write(b'data: {"error": {"message": "broken"}}\n\n')
            case "rubbish":
                await response.write(b"data: {{{\n\n")
            case "cut":
                assert request.transport is not None
                request.transport.abort()
            case _:
                await forever()  # ends with the connection
        return response


async def _one(relay: Relay, url: str, story: Story) -> str:
    """Plays the caller; returns how it ended."""
    started = inference_pb2.Started(request_id="r", replica_id="r-0")
    stream = relay.stream("r-0", url, {"story": story.__dict__}, {}, started, story.deadline_s)
    seen = 0
    try:
        async for _ in stream:
            seen += 1
            if story.leaves_after is not None and seen > story.leaves_after:
                return "left"
    except StokerError as error:
        return error.reason
    finally:
        await stream.aclose()  # type: ignore[attr-defined]  # an async generator
    return "OK"


async def _play(together: list[Story]) -> None:
    engine = Engine()
    app = web.Application()
    app.router.add_post("/", engine.handle)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    in_flight = InFlight(limit=6)
    relay = Relay(in_flight, RelayConfig())
    try:
        before = telemetry.RELAY_STREAMS._value.get()
        tasks = [asyncio.create_task(_one(relay, url, story)) for story in together]
        for task, story in zip(tasks, together, strict=True):
            if story.leaves_after == 0:
                await asyncio.sleep(0)
                task.cancel()  # gone before the engine said anything
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [end for end in ends if isinstance(end, Exception)], ends
        assert in_flight.total == 0
        assert in_flight("r-0") == 0
        assert telemetry.RELAY_STREAMS._value.get() == before
        assert not relay._calls
        # Closed connections reach the engine at once.
        await asyncio.wait_for(engine.idle.wait(), 1.0)
    finally:
        await relay.close()
        await runner.cleanup()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(stories, min_size=1, max_size=8))
def test_every_ending_releases(together: list[Story]) -> None:
    asyncio.run(_play(together))


def test_the_relay_refuses_beyond_its_limit() -> None:
    in_flight = InFlight(limit=1)
    with in_flight.place("a"), pytest.raises(StokerError, match="relays 1 streams"), in_flight.place("b"):
        raise AssertionError("a second place was given")
    with in_flight.place("b"):
        assert (in_flight("a"), in_flight("b")) == (0, 1)
