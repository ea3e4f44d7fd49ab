"""Checks asked directly: what is recalled decides as what is read anew does, and only as long as it holds."""

from __future__ import annotations

import contextlib
import inspect
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from stoker.local.model import cached
from stoker.router.app import RouterApp
from stoker.router.envoy.addresses import Addresses
from stoker.router.envoy.check import Checks
from stoker.router.envoy.flights import Ending, Flights
from stoker.router.http.port import Answer, Ask
from stoker.router.prompts.prompt import read
from tests.support.engines import TINY
from tests.support.router import replica, running_router, tell, tokenizer_of

PROMPT = "Once upon a time there was a stoker " * 30


@dataclass
class Desk:
    app: RouterApp
    checks: Checks
    flights: Flights
    sha256: str

    def tell(self, **fields: Any) -> None:
        names = ("tiny-0", "tiny-1", "tiny-2")
        made = [replica(name, f"http://127.0.0.1:{9 + place}", sha256=self.sha256, **fields)
                for place, name in enumerate(names)]  # fmt: skip
        tell(self.app, *made)
        for target in self.app.view.targets.values():
            self.app.view.proved(target, "ok")

    def ask(self, body: Any, **headers: str) -> Any:
        return self.checks.decide(Ask("POST", "/v1/completions", headers, json.dumps(body).encode()))

    async def answer(self, body: Any, **headers: str) -> Answer:
        asked = self.ask(body, **headers)
        answer = await asked if inspect.isawaitable(asked) else asked
        assert isinstance(answer, Answer)
        return answer

    def end(self, answer: Answer) -> None:
        self.flights.ended(answer.headers["x-stoker-flight"], Ending(200, tries=1))


@contextlib.asynccontextmanager
async def desk(*settings: str) -> AsyncIterator[Desk]:
    async with running_router("parity=false", "checks.interval_s=600", *settings) as app:
        sha256, tokenizer = tokenizer_of(cached(TINY))
        app.tokenizers.add(sha256, tokenizer)
        flights = Flights(60.0, time.monotonic, app.router.move)
        there = Desk(app, Checks(app.router, flights, app.config.limits, Addresses(time.monotonic)), flights, sha256)
        there.tell()
        yield there
        flights.close()


def body(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, **more}


async def test_the_same_bytes_are_answered_at_once_and_alike() -> None:
    async with desk() as there:
        first = await there.answer(body())
        there.end(first)
        again = there.ask(body())
        assert isinstance(again, Answer), "nothing to wait for"
        told = ("x-gateway-destination-endpoint", "x-stoker-replica-1", "x-envoy-max-retries")
        assert [again.headers[name] for name in told] == [first.headers[name] for name in told]
        assert again.headers["x-stoker-decision"].startswith("speculative;")
        (flight,) = there.flights.now()
        assert flight.flight is not None
        assert flight.flight.decided.plan.tokens
        other = there.ask(body(max_tokens=5))
        assert inspect.isawaitable(other), "others are read"
        there.end(await other)
        there.end(again)
        assert not there.app.router.in_flight
        assert there.app.view.pools["tiny"].fleet.load.in_flight == 0


async def test_other_limits_of_the_fleet_end_what_was_remembered() -> None:
    async with desk() as there:
        there.end(await there.answer(body(max_tokens=1000)))
        there.tell(max_model_len=500)
        refused = await there.answer(body(max_tokens=1000))
        assert (refused.status, b"max_model_len=500" in refused.body) == (400, True)


async def test_a_model_that_has_gone_is_not_found_for_known_bodies_either() -> None:
    async with desk() as there:
        there.end(await there.answer(body()))
        there.tell(models=("other",))
        assert (await there.answer(body())).status == 404


async def test_known_bodies_are_charged_to_whoever_sends_them() -> None:
    async with desk("tenants.named={small: {requests_per_s: 0.5, burst_s: 2}}") as there:
        header = {"x-stoker-tenant": "small"}
        statuses = [(await there.answer(body())).status]
        statuses += [(await there.answer(body(), **header)).status for _ in range(2)]
        assert statuses == [200, 200, 429]
        tenants = [each.flight.decided.plan.request.tenant for each in there.flights.now() if each.flight]
        assert tenants == ["", "small"]


async def test_a_policy_is_refused_for_known_bodies_too() -> None:
    async with desk() as there:
        there.end(await there.answer(body()))
        assert (await there.answer(body(), **{"x-stoker-policy": "round_robin"})).status == 400


@pytest.mark.parametrize("way", ["read", "recalled"])
async def test_what_is_given_up_before_it_began_leaves_nothing(way: str) -> None:
    async with desk() as there:
        if way == "recalled":
            there.end(await there.answer(body()))
        asked = there.ask(body())
        if inspect.iscoroutine(asked):
            asked.close()
        else:
            asked.undo()
        assert not len(there.flights)
        assert not there.app.router.in_flight
        assert there.app.view.pools["tiny"].fleet.load.in_flight == 0


async def test_what_was_read_for_envoy_is_known_on_the_openai_port(monkeypatch: pytest.MonkeyPatch) -> None:
    async with desk() as there:
        answered = await there.answer(body(stream=True))
        (flight,) = there.flights.now()
        assert flight.flight is not None
        made = flight.flight.decided.plan
        assert not made.request.streamed, "nobody tells when its first token comes"
        there.end(answered)
        monkeypatch.setattr(there.app.router.planner, "plan", None)  # would be called for what is not known
        raw = json.dumps(body(stream=True)).encode()
        asked = read("completions", json.loads(raw), raw)
        plan = await there.app.router.plan(asked, body=raw)
        assert list(plan.request.keys) == list(made.request.keys)
        assert plan.tokens == made.tokens
        assert plan.request.streamed
        with pytest.raises(TypeError):
            await there.app.router.plan(asked, body=raw + b" ")
