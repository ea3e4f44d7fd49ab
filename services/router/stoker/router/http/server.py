"""The OpenAI port's connections: those of aiohttp's server, of bounded number, which end when the router drains."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

from aiohttp import HttpVersion11, web

_KEEPALIVE_S = 75.0
"""How long a connection may be idle, or send nothing but a part of a head."""
_CLOSE_S = 1.0


class HttpPort:
    """Answers each request by `handle`, in a task that ends with its client's connection."""

    def __init__(
        self,
        handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        *,
        max_connections: int,
        keepalive_s: float = _KEEPALIVE_S,
    ) -> None:
        self._handle = handle
        self._max_connections = max_connections
        self._busy: set[web.RequestHandler] = set()
        self._retiring = False
        self._server = web.Server(
            self._answer,
            handler_cancellation=True,  # a client that goes takes its work in the engine with it
            access_log=None,
            keepalive_timeout=keepalive_s,
            max_field_size=32 * 1024,
            max_line_size=16 * 1024,
        )

    def __call__(self) -> asyncio.BaseProtocol:
        """For a connection that comes in."""
        if len(self._server.connections) >= self._max_connections:
            return _Refused()
        return self._server()

    def retire(self) -> None:
        """Close what is idle now, and each other connection with its response."""
        self._retiring = True
        for each in self._server.connections:
            if each in self._busy:
                each.close()
            else:
                each.force_close()  # `close` alone would leave it open, and deaf

    async def close(self) -> None:
        """Close all."""
        await self._server.shutdown(_CLOSE_S)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        self._busy.add(connection)
        try:
            answer = await self._handle(request)
        finally:
            self._busy.discard(connection)
        if self._retiring or request.version < HttpVersion11:  # whose streams end with their connections
            connection.close()
            if not answer.prepared:
                answer.force_close()
        return answer


class _Refused(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()  # uvloop's is one by its methods alone
