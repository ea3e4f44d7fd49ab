"""Publishes KV events as vLLM does: msgpack batches over ZeroMQ, with a buffer for replay."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from stoker.sim_engine.config import KvEventsConfig
from stoker.sim_engine.core.blocks import AllCleared, BlocksRemoved, BlocksStored, CacheEvent

_END = (-1).to_bytes(8, "big", signed=True)
_WILDCARDS = ("*", "::", "ipc://", "inproc://")


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    """vLLM's event, field for field."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    """vLLM's event, field for field."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True):
    """vLLM's event, field for field."""


class Publisher:
    """One engine's event socket, and the replay socket beside it."""

    def __init__(self, config: KvEventsConfig, block_size: int, *, rank: int = 0, drop_every: int = 0) -> None:
        config = config.of_rank(rank)
        self._rank = rank
        self._block_size = block_size
        self._drop_every = drop_every
        self._topic = config.topic.encode()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._next = 0
        self._pack = msgspec.msgpack.Encoder()
        self._context = zmq.asyncio.Context()
        self._live = zmq.Context(self._context).socket(zmq.PUB)
        self._live.setsockopt(zmq.SNDHWM, config.hwm)
        if any(mark in config.endpoint for mark in _WILDCARDS):
            self._live.bind(config.endpoint)
        else:
            self._live.connect(config.endpoint)
        self._replay: zmq.asyncio.Socket | None = None
        if config.replay_endpoint:
            self._replay = self._context.socket(zmq.ROUTER)
            self._replay.setsockopt(zmq.SNDHWM, 0)
            self._replay.bind(config.replay_endpoint)

    def publish(self, timestamp_s: float, events: Sequence[CacheEvent]) -> None:
        """Send one step's events. Never blocks: a subscriber that is too slow misses some."""
        seq, self._next = self._next, self._next + 1
        payload = self._pack.encode([timestamp_s, [self._wire(event) for event in events], self._rank])
        self._buffer.append((seq, payload))
        if self._drop_every and (seq + 1) % self._drop_every == 0:
            return
        with contextlib.suppress(zmq.Again):
            self._live.send_multipart([self._topic, seq.to_bytes(8, "big"), payload], flags=zmq.NOBLOCK)

    async def serve_replay(self) -> None:
        """Answer replay requests until cancelled."""
        if self._replay is None:
            return
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) != 3:
                continue
            peer, start = frames[0], int.from_bytes(frames[2], "big")
            oldest = self._buffer[0][0] if self._buffer else self._next
            for seq, payload in list(islice(self._buffer, max(0, start - oldest), None)):
                await self._replay.send_multipart([peer, b"", self._topic, seq.to_bytes(8, "big"), payload])
            await self._replay.send_multipart([peer, b"", b"", _END, b""])
            await asyncio.sleep(0)

    def close(self) -> None:
        """Close the sockets; what is queued is dropped."""
        self._live.close(linger=0)
        self._context.destroy(linger=0)

    def _wire(self, event: CacheEvent) -> BlockStored | BlockRemoved | AllBlocksCleared:
        match event:
            case BlocksStored(hashes, parent, tokens, salt):
                extra: list[list[Any] | None] = [None] * len(hashes)
                if salt is not None:
                    extra[0] = [salt]
                return BlockStored(
                    block_hashes=list(hashes),
                    parent_block_hash=parent,
                    token_ids=list(tokens),
                    block_size=self._block_size,
                    lora_id=None,
                    medium="GPU",
                    lora_name=None,
                    extra_keys=extra,
                    group_idx=0,
                    kv_cache_spec_kind="full_attention",
                )
            case BlocksRemoved(hashes):
                return BlockRemoved(block_hashes=list(hashes), medium="GPU", group_idx=0)
            case AllCleared():
                return AllBlocksCleared()
