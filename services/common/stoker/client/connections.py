"""Channels to nodes: few enough, and known to be connected before anything is sent."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator

import grpc

from stoker.common.channels import Channels
from stoker.common.errors import Unavailable


class Unreachable(Unavailable):
    """Nothing could be sent: a service did not answer within the time to connect."""

    reason = "UNREACHABLE"


async def connected(channel: grpc.aio.Channel, endpoint: str, within_s: float) -> None:
    """Return once the channel is connected. Raises Unreachable."""
    if (state := channel.get_state(try_to_connect=True)) is grpc.ChannelConnectivity.READY:
        return
    try:
        async with asyncio.timeout(within_s):
            while state is not grpc.ChannelConnectivity.READY:
                if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                    raise Unreachable(f"cannot connect to {endpoint}")
                await channel.wait_for_state_change(state)
                state = channel.get_state(try_to_connect=True)
    except TimeoutError:
        raise Unreachable(f"no connection to {endpoint} within {within_s:g} s") from None


class Nodes:
    """Channels to the nodes asked lately; beyond `most`, the one that was asked longest ago and is idle is closed."""

    def __init__(self, channels: Channels, always: tuple[str, ...], most: int = 256) -> None:
        """`always` are endpoints whose channels stay."""
        self._channels = channels
        self._always = always
        self._most = most
        self._asked: dict[str, None] = {}  # the last one last
        self._busy: Counter[str] = Counter()

    @contextlib.contextmanager
    def to(self, endpoint: str) -> Iterator[grpc.aio.Channel]:
        """A node's channel, held while the block runs."""
        self._asked.pop(endpoint, None)
        self._asked[endpoint] = None
        self._busy[endpoint] += 1
        try:
            yield self._channels.to(endpoint)
        finally:
            self._busy[endpoint] -= 1
            if not self._busy[endpoint]:
                del self._busy[endpoint]
            self._close_some()

    def _close_some(self) -> None:
        if len(self._asked) <= self._most:
            return
        idle = [endpoint for endpoint in self._asked if endpoint not in self._busy]
        for endpoint in idle[: len(self._asked) - self._most]:
            del self._asked[endpoint]
        self._channels.keep([*self._asked, *self._always])
