"""Leadership's own conduct: what is cancelled stays cancelled."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from structlog.testing import capture_logs

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import registry_pb2
from stoker.registry.client import Leadership, RegistryClient


class SlowToLetGo:
    """A registry client whose call, once cancelled, takes its time to end."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.may_end = asyncio.Event()

    async def acquire_leadership(self, *_: object) -> None:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()
            await self.may_end.wait()


async def test_resigning_can_itself_be_cancelled() -> None:
    client = SlowToLetGo()
    leadership = Leadership(cast(RegistryClient, client), "scaler", "me")
    await leadership.start()
    async with asyncio.timeout(5):
        await client.asked.wait()
        resigning = asyncio.create_task(leadership.resign())
        await client.cancelled.wait()
        resigning.cancel()
        await asyncio.sleep(0)
        client.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await resigning


class Broken:
    """A registry client with defects: the calls named fail as no registry would have them fail."""

    def __init__(self, *defects: str) -> None:
        self.defects = list(defects)
        self.renewed = asyncio.Event()

    def _call(self, name: str) -> None:
        if name in self.defects:
            self.defects.remove(name)
            raise RuntimeError(f"a defect in {name}")

    async def acquire_leadership(self, *_: object) -> registry_pb2.AcquireLeadershipResponse:
        self._call("acquire")
        fence = common_pb2.Fence(role="scaler", revision=7)
        return registry_pb2.AcquireLeadershipResponse(fence=fence, lease_id=1, ttl_ms=10_000)

    async def renew_leadership(self, *_: object, timeout_s: float) -> float:
        self._call("renew")
        self.renewed.set()
        return 10.0

    async def resign_leadership(self, *_: object) -> None:
        return None


@pytest.mark.looptime
async def test_a_defect_costs_one_try_and_is_logged() -> None:
    client = Broken("acquire", "acquire", "renew")
    with capture_logs() as logs:
        async with asyncio.timeout(30), Leadership(cast(RegistryClient, client), "scaler", "me") as leadership:
            fence = await leadership.wait_leading()
            await client.renewed.wait()
            assert leadership.fence == fence, "a renewal that failed once leaves time for another"
    assert not client.defects
    failed = [entry for entry in logs if entry["event"] == "leadership.failed"]
    assert [entry["log_level"] for entry in failed] == ["error"] * 3
