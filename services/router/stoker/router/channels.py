"""One gRPC channel to each node agent, opened on first use."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import grpc

from stoker.common import rpc


class Channels:
    """Channels by endpoint (host:port)."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def to(self, endpoint: str) -> grpc.aio.Channel:
        """The channel to an agent."""
        channel = self._channels.get(endpoint)
        if channel is None:
            channel = self._channels[endpoint] = rpc.channel(endpoint)
        return channel

    def stream(self, endpoint: str, method: str) -> grpc.aio.UnaryStreamMultiCallable[bytes, bytes]:
        """A server-streaming method that takes and gives bytes."""
        return self.to(endpoint).unary_stream(method)

    def unary(self, endpoint: str, method: str) -> grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]:
        """A unary method that takes and gives bytes."""
        return self.to(endpoint).unary_unary(method)

    def keep(self, endpoints: Iterable[str]) -> None:
        """Close the channels to all others; calls in flight there get a moment to end."""
        for endpoint in self._channels.keys() - set(endpoints):
            task = asyncio.create_task(self._channels.pop(endpoint).close(grace=60.0))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close all."""
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))
        self._channels.clear()
