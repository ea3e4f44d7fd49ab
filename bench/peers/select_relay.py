"""A relay for a service that only decides: tokenizes, asks it where, carries the answer, reports start and end.

python -m bench.peers.select_relay --port P --service URL --model NAME --model-dir DIR
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import uuid
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from aiohttp import web

from stoker.node_agent import tokenizer_files
from stoker.router.prompts.render import Conversation
from stoker.router.prompts.tokenizer import ModelTokenizer

_BODY_BYTES = 16 * 1024 * 1024


class SelectRelay:
    """One model's requests."""

    def __init__(self, service: str, model: str, model_dir: Path) -> None:
        files = {n: (model_dir / n).read_bytes() for n in tokenizer_files.NAMES if (model_dir / n).is_file()}
        self._tokenizer = ModelTokenizer(files)
        self._service = service
        self._model = model

    async def connections(self, _: web.Application) -> Any:
        """Keeps connections for as long as the server runs."""
        timeout = aiohttp.ClientTimeout(total=300)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=1 << 20) as self._session:
            yield

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Carry one request."""
        body = await request.read()
        asked = json.loads(body)
        reservation = uuid.uuid4().hex
        tokens = await asyncio.to_thread(self._tokens, asked)
        selection = {
            "model_name": self._model,
            "selection_id": reservation,
            "token_ids": tokens,
            "expected_output_tokens": asked.get("max_tokens") or asked.get("max_completion_tokens"),
        }
        async with self._session.post(f"{self._service}/select_and_reserve", json=selection) as answer:
            if answer.status >= 300:
                return web.Response(status=503, text=await answer.text())
            endpoint = (await answer.json())["endpoint"]
        try:
            return await self._carry(request, f"{endpoint}{request.path}", body, reservation)
        finally:
            await asyncio.shield(self._report("DELETE", f"/reservations/{reservation}"))

    async def _carry(self, request: web.Request, url: str, body: bytes, reservation: str) -> web.StreamResponse:
        headers = {"content-type": "application/json"}
        async with self._session.post(url, data=body, headers=headers) as upstream:
            response = web.StreamResponse(status=upstream.status)
            response.content_type = upstream.content_type
            await response.prepare(request)
            first = True
            async for piece in upstream.content.iter_any():
                await response.write(piece)
                if first:
                    first = False
                    await self._report("POST", f"/reservations/{reservation}/prefill_complete")
            return response

    async def _report(self, method: str, path: str) -> None:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self._session.request(method, f"{self._service}{path}", json={}) as answer:
                await answer.read()

    def _tokens(self, asked: dict[str, Any]) -> list[int]:
        if "messages" in asked:
            text = self._tokenizer.render(Conversation(asked["messages"], tools=asked.get("tools")))
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        return list(self._tokenizer.encode(asked["prompt"]))


def application(service: str, model: str, model_dir: Path) -> web.Application:
    """The relay as a server."""
    relay = SelectRelay(service, model, model_dir)
    app = web.Application(client_max_size=_BODY_BYTES)
    app.cleanup_ctx.append(relay.connections)
    app.router.add_post("/v1/completions", relay.serve)
    app.router.add_post("/v1/chat/completions", relay.serve)
    return app


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description="A relay for a service that only decides.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--service", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--model-dir", type=Path, required=True)
    options = parser.parse_args()
    web.run_app(
        application(options.service, options.model, options.model_dir),
        host="127.0.0.1",
        port=options.port,
        access_log=None,
        print=None,
        handler_cancellation=True,
        loop=uvloop.new_event_loop(),
    )


if __name__ == "__main__":
    main()
