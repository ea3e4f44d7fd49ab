"""Start an engine for a test, by the very commands the node agent uses, and stop it whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from stoker.local.model import ModelSpec, cached
from stoker.node_agent.engine import ENGINES
from stoker.node_agent.engine.client import EngineClient
from stoker.node_agent.engine.protocol import Engine, Gang, Health, KvEndpoint, LaunchRequest
from tests.support.etcd import free_port
from tests.support.waiting import eventually

TINY = ModelSpec(hidden=64, layers=2, heads=2, kv_heads=1, intermediate=128)
"""For tests that want no cost at all: about half a million parameters, the same tokenizer."""

FAST = ("--sim-speed", "20")
"""Arguments that make the simulated engine quick."""


@dataclass(frozen=True)
class RunningEngine:
    """An engine process that answers."""

    engine: Engine
    request: LaunchRequest
    process: asyncio.subprocess.Process
    session: aiohttp.ClientSession
    client: EngineClient

    @property
    def url(self) -> str:
        """Base URL of its HTTP server."""
        return self.request.base_url

    @property
    def model(self) -> str:
        """The served name."""
        return self.request.served_model_name

    @property
    def kv(self) -> KvEndpoint:
        """Where its KV events come."""
        return self.engine.kv_endpoints(self.request)[0]

    def log(self) -> str:
        """What it wrote."""
        return self.request.log_path.read_text(errors="replace")


def launch_request(
    directory: Path,
    *,
    model: Path | None = None,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    gang: Gang | None = None,
    name: str = "tiny",
    data_parallel: int = 1,
) -> LaunchRequest:
    """A request with free ports and a log in `directory`."""
    http, events, replay = free_port(), free_port(data_parallel), free_port(data_parallel)
    return LaunchRequest(
        model=str(model or cached(TINY)),
        served_model_name=name,
        http_port=http,
        kv_events_port=events,
        kv_replay_port=replay,
        log_path=directory / f"engine-{http}.log",
        engine_args=tuple(args),
        env=env or {},
        gang=gang,
        data_parallel=data_parallel,
    )


async def spawn(engine: Engine, request: LaunchRequest) -> asyncio.subprocess.Process:
    """Start the process, in a group of its own."""
    command = engine.command(request)
    with request.log_path.open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *command.argv, env=dict(command.env), stdout=log, stderr=log, stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip


async def terminate(process: asyncio.subprocess.Process, grace_s: float = 10.0) -> None:
    """SIGTERM, then SIGKILL to what is left of its group."""
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


@contextlib.asynccontextmanager
async def running_engine(
    kind: str,
    directory: Path,
    *,
    model: Path | None = None,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    start_s: float = 150.0,
    data_parallel: int = 1,
) -> AsyncIterator[RunningEngine]:
    """An engine of a kind (`sim` or `vllm`) that serves; its log is shown if it does not come up."""
    engine = ENGINES[kind]
    request = launch_request(directory, model=model, args=args, env=env, data_parallel=data_parallel)
    process = await spawn(engine, request)
    try:
        async with aiohttp.ClientSession() as session:
            client = EngineClient(session, request.base_url)
            await wait_serving(client, process, request, start_s)
            yield RunningEngine(engine, request, process, session, client)
    finally:
        await terminate(process)


async def wait_serving(
    client: EngineClient, process: asyncio.subprocess.Process, request: LaunchRequest, start_s: float
) -> None:
    """Wait until `/health` is good. Raises `AssertionError` with the end of the log if it ends or is late."""

    async def serves_or_ended() -> bool:
        return await client.health(timeout_s=2.0) is Health.SERVING or process.returncode is not None

    try:
        await eventually(serves_or_ended, "the engine serves", start_s)
        assert process.returncode is None, f"the engine ended with {process.returncode}"
    except AssertionError as error:
        raise AssertionError(f"{error}\n{request.log_path.read_text(errors='replace')[-4000:]}") from None
