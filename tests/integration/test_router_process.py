"""`stoker-router` as a process: how it starts, refuses to, and stops."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import aiohttp

from stoker.common import service
from stoker.common.rpc import wait_serving
from tests.support.etcd import free_port

ROUTER = str(Path(sys.executable).parent / "stoker-router")


async def start(*settings: str) -> asyncio.subprocess.Process:
    flags = [part for setting in settings for part in ("--set", setting)]
    return await asyncio.create_subprocess_exec(
        ROUTER, *flags, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )


async def ports_of(process: asyncio.subprocess.Process) -> tuple[int, int]:
    assert process.stderr is not None
    async with asyncio.timeout(30):
        async for line in process.stderr:
            said = json.loads(line)
            if said["event"] == "router.listening":
                return said["grpc_port"], said["http_port"]
    raise AssertionError("it ended without listening")


async def test_without_registries_it_lives_says_not_ready_and_stops_when_asked() -> None:
    process = await start(
        "listen.grpc=127.0.0.1:0", "listen.http=127.0.0.1:0", f"registries=[127.0.0.1:{free_port()}]"
    )
    try:
        grpc_port, http_port = await ports_of(process)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{http_port}") as http:
            async with http.get("/health") as answer:
                assert answer.status == 200
            async with http.get("/ready") as answer:
                assert answer.status == 503
        assert not await wait_serving(f"127.0.0.1:{grpc_port}", 0.5)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 10) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def refusal(*settings: str) -> str:
    process = await start(*settings)
    _, said = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode in {1, service.EXIT_STAY_DOWN}
    return str(json.loads(said.splitlines()[-1])["error"])


async def test_bad_settings_are_refused_by_name() -> None:
    free = "listen.grpc=127.0.0.1:0"
    assert "policy" in await refusal("policy=best")
    assert "registry: no such setting" in await refusal("registry=x")
    assert "listen.http" in await refusal(free, "listen.http=127.0.0.1:99999")
    taken = await asyncio.start_server(lambda _r, _w: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    assert "listen.http" in await refusal(free, f"listen.http=127.0.0.1:{port}")
    taken.close()
