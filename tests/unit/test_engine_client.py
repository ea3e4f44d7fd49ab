"""The HTTP client against servers that misbehave: each fault is one error, in time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from stoker.common.errors import InvalidRequest
from stoker.node_agent.engine import client as module
from stoker.node_agent.engine.client import EngineClient, EngineUnreachable
from stoker.node_agent.engine.protocol import EngineLoad, Health
from tests.support.etcd import free_port
from tests.support.waiting import forever

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handler: Handler, timeout_s: float = 2.0) -> AsyncIterator[EngineClient]:
    """A server that answers everything by `handler`, and a client of it."""
    server = web.Server(handler)
    runner = web.ServerRunner(server, shutdown_timeout=0.1)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        async with aiohttp.ClientSession() as session:
            yield EngineClient(session, f"http://127.0.0.1:{port}", timeout_s)
    finally:
        await runner.cleanup()


def says(text: str, status: int = 200) -> Handler:
    async def handler(_: web.BaseRequest) -> web.Response:
        return web.Response(text=text, status=status)

    return handler


async def silent(_: web.BaseRequest) -> web.Response:
    await forever()


@pytest.mark.parametrize(
    ("status", "health"), [(200, Health.SERVING), (503, Health.UNHEALTHY), (500, Health.UNHEALTHY)]
)
async def test_health_is_the_status(status: int, health: Health) -> None:
    async with serving(says("", status)) as client:
        assert await client.health() is health


async def test_nobody_and_silence_are_unreachable() -> None:
    async with aiohttp.ClientSession() as session:
        assert await EngineClient(session, f"http://127.0.0.1:{free_port()}").health() is Health.UNREACHABLE
    async with serving(silent) as client:
        assert await client.health(timeout_s=0.05) is Health.UNREACHABLE
        with pytest.raises(EngineUnreachable, match="/metrics"):
            await client.load(timeout_s=0.05)


@pytest.mark.parametrize("body", ["", "no json", "[]", '{"data": []}', '{"data": [{}]}', '{"data": 7}', "null"])
async def test_a_server_of_another_kind_is_unreachable_not_a_crash(body: str) -> None:
    async with serving(says(body)) as client:
        with pytest.raises(EngineUnreachable):
            await client.info()
        with pytest.raises(EngineUnreachable):
            await client.tokenize("x")
        with pytest.raises(EngineUnreachable):
            await client.detokenize([1])


async def test_metrics_of_another_kind_are_unknown() -> None:
    async with serving(says("<html>")) as client:
        assert await client.load() == EngineLoad()


async def test_a_refusal_names_the_engines_words() -> None:
    async with serving(says('{"error": {"message": "too long", "code": 400}}', 400)) as client:
        with pytest.raises(InvalidRequest, match="answered 400: too long"):
            await client.tokenize("x")
    async with serving(says("boom", 500)) as client:
        with pytest.raises(EngineUnreachable, match="answered 500: boom"):
            await client.tokenize("x")


async def test_an_endless_answer_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_BODY", 1000)
    async with serving(says("x" * 5000)) as client:
        with pytest.raises(EngineUnreachable):
            await client.tokenize("x")
