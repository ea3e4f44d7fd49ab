"""Lets any number of routers subscribe to engines' KV events.

An engine's event socket connects to its node agent, and to nobody else; its replay socket answers everyone. So
each engine is asked again and again for what is new, and its batches are published as they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import zmq
import zmq.asyncio

_EVERY_S = 0.02
_LATE_S = 2.0
_END = (-1).to_bytes(8, "big", signed=True)


@asynccontextmanager
async def republished(replays: Sequence[str]) -> AsyncIterator[list[str]]:
    """One address to subscribe to for each replay address, in their order."""
    context = zmq.asyncio.Context()
    tasks: list[asyncio.Task[None]] = []
    addresses = []
    try:
        for replay in replays:
            live = context.socket(zmq.PUB)
            live.setsockopt(zmq.SNDHWM, 100_000)
            port = live.bind_to_random_port("tcp://127.0.0.1")
            addresses.append(f"tcp://127.0.0.1:{port}")
            tasks.append(asyncio.create_task(_follow(context, replay, live)))
        yield addresses
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        context.destroy(linger=0)


async def _follow(context: zmq.asyncio.Context, replay: str, live: zmq.asyncio.Socket) -> None:
    following = 0
    while True:
        asking = context.socket(zmq.DEALER)
        asking.connect(replay)
        try:
            async with asyncio.timeout(None) as deadline:
                while True:
                    deadline.reschedule(asyncio.get_running_loop().time() + _LATE_S)
                    await asking.send_multipart([b"", following.to_bytes(8, "big")])
                    following = await _pass_on(asking, live, following)
                    await asyncio.sleep(_EVERY_S)
        except TimeoutError:
            continue  # an answer got lost, or the engine stands still: ask on a new connection
        finally:
            asking.close(linger=0)


async def _pass_on(asking: zmq.asyncio.Socket, live: zmq.asyncio.Socket, following: int) -> int:
    """Publish one replay; returns the sequence to ask for next."""
    while True:
        frames = (await asking.recv_multipart())[1:]
        if frames[-2] == _END:
            return following
        # Older engines leave out the topic.
        topic = frames[0] if len(frames) == 3 else b""
        seq = int.from_bytes(frames[-2], "big")
        if seq >= following:
            await live.send_multipart([topic, frames[-2], frames[-1]])
            following = seq + 1
