"""One generation at an engine: what it says, as it arrives.

Whatever ends it (the end, an error, a deadline, a reader who stands still), `close` lets go of its connection at
once, which is how the engine learns to abort.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterator, Sequence

from stoker.api.common.v1 import common_pb2
from stoker.api.inference.v1 import inference_pb2
from stoker.common.errors import DeadlineExceeded, Unavailable
from stoker.common.http1 import Broken, Exchange
from stoker.openai.stream import EventStream, SlowReader, refusal

_MOST_ERROR_BYTES = 1 << 20
# An engine that has said it is done ends its response at once; one that does not loses its connection.
_END_S = 0.1


class Generation:
    """Begun, then its deltas, then its usage; all until `ends`, by the clock of the running loop."""

    __slots__ = ("_answered", "_events", "_exchange", "_loop", "_slow_s", "ends", "given_at", "url")

    def __init__(self, url: str, ends: float) -> None:
        """`url` is the engine's, for errors."""
        self.url = url
        self.ends = ends
        self.given_at: float | None = None
        """Since when its reader has had the last of it and asks for no more; None while it waits. Users set it."""
        self._loop = asyncio.get_running_loop()
        self._events = EventStream()
        self._exchange: Exchange | None = None
        self._answered = False
        self._slow_s: float | None = None

    @property
    def begun(self) -> bool:
        """Whether the request was sent."""
        return self._exchange is not None

    @property
    def done(self) -> bool:
        """Whether the engine has said all, and `deltas` has given it."""
        return self._events.done

    @property
    def usage(self) -> common_pb2.Usage | None:
        """Of tokens, once it is done."""
        return self._events.usage

    async def begin(self, sending: Awaitable[Exchange]) -> None:
        """Take the request as sent. Raises as `deltas`, and what `sending` does."""
        until = asyncio.timeout_at(self.ends)
        with self._failures(until):
            async with until:
                self._exchange = await sending

    async def deltas(self) -> Sequence[inference_pb2.Delta]:
        """What has arrived together since the last call; none at the end.

        Raises what the engine refuses, Unavailable (ENGINE_DIED) where it goes away, DeadlineExceeded, SlowReader.
        """
        exchange = self._exchange
        assert exchange is not None  # noqa: S101 - it was begun
        if self._slow_s is not None:
            raise self._too_slow(self._slow_s)
        until = asyncio.timeout_at(self.ends)
        with self._failures(until):
            async with until:
                if not self._answered:
                    await exchange.head()
                    self._answered = True
                    if exchange.status != 200:
                        raise refusal(exchange.status, await exchange.read(_MOST_ERROR_BYTES))
                while not self._events.done:
                    data = await exchange.readany()
                    if not data:
                        raise Broken("the stream ended before its end")
                    if deltas := list(self._events.feed(data)):
                        return deltas
        return ()

    def let_go_of_slow(self, patience_s: float) -> None:
        """Let the engine go where the reader has stood still for so long; its next call raises SlowReader."""
        if self.given_at is not None and self._loop.time() - self.given_at >= patience_s and self._slow_s is None:
            self._slow_s = patience_s
            self.close()

    def close(self) -> None:
        """Drop the connection, unless the response has ended. Harmless when repeated."""
        if self._exchange is not None:
            self._exchange.close()

    async def end(self) -> None:
        """Read to the end of the response: only then can its connection serve the next request."""
        try:
            with contextlib.suppress(TimeoutError, Broken):
                async with asyncio.timeout(_END_S):
                    while self._exchange is not None and await self._exchange.readany():
                        pass
        finally:
            self.close()

    @contextlib.contextmanager
    def _failures(self, until: asyncio.Timeout) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            if not until.expired():
                raise  # somebody else's
            raise DeadlineExceeded(f"the deadline passed while {self.url} generated") from error
        except Broken as error:
            if self._slow_s is not None:
                raise self._too_slow(self._slow_s) from error
            when = "after its first output" if self._events.emitted else "before any output"
            raise Unavailable(
                f"the engine went away {when}: {error}",
                reason="ENGINE_DIED",
                metadata={"emitted": str(self._events.emitted).lower()},
            ) from error

    @staticmethod
    def _too_slow(patience_s: float) -> SlowReader:
        return SlowReader(f"the reader stood still for {patience_s:g} s; the generation was aborted")
