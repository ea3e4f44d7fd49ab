"""Processes that end with the command that started them, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from bench.peers.install import NotRunnable
from stoker.local.process import last_lines

_GRACE_S = 5.0
_ASK_S = 5.0
_PR_SET_PDEATHSIG = 1
_TICKS = os.sysconf("SC_CLK_TCK")
_running: set[int] = set()
_libc = ctypes.CDLL(None, use_errno=True)


def _die_with_parent() -> None:
    """In the child, before it becomes the program: also a killed parent takes it along."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@asynccontextmanager
async def child(
    argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that writes to `log`; SIGTERM, then SIGKILL when the block ends. Raises NotRunnable."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=cwd,
                env={**os.environ, **(env or {})},
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        except OSError as error:
            raise NotRunnable(f"cannot start {argv[0]}: {error.strerror}") from error
    _running.add(process.pid)
    try:
        yield process
    finally:
        _running.discard(process.pid)
        await asyncio.shield(_end(process))


def cpu_s(without: Collection[int] = ()) -> float:
    """CPU time so far of all processes that run now, with their threads, some left out."""
    ticks = 0
    for pid in _running.difference(without):
        with contextlib.suppress(OSError):
            # The name, in parentheses, may hold anything; user and system time are the 12th and 13th after it.
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return ticks / _TICKS


def running() -> frozenset[int]:
    """Those that run now."""
    return frozenset(_running)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                await process.wait()
    # Its session is its own: what it started, if anything, goes with it.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


async def until_it_says(process: asyncio.subprocess.Process, log: Path, word: str, *, within_s: float = 60.0) -> None:
    """Wait for a word in its log. Raises NotRunnable with what it last said."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while process.returncode is None:
                if any(word in line for line in last_lines(log, 100)):
                    return
                await asyncio.sleep(0.2)
    end = " / ".join(line.strip() for line in last_lines(log, 3) if line.strip())
    raise NotRunnable(f"did not serve within {within_s:g} s, or ended: {end[-300:]}")


async def until_it_answers(process: asyncio.subprocess.Process, log: Path, url: str, model: str) -> None:
    """Send the smallest request until it is served: that alone proves that a router found its engines."""
    body = json.dumps({"model": model, "prompt": "ready", "max_tokens": 1}).encode()
    await until_it_serves(process, log, f"{url}/v1/completions", body)


async def until_it_serves(
    process: asyncio.subprocess.Process, log: Path, url: str, body: bytes | None = None, *, within_s: float = 60.0
) -> None:
    """Ask `url` until it answers 200: POST `body`, or GET without one. Raises NotRunnable with what it last said."""
    said = "nothing listens"
    timeout = aiohttp.ClientTimeout(total=_ASK_S)
    headers = {"content-type": "application/json"}
    async with aiohttp.ClientSession(timeout=timeout) as session:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while process.returncode is None:
                    try:
                        method = "GET" if body is None else "POST"
                        async with session.request(method, url, data=body, headers=headers) as answer:
                            text = (await answer.text())[:200]
                            if answer.status == 200:
                                return
                            said = f"HTTP {answer.status} {text}"
                    except (aiohttp.ClientError, TimeoutError) as error:
                        said = f"{said.partition(' (')[0]} ({type(error).__name__})"
                    await asyncio.sleep(0.2)
    if process.returncode is not None:
        end = " / ".join(line.strip() for line in last_lines(log, 3) if line.strip())
        raise NotRunnable(f"ended with status {process.returncode}: {end[-300:]}")
    raise NotRunnable(f"did not serve within {within_s:g} s: {said}; its log: {log}")
