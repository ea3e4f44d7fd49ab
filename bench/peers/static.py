"""Engines that answer at once, always the same: what stands behind the routers when their speed is measured.

    python -m bench.peers.static --model-dir DIR PORT…

One process, uvloop and httptools; an engine on each port, until SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from contextlib import AsyncExitStack
from typing import cast

import httptools
import uvloop

_ANSWER = {
    "id": "cmpl-0",
    "object": "text_completion",
    "created": 0,
    "model": "tiny",
    "choices": [{"index": 0, "text": " ready", "logprobs": None, "finish_reason": "length"}],
    "usage": {"prompt_tokens": 512, "completion_tokens": 1, "total_tokens": 513},
}
_TOKENS = 512


def _response(body: bytes, status: bytes = b"200 OK", kind: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (status, kind, len(body), body)


def responses(model_dir: str) -> dict[bytes, bytes]:
    """What is answered, by path."""
    models = {
        "object": "list",
        "data": [{"id": "tiny", "object": "model", "owned_by": "vllm", "root": model_dir, "max_model_len": 131072}],
    }
    return {
        b"/v1/completions": _response(json.dumps(_ANSWER).encode()),
        b"/v1/models": _response(json.dumps(models).encode()),
        b"/version": _response(b'{"version":"0.32.0"}'),
        b"/tokenize": _response(json.dumps({"count": _TOKENS, "tokens": list(range(_TOKENS))}).encode()),
        b"/health": _response(b""),
        b"/metrics": _response(b"# TYPE vllm:num_requests_running gauge\n", kind=b"text/plain; version=0.0.4"),
    }


class Connection(asyncio.Protocol):
    """One connection, requests one after another."""

    def __init__(self, answers: dict[bytes, bytes]) -> None:
        self._answers = answers
        self._missing = _response(b'{"detail":"Not Found"}', b"404 Not Found")
        self._path = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._transport.close()

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_message_complete(self) -> None:
        path, self._path = self._path.partition(b"?")[0], b""
        self._transport.write(self._answers.get(path, self._missing))


async def serve(ports: list[int], model_dir: str) -> None:
    """Serve until SIGTERM."""
    loop = asyncio.get_running_loop()
    answers = responses(model_dir)
    async with AsyncExitStack() as stack:
        for port in ports:
            server = await loop.create_server(lambda: Connection(answers), "127.0.0.1", port, backlog=1024)
            await stack.enter_async_context(server)
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await stop.wait()


def main() -> None:
    """Parse and serve."""
    parser = argparse.ArgumentParser(description="Engines that answer at once, always the same.")
    parser.add_argument("--model-dir", required=True)
    parser.add_argument("ports", type=int, nargs="+")
    options = parser.parse_args()
    uvloop.run(serve(options.ports, options.model_dir))


if __name__ == "__main__":
    main()
