"""Leadership's own conduct: what is cancelled stays cancelled."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

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
