"""The comparison's own processes and wires: peers are installed, started, fed with KV events, and ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import zmq
import zmq.asyncio
from aiohttp import web

from bench.peers import children
from bench.peers.__main__ import Run, options
from bench.peers.children import child, until_it_serves
from bench.peers.install import NotRunnable, Package, install
from bench.peers.kv_events import republished
from bench.peers.select_relay import application
from stoker.local.model import cached
from stoker.local.ports import PortPicker
from stoker.local.process import identify
from tests.support.engines import TINY
from tests.support.waiting import eventually, forever

STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.alarm(60);"
    "print('up', flush=True); signal.pause()"
)
ROOT = Path(__file__).resolve().parents[2]


async def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_GRACE_S", 0.2)
    log = tmp_path / "log"
    async with child([sys.executable, "-c", STUBBORN], log) as process:
        await eventually(lambda: log.read_text() == "up\n", "start")
        known = identify(process.pid)
    assert known is not None
    assert not known.alive()


async def test_a_child_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    parent = f"""
import asyncio, pathlib, sys
from bench.peers.children import child
async def main():
    async with child([sys.executable, "-c", {STUBBORN!r}], pathlib.Path({str(log)!r})) as process:
        print(process.pid, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-c", parent, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert started.stdout is not None
    known = identify(int(await started.stdout.readline()))
    assert known is not None
    try:
        await eventually(lambda: log.is_file() and log.read_text() == "up\n", "start")
        started.kill()
        await started.wait()
        await eventually(lambda: not known.alive(), "end of the child")
    finally:
        known.signal(signal.SIGKILL)
        if started.returncode is None:
            started.kill()
            await started.wait()


async def test_a_program_that_is_not_there_is_a_reason(tmp_path: Path) -> None:
    with pytest.raises(NotRunnable, match="cannot start /nowhere/router: No such file"):
        async with child(["/nowhere/router"], tmp_path / "log"):
            pass


async def test_a_peer_that_ends_at_once_is_told_with_its_last_words(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with child([sys.executable, "-c", "raise SystemExit('no such policy')"], log) as process:
        with pytest.raises(NotRunnable, match="ended with status 1: no such policy"):
            await until_it_serves(process, log, "http://127.0.0.1:1/health")


async def test_a_peer_that_never_serves_is_told_with_what_it_said(tmp_path: Path) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=503, text="no worker")

    async with (
        served({"/v1/completions": refuse}) as url,
        child([sys.executable, "-c", STUBBORN], tmp_path / "l") as p,
    ):
        with pytest.raises(NotRunnable, match="HTTP 503 no worker"):
            await until_it_serves(p, tmp_path / "l", f"{url}/v1/completions", b"{}", within_s=0.5)
        p.kill()


async def test_what_pip_says_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    package = Package("stoker-peer-that-is-not-there", "1.0")
    with pytest.raises(NotRunnable, match=r"No matching distribution found for stoker-peer-that-is-not-there==1\.0"):
        await install(package, tmp_path / "cache")


async def test_subscribers_get_every_batch_once_and_in_order() -> None:
    context = zmq.asyncio.Context()
    engine = context.socket(zmq.ROUTER)
    port = engine.bind_to_random_port("tcp://127.0.0.1")
    batches = [b"batch %d" % number for number in range(5)]
    have = 2

    async def replay() -> None:
        while True:
            peer, _, start = await engine.recv_multipart()
            for seq in range(int.from_bytes(start, "big"), have):
                await engine.send_multipart([peer, b"", b"topic", seq.to_bytes(8, "big"), batches[seq]])
            await engine.send_multipart([peer, b"", b"", (-1).to_bytes(8, "big", signed=True), b""])

    task = asyncio.create_task(replay())
    try:
        async with republished([f"tcp://127.0.0.1:{port}"]) as (address,):
            router = context.socket(zmq.SUB)
            router.subscribe(b"")
            monitor = router.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            router.connect(address)
            await asyncio.wait_for(monitor.recv_multipart(), 10)
            # A subscription travels after the handshake: the first batches are gone by then, or come as well.
            got: list[tuple[int, bytes]] = []
            async with asyncio.timeout(60):
                while not got or got[-1][0] < 4:
                    have = min(5, have + 1)
                    if await router.poll(50):
                        topic, seq, payload = await router.recv_multipart()
                        assert topic == b"topic"
                        got.append((int.from_bytes(seq, "big"), payload))
            assert [payload for _, payload in got] == batches[got[0][0] :]
    finally:
        task.cancel()
        context.destroy(linger=0)


@asynccontextmanager
async def served(routes: dict[str, Any], method: str = "*") -> AsyncIterator[str]:
    app = web.Application()
    for path, handler in routes.items():
        app.router.add_route(method, path, handler)
    async with running(app) as url:
        yield url


@asynccontextmanager
async def running(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Service:
    """A service that decides, and remembers."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self.held: set[str] = set()
        self.prefilled: list[str] = []
        self.asked: list[dict[str, Any]] = []

    async def select(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.asked.append(asked)
        self.held.add(asked["selection_id"])
        return web.json_response({"endpoint": self._engine})

    async def prefill_complete(self, request: web.Request) -> web.Response:
        self.prefilled.append(request.match_info["id"])
        return web.json_response({})

    async def free(self, request: web.Request) -> web.Response:
        self.held.discard(request.match_info["id"])
        return web.json_response({})

    def routes(self) -> dict[str, Any]:
        return {
            "/select_and_reserve": self.select,
            "/reservations/{id}/prefill_complete": self.prefill_complete,
            "/reservations/{id}": self.free,
        }


@pytest.mark.parametrize("body", [{"prompt": "hello there"}, {"messages": [{"role": "user", "content": "hello"}]}])
async def test_the_relay_asks_carries_and_gives_back(body: dict[str, Any]) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=f"data: {await request.text()}\n\n", content_type="text/event-stream")

    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    async with served({path: answer}) as engine:
        service = Service(engine)
        async with served(service.routes()) as url, running(application(url, "tiny", cached(TINY))) as relay:
            async with aiohttp.ClientSession() as session, session.post(relay + path, json=body) as got:
                assert got.status == 200
                assert got.content_type == "text/event-stream"
                assert json.loads((await got.text()).removeprefix("data: ")) == body
            await eventually(lambda: not service.held, "the reservation's end")
    assert len(service.prefilled) == 1
    assert len(service.asked[0]["token_ids"]) >= 2


async def test_the_relay_gives_back_what_its_client_left() -> None:
    stuck = asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        stuck.set()
        await forever()

    async with served({"/v1/completions": hang}) as engine:
        service = Service(engine)
        async with served(service.routes()) as url, running(application(url, "tiny", cached(TINY))) as relay:
            async with aiohttp.ClientSession() as session:
                asking = asyncio.create_task(
                    session.post(f"{relay}/v1/completions", json={"prompt": "x"}).__aenter__()
                )
                await asyncio.wait_for(stuck.wait(), 10)
                assert service.held
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            await eventually(lambda: not service.held, "the reservation's end")


async def test_stoker_alone_is_measured_before_static_engines(tmp_path: Path) -> None:
    asked = options(["--peer", "none", "--rounds", "1", "--seconds", "0.4", "--prompt-bytes", "2000"])
    asked.cache = tmp_path
    run = Run(asked, lambda _: None, PortPicker())
    await run.measure_speed()
    names = [speed.name for speed in run.report.speed]
    assert names[:2] == ["direct", "stoker"]
    assert ("stoker + envoy" in names) != ("stoker + envoy" in run.report.not_run)
    for speed in run.report.speed:
        assert speed.errors == 0, speed
        assert speed.requests_per_s
        assert speed.one_client_p50_ms
