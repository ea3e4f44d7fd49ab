"""Dispatches on their way from one router to the others: bounded, and worth less with every moment."""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

MAX_DISPATCHES = 1_024
"""Dispatches in one message."""
MAX_KEYS = 4_096
"""Block keys of one dispatch; of a longer prompt the first ones go."""
MAX_TOKENS = 100_000_000
MAX_AGE_MS = 60_000
QUEUE_BYTES = 4 * 1024 * 1024
"""What waits for one reader: some seconds of 1,000 requests a second."""
_OVERHEAD_BYTES = 128


class _Sized(Protocol):
    def ByteSize(self) -> int: ...  # noqa: N802 - protobuf's name


T = TypeVar("T", bound=_Sized)


class DropOldest(Generic[T]):
    """A queue of messages of at most `limit_bytes`: where a new one does not fit, the oldest go."""

    def __init__(self, limit_bytes: int = QUEUE_BYTES) -> None:
        self.dropped = 0
        """Messages that gave way so far."""
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._waiting: deque[tuple[float, int, T]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, message: T, now: float) -> None:
        """Let a message wait, from `now` (seconds) on."""
        size = message.ByteSize() + _OVERHEAD_BYTES
        self._waiting.append((now, size, message))
        self._bytes += size
        while self._bytes > self._limit_bytes:
            self._bytes -= self._waiting.popleft()[1]
            self.dropped += 1

    def take(self) -> list[tuple[float, T]]:
        """All that wait, oldest first, each with the time since when."""
        taken = [(since, message) for since, _, message in self._waiting]
        self._waiting.clear()
        self._bytes = 0
        return taken


def aged_ms(age_ms: int, since: float, now: float) -> int:
    """An age after a wait, both in ms; at most what is allowed to be told."""
    return min(MAX_AGE_MS, age_ms + max(0, round(1000 * (now - since))))
