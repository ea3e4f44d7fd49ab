"""Whole requests through a real Envoy, before the simulated engine: decided by the router, carried by Envoy."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from multidict import CIMultiDict

from stoker.api.common.v1 import common_pb2, scaling_pb2
from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.common import otel
from stoker.router.envoy.flights import Flights
from tests.integration.test_router_openai_http import DECISION, GREEDY, SLOW, Stack, stack
from tests.support.collector import CALLER, collecting
from tests.support.engines import FAST
from tests.support.envoy import running_envoy
from tests.support.router import replica, tell
from tests.support.waiting import eventually

QUICK = ("envoy.report_s=0.05", "envoy.silence_s=60")
EXT_AUTHZ = "listen.ext_authz=127.0.0.1:0"


@contextlib.asynccontextmanager
async def carried(
    folder: Path, *settings: str, args: tuple[str, ...] = FAST, count: int = 1
) -> AsyncIterator[tuple[Stack, str, Flights]]:
    async with (
        stack(folder, EXT_AUTHZ, *QUICK, *settings, args=args, count=count) as running,
        running_envoy(running.app, folder, *QUICK, *settings) as url,
    ):
        assert running.app.envoy is not None
        yield running, url, running.app.envoy.flights


def idle(running: Stack, flights: Flights) -> bool:
    """Whether nothing is counted anywhere any more."""
    app = running.app
    return not len(flights) and not app.router.in_flight and not any(t.in_flight for t in app.view.targets.values())


async def test_a_request_is_decided_carried_and_accounted_for(tmp_path: Path) -> None:
    async with carried(tmp_path, count=2) as (running, url, flights):
        body = {**GREEDY, "prompt": "Once upon a time " * 40, "max_tokens": 3}
        _, _, direct = await running.post("/v1/completions", body)
        replicas = set()
        for _ in range(3):
            async with running.http.post(f"{url}/v1/completions", json=body, headers={"x-request-id": "mine"}) as got:
                assert got.status == 200
                assert got.headers["x-request-id"] == "mine"
                assert re.fullmatch(DECISION, got.headers["x-stoker-decision"])
                replicas.add(got.headers["x-stoker-replica"])
                assert (await got.json())["choices"][0]["text"] in direct.decode()
        assert len(replicas) == 1, "the same prefix goes home"
        await eventually(lambda: idle(running, flights), "all flights are released by the access log", 10.0)
        assert running.app.router.recent.of("mine") is not None, "Explain knows it"


async def test_the_engine_goes_on_with_the_trace_of_its_check(tmp_path: Path) -> None:
    async with (
        collecting() as (endpoint, collector),
        carried(tmp_path, args=(*FAST, "--otlp-traces-endpoint", endpoint)) as (running, url, _),
    ):
        body = {**GREEDY, "prompt": "Once upon a time", "max_tokens": 2}
        with otel.traced("stoker-router", endpoint):
            async with running.http.post(f"{url}/v1/completions", json=body, headers={"traceparent": CALLER}) as got:
                assert got.status == 200
            check, engine = ("stoker-router", "envoy check"), ("vllm", "llm_request")
            await eventually(lambda: {check, engine} <= collector.spans.keys(), "both spans", 60)
        assert collector.spans[check].parent_span_id.hex() == CALLER.split("-")[2]
        assert collector.spans[engine].parent_span_id == collector.spans[check].span_id


async def test_a_stream_is_counted_while_it_runs_and_its_first_token_is_told(tmp_path: Path) -> None:
    async with carried(tmp_path, args=SLOW) as (running, url, flights):
        body = {**GREEDY, "prompt": "slowly", "max_tokens": 40, "stream": True}
        async with running.http.post(f"{url}/v1/completions", json=body) as got:
            await got.content.readany()
            assert len(flights) == 1
            assert running.app.router.in_flight == 1
            await eventually(lambda: all(each.token_seen for each in flights.now()), "the first token is told", 10.0)
            await asyncio.wait_for(got.read(), 60)
        await eventually(lambda: idle(running, flights), "released at its end", 10.0)


async def test_a_request_for_a_model_at_zero_waits_behind_envoy_for_the_first_replica(tmp_path: Path) -> None:
    async with carried(tmp_path) as (running, url, flights):
        app = running.app
        policy = scaling_pb2.ScalingPolicy(kind=scaling_pb2.SCALING_KIND_SLO)
        policy.bounds.least = 0
        deployment = records_pb2.Deployment(spec=common_pb2.DeploymentSpec(name="tiny", scaling=policy))
        app.view.records(
            registry_pb2.Records(deployments=[deployment]), registry_pb2.Removals(replicas=["tiny-0"]), now=0.0
        )
        body = {**GREEDY, "prompt": "Once upon a time", "max_tokens": 3, "stream": True}
        asking = asyncio.create_task(running.http.post(f"{url}/v1/completions", json=body))
        await eventually(lambda: len(app.router.holding) == 1, "it is held")
        tell(app, *running.replicas())
        async with await asyncio.wait_for(asking, 20) as got:
            assert (got.status, got.headers["x-stoker-replica"]) == (200, "tiny-0")
            await got.read()
        await eventually(lambda: idle(running, flights), "released at its end", 10.0)
        (demand,) = app.router.demand.report(True)
        assert (demand.arrivals, demand.finished, demand.judged, demand.held) == (1, 1, 1, 0)


async def test_a_client_that_goes_is_released_and_so_is_the_engine(tmp_path: Path) -> None:
    async with carried(tmp_path, args=SLOW) as (running, url, flights):
        body = {**GREEDY, "prompt": "gone", "max_tokens": 400, "stream": True}
        async with running.http.post(f"{url}/v1/completions", json=body) as got:
            await got.content.readany()
        await eventually(lambda: idle(running, flights), "released when the client left", 10.0)


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"model": "nobody", "prompt": "x"}, 404, b"model_not_found"),
        ({"model": "tiny"}, 400, b'"prompt"'),
        ({"model": "tiny", "prompt": "x", "max_tokens": 10_000_000}, 400, b"max_model_len"),
    ],
)
async def test_refusals_are_the_routers_own(
    tmp_path: Path, body: dict[str, object], status: int, says: bytes
) -> None:
    async with carried(tmp_path) as (running, url, flights):
        async with running.http.post(f"{url}/v1/completions", json=body) as got:
            assert got.status == status
            assert got.content_type == "application/json"
            assert says in await got.read()
            assert got.headers["x-request-id"]
        assert idle(running, flights)


async def test_limits_of_tenants_hold_and_say_when_to_come_back(tmp_path: Path) -> None:
    limited = "tenants.named={small: {requests_per_s: 0.5, burst_s: 2}}"
    async with carried(tmp_path, limited) as (running, url, flights):
        body = {**GREEDY, "prompt": "x", "max_tokens": 1}
        statuses = []
        for _ in range(2):
            async with running.http.post(
                f"{url}/v1/completions", json=body, headers={"x-stoker-tenant": "small"}
            ) as got:
                statuses.append((got.status, got.headers.get("Retry-After")))
        assert statuses == [(200, None), (429, "2")]
        await eventually(lambda: idle(running, flights), "released", 10.0)


async def test_a_dead_engine_is_found_out_and_nothing_stays_counted(tmp_path: Path) -> None:
    async with carried(tmp_path, "checks.interval_s=60") as (running, url, flights):
        running.engines["tiny-0"].process.kill()
        await running.engines["tiny-0"].process.wait()
        async with running.http.post(f"{url}/v1/completions", json={**GREEDY, "prompt": "x"}) as got:
            assert got.status == 503
            assert b"engine_failed" in await got.read()
        await eventually(lambda: idle(running, flights), "released", 10.0)
        await eventually(
            lambda: not running.app.view.targets["tiny-0"].reachable, "a refused connection is proof", 1.0
        )


PROMPT = "Once upon a time there was a stoker " * 30


@dataclass
class Failing:
    """An engine that fails each request, once it may, before the first byte: by this answer, or by none."""

    answer: bytes
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    asked: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head.lower())
            await reader.readexactly(int(length.group(1)) if length else 0)
            if head.startswith(b"POST /tokenize "):
                return  # the router's own probe of whatever has another address
            self.asked += 1
            await self.gate.wait()
            writer.write(self.answer)
        finally:
            writer.close()


async def home_of(running: Stack, url: str) -> tuple[str, str]:
    """The replica that holds PROMPT, and the other one."""
    async with running.http.post(f"{url}/v1/completions", json={**GREEDY, "prompt": PROMPT, "max_tokens": 2}) as got:
        home = got.headers["x-stoker-replica"]
    return home, next(name for name in running.engines if name != home)


async def stand_in(running: Stack, name: str, engine: Failing, held: contextlib.AsyncExitStack) -> None:
    """Put another engine in a replica's place."""
    server = await held.enter_async_context(await asyncio.start_server(engine.serve, "127.0.0.1", 0))
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    sha256 = running.app.view.targets[name].record.engine.tokenizer_sha256
    urls = {**{each: engine.url for each, engine in running.engines.items()}, name: url}
    tell(running.app, *(replica(each, at, sha256=sha256) for each, at in urls.items()))


async def test_an_engine_that_refuses_is_left_for_the_next_before_the_first_byte(tmp_path: Path) -> None:
    async with carried(tmp_path, "checks.interval_s=60", count=2) as (running, url, flights):
        home, other = await home_of(running, url)
        running.engines[home].process.kill()
        await running.engines[home].process.wait()
        body = {**GREEDY, "prompt": PROMPT, "max_tokens": 2}
        async with running.http.post(f"{url}/v1/completions", json=body) as got:
            assert (got.status, got.headers["x-stoker-replica"]) == (200, other), await got.text()
            assert len(got.headers.getall("x-stoker-replica")) == 1
        await eventually(lambda: idle(running, flights), "both are released", 10.0)
        assert not running.app.view.targets[home].reachable, "a refused connection is proof"
        assert running.app.view.targets[other].reachable


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nbusy", b""], ids=["503", "broken"]
)
async def test_counts_follow_a_request_that_is_tried_elsewhere(tmp_path: Path, answer: bytes) -> None:
    async with (
        carried(tmp_path, "checks.interval_s=60", count=2, args=SLOW) as (running, url, flights),
        contextlib.AsyncExitStack() as held,
    ):
        home, other = await home_of(running, url)
        await eventually(lambda: idle(running, flights), "released", 10.0)
        failing = Failing(answer)
        await stand_in(running, home, failing, held)
        targets = running.app.view.targets
        body = {**GREEDY, "prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "stream": True}
        asking = asyncio.create_task(running.http.post(f"{url}/v1/completions", json=body))
        await eventually(lambda: failing.asked == 1, "the first engine has it")
        assert (targets[home].in_flight, targets[other].in_flight) == (1, 0)
        failing.gate.set()
        got = await asking
        await eventually(lambda: (targets[home].in_flight, targets[other].in_flight) == (0, 1), "it moved", 10.0)
        assert (got.status, got.headers["x-stoker-replica"]) == (200, other)
        fleet = running.app.view.pools["tiny"].fleet
        assert fleet.load.own(home) == 0 < fleet.load.own(other)
        assert not fleet.health.quiet, "the first one is blamed"
        assert (await got.read()).endswith(b"data: [DONE]\n\n")
        await eventually(lambda: idle(running, flights), "released at its end", 10.0)


async def test_an_error_that_may_be_the_request_s_own_is_not_tried_elsewhere(tmp_path: Path) -> None:
    async with (
        carried(tmp_path, "checks.interval_s=60", count=2) as (running, url, flights),
        contextlib.AsyncExitStack() as held,
    ):
        home, _ = await home_of(running, url)
        await eventually(lambda: idle(running, flights), "released", 10.0)
        failing = Failing(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 4\r\n\r\nmine")
        failing.gate.set()
        await stand_in(running, home, failing, held)
        async with running.http.post(f"{url}/v1/completions", json={**GREEDY, "prompt": PROMPT}) as got:
            assert (got.status, got.headers["x-stoker-replica"], await got.read()) == (500, home, b"mine")
        assert failing.asked == 1
        await eventually(lambda: idle(running, flights), "released", 10.0)


async def test_where_all_fail_the_last_answer_is_the_client_s(tmp_path: Path) -> None:
    async with carried(tmp_path, "checks.interval_s=60", count=2) as (running, url, flights):
        for engine in running.engines.values():
            engine.process.kill()
            await engine.process.wait()
        async with running.http.post(f"{url}/v1/completions", json={**GREEDY, "prompt": "x"}) as got:
            assert got.status == 503
            assert b"engine_failed" in await got.read()
        await eventually(lambda: idle(running, flights), "released", 10.0)
        await eventually(
            lambda: not any(t.reachable for t in running.app.view.targets.values()), "both found dead", 1.0
        )


async def test_a_killed_envoy_leaves_no_flight_behind(tmp_path: Path) -> None:
    async with stack(tmp_path, EXT_AUTHZ, *QUICK, "envoy.silence_s=2", args=SLOW) as running:
        assert running.app.envoy is not None
        flights = running.app.envoy.flights
        async with running_envoy(running.app, tmp_path, *QUICK) as url:
            body = {**GREEDY, "prompt": "lost", "max_tokens": 400, "stream": True}
            got = await running.http.post(f"{url}/v1/completions", json=body)
            await got.content.readany()
            assert len(flights) == 1
        got.close()
        await eventually(lambda: idle(running, flights), "released after a silence", 60.0)


async def test_a_client_cannot_choose_the_engine_nor_name_a_flight(tmp_path: Path) -> None:
    async with carried(tmp_path) as (running, url, flights):
        spoofed = [
            ("x-gateway-destination-endpoint", "127.0.0.1:1"),
            ("X-Gateway-Destination-Endpoint", "127.0.0.1:2"),
            ("x-stoker-flight", "0" * 24),
            ("x-envoy-upstream-rq-timeout-ms", "1"),
            ("x-data-parallel-rank", "7"),
        ]
        body = {**GREEDY, "prompt": "x", "max_tokens": 2, "user": "u" * 200_000}
        async with running.http.post(f"{url}/v1/completions", json=body, headers=CIMultiDict(spoofed)) as got:
            assert got.status == 200, await got.text()
        await eventually(lambda: idle(running, flights), "released", 10.0)


async def test_a_streams_headers_do_not_pass_for_its_first_token(tmp_path: Path) -> None:
    async with carried(tmp_path, args=SLOW) as (running, url, flights):
        body = {**GREEDY, "prompt": "a long one " * 300, "max_tokens": 20, "ignore_eos": True, "stream": True}
        async with running.http.post(f"{url}/v1/completions", json=body) as got:
            (flight,) = flights.now()
            began = flight.heard
            await eventually(lambda: flight.heard > began, "Envoy has reported of it since its headers came")
            assert not flight.token_seen
            await got.content.readany()
            await eventually(lambda: flight.token_seen, "Envoy has reported of its body")
            assert flight.flight is not None
            ago_s = flight.flight.first_token_ago_s()
            assert ago_s is not None
            assert ago_s < 0.5


async def test_time_runs_out_as_the_caller_asked(tmp_path: Path) -> None:
    async with carried(tmp_path, args=SLOW) as (running, url, flights):
        body = {**GREEDY, "prompt": "x", "max_tokens": 400}
        async with running.http.post(f"{url}/v1/completions", json=body, headers={"x-request-timeout": "0.5"}) as got:
            assert got.status == 504
            assert b"deadline_exceeded" in await got.read()
        await eventually(lambda: idle(running, flights), "released", 10.0)
        assert all(pool.fleet.health.quiet for pool in running.app.view.pools.values()), "a hurry is no fault"


async def test_who_waits_in_line_and_leaves_is_forgotten(tmp_path: Path) -> None:
    async with carried(tmp_path, "routing.hold_s=0", args=SLOW) as (running, url, flights):
        turns = running.app.router.turns

        async def one() -> None:
            body = {**GREEDY, "prompt": "a long one " * 300, "max_tokens": 4, "stream": True}
            async with running.http.post(f"{url}/v1/completions", json=body) as got:
                await got.read()

        asking = [asyncio.create_task(one()) for _ in range(4)]
        await eventually(lambda: len(turns) >= 1, "some wait")
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await eventually(lambda: not len(turns) and idle(running, flights), "nobody waits, nothing flies", 10.0)


async def test_stop_waits_for_what_envoy_carries_and_refuses_what_comes(tmp_path: Path) -> None:
    async with carried(tmp_path, args=SLOW) as (running, url, flights):
        body = {**GREEDY, "prompt": "last", "max_tokens": 40, "ignore_eos": True, "stream": True}
        async with running.http.post(f"{url}/v1/completions", json=body) as last:
            await last.content.readany()
            stopping = asyncio.create_task(running.app.stop())
            await eventually(lambda: running.app.router.draining, "it drains")
            async with running.http.post(f"{url}/v1/completions", json=body) as refused:
                assert refused.status == 503
                assert b"draining" in await refused.read()
            assert not stopping.done()
            assert (await last.read()).endswith(b"data: [DONE]\n\n")
        await asyncio.wait_for(stopping, 10)
        assert idle(running, flights)


async def test_a_router_that_is_gone_lets_nobody_pass(tmp_path: Path) -> None:
    async with carried(tmp_path) as (running, url, _):
        envoy = running.app.envoy
        assert envoy is not None
        await envoy.close()
        async with running.http.post(f"{url}/v1/completions", json={**GREEDY, "prompt": "x"}) as got:
            assert (got.status, got.headers["Retry-After"]) == (503, "1")
            assert b'"unavailable"' in await got.read()


async def test_other_paths_go_to_the_router_unchecked(tmp_path: Path) -> None:
    async with carried(tmp_path) as (running, url, _), running.http.get(f"{url}/v1/models") as got:
        assert got.status == 200
        assert (await got.json())["data"][0]["id"] == "tiny"


async def test_a_body_beyond_the_bound_is_refused_in_the_form_of_the_api(tmp_path: Path) -> None:
    async with carried(tmp_path, "limits.max_body_bytes=4096") as (running, url, flights):
        body = {**GREEDY, "prompt": "x" * 8192}
        async with running.http.post(f"{url}/v1/completions", json=body) as got:
            assert got.status == 413
            assert b"body_too_large" in await got.read()
        assert idle(running, flights)
