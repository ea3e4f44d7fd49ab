"""Closed-loop clients with as little of their own as possible: prebuilt requests, no parsing but of lengths.

    python -m bench.peers.speed_client '{"url": "http://127.0.0.1:1", …}'

Prints one Reading as JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, cast
from urllib.parse import urlsplit

import uvloop

from stoker.bench.stats import quantile
from stoker.bench.workloads import WORDS

_POOL = 128
_PREFIXES = 16
_SHARED = 0.75
_BYTES_PER_TOKEN = 4
_LONGEST_S = 60.0


@dataclass(frozen=True)
class Job:
    """One reading."""

    url: str
    path: str
    model: str
    prompt_bytes: int
    clients: int
    seconds: float
    seed: int = 0
    token_ids: bool = False
    """Send token ids, as a service that only decides wants them, instead of text."""
    once: bool = False
    """Ask every prompt of the pool once instead, however long that takes."""
    fresh: bool = False
    """No prompt comes twice: each request's own part is its own."""


@dataclass(frozen=True)
class Reading:
    """What one run showed."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    errors: int
    """Answers other than 200, and broken connections."""
    answered: int
    """Answers, of whatever kind."""


def prompts(seed: int, size: int) -> list[str]:
    """Prompts of `size` bytes: three quarters are one of a few prefixes, the rest is their own."""
    rng = random.Random(seed)
    prefixes = [_text(rng, int(size * _SHARED)) for _ in range(_PREFIXES)]
    return [prefixes[number % _PREFIXES] + _text(rng, size - int(size * _SHARED)) for number in range(_POOL)]


def _text(rng: random.Random, size: int) -> str:
    # Every word is longer than its share here: there is always enough to cut from.
    return " ".join(rng.choices(WORDS, k=size // 2 + 1))[:size]


def requests(job: Job) -> list[bytes]:
    """The whole pool, ready to write."""
    host = urlsplit(job.url).netloc
    made = []
    for number, prompt in enumerate(prompts(job.seed, job.prompt_bytes)):
        body: dict[str, object]
        if job.token_ids:
            rng = random.Random(number % _PREFIXES)
            body = {
                "model_name": job.model,
                "token_ids": rng.choices(range(30_000), k=len(prompt) // _BYTES_PER_TOKEN),
            }
        else:
            body = {"model": job.model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        content = json.dumps(body).encode()
        head = f"POST {job.path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        made.append(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    return made


class Fresh(Sequence[bytes]):
    """The pool, each time with another number in the middle of a prompt's own part."""

    def __init__(self, pool: Sequence[bytes]) -> None:
        self._cut = []
        for request in pool:
            at = len(request) - 60  # within the prompt, before the other fields
            self._cut.append((request[:at], request[at + 12 :]))
        self._number = random.getrandbits(30)

    def __len__(self) -> int:
        return len(self._cut)

    def __getitem__(self, index: Any) -> Any:
        self._number += 1
        before, after = self._cut[index]
        return b"%b %010d %b" % (before, self._number, after)


class Client(asyncio.Protocol):
    """One connection; sends its next request when the last one's answer has ended."""

    def __init__(
        self, pool: Sequence[bytes], first: int, until: float, most: float, ended: asyncio.Future[None]
    ) -> None:
        self._pool = pool
        self._next = first
        self._until = until
        self._last = first + most
        self._ended = ended
        self._buffer = b""
        self._began = 0.0
        self.times: list[float] = []
        self.errors = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def _send(self) -> None:
        self._began = time.perf_counter()
        if self._began >= self._until or self._next >= self._last:
            self._until = self._began
            self._transport.close()
            return
        self._transport.write(self._pool[self._next % len(self._pool)])
        self._next += 1

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        end = answer_end(self._buffer)
        if end is None:
            return
        self.times.append(time.perf_counter() - self._began)
        if not self._buffer.startswith(b"HTTP/1.1 200"):
            self.errors += 1
        self._buffer = self._buffer[end:]
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None or time.perf_counter() < self._until:
            self.errors += 1
        if not self._ended.done():
            self._ended.set_result(None)


def answer_end(answer: bytes) -> int | None:
    """Where the first answer in these bytes ends; None while it has not."""
    split = answer.find(b"\r\n\r\n")
    if split < 0:
        return None
    head = answer[:split].lower()
    length = head.find(b"content-length:")
    if length >= 0:
        end = split + 4 + int(head[length + 15 :].split(b"\r\n", 1)[0])
        return end if len(answer) >= end else None
    if b"transfer-encoding:" in head:
        last = answer.find(b"0\r\n\r\n", split + 4)
        return last + 5 if last >= 0 else None
    return split + 4


def _same(client: Client) -> Client:
    return client


async def read(job: Job) -> Reading:
    """Run the clients for `seconds`. Answers still under way at the end are waited for, and count."""
    pool: Sequence[bytes] = Fresh(requests(job)) if job.fresh else requests(job)
    loop = asyncio.get_running_loop()
    where = urlsplit(job.url)
    began = time.perf_counter()
    clients: list[Client] = []
    ended: list[asyncio.Future[None]] = []
    until = began + (_LONGEST_S if job.once else job.seconds)
    for number in range(job.clients):
        future: asyncio.Future[None] = loop.create_future()
        first = number * len(pool) // job.clients
        most = (number + 1) * len(pool) // job.clients - first if job.once else float("inf")
        client = Client(pool, first, until, most, future)
        await loop.create_connection(partial(_same, client), where.hostname or "", where.port or 80)
        clients.append(client)
        ended.append(future)
    await asyncio.wait_for(asyncio.gather(*ended), until - began + _LONGEST_S)
    took = time.perf_counter() - began
    times = [value * 1000 for client in clients for value in client.times]
    errors = sum(client.errors for client in clients)
    return Reading(
        requests_per_s=max(0, len(times) - errors) / took,
        p50_ms=quantile(times, 0.5) or 0.0,
        p99_ms=quantile(times, 0.99) or 0.0,
        errors=errors,
        answered=len(times),
    )


def main() -> None:
    """Run the job in the first argument."""
    job = Job(**json.loads(sys.argv[1]))
    sys.stdout.write(json.dumps(asdict(uvloop.run(read(job)))))


if __name__ == "__main__":
    main()
