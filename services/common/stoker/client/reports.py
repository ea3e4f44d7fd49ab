"""Tells routers what becomes of their picks, a few milliseconds later and many at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from stoker.api.router.v1 import router_pb2
from stoker.client.routers import REPORT, Routers
from stoker.common.errors import StokerError

_GATHER_S = 0.01
_ALIVE_S = 5.0
"""A third of what a router waits for."""
_ASK_S = 2.0
_TRIES = 2
_MOST = 10_000
_BATCH = 1_000


class Reports:
    """To all routers of a client. Nothing waits for them; what a router does not take, it finds out by time."""

    def __init__(self, routers: Routers) -> None:
        self._routers = routers
        self._waiting: dict[str, deque[router_pb2.PickReport]] = {}
        self._open: dict[str, str] = {}  # pick → its router
        self._some = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, router: str, pick_id: str) -> None:
        """A pick is under way: say so every few seconds, until `tell` has its end."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._send()), asyncio.create_task(self._say_alive())]
        self._open[pick_id] = router

    def tell(
        self, pick_id: str, event: router_pb2.PickEvent.ValueType, place: int = 0, *, fault: bool = False
    ) -> None:
        """Something happened to a pick that is under way."""
        router = self._open.get(pick_id)
        if router is None:
            return
        if event in (router_pb2.PICK_EVENT_SERVED, router_pb2.PICK_EVENT_FAILED, router_pb2.PICK_EVENT_DROPPED):
            del self._open[pick_id]
        waiting = self._waiting.setdefault(router, deque(maxlen=_MOST))
        waiting.append(router_pb2.PickReport(pick_id=pick_id, event=event, place=place, fault=fault))
        self._some.set()

    async def close(self) -> None:
        """Tell what there is, for a second at most."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._flush()

    async def _send(self) -> None:
        while True:
            await self._some.wait()
            await asyncio.sleep(_GATHER_S)
            self._some.clear()
            await self._flush()

    async def _flush(self) -> None:
        # At once: a router that does not answer must not keep the others from hearing.
        await asyncio.gather(*(self._flush_one(router, waiting) for router, waiting in self._waiting.items()))

    async def _flush_one(self, router: str, waiting: deque[router_pb2.PickReport]) -> None:
        while waiting:
            batch = [waiting.popleft() for _ in range(min(len(waiting), _BATCH))]
            try:
                for _ in range(_TRIES):
                    with contextlib.suppress(StokerError):
                        await self._routers.call(router, REPORT, router_pb2.ReportPicksRequest(reports=batch), _ASK_S)
                        break
            except asyncio.CancelledError:
                # Whether the router heard is unknown; `close` tells again, and hearing twice does no harm.
                waiting.extendleft(reversed(batch))
                raise

    async def _say_alive(self) -> None:
        while True:
            await asyncio.sleep(_ALIVE_S)
            for pick_id in list(self._open):
                self.tell(pick_id, router_pb2.PICK_EVENT_ALIVE)
