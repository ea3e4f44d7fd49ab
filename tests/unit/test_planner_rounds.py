"""A planner's rounds at their edges: what a leader tells, and what it tells no more."""

from __future__ import annotations

import asyncio
import math
from typing import cast

from prometheus_client import REGISTRY

from stoker.planner import metrics
from stoker.planner.config import PlannerConfig
from stoker.planner.core.holding import Violation
from stoker.planner.core.values import Unplaced
from stoker.planner.rounds import PlannerRound
from stoker.registry.client import FleetView, RegistryClient


def rounds() -> PlannerRound:
    return PlannerRound(cast("RegistryClient", None), FleetView(), PlannerConfig())


async def test_who_waits_for_a_move_hears_at_once_that_another_leads() -> None:
    round_ = rounds()
    move = asyncio.ensure_future(round_.move("chat-0", ()))
    await asyncio.sleep(0)
    round_.end()
    async with asyncio.timeout(5):
        assert await move == "this planner leads no more; ask the one that does"


async def test_a_move_that_nobody_waits_for_any_more_is_not_made() -> None:
    """It kept every other move waiting until its deployment was at rest, and was made then."""
    round_ = rounds()
    given_up = asyncio.ensure_future(round_.move("chat-0", ()))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    second = asyncio.ensure_future(round_.move("chat-1", ()))
    await asyncio.sleep(0)
    assert not second.done(), "told that chat-0 is still being moved"
    second.cancel()


def test_a_planner_that_leads_no_more_does_not_alarm_for_ever() -> None:
    metrics.note_unplaced([Unplaced("chat", 3, "too full")])
    metrics.note_violations([Violation("power", "feed a", "too much")])
    rounds().end()
    told = REGISTRY.get_sample_value("stoker_planner_unplaced_replicas")
    assert told is not None
    assert math.isnan(told), "unknown is not zero, and not above it"
    assert REGISTRY.get_sample_value("stoker_planner_violations", {"limit": "power"}) is None
