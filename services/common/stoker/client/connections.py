"""Channels that are known to be connected before anything is sent."""

from __future__ import annotations

import asyncio

import grpc

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
