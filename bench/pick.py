"""What a decision costs whoever asks for one: Stoker's Pick beside Dynamo's select service.

    python bench/pick.py                     # 64 and 32,768 tokens; installs the select service on first use
    python bench/pick.py -o json --turns 200

One client, which asks each for the same prompts, in an order that is drawn anew for each prompt: half of a prompt
is one of eight prefixes, the rest is new. Timed is one call, from the body's first byte written to the answer's last
byte read, with protobuf the message's writing and reading too; making JSON is not, and neither is giving the place
back, which follows each. Stoker signs a ticket
for three places. `/select` counts nothing, `/select_and_reserve` counts the request as Pick does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import statistics
import sys
import tempfile
import time
import uuid
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.peers.backends import Backends
from bench.peers.catalog import PEERS, ROOT, Site, select_service
from bench.peers.children import child, until_it_serves
from bench.peers.install import DYNAMO, NotRunnable, default_cache, install
from bench.peers.speed import engines
from stoker.api.inference.v1 import inference_pb2
from stoker.api.router.v1 import router_pb2, router_pb2_grpc
from stoker.client.routers import PICK, REPORT
from stoker.common import connect, rpc
from stoker.common.blocks import pack_keys, packed_block_keys, root_key
from stoker.local.model import cached
from stoker.local.ports import PortPicker
from tests.support.engines import TINY

MODEL, BLOCK, OUTPUT = "tiny", 32, 64
WARM_UP = 20
JSON = "application/json"


class Http:
    """One keep-alive connection, with as little of its own as possible."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)

    async def ask(self, method: str, path: str, body: bytes, kind: str = JSON) -> bytes:
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        headers = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        size = int(headers.split(b"content-length:")[1].split(b"\r\n")[0]) if b"content-length:" in headers else 0
        answer = await self._reader.readexactly(size)
        if not headers.startswith(b"http/1.1 2"):
            raise RuntimeError(f"{path}: {headers.decode()}{answer.decode(errors='replace')}")
        return answer


Timed = Callable[[list[int]], Awaitable[float]]
"""Asks for a prompt and gives back what it got; returns the seconds of the asking."""


def packed(tokens: list[int]) -> bytes:
    return array("I", tokens).tobytes()


def block_keys(tokens: list[int]) -> bytes:
    return pack_keys(packed_block_keys(packed(tokens), BLOCK, root_key(MODEL)))


def by_http(client: Http) -> Timed:
    """With the OpenAI body that would be sent."""

    async def timed(tokens: list[int]) -> float:
        body = msgspec.json.encode({"model": MODEL, "prompt": tokens, "max_tokens": OUTPUT})
        began = time.perf_counter()
        answer = await client.ask("POST", "/pick", body)
        took = time.perf_counter() - began
        pick_id = msgspec.json.decode(answer)["pick_id"]
        await client.ask("POST", "/picks", msgspec.json.encode([{"pick_id": pick_id, "event": "dropped"}]))
        return took

    return timed


def by_connect(client: Http, request_of: Callable[[list[int]], router_pb2.PickRequest]) -> Timed:
    async def timed(tokens: list[int]) -> float:
        request = request_of(tokens)
        began = time.perf_counter()
        body = await client.ask("POST", PICK.path, request.SerializeToString(), connect.PROTO)
        answer = PICK.read(body)
        took = time.perf_counter() - began
        await client.ask("POST", REPORT.path, dropped(answer).SerializeToString(), connect.PROTO)
        return took

    return timed


def dropped(answer: router_pb2.PickResponse) -> router_pb2.ReportPicksRequest:
    report = router_pb2.PickReport(pick_id=answer.pick_id, event=router_pb2.PICK_EVENT_DROPPED)
    return router_pb2.ReportPicksRequest(reports=[report])


def by_grpc(stub: Any, request_of: Callable[[list[int]], router_pb2.PickRequest]) -> Timed:
    async def timed(tokens: list[int]) -> float:
        request = request_of(tokens)
        began = time.perf_counter()
        answer = await stub.Pick(request)
        took = time.perf_counter() - began
        await stub.ReportPicks(dropped(answer))
        return took

    return timed


def by_select(client: Http, path: str) -> Timed:
    async def timed(tokens: list[int]) -> float:
        name = uuid.uuid4().hex
        asked = {"model_name": MODEL, "token_ids": tokens, "expected_output_tokens": OUTPUT}
        if path != "/select":
            asked["selection_id"] = name
        body = msgspec.json.encode(asked)
        began = time.perf_counter()
        await client.ask("POST", path, body)
        took = time.perf_counter() - began
        if path != "/select":
            await client.ask("DELETE", f"/reservations/{name}", b"{}")
        return took

    return timed


def generate_request(tokens: list[int]) -> router_pb2.PickRequest:
    sampling = inference_pb2.Sampling(max_tokens=OUTPUT)
    ids = inference_pb2.TokenIds(ids=tokens)
    return router_pb2.PickRequest(
        request=inference_pb2.GenerateRequest(model=MODEL, token_ids=ids, sampling=sampling)
    )


def tokens_request(tokens: list[int]) -> router_pb2.PickRequest:
    return router_pb2.PickRequest(
        tokenized=router_pb2.TokenizedPrompt(model=MODEL, token_ids=packed(tokens), max_tokens=OUTPUT)
    )


def keys_request(tokens: list[int]) -> router_pb2.PickRequest:
    prompt = router_pb2.TokenizedPrompt(
        model=MODEL, block_keys=block_keys(tokens), prompt_tokens=len(tokens), block_size=BLOCK, max_tokens=OUTPUT
    )
    return router_pb2.PickRequest(tokenized=prompt)


@asynccontextmanager
async def stoker(backends: Backends, site: Site) -> AsyncIterator[dict[str, Timed]]:
    """Stoker's router as it is by default, with ticket keys."""
    listens = {part: site.ports.pick() for part in ("http", "grpc", "pick")}
    keys, log = site.logs / "ticket-keys", site.log("stoker pick")
    keys.parent.mkdir(parents=True, exist_ok=True)
    keys.write_text(f"bench {secrets.token_hex(32)}\n")
    argv = [sys.executable, "-m", "bench.peers.told_router", "--model-dir", backends.model_dir]
    for part, port in listens.items():
        argv += ["--listen", f"{part}=127.0.0.1:{port}"]
    argv += ["--set", f"tickets.keys={keys}", *backends.urls]
    async with child(argv, log, cwd=ROOT) as process:
        await until_it_serves(process, log, f"http://127.0.0.1:{listens['pick']}/picks", b"[]")
        client = Http(listens["pick"])
        await client.open()
        async with rpc.channel(f"127.0.0.1:{listens['grpc']}") as channel:
            stub: Any = router_pb2_grpc.RouterServiceStub(channel)
            yield {
                "stoker POST /pick, OpenAI JSON": by_http(client),
                "stoker Connect Pick, GenerateRequest": by_connect(client, generate_request),
                "stoker Connect Pick, packed tokens": by_connect(client, tokens_request),
                "stoker Connect Pick, block keys": by_connect(client, keys_request),
                "stoker gRPC Pick, GenerateRequest": by_grpc(stub, generate_request),
                "stoker gRPC Pick, packed tokens": by_grpc(stub, tokens_request),
            }


@asynccontextmanager
async def dynamo(backends: Backends, site: Site) -> AsyncIterator[dict[str, Timed]]:
    """Dynamo's select service. Raises NotRunnable."""
    peer = next(peer for peer in PEERS if peer.package is DYNAMO)
    async with select_service(peer, await install(DYNAMO, site.cache), backends, site) as url:
        client = Http(int(url.rsplit(":", 1)[1]))
        await client.open()
        for tokens in ([1, 2, 3],):
            await until_selected(client, tokens)
        yield {f"dynamo POST {path}": by_select(client, path) for path in ("/select", "/select_and_reserve")}


async def until_selected(client: Http, tokens: list[int]) -> None:
    """Workers are registered before they can be selected."""
    async with asyncio.timeout(30):
        while True:
            try:
                await by_select(client, "/select")(tokens)
            except RuntimeError:
                await asyncio.sleep(0.2)
            else:
                return


async def measure(askers: dict[str, Timed], size: int, turns: int, rng: Random) -> list[dict[str, object]]:
    """Interleaved: in each turn every asker gets the same prompt, in an order of its own."""
    prefixes = [[rng.randrange(150_000) for _ in range(size // 2)] for _ in range(8)]
    taken: dict[str, list[float]] = {name: [] for name in askers}
    names = list(askers)
    for turn in range(turns + WARM_UP):
        tokens = rng.choice(prefixes) + [rng.randrange(150_000) for _ in range(size - size // 2)]
        rng.shuffle(names)  # who comes after whom matters
        for name in names:
            seconds = await askers[name](tokens)
            if turn >= WARM_UP:
                taken[name].append(1000 * seconds)
    return [
        {
            "asked": name,
            "tokens": size,
            "p50_ms": round(statistics.median(times), 3),
            "p99_ms": round(statistics.quantiles(times, n=100)[98], 3),
        }
        for name, times in taken.items()
    ]


async def run(options: argparse.Namespace) -> list[dict[str, object]]:
    rng = Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        site = Site(options.cache, Path(folder), PortPicker())
        async with AsyncExitStack() as stack:
            backends = await stack.enter_async_context(engines(site, cached(TINY)))
            askers = await stack.enter_async_context(stoker(backends, site))
            try:
                askers |= await stack.enter_async_context(dynamo(backends, site))
            except NotRunnable as error:
                print(f"dynamo: {error}", file=sys.stderr)
            return [row for size in options.tokens for row in await measure(askers, size, options.turns, rng)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 32_768])
    parser.add_argument("--turns", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cache", type=Path, default=default_cache())
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    options = parser.parse_args()
    rows = uvloop.run(run(options))
    if options.output == "json":
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(f"{row['asked']:<40}{row['tokens']:>8} tokens   p50 {row['p50_ms']:>7} ms   p99 {row['p99_ms']:>7} ms")


if __name__ == "__main__":
    main()
