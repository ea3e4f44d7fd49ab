"""A real Envoy before a router of the test's own process."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec

from stoker.common.config import load
from stoker.local.ports import PortPicker
from stoker.local.process import last_lines
from stoker.router.app import RouterApp
from stoker.router.config import RouterConfig
from stoker.router.envoy.binary import binary, command
from stoker.router.envoy.bootstrap import bootstrap
from tests.support.waiting import eventually

_START_S = 30.0


def as_it_listens(app: RouterApp, *settings: str) -> RouterConfig:
    """A router's settings with the ports that it has."""
    assert app.envoy is not None
    ports = {"grpc": app.rpc.port, "http": app.http_port, "ext_authz": app.envoy.port}
    return load(RouterConfig, None, [*(f"listen.{name}=127.0.0.1:{port}" for name, port in ports.items()), *settings])


@contextlib.asynccontextmanager
async def running_envoy(app: RouterApp, folder: Path, *settings: str) -> AsyncIterator[str]:
    """An Envoy that asks this router; its base URL."""
    program, port = binary(), PortPicker().pick()
    file = folder / "envoy.json"
    file.write_bytes(msgspec.json.encode(bootstrap(as_it_listens(app, *settings), f"127.0.0.1:{port}")))
    argv = command(program, file, threads=1)
    with (folder / "envoy.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*argv, stdout=log, stderr=log)
    try:
        await _serves(process, f"http://127.0.0.1:{port}", folder / "envoy.log")
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(5):
                await process.wait()
        except TimeoutError:
            os.kill(process.pid, 9)
            await process.wait()


async def _serves(process: asyncio.subprocess.Process, url: str, log: Path) -> None:
    async with aiohttp.ClientSession() as session:

        async def serves() -> bool:
            assert process.returncode is None, f"Envoy ended: {last_lines(log)}"
            async with session.get(f"{url}/health") as answer:
                return answer.status == 200

        await eventually(serves, f"Envoy serves; its log is {log}", _START_S, not_yet=(aiohttp.ClientError,))
