"""Engines that die under the router: what fails, what does not, and how soon the router knows."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from pathlib import Path

import aiohttp
import aiohttp.web
import pytest

from stoker.api.registry.v1 import records_pb2, registry_pb2
from tests.integration.test_router_openai_http import DECISION, SLOW, Stack, stack
from tests.support.engines import spawn, terminate, wait_serving
from tests.support.router import replica, running_router, tell
from tests.support.waiting import eventually

pytestmark = pytest.mark.fault

LONG = {"model": "tiny", "max_tokens": 2000, "ignore_eos": True, "stream": True}


def kill(running: Stack, name: str) -> None:
    os.killpg(running.engines[name].process.pid, signal.SIGKILL)


async def test_a_stream_on_a_killed_engine_says_so_and_ends(tmp_path: Path) -> None:
    async with stack(tmp_path, args=SLOW) as running:
        pieces: list[bytes] = []
        async with running.http.post(f"{running.url}/v1/completions", json={**LONG, "prompt": "x"}) as answer:
            async with asyncio.timeout(60):
                async for piece in answer.content.iter_any():
                    if not pieces:
                        kill(running, "tiny-0")
                    pieces.append(piece)
        events = [event for event in b"".join(pieces).split(b"\n\n") if event]
        assert b"[DONE]" not in events[-1]
        last = json.loads(events[-1].removeprefix(b"data: "))
        assert last["error"]["code"] == "engine_failed"
        for event in events:
            json.loads(event.removeprefix(b"data: "))
        await eventually(lambda: running.app.view.pools["tiny"].fleet.load.in_flight == 0, "flight released")


async def test_a_broken_stream_leaves_its_connection_usable(tmp_path: Path) -> None:
    """A connection closed under a client fails the next request it puts there, which broke nothing."""
    async with stack(tmp_path, args=SLOW) as running:
        async with running.http.post(f"{running.url}/v1/completions", json={**LONG, "prompt": "x"}) as answer:
            assert answer.connection is not None
            used = answer.connection.transport
            async with asyncio.timeout(60):
                await answer.content.readany()
                kill(running, "tiny-0")
                await answer.read()
        async with running.http.get(f"{running.url}/v1/models") as answer:
            assert answer.status == 200
            assert answer.connection is None or answer.connection.transport is used
        assert used is not None
        assert not used.is_closing()


async def test_a_plain_request_on_a_killed_engine_is_served_by_another(tmp_path: Path) -> None:
    async with stack(tmp_path, count=2, args=SLOW) as running:
        body = {"model": "tiny", "prompt": "coal", "max_tokens": 30, "ignore_eos": True}
        asking = asyncio.create_task(running.post("/v1/completions", body))
        targets = running.app.view.targets
        await eventually(lambda: any(target.in_flight for target in targets.values()), "it is on its way")
        first = next(target.id for target in targets.values() if target.in_flight)
        kill(running, first)
        async with asyncio.timeout(60):
            status, headers, got = await asking
        assert status == 200, got
        assert headers["x-stoker-replica"] != first
        assert headers["x-stoker-decision"].endswith(";attempt=2")
        assert json.loads(got)["usage"]["completion_tokens"] == 30


async def test_a_dead_engine_is_out_at_the_first_refused_connection_and_back_when_it_answers(tmp_path: Path) -> None:
    async with stack(tmp_path, count=2) as running:
        kill(running, "tiny-0")
        target = running.app.view.targets["tiny-0"]
        await eventually(lambda: not target.reachable, "the router notices by itself")
        for _ in range(10):
            status, headers, _ = await running.post(
                "/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 1}
            )
            assert (status, headers["x-stoker-replica"]) == (200, "tiny-1")
        engine = running.engines["tiny-0"]
        process = await spawn(engine.engine, engine.request)
        try:
            await wait_serving(engine.client, process, engine.request, 30)
            await eventually(lambda: target.reachable, "the router takes it back", within_s=60.0)
        finally:
            await terminate(process)


async def test_under_load_only_streams_on_the_killed_engine_fail_and_nothing_hangs(tmp_path: Path) -> None:
    async with stack(tmp_path, count=3) as running:

        async def ask(number: int) -> tuple[int, bytes]:
            body = {"model": "tiny", "prompt": f"{number} " * 50, "max_tokens": 20, "stream": number % 2 == 0}
            status, _, got = await running.post("/v1/completions", body)
            return status, got

        asking = [asyncio.create_task(ask(number)) for number in range(60)]
        await eventually(lambda: running.app.view.targets["tiny-1"].in_flight > 3, "load on it")
        kill(running, "tiny-1")
        async with asyncio.timeout(30):
            answers = await asyncio.gather(*asking)
        broken = [got for status, got in answers if status != 200 or b'"error":{' in got]
        whole = [got for status, got in answers if status == 200 and b'"error":{' not in got]
        assert len(whole) >= 40
        assert all(b"engine_failed" in got for got in broken), [got for got in broken if b"engine_failed" not in got]
        assert running.app.view.pools["tiny"].fleet.load.in_flight == 0


async def test_all_dead_is_503_with_retry_after(tmp_path: Path) -> None:
    async with stack(tmp_path, count=2) as running:
        kill(running, "tiny-0")
        kill(running, "tiny-1")
        for _ in range(3):
            status, headers, got = await running.post("/v1/completions", {"model": "tiny", "prompt": "x"})
            assert status == 503
            assert int(headers["Retry-After"]) >= 1
            assert json.loads(got)["error"]["type"] == "server_error"


async def test_registries_that_fall_silent_change_nothing(tmp_path: Path) -> None:
    async with stack(tmp_path) as running:
        running.app.view.source("registry", True, registry_pb2.Freshness(), running.app.router.clock())
        running.app.view.source("registry", False, None, running.app.router.clock())
        status, _, _ = await running.post("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 1})
        assert status == 200


async def test_a_draining_replica_takes_nothing_new(tmp_path: Path) -> None:
    async with stack(tmp_path, count=2) as running:
        record = running.replicas()[0]
        record.state = records_pb2.STATE_DRAINING
        tell(running.app, record)
        for number in range(8):
            body = {"model": "tiny", "prompt": f"{number} " * 60, "max_tokens": 1}
            _, headers, _ = await running.post("/v1/completions", body)
            assert headers["x-stoker-replica"] == "tiny-1"


@pytest.mark.parametrize("status", [500, 503])
async def test_an_engine_that_errs_is_ejected_but_one_that_refuses_the_caller_is_not(status: int) -> None:
    answers = {"good": 400, "bad": status}
    listeners = []

    async def start(name: str) -> str:
        async def engine(request: aiohttp.web.BaseRequest) -> aiohttp.web.Response:
            if request.path == "/health":
                return aiohttp.web.Response()
            return aiohttp.web.Response(status=answers[name], text=name)

        server = await asyncio.get_running_loop().create_server(aiohttp.web.Server(engine), "127.0.0.1", 0)
        listeners.append(server)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async with running_router("parity=false", "limits.retries=0") as app, aiohttp.ClientSession() as http:
        names = ("odd",)
        tell(app, *[replica(name, await start(name), models=names) for name in answers])
        fleet = app.view.pools["odd"].fleet
        for number in range(40):
            body = {"model": "odd", "prompt": f"{number} " * 40}
            async with http.post(f"http://127.0.0.1:{app.http_port}/v1/completions", json=body) as answer:
                await answer.read()
        assert fleet.health.ejected("bad", app.router.clock())
        assert not fleet.health.ejected("good", app.router.clock())
    for listener in listeners:
        listener.close()


async def test_an_error_after_decisions_tells_the_last_one() -> None:
    async def engine(request: aiohttp.web.BaseRequest) -> aiohttp.web.Response:
        if request.path != "/health":
            assert request.transport is not None
            request.transport.abort()
        return aiohttp.web.Response()

    loop = asyncio.get_running_loop()
    listener = await loop.create_server(aiohttp.web.Server(engine), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with running_router("parity=false", "limits.retries=1") as app, aiohttp.ClientSession() as http:
        tell(app, *(replica(name, url, models=("odd",)) for name in ("a", "b", "c")))
        body = {"model": "odd", "prompt": "coal"}
        async with http.post(f"http://127.0.0.1:{app.http_port}/v1/completions", json=body) as answer:
            assert answer.status == 503
            assert (await answer.json())["error"]["code"] == "engine_failed"
            assert answer.headers["x-stoker-replica"] in app.view.targets
            assert re.fullmatch(DECISION, answer.headers["x-stoker-decision"])
            assert answer.headers["x-stoker-decision"].endswith(";attempt=2")
            request_id = answer.headers["x-request-id"]
        remembered = app.router.recent.of(request_id)
        assert remembered is not None
        assert [reason for _, reason in remembered.excluded] == ["already_tried"]
    listener.close()


async def test_a_frozen_engine_is_left_alone_and_taken_back(tmp_path: Path) -> None:
    async with stack(tmp_path, "checks.timeout_s=0.3", "health.pause_s=1", count=3) as running:
        app, process = running.app, running.engines["tiny-0"].process
        fleet = app.view.pools["tiny"].fleet
        process.send_signal(signal.SIGSTOP)
        try:
            await eventually(lambda: fleet.health.ejected("tiny-0", app.router.clock()), "ejected", within_s=60.0)
            for number in range(6):
                body = {"model": "tiny", "prompt": f"{number} " * 60, "max_tokens": 1}
                status, headers, _ = await running.post("/v1/completions", body)
                assert (status, headers["x-stoker-replica"] == "tiny-0") == (200, False)
        finally:
            process.send_signal(signal.SIGCONT)
        await eventually(lambda: not fleet.health.ejected("tiny-0", app.router.clock()), "taken back", within_s=60.0)


@pytest.mark.parametrize("stream", [False, True])
async def test_who_waits_at_a_frozen_engine_is_served_by_another(tmp_path: Path, stream: bool) -> None:
    settings = ("checks.timeout_s=0.3", "health.failures=2", "health.pause_s=30")
    async with stack(tmp_path, *settings, count=3) as running:
        app, process = running.app, running.engines["tiny-0"].process
        frozen = app.view.targets["tiny-0"]

        async def ask(number: int) -> tuple[int, str]:
            body = {"model": "tiny", "prompt": f"{number} " * 60, "max_tokens": 2, "stream": stream}
            async with running.http.post(f"{running.url}/v1/completions", json=body) as answer:
                said = await answer.read()
                assert b'"error"' not in said
                return answer.status, answer.headers["x-stoker-replica"]

        process.send_signal(signal.SIGSTOP)
        try:
            asked = [asyncio.create_task(ask(number)) for number in range(12)]
            await eventually(lambda: frozen.in_flight > 0, "somebody waits at the frozen engine")
            async with asyncio.timeout(30):
                answers = await asyncio.gather(*asked)
        finally:
            process.send_signal(signal.SIGCONT)
        assert {status for status, _ in answers} == {200}
        assert "tiny-0" not in {name for _, name in answers}
        assert not frozen.waiting


async def test_where_nobody_else_can_serve_the_frozen_engine_is_waited_for(tmp_path: Path) -> None:
    async with stack(tmp_path, "checks.timeout_s=0.2", "health.failures=1", count=1) as running:
        process, target = running.engines["tiny-0"].process, running.app.view.targets["tiny-0"]
        process.send_signal(signal.SIGSTOP)
        try:
            body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
            asked = asyncio.create_task(running.post("/v1/completions", body))
            await eventually(lambda: target.in_flight == 1, "it waits")
            target.found_dead()
            assert len(target.waiting) == 1, "it has nowhere to go"
        finally:
            process.send_signal(signal.SIGCONT)
        status, _, _ = await asked
        assert status == 200


@pytest.mark.parametrize("status", [500, 501, 503])
async def test_a_request_that_no_engine_can_serve_takes_out_one_replica_at_most(status: int) -> None:
    async def engine(request: aiohttp.web.BaseRequest) -> aiohttp.web.Response:
        if request.path == "/health":
            return aiohttp.web.Response()
        return aiohttp.web.Response(status=status, text="no")

    listeners = [
        await asyncio.get_running_loop().create_server(aiohttp.web.Server(engine), "127.0.0.1", 0) for _ in range(9)
    ]
    urls = [f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}" for listener in listeners]
    async with running_router("parity=false") as app, aiohttp.ClientSession() as http:
        tell(app, *[replica(f"r-{number}", url) for number, url in enumerate(urls)])
        health, now = app.view.pools["tiny"].fleet.health, app.router.clock
        for number in range(80):
            body = {"model": "tiny", "prompt": f"{number} " * 40}
            async with http.post(f"http://127.0.0.1:{app.http_port}/v1/completions", json=body) as answer:
                assert answer.status == status
        out = [name for name in app.view.targets if health.ejected(name, now())]
        assert len(out) == (0 if status == 501 else 1)
    for listener in listeners:
        listener.close()
