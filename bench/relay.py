"""What the embedded relay costs a token: CPU time of the router's process, whatever else the machine does.

    python bench/relay.py                       # both APIs, tokens one by one and as fast as they can be had; a table
    python bench/relay.py -o json --streams 64 --rate 100 --seconds 5

One static engine, which streams without computing anything, one router and one client, each in a process of its
own. `paced`: every stream gets a token each 1 / rate seconds, so each arrives alone. `burst`: it writes as fast as
their sockets take, so the router finds what has arrived meanwhile. Tokens a second a core = 1 / CPU seconds a token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from stoker.api.inference.v1 import inference_pb2, inference_pb2_grpc
from stoker.common import rpc
from stoker.router.app import RouterApp
from tests.support.router import replica, running_router, tell

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
PIECES = 64
"""Tokens that a fast engine writes at once."""


def event(fields: dict[str, object]) -> bytes:
    payload = b"data: " + json.dumps(fields).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(payload), payload)


TOKEN = event({
    "id": "cmpl-0123456789abcdef0123456789abcdef",
    "object": "text_completion",
    "created": 1750000000,
    "model": "tiny",
    "choices": [{"index": 0, "text": " token", "logprobs": None, "finish_reason": None, "stop_reason": None}],
    "usage": None,
})  # fmt: skip
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Engine(asyncio.Protocol):
    """Answers every POST with as many tokens as its `max_tokens` says."""

    rate: float = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._writable = asyncio.Event()
        self._writable.set()
        self._received = b""
        self._work: set[asyncio.Task[None]] = set()

    def connection_lost(self, error: Exception | None) -> None:
        for task in self._work:
            task.cancel()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end:
            return
        if head.startswith(b"GET"):
            self._received = b""
            self._write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            return
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        if len(body) < length:
            return
        self._received = b""
        task = asyncio.get_running_loop().create_task(self._answer(json.loads(body)["max_tokens"]))
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _answer(self, tokens: int) -> None:
        self._write(HEAD)
        if self.rate:
            loop = asyncio.get_running_loop()
            due = loop.time()
            for _ in range(tokens):
                due += 1 / self.rate
                await asyncio.sleep(due - loop.time())
                self._write(TOKEN)
        else:
            for _ in range(tokens // PIECES):
                await self._writable.wait()
                self._write(TOKEN * PIECES)
                await asyncio.sleep(0)
        self._write(DONE)

    def _write(self, data: bytes) -> None:
        assert isinstance(self._transport, asyncio.WriteTransport) or hasattr(self._transport, "write")
        self._transport.write(data)


async def engine(rate: float) -> None:
    Engine.rate = rate
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0)
    say(f"{server.sockets[0].getsockname()[1]}")
    await asyncio.to_thread(sys.stdin.read)


async def router(url: str) -> None:
    async with running_router("parity=false", "checks.interval_s=1") as app:
        tell(app, replica("static-0", url))
        assert isinstance(app, RouterApp)
        say(f"{app.http_port} {app.rpc.port}")
        await asyncio.to_thread(sys.stdin.read)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def http_stream(port: int, tokens: int) -> int:
    """Tokens that arrived, counted without reading them."""
    body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": tokens, "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    count, rest = 0, b""
    while data := await reader.read(1 << 18):
        data = rest + data
        count += data.count(b'" token"')
        rest = data[-7:]
    writer.close()
    return count


async def grpc_stream(stub: inference_pb2_grpc.InferenceServiceAsyncStub, tokens: int) -> int:
    sampling = inference_pb2.Sampling(max_tokens=tokens)
    count = 0
    async for response in stub.Generate(inference_pb2.GenerateRequest(model="tiny", text="x", sampling=sampling)):
        count += response.delta.text.count(" token")
    return count


def cpu_s(pid: int) -> float:
    """CPU time of a process, all its threads, in seconds."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


async def spawn(*args: str) -> tuple[asyncio.subprocess.Process, list[int]]:
    """A process of this bench, and the ports it says."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, *args, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    while True:
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        if not line:
            raise RuntimeError(f"{args[0]} did not start")
        if line.replace(" ", "").strip().isdigit():
            return process, [int(port) for port in line.split()]


async def measure(api: str, mode: str, options: argparse.Namespace) -> dict[str, object]:
    rate = options.rate if mode == "paced" else 0.0
    tokens = int(options.rate * options.seconds) if rate else options.tokens
    tokens = max(PIECES, tokens // PIECES * PIECES)
    backend, (engine_port,) = await spawn("--engine", str(rate))
    process, (http_port, grpc_port) = await spawn("--router", f"http://127.0.0.1:{engine_port}")
    try:
        async with rpc.channel(f"127.0.0.1:{grpc_port}") as channel:
            stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)

            async def stream(count: int) -> int:
                return await (http_stream(http_port, count) if api == "http" else grpc_stream(stub, count))

            await stream(PIECES)  # imports, connections
            before, began = cpu_s(process.pid), time.perf_counter()
            counts = await asyncio.gather(*(stream(tokens) for _ in range(options.streams)))
            seconds, spent = time.perf_counter() - began, cpu_s(process.pid) - before
    finally:
        for child in (process, backend):
            child.terminate()
            await child.wait()
    if counts != [tokens] * options.streams:
        raise RuntimeError(f"tokens were lost: {counts[:4]}… of {tokens}")
    total = sum(counts)
    return {
        "api": api,
        "mode": mode,
        "streams": options.streams,
        "tokens": total,
        "tokens_per_s": round(total / seconds),
        "cpu_us_per_token": round(1e6 * spent / total, 2),
        "tokens_per_s_core": round(total / spent),
    }


async def run(options: argparse.Namespace) -> list[dict[str, object]]:
    return [await measure(api, mode, options) for api in options.api for mode in options.mode]


def main() -> None:
    parser = argparse.ArgumentParser(description="What the embedded relay costs a token.")
    parser.add_argument("--api", action="append", choices=("http", "grpc"))
    parser.add_argument("--mode", action="append", choices=("paced", "burst"))
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=50.0, help="tokens/s of a paced stream")
    parser.add_argument("--seconds", type=float, default=4.0, help="of paced streams")
    parser.add_argument("--tokens", type=int, default=8192, help="of a fast stream")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    parser.add_argument("--engine", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--router", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None or options.router:
        uvloop.run(router(options.router) if options.router else engine(options.engine))
        return
    options.api, options.mode = options.api or ["http", "grpc"], options.mode or ["paced", "burst"]
    rows = uvloop.run(run(options))
    if options.output == "json":
        print(json.dumps(rows, indent=2))
        return
    print("  ".join(f"{name:>17}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{value!s:>17}" for value in row.values()))


if __name__ == "__main__":
    main()
