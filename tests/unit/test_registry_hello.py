"""The beginning of an agent's stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from stoker.api.registry.v1 import registry_pb2
from stoker.common.errors import InvalidRequest, Unavailable
from stoker.registry import server


async def silent() -> AsyncIterator[registry_pb2.ReportRequest]:
    await asyncio.Event().wait()
    yield registry_pb2.ReportRequest()


async def ended() -> AsyncIterator[registry_pb2.ReportRequest]:
    requests: tuple[registry_pb2.ReportRequest, ...] = ()
    for request in requests:
        yield request


async def of_heartbeats() -> AsyncIterator[registry_pb2.ReportRequest]:
    yield registry_pb2.ReportRequest(heartbeat=registry_pb2.Heartbeat())


async def test_a_late_hello_may_be_said_again_but_none_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_HELLO_TIMEOUT_S", 0.01)
    with pytest.raises(Unavailable) as late:
        await server._hello(silent())
    assert late.value.reason == "AGENT_SILENT"
    for requests in (ended(), of_heartbeats()):
        with pytest.raises(InvalidRequest):
            await server._hello(requests)
