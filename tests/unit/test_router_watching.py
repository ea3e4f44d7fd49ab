"""What the router does about a digest that turns out wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest
from prometheus_client import REGISTRY

from stoker.api.registry.v1 import registry_pb2
from stoker.registry.client import DigestChanged, FleetWatch, LoadChanged, RecordsChanged, SourceChanged
from stoker.router import core
from stoker.router.fleet.view import View
from stoker.router.watching import Watching, loop_lag
from tests.support.registry import snapshot
from tests.support.router import replica
from tests.support.waiting import eventually


class Told:
    """A watch that tells given events, each at its time."""

    def __init__(self, *events: tuple[float, Any]) -> None:
        self._events = events
        self.now = 0.0
        self.resynced: list[tuple[float, str]] = []

    async def events(self) -> AsyncGenerator[Any, None]:
        for at, event in self._events:
            self.now = at
            yield event

    def resync(self, replica_id: str) -> None:
        self.resynced.append((self.now, replica_id))


def wrong(replica_id: str) -> DigestChanged:
    update = snapshot(replica_id, {1, 2}, 3)
    update.xor_digest ^= 1
    return DigestChanged(update)


RECORDS = RecordsChanged(
    registry_pb2.Records(replicas=[replica("a", "http://a"), replica("b", "http://b")]),
    registry_pb2.Removals(),
    True,
)
BEAT = SourceChanged("r", True, registry_pb2.Freshness())


async def follow(told: Told) -> View:
    view = View(core.RoutingConfig(), core.HealthConfig())
    watching = Watching(view, ("r",), "me", lambda: None, lambda: told.now)
    await watching._follow(cast(FleetWatch, told))
    return view


async def test_wrong_digests_are_told_anew_alone_and_not_too_often() -> None:
    told = Told(
        (0.0, RECORDS), (1.0, wrong("a")), (2.0, BEAT), (15.0, BEAT), (16.0, BEAT),
        (17.0, wrong("a")), (18.0, wrong("b")), (29.0, BEAT), (30.0, BEAT), (60.0, BEAT),
    )  # fmt: skip
    view = await follow(told)
    assert sorted(told.resynced) == [(15.0, "a"), (30.0, "a"), (30.0, "b")]
    assert view.targets.keys() == {"a", "b"}


async def test_an_event_that_cannot_be_taken_has_everything_told_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(View, "load", refuse)
    never = (99.0, wrong("a"))
    told = Told((0.0, RECORDS), (1.0, LoadChanged(())), (16.0, BEAT), never)
    await follow(told)
    assert told.now == 16.0
    assert not told.resynced


async def test_a_loop_that_stood_still_is_measured() -> None:
    def observed() -> tuple[float, float]:
        name = "stoker_router_loop_lag_seconds"
        return REGISTRY.get_sample_value(f"{name}_sum") or 0.0, REGISTRY.get_sample_value(f"{name}_count") or 0.0

    before = observed()
    measuring = asyncio.create_task(loop_lag(0.01))
    try:
        await eventually(lambda: observed()[1] > before[1], "it measures")
        began = time.monotonic()
        while time.monotonic() < began + 0.2:  # nothing else runs meanwhile
            pass
        await eventually(lambda: observed()[0] - before[0] > 0.15, "the standstill is seen")
    finally:
        measuring.cancel()
