"""Connections to a router's port for Envoy or for picks, byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import NamedTuple

from stoker.router.http.port import Connections
from tests.support.waiting import eventually


class Said(NamedTuple):
    """An answer. Headers are by names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class Line:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def to(cls, number: int, sends: bytes = b"") -> Line:
        line = cls(*await asyncio.open_connection("127.0.0.1", number))
        line.writer.write(sends)
        return line

    async def answer(self) -> Said:
        async with asyncio.timeout(60):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in head[1:] if line)}
            body = await self.reader.readexactly(int(headers["content-length"]))
        return Said(int(head[0].split()[1]), headers, body)

    async def ended(self) -> bool:
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionResetError):
                return await self.reader.read() == b""
            return True


@contextlib.asynccontextmanager
async def listening(shared: Connections) -> AsyncIterator[int]:
    """The number of a port that `shared` answers. At the end its connections are closed and hold nothing."""
    server = await asyncio.get_running_loop().create_server(shared.protocol, "127.0.0.1", 0)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        shared.close()
        await eventually(lambda: not shared.open, "all connections are closed")
        assert shared.held_bytes == 0, "bytes are counted back"
