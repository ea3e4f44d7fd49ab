"""What the router adds to a request: the same requests, in turn to the engine and through the router.

    python bench/router_latency.py                    # sim engine, 2 KB prompts, one client; a table
    python bench/router_latency.py -o json --prompt-bytes 100000 --engine vllm
    python bench/router_latency.py --set tokenizer.send_tokens=never
    python bench/router_latency.py --shared           # also with prompts whose first half is the same in all

One engine and one router, each in a process of its own; every prompt is new, so that neither side has it
tokenized or cached, except in the rows named "shared half". In each round all kinds take their turn. `added_p50` is
the median over the rounds of the median of the pairwise differences, to the first output; beside it the least and the
greatest of rounds. On a machine with other work `chrt -r 5` before the command lets that wait.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from stoker.api.inference.v1 import inference_pb2, inference_pb2_grpc
from stoker.local.model import cached
from tests.support.engines import TINY, running_engine
from tests.support.router import replica, running_router, tell, tokenizer_of
from tests.support.waiting import eventually

KINDS = {
    "completion": ("/v1/completions", False),
    "completion stream": ("/v1/completions", True),
    "chat": ("/v1/chat/completions", False),
    "chat stream": ("/v1/chat/completions", True),
    "gRPC": ("/v1/completions", True),
}
EMPTY = "gRPC, empty stream"
"""What grpc.aio takes by itself: as many messages, from a handler that does nothing."""
_EMPTY_METHOD = "/bench.Empty/Stream"


class Client:
    """One keep-alive connection, with as little of its own as possible."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)

    def close(self) -> None:
        self._writer.close()

    async def ask(self, path: str, body: bytes) -> tuple[float, float]:
        """Seconds to the first byte of the body, and to its end."""
        started = time.perf_counter()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        self._writer.write(head.encode() + b"\r\n\r\n" + body)
        headers = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        if b" 200 " not in headers.split(b"\r\n", 1)[0]:
            raise RuntimeError(f"{path}: {headers.decode()}")
        if b"content-length:" in headers:
            size = int(headers.split(b"content-length:")[1].split(b"\r\n")[0])
            await self._reader.readexactly(size)
            first = time.perf_counter()
            return first - started, first - started
        first = 0.0
        while True:
            size = int(await self._reader.readline(), 16)
            first = first or time.perf_counter()
            await self._reader.readexactly(size + 2)
            if not size:
                return first - started, time.perf_counter() - started


class GrpcClient:
    """One channel, typed messages, as any client has it."""

    def __init__(self, port: int) -> None:
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        stub: Any = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._generate = stub.Generate
        self._empty = self._channel.unary_stream(
            _EMPTY_METHOD,
            request_serializer=inference_pb2.GenerateRequest.SerializeToString,
            response_deserializer=inference_pb2.GenerateResponse.FromString,
        )

    async def close(self) -> None:
        await self._channel.close()

    async def ask(self, text: str, *, empty: bool = False) -> tuple[float, float]:
        """Seconds to the first output, and to the end of the stream."""
        started, first = time.perf_counter(), 0.0
        sampling = inference_pb2.Sampling(max_tokens=1, temperature=0)
        request = inference_pb2.GenerateRequest(model="tiny", text=text, sampling=sampling)
        async for message in (self._empty if empty else self._generate)(request):
            if message.HasField("delta"):
                first = first or time.perf_counter()
        return first - started, time.perf_counter() - started


async def _empty(raw: bytes, context: object) -> AsyncIterator[bytes]:
    """The messages of the shortest generation."""
    started = inference_pb2.Started(request_id="0" * 32, replica_id="tiny-0", reason="ring")
    yield inference_pb2.GenerateResponse(started=started).SerializeToString()
    yield inference_pb2.GenerateResponse(delta=inference_pb2.Delta(text=" the")).SerializeToString()
    yield inference_pb2.GenerateResponse(finished=inference_pb2.Finished()).SerializeToString()


_WARM = 10
WORDS = Path(argparse.__file__).read_text().split()


def prompt(rng: random.Random, size: int) -> str:
    text = ""
    while len(text) < size:
        text += rng.choice(WORDS) + " "
    return text[:size]


def body(kind: str, text: str) -> bytes:
    fields: dict[str, object] = {"model": "tiny", "max_tokens": 1, "temperature": 0}
    path, stream = KINDS[kind]
    if stream:
        fields["stream"] = True
    if path.endswith("chat/completions"):
        fields["messages"] = [{"role": "user", "content": text}]
    else:
        fields["prompt"] = text
    return json.dumps(fields).encode()


@dataclass
class Row:
    """One kind of request, measured in several rounds. Times in ms, in order of the requests."""

    kind: str
    shared: bool
    direct: list[list[float]] = field(default_factory=list)
    router: list[list[float]] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    """What was added to the end of the answer."""

    def report(self, options: argparse.Namespace) -> dict[str, object]:
        added = [
            [routed - direct for routed, direct in zip(router, direct, strict=True)]
            for router, direct in zip(self.router, self.direct, strict=True)
        ]
        medians = [statistics.median(each) for each in added]
        return {
            "kind": f"{self.kind}, shared half" if self.shared else self.kind,
            "prompt_bytes": options.prompt_bytes,
            "requests": options.rounds * options.requests,
            "direct_p50_ms": round(statistics.median(map(statistics.median, self.direct)), 3),
            "router_p50_ms": round(statistics.median(map(statistics.median, self.router)), 3),
            "added_p50_ms": round(statistics.median(medians), 3),
            "of_rounds_ms": f"{min(medians):.2f} to {max(medians):.2f}",
            "added_end_p50_ms": round(statistics.median(self.ends), 3),
            "added_p99_ms": round(statistics.quantiles([one for each in added for one in each], n=100)[98], 3),
        }


async def measure(ports: dict[str, int], row: Row, round_: int, options: argparse.Namespace) -> None:
    # Prompts of its own: the router remembers the tokens of those that it has seen.
    rng = random.Random(f"{options.seed} {row.kind} {row.shared} {round_}")
    half = prompt(rng, options.prompt_bytes // 2) if row.shared else ""
    clients = {name: Client(ports[name]) for name in ("direct", "router")}
    for client in clients.values():
        await client.open()
    streams = GrpcClient(ports["grpc"])
    taken: dict[str, list[float]] = {name: [] for name in clients}
    ended: dict[str, list[float]] = {name: [] for name in clients}
    for turn in range(options.requests + _WARM):
        # Each goes first every other time.
        for name in sorted(clients, reverse=bool(turn % 2)):
            text = half + prompt(rng, options.prompt_bytes - len(half))
            if row.kind == EMPTY:
                first, end = (0.0, 0.0) if name == "direct" else await streams.ask(text, empty=True)
            elif row.kind == "gRPC" and name == "router":
                first, end = await streams.ask(text)
            else:
                first, end = await clients[name].ask(KINDS[row.kind][0], body(row.kind, text))
            if turn >= _WARM:
                taken[name].append(first * 1000)
                ended[name].append(end * 1000)
    for client in clients.values():
        client.close()
    await streams.close()
    row.direct.append(taken["direct"])
    row.router.append(taken["router"])
    row.ends += [routed - direct for routed, direct in zip(ended["router"], ended["direct"], strict=True)]


async def serve(url: str, settings: list[str]) -> None:
    """The router's own process: prints its ports, and runs until its standard input closes."""
    sha256, tokenizer = tokenizer_of(cached(TINY))
    async with running_router("checks.interval_s=1", *settings) as app:
        app.tokenizers.add(sha256, tokenizer)
        tell(app, replica("tiny-0", url, sha256=sha256))
        await eventually(lambda: app.view.targets["tiny-0"].parity == "ok", "parity with the engine", 30)
        name, method = _EMPTY_METHOD[1:].split("/")
        empty: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {method: grpc.unary_stream_rpc_method_handler(_empty)}
        app.rpc.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, empty),))
        sys.stdout.write(f"{app.http_port} {app.rpc.port}\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


async def run(options: argparse.Namespace) -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        args = ("--sim-speed", "1000") if options.engine == "sim" else ()
        async with running_engine(options.engine, Path(folder), args=args) as engine:
            router = await asyncio.create_subprocess_exec(
                sys.executable,
                __file__,
                "--serve",
                engine.url,
                *(word for setting in options.set for word in ("--set", setting)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            try:
                assert router.stdout is not None
                line = b""
                while not line.replace(b" ", b"").strip().isdigit():
                    line = await asyncio.wait_for(router.stdout.readline(), 60)
                    if not line:
                        raise RuntimeError("the router did not start")
                http, rpc = map(int, line.split())
                ports = {"direct": engine.request.http_port, "router": http, "grpc": rpc}
                halves = (False, True) if options.shared else (False,)
                rows = [Row(kind, shared) for shared in halves for kind in KINDS] + [Row(EMPTY, False)]
                for round_ in range(options.rounds):
                    for row in rows:
                        await measure(ports, row, round_, options)
                return [row.report(options) for row in rows]
            finally:
                router.terminate()
                await router.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="What the router adds to a request.")
    parser.add_argument("--engine", choices=("sim", "vllm"), default="sim")
    parser.add_argument("--prompt-bytes", type=int, default=2048)
    parser.add_argument("--requests", type=int, default=100, help="of each kind, in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shared", action="store_true", help="also measure prompts that share their first half")
    parser.add_argument("--set", action="append", default=[], help="a setting of the router, KEY=VALUE")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        uvloop.run(serve(options.serve, options.set))
        return
    rows = uvloop.run(run(options))
    if options.output == "json":
        print(json.dumps(rows, indent=2))
        return
    names = list(rows[0])
    print("  ".join(f"{name:>14}" if number else f"{name:<30}" for number, name in enumerate(names)))
    for row in rows:
        print("  ".join(f"{row[name]!s:>14}" if number else f"{row[name]:<30}" for number, name in enumerate(names)))


if __name__ == "__main__":
    main()
