"""The HTTP surface: routes, and errors in vLLM's shape."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web

from stoker.common import otel
from stoker.sim_engine.api import chat, completions, request, responses
from stoker.sim_engine.api.request import ApiError
from stoker.sim_engine.core import text
from stoker.sim_engine.engine import SimEngine
from stoker.sim_engine.tokenizer import Tokenizer

log = logging.getLogger(__name__)

VERSION = "0.32.0"
"""The vLLM version imitated."""
_MAX_BODY = 64 << 20
_RANK_HEADER = "X-data-parallel-rank"
_EMBEDDING = 64
"""Length of an embedding."""


class Server:
    """One server's routes."""

    def __init__(self, ranks: Sequence[SimEngine], tokenizer: Tokenizer) -> None:
        """`ranks` are the data-parallel ones, in order; there is one where there is no such thing."""
        self._ranks = ranks
        self._config = ranks[0].config
        self._tokenizer = tokenizer
        self._created = int(time.time())

    def app(self) -> web.Application:
        """The application, for a runner with `handler_cancellation`: a client that leaves ends its call."""
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[_errors])
        app.add_routes([
            web.get("/health", self._health),
            web.get("/version", self._version),
            web.get("/metrics", self._metrics),
            web.get("/v1/models", self._models),
            web.post("/tokenize", self._tokenize),
            web.post("/detokenize", self._detokenize),
            web.post("/v1/completions", self._generate(completions.handle)),
            web.post("/v1/chat/completions", self._generate(chat.handle)),
            web.post("/v1/responses", self._generate(responses.handle)),
            web.post("/v1/embeddings", self._embeddings),
            web.post("/reset_prefix_cache", self._reset),
        ])  # fmt: skip
        return app

    def _generate(
        self, handle: Callable[[web.Request, SimEngine, Tokenizer], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handler(http: web.Request) -> web.StreamResponse:
            with otel.begin("llm_request", http.headers) as span:
                span.set(otel.REQUEST_ID, http.headers.get("x-request-id"))
                return await handle(http, self._rank_for(http), self._tokenizer)

        return handler

    def _rank_for(self, http: web.Request) -> SimEngine:
        """The rank that the caller names, or the one with least to do."""
        named = http.headers.get(_RANK_HEADER, "")
        if not named.isdecimal():
            return min(self._ranks, key=lambda rank: rank.scheduler.waiting * 4 + len(rank.scheduler.running))
        if int(named) >= len(self._ranks):
            raise ApiError(f"data_parallel_rank {named} is out of range [0, {len(self._ranks)}).")
        return self._ranks[int(named)]

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": VERSION})

    async def _metrics(self, _: web.Request) -> web.Response:
        first, *others = (rank.page() for rank in self._ranks)
        samples = [line for page in others for line in page.splitlines(keepends=True) if not line.startswith("#")]
        return web.Response(text="".join((first, *samples)), content_type="text/plain")

    async def _models(self, _: web.Request) -> web.Response:
        config = self._config
        cards = [
            {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": "vllm",
                "root": str(config.model),
                "parent": None,
                "max_model_len": config.max_model_len,
            }
            for name in config.served_names
        ]
        return web.json_response({"object": "list", "data": cards})

    async def _tokenize(self, http: web.Request) -> web.Response:
        body = await request.body_of(http)
        request.check_model(body, self._config)
        if "messages" in body:
            tokens = await chat.render(body, self._tokenizer)
        elif isinstance(body.get("prompt"), str):
            tokens = await self._tokenizer.encode_aside(
                body["prompt"], special=bool(body.get("add_special_tokens", True))
            )
        else:
            raise request.missing("prompt")
        return web.json_response({
            "count": len(tokens),
            "max_model_len": self._config.max_model_len,
            "tokens": tokens,
            "token_strs": None,
        })  # fmt: skip

    async def _detokenize(self, http: web.Request) -> web.Response:
        body = await request.body_of(http)
        tokens = body.get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(one, int) and one >= 0 for one in tokens):
            raise request.missing("tokens")
        return web.json_response({"prompt": self._tokenizer.decode(tokens)})

    async def _embeddings(self, http: web.Request) -> web.Response:
        body = await request.body_of(http)
        name = request.check_model(body, self._config)
        given = body.get("input")
        if given is None:
            raise request.missing("input")
        inputs: list[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        data, total = [], 0
        for index, one in enumerate(inputs):
            tokens = (
                await self._tokenizer.encode_aside(one) if isinstance(one, str) else [int(token) for token in one]
            )
            total += len(tokens)
            values = [text.mix(at, *tokens) / 2**63 - 1 for at in range(_EMBEDDING)]
            data.append({"index": index, "object": "embedding", "embedding": values})
        told = {"prompt_tokens": total, "total_tokens": total, "completion_tokens": 0}
        return web.json_response({"object": "list", "model": name, "data": data, "usage": told})

    async def _reset(self, _: web.Request) -> web.Response:
        done = [rank.reset_prefix_cache() for rank in self._ranks]
        return web.Response(status=200 if all(done) else 503)


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return error.response()
    except web.HTTPNotFound:
        return web.json_response({"detail": "Not Found"}, status=404)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        # A field of a shape that no check above foresaw: this call fails, the engine lives.
        log.warning("malformed request to %s: %r", request.path, error)
        return ApiError(f"The request has a field of the wrong shape: {error!r}").response()
