"""Tenants at the router's doors: limits, priorities and a fair line, over HTTP before a simulated engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.integration.test_router_openai_http import GREEDY, SLOW, Stack, stack
from tests.support.engines import FAST
from tests.support.waiting import eventually

LIMITED = "tenants.named={small: {requests_per_s: 0.5, burst_s: 4}, few: {tokens_per_s: 100, burst_s: 1}}"


async def ask(running: Stack, tenant: str, prompt: str = "how much", **headers: str) -> tuple[int, float | None]:
    """Status, and the delay until the next try where there is one."""
    body = {**GREEDY, "prompt": prompt, "max_tokens": 2}
    status, answered, _ = await running.post("/v1/completions", body, headers={"x-stoker-tenant": tenant, **headers})
    delay = answered.get("Retry-After")
    return status, float(delay) if delay is not None else None


async def test_a_tenant_is_held_to_its_own_limits(tmp_path: Path) -> None:
    async with stack(tmp_path, LIMITED, args=FAST) as running:
        answers = [await ask(running, "small") for _ in range(4)]
        assert [status for status, _ in answers] == [200, 200, 429, 429]
        assert answers[2][1] is not None
        assert 1.0 <= answers[2][1] <= 2.0, "one request every two seconds"
        assert (await ask(running, "few", "a " * 150))[0] == 200, "more than a bucket holds, and it is full"
        assert (await ask(running, "few"))[0] == 429
        assert (await ask(running, "other"))[0] == 200
        status, _, body = await running.post(
            "/v1/completions", {**GREEDY, "prompt": "x"}, headers={"x-stoker-tenant": "small"}
        )
        assert status == 429
        assert b"tenant_limit" in body


async def test_a_priority_that_is_none_is_refused_and_named(tmp_path: Path) -> None:
    async with stack(tmp_path) as running:
        body = {**GREEDY, "prompt": "x"}
        status, _, answer = await running.post("/v1/completions", body, headers={"x-stoker-priority": "soon"})
        assert status == 400
        assert b"x-stoker-priority" in answer


async def test_who_waits_goes_by_priority_and_then_turn_and_turn_about(tmp_path: Path) -> None:
    settings = ("routing.hold_s=0", "routing.fair_tokens=0", "routing.aging=0")
    async with stack(tmp_path, *settings, args=SLOW) as running:
        served: list[str] = []

        async def one(tenant: str, priority: str = "0") -> None:
            body = {**GREEDY, "prompt": f"{tenant} asks", "max_tokens": 1, "stream": True}
            headers = {"x-stoker-tenant": tenant, "x-stoker-priority": priority}
            async with running.http.post(f"{running.url}/v1/completions", json=body, headers=headers) as answer:
                await answer.content.readany()
                served.append(tenant)
                await answer.read()

        waiting = [asyncio.create_task(one("greedy")) for _ in range(6)]
        await eventually(lambda: len(running.app.router.turns) >= 5, "five of six wait")
        waiting += [asyncio.create_task(one("modest")), asyncio.create_task(one("urgent", "-5"))]
        await asyncio.gather(*waiting)
        assert served.index("urgent") <= 2
        assert served.index("modest") <= 4
        assert running.app.router.in_flight == 0
        assert not len(running.app.router.turns)
