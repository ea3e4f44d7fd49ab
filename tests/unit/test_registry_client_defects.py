"""A defect in the client's own code costs one connection, never the service: it says so and connects again."""

from __future__ import annotations

import asyncio

import grpc
from structlog.testing import capture_logs

from stoker.api.registry.v1 import registry_pb2
from stoker.registry.client import FleetWatch, ReportSession
from tests.support.registry import node

NOWHERE = ["127.0.0.1:1"]


class DefectiveWatch(FleetWatch):
    tries = 0

    def __init__(self) -> None:
        super().__init__(NOWHERE, [registry_pb2.TOPIC_REPLICAS])
        self.again = asyncio.Event()

    async def _stream(self, source: object, channel: grpc.aio.Channel) -> None:
        self.tries += 1
        if self.tries == 3:
            self.again.set()
        raise RuntimeError("a defect")


class DefectiveReport(ReportSession):
    tries = 0

    def __init__(self) -> None:
        super().__init__(NOWHERE, node("n"))
        self.again = asyncio.Event()

    async def _stream(self, endpoint: str, channel: grpc.aio.Channel) -> bool:
        self.tries += 1
        if self.tries == 3:
            self.again.set()
        raise RuntimeError("a defect")


async def test_a_watch_connects_again() -> None:
    with capture_logs() as logs:
        watch = DefectiveWatch()
        async with asyncio.timeout(10), watch:
            await watch.again.wait()
    assert [e["log_level"] for e in logs if e["event"] == "watch.failed"][:2] == ["error", "error"]


async def test_an_agent_reports_again() -> None:
    with capture_logs() as logs:
        report = DefectiveReport()
        async with asyncio.timeout(10), report:
            await report.again.wait()
    assert [e["log_level"] for e in logs if e["event"] == "report.failed"][:2] == ["error", "error"]
