"""Bodies that cost much to read: they cost their own call, never the others'."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
import pytest

from stoker.local.model import cached
from stoker.router.app import RouterApp
from tests.support.engines import FAST, TINY, running_engine
from tests.support.router import fresh_tokenizer_of, replica, running_router, tell
from tests.support.waiting import eventually

BODY = 16 * 1024 * 1024
YARDSTICK = b"[" + b"0," * 6_000_000 + b"0]"
"""Nothing may hold up the event loop for longer than it takes to decode this. Decoded whole, the bodies below take
1.5 to 60 times as long."""
TRIES = 3


def filled(unit: bytes, *, before: bytes = b"[", after: bytes = b"0]", size: int = BODY - 4096) -> bytes:
    """A completion whose prompt is `unit` over and over."""
    prompt = before + unit * (size // len(unit)) + after
    return b'{"max_tokens":1,"prompt":' + prompt + b',"model":"tiny"}'


HOSTILE = {
    "lists": filled(b"[],"),
    "nested lists": filled(b"[" * 100 + b"]" * 100 + b","),
    "objects": filled(b'{"a":0},'),
    "numbers": filled(b"0,"),
    "large numbers": filled(b"123456,"),
    "keys": b'{"model":"tiny","prompt":"x"' + b"".join(b',"%x":0' % n for n in range(BODY // 12)) + b"}",
    "few lists": filled(b"[],", size=140_000),
    "lists, just few enough to skip": filled(b"[],", size=2_900_000),
    "lists, just few enough to decode": filled(b"[],", size=72_000),
    "numbers, just few enough to decode": filled(b"123456,", size=6_900_000),
    "text": filled(b"word ", before=b'"', after=b'"'),
    "escapes": filled(b"\\n", before=b'"', after=b'"', size=BODY // 2),
    "a long chat": (
        b'{"model":"tiny","messages":['
        + b'{"role":"user","content":"x"},' * (BODY // 32)
        + b'{"role":"user","content":"x"}]}'
    ),
}


@dataclass
class Stack:
    app: RouterApp
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.app.http_port}"


@contextlib.asynccontextmanager
async def stack(folder: Path, *settings: str) -> AsyncIterator[Stack]:
    async with (
        running_engine("sim", folder, args=FAST) as engine,
        running_router(*settings) as app,
        aiohttp.ClientSession() as session,
    ):
        sha256, tokenizer = fresh_tokenizer_of(cached(TINY))
        app.tokenizers.add(sha256, tokenizer)
        tell(app, replica("tiny-0", engine.url, sha256=sha256))
        await eventually(lambda: all(t.parity == "ok" for t in app.view.targets.values()), "parity")
        yield Stack(app, session)


@functools.cache
def yardstick() -> float:
    """Seconds of this process's processor time, whatever else the machine does."""
    began = time.process_time()
    msgspec.json.decode(YARDSTICK)
    return time.process_time() - began


class Stall:
    """The longest that the event loop was held up, in seconds of processor time of this process."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def watch(self) -> None:
        last = time.process_time()
        while True:
            await asyncio.sleep(0)
            now = time.process_time()
            self.longest_s = max(self.longest_s, now - last)
            last = now


def post(port: int, path: str, body: bytes) -> int:
    """Send from a thread: a client on the router's own loop would be measured with it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize("name", HOSTILE)
async def test_no_body_holds_up_the_event_loop(tmp_path: Path, name: str) -> None:
    body = HOSTILE[name]
    path = "/v1/chat/completions" if b'"messages"' in body[:64] else "/v1/completions"
    async with stack(tmp_path) as running:
        stalls: list[float] = []
        # What the body does it does each time; a garbage collection of the whole test process comes once.
        while len(stalls) < TRIES and (not stalls or stalls[-1] >= yardstick()):
            stall = Stall()
            watching = asyncio.create_task(stall.watch())
            status = await asyncio.to_thread(post, running.app.http_port, path, body)
            watching.cancel()
            assert status in (200, 400, 413, 503), "one clear answer"
            stalls.append(stall.longest_s)
        held_up = ", ".join(f"{1e3 * seconds:.1f}" for seconds in stalls)
        sys.stdout.write(f"{name}: status {status}, held up for {held_up} ms; bound {1e3 * yardstick():.1f} ms\n")
        assert min(stalls) < yardstick()
        async with running.http.post(f"{running.url}/v1/completions", json={"model": "tiny", "prompt": "x"}) as next_:
            assert next_.status == 200, await next_.text()
    assert running.app.router.in_flight == 0


async def test_slow_bodies_keep_nobody_out(tmp_path: Path) -> None:
    async with stack(tmp_path, "limits.max_in_flight=2") as running, contextlib.AsyncExitStack() as held:
        for _ in range(4):
            _, writer = await asyncio.open_connection("127.0.0.1", running.app.http_port)
            held.callback(writer.close)
            writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"model": ')
            await writer.drain()
        # Each of these was accepted before the next request, on the same loop.
        async with running.http.post(f"{running.url}/v1/completions", json={"model": "tiny", "prompt": "x"}) as one:
            answer = json.loads(await one.read())
            assert one.status == 200, answer
