"""Follows one engine process's KV events: in order, without gaps, and saying so when that cannot be.

The socket is always read; what the engine published while nobody listened comes from its replay buffer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import zmq
import zmq.asyncio

from stoker.common.errors import Unavailable
from stoker.node_agent.engine.events import END_OF_REPLAY, Batch, Ignored, Malformed, decode, sequence_of
from stoker.node_agent.engine.protocol import KvEndpoint

_HIGH_WATER = 100_000
_MAX_MESSAGE = 64 << 20
_QUIET_S = (0.25, 1.0, 5.0, 30.0)
"""How long to wait on a silent socket before asking whether something was missed, first to last."""


@dataclass(frozen=True)
class Received:
    """The next batch. `Malformed` ones keep their place, so that order and gaps stay known."""

    seq: int
    batch: Batch | Malformed


@dataclass(frozen=True)
class Lost:
    """Batches `first` to `last` are gone from the replay buffer too: what they said is unknown."""

    first: int
    last: int


@dataclass(frozen=True)
class Restarted:
    """The sequence began anew: another engine process, with an empty cache."""


Item = Received | Lost | Restarted


@dataclass
class Counts:
    """What went by since the start, for metrics."""

    batches: int = 0
    malformed: int = 0
    ignored: int = 0
    replays: int = 0
    replayed: int = 0
    lost: int = 0
    restarts: int = 0


class KvEventStream:
    """The events of one data-parallel rank, as an async context manager and an async iterator.

    Open it before the engine starts; opened later, it first replays what the engine still has, from `start` on.
    """

    def __init__(
        self,
        endpoint: KvEndpoint,
        *,
        start: int = 0,
        replay_timeout_s: float = 2.0,
        quiet_s: tuple[float, ...] = _QUIET_S,
    ) -> None:
        self.counts = Counts()
        self._endpoint = endpoint
        self._replay_timeout_s = replay_timeout_s
        self._quiet_s = quiet_s
        self._quiet_at = 0
        self._context = zmq.asyncio.Context()
        self._live: zmq.asyncio.Socket | None = None
        self._next = start
        self._last_live = -1
        self._last_timestamp_s = 0.0
        self._last_payload: bytes | None = None

    async def __aenter__(self) -> Self:
        """Bind the address the engine connects to. Raises `Unavailable` if it is taken."""
        live = self._context.socket(zmq.SUB)
        live.setsockopt(zmq.RCVHWM, _HIGH_WATER)
        live.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE)
        live.setsockopt(zmq.SUBSCRIBE, b"")
        try:
            live.bind(self._endpoint.events)
        except zmq.ZMQError as error:
            live.close(linger=0)
            self._context.term()
            raise Unavailable(
                f"cannot listen for KV events on {self._endpoint.events}: {error}; give the replica another port",
                reason="KV_EVENTS_PORT_TAKEN",
            ) from error
        self._live = live
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the sockets; what was not read is dropped."""
        self._context.destroy(linger=0)

    async def __aiter__(self) -> AsyncIterator[Item]:
        """All items in order, for ever."""
        async for item in self._replay():
            yield item
        while True:
            frames = await self._receive()
            if frames is None:
                async for item in self._replay():
                    yield item
                continue
            async for item in self._take(frames):
                yield item

    async def _receive(self) -> list[bytes] | None:
        """The next live message, or `None` when it is time to ask for what may have been missed."""
        if self._live is None:
            raise RuntimeError("KvEventStream is used outside its context")
        wait_s = self._quiet_s[self._quiet_at]
        if await self._live.poll(int(wait_s * 1000)):
            return await self._live.recv_multipart()
        self._quiet_at = min(self._quiet_at + 1, len(self._quiet_s) - 1)
        return None

    async def _take(self, frames: list[bytes]) -> AsyncIterator[Item]:
        seq = sequence_of(frames[1]) if len(frames) == 3 else None
        if seq is None:
            self.counts.malformed += 1
            return
        payload = frames[2]
        if seq < self._next:
            if not self._is_new_engine(seq, payload):
                return  # came by replay already
            yield self._restart()
        self._last_live = seq
        if seq > self._next:
            async for item in self._replay():
                yield item
        if seq > self._next:
            yield self._lose(until=seq)
        if seq == self._next:
            yield self._accept(seq, payload)

    def _is_new_engine(self, seq: int, payload: bytes) -> bool:
        # One engine's live sequence only grows, and a repeated batch is as old as it was.
        batch = decode(payload)
        later = isinstance(batch, Batch) and batch.timestamp_s > self._last_timestamp_s
        return seq <= self._last_live or later

    def _restart(self) -> Restarted:
        self.counts.restarts += 1
        self._next, self._last_live, self._last_timestamp_s, self._last_payload = 0, -1, 0.0, None
        self._quiet_at = 0
        return Restarted()

    def _accept(self, seq: int, payload: bytes) -> Received:
        batch = decode(payload)
        self._next, self._last_payload = seq + 1, payload
        self.counts.batches += 1
        if isinstance(batch, Batch):
            self._last_timestamp_s = batch.timestamp_s
            self.counts.ignored += sum(isinstance(event, Ignored) for event in batch.events)
        else:
            self.counts.malformed += 1
        return Received(seq, batch)

    def _lose(self, until: int) -> Lost:
        lost = Lost(self._next, until - 1)
        self.counts.lost += until - self._next
        self._next = until
        return lost

    async def _replay(self) -> AsyncIterator[Item]:
        """Everything from the next sequence on that the engine still holds.

        The engine's replay socket drops what it cannot send at once, so one replay may itself have holes:
        ask again for as long as that brings anything. It is asked for the last batch received, too: an engine
        that does not have it is another engine.
        """
        again = True
        while again:
            again, before, first = False, self._next, True
            async with aclosing(self._replay_once(max(0, before - 1))) as answers:
                async for seq, payload in answers:
                    if first and before and self._is_another(seq, payload):
                        again = True
                        yield self._restart()
                        break
                    first = False
                    if seq == END_OF_REPLAY:
                        break
                    if seq < self._next:
                        continue
                    if seq > self._next > before:  # a hole, not the buffer's beginning
                        again = True
                        break
                    if seq > self._next:
                        yield self._lose(until=seq)
                    self.counts.replayed += 1
                    yield self._accept(seq, payload)

    def _is_another(self, seq: int, payload: bytes) -> bool:
        """Whether a replay from the last batch received begins as no replay of the same engine can."""
        if seq == END_OF_REPLAY:
            return True
        return seq == self._next - 1 and self._last_payload not in (None, payload)

    async def _replay_once(self, start: int) -> AsyncGenerator[tuple[int, bytes], None]:
        """One answer, its end mark included; without that if the engine falls silent."""
        self.counts.replays += 1
        asking = self._context.socket(zmq.DEALER)
        try:
            asking.setsockopt(zmq.RCVHWM, 0)
            asking.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE)
            asking.connect(self._endpoint.replay)
            await asking.send_multipart([b"", start.to_bytes(8, "big")])
            while await asking.poll(int(self._replay_timeout_s * 1000)):
                frames = await asking.recv_multipart()
                seq = sequence_of(frames[2]) if len(frames) == 4 else None
                if seq is None:
                    self.counts.malformed += 1
                else:
                    yield seq, frames[3]
                    if seq == END_OF_REPLAY:
                        return
        finally:
            asking.close(linger=0)
