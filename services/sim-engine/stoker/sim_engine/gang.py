"""A multi-node engine's members hold on to each other: all start, and all end, together.

Members connect to the head and stay connected. The head serves only when all have joined; whoever loses
the other side ends. One byte a second each way tells a dead peer from a quiet one.
"""

from __future__ import annotations

import asyncio
import contextlib

from stoker.sim_engine.config import GangConfig

_BEAT_S = 1.0
_DEAD_S = 5.0
_JOIN_S = 600.0


class GangBroken(Exception):
    """A member is gone, or did not come."""


class Head:
    """The head's side: `joined` when complete, `broken` when a member is lost."""

    def __init__(self, config: GangConfig) -> None:
        self._config = config
        self._members: set[int] = set()
        self._complete = asyncio.Event()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._server: asyncio.Server | None = None
        self._holding: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def joined(self) -> None:
        """Wait for all members. Raises `GangBroken` after ten minutes."""
        self._server = await asyncio.start_server(self._serve, self._config.master_addr, self._config.master_port)
        try:
            async with asyncio.timeout(_JOIN_S):
                await self._complete.wait()
        except TimeoutError:
            missing = sorted(set(range(1, self._config.size)) - self._members)
            raise GangBroken(f"members {missing} did not join within {_JOIN_S:.0f} s") from None

    async def broken(self) -> None:
        """Wait until a member is lost, then raise `GangBroken`."""
        await self._broken

    async def close(self) -> None:
        """Let go of the members; they end."""
        if self._server is not None:
            self._server.close()
        for writer in self._holding.values():
            writer.transport.abort()
        await asyncio.gather(*self._holding, return_exceptions=True)
        if not self._broken.done():
            self._broken.cancel()
        elif not self._broken.cancelled():
            self._broken.exception()  # looked at: nobody may be waiting

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank = -1
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a connection's callback is a task
        self._holding[task] = writer
        try:
            async with asyncio.timeout(_DEAD_S):
                rank = int.from_bytes(await reader.readexactly(4), "big")
            if not 0 < rank < self._config.size or rank in self._members:
                return
            self._members.add(rank)
            if len(self._members) == self._config.size - 1:
                self._complete.set()
            await _hold(reader, writer)
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            pass
        finally:
            del self._holding[task]
            writer.close()
            if rank in self._members and not self._broken.done():
                self._broken.set_exception(GangBroken(f"member {rank} is gone"))


async def member(config: GangConfig) -> None:
    """Join the head and stay until it is gone; raises `GangBroken` then, or if it cannot be reached."""
    deadline = asyncio.get_running_loop().time() + _JOIN_S
    while True:
        try:
            reader, writer = await asyncio.open_connection(config.master_addr, config.master_port)
            break
        except OSError as error:
            if asyncio.get_running_loop().time() > deadline:
                raise GangBroken(f"no head at {config.master_addr}:{config.master_port}") from error
            await asyncio.sleep(0.1)
    writer.write(config.rank.to_bytes(4, "big"))
    try:
        with contextlib.suppress(TimeoutError, OSError, asyncio.IncompleteReadError):
            await _hold(reader, writer)
    finally:
        writer.close()
    raise GangBroken("the head is gone")


async def _hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Beat and listen; returns or raises when the peer is gone."""

    async def beat() -> None:
        while True:
            writer.write(b".")
            await writer.drain()
            await asyncio.sleep(_BEAT_S)

    beating = asyncio.create_task(beat())
    try:
        while True:
            async with asyncio.timeout(_DEAD_S):
                if not await reader.read(64):
                    return
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
