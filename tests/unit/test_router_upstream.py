"""Connections to engines."""

from __future__ import annotations

import asyncio
import socket

from aiohttp import web

from stoker.router.http.engines import Engines
from tests.support.waiting import forever


async def test_an_engine_whose_host_vanished_is_noticed_within_13_seconds() -> None:
    async def hello(request: web.BaseRequest) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(b"x" * 10)
        await forever()

    server = await asyncio.get_running_loop().create_server(web.Server(hello), "127.0.0.1", 0)
    engines = Engines(connect_s=2.0)
    try:
        answer = await engines.call("GET", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
        assert answer._connection.transport is not None
        held = answer._connection.transport.get_extra_info("socket")
        assert held.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, every, count = (
            held.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + every * count <= 13
        assert held.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 13_000
        answer.close()
    finally:
        await engines.close()
        server.close()
