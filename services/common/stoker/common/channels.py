"""One gRPC channel to each of several services, opened on first use."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import grpc

from stoker.common import rpc
from stoker.common.tls import Tls

_MOVED_GRACE_S = 60.0
_RENEWED_GRACE_S = 3600.0
"""The longest that a router lets a request run."""


class Channels:
    """Channels by endpoint (host:port). After certificates were renewed, new calls go over new connections."""

    def __init__(self, tls: Tls | None = None) -> None:
        self._tls = tls
        self._generation = tls.generation if tls is not None else 0
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._retired: dict[asyncio.Task[None], grpc.aio.Channel] = {}

    def to(self, endpoint: str) -> grpc.aio.Channel:
        """The channel to an endpoint."""
        if self._tls is not None and self._tls.generation != self._generation:
            self._generation = self._tls.generation
            self._retire(self._channels.keys(), _RENEWED_GRACE_S)
        channel = self._channels.get(endpoint)
        if channel is None:
            channel = self._channels[endpoint] = rpc.channel(endpoint, self._tls)
        return channel

    def keep(self, endpoints: Iterable[str]) -> None:
        """Close the channels to all others; calls in flight there get a minute to end."""
        self._retire(self._channels.keys() - set(endpoints), _MOVED_GRACE_S)

    async def close(self) -> None:
        """Close all; calls in flight fail."""
        for task in self._retired:
            task.cancel()
        held = [*self._channels.values(), *self._retired.values()]
        self._channels.clear()
        await asyncio.gather(*(channel.close() for channel in held))

    def _retire(self, endpoints: Iterable[str], grace_s: float) -> None:
        for endpoint in tuple(endpoints):
            channel = self._channels.pop(endpoint)
            task = asyncio.create_task(_close_later(channel, grace_s), name=f"close {endpoint}")
            self._retired[task] = channel
            task.add_done_callback(self._retired.pop)


async def _close_later(channel: grpc.aio.Channel, grace_s: float) -> None:
    # Not `close(grace)`: that refuses at once the calls which somebody who was given the channel is about to make.
    await asyncio.sleep(grace_s)
    await channel.close()
