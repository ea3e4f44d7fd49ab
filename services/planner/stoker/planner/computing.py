"""Heavy computations beside the loop: one at a time, in a thread, ended by their callers."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from stoker.common.errors import DeadlineExceeded, Exhausted

T = TypeVar("T")

_MARGIN_S = 0.25
"""Of a caller's deadline, what is left for building and sending the answer."""


_AGAIN_S = 0.5
"""What nobody waits for is told so again after this time, until it has ended."""


class Abandoned(Exception):
    """Ends a computation that nobody waits for; nobody hears of it."""


@dataclass(frozen=True)
class Task:
    """What a computation may take. `stop` is set when nobody waits for it any more."""

    limit_s: float
    stop: threading.Event
    _ends: list[Callable[[], None]] = field(default_factory=list)

    def clock(self) -> float:
        """Monotonic seconds; for ever gone by once nobody waits any more, so that whoever looks at it ends."""
        return math.inf if self.stop.is_set() else time.monotonic()

    def look(self) -> None:
        """For computations without a clock to call now and then. Raises Abandoned once nobody waits any more."""
        if self.stop.is_set():
            raise Abandoned

    def stopping(self, end: Callable[[], None]) -> None:
        """For computations that look at nothing for long: `end` is called once nobody waits any more, from another
        thread. It replaces the one before."""
        self._ends[:] = [end]
        if self.stop.is_set():
            end()

    def abandon(self) -> None:
        """Nobody waits any more."""
        self.stop.set()
        for end in tuple(self._ends):
            end()


class Computing:
    """Runs one computation at a time; others are turned away rather than queued."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._running: asyncio.Future[Any] | None = None

    async def run(self, work: Callable[[Task], T], *, left_s: float | None, limit_s: float | None = None) -> T:
        """The answer of `work`. `left_s` is what the caller's deadline leaves, None without one; `limit_s` what it
        asks for. Raises PLANNER_BUSY while another runs, and DEADLINE_EXCEEDED.

        A caller that goes away sets `Task.stop`; until the thread has seen it, this one still counts as running.
        """
        if self._running is not None and not self._running.done():
            raise Exhausted(
                "this planner computes something else; ask again, or another planner",
                reason="PLANNER_BUSY",
                retry_after_s=1.0,
            )
        bounds = [self._longest_s, limit_s, left_s - _MARGIN_S if left_s is not None else None]
        longest_s = min(bound for bound in bounds if bound is not None)
        if left_s is not None and left_s <= _MARGIN_S:
            raise DeadlineExceeded(f"the deadline leaves {max(0.0, left_s):.2f} s, too little to compute anything")
        task = Task(max(0.0, longest_s), threading.Event())
        running = asyncio.ensure_future(asyncio.to_thread(work, task))
        self._running = running
        running.add_done_callback(_retrieved)
        try:
            async with asyncio.timeout(left_s):
                # Shielded: a thread cannot be cancelled, and until it ends no other may begin.
                return await asyncio.shield(running)
        except TimeoutError:
            raise DeadlineExceeded("the caller's deadline passed before the answer was there; allow more") from None
        finally:
            _end(running, task)


def _end(running: asyncio.Future[Any], task: Task) -> None:
    """More than once: a solver forgets what it is told before it has begun."""
    if not running.done():
        task.abandon()
        asyncio.get_running_loop().call_later(_AGAIN_S, _end, running, task)


def _retrieved(done: asyncio.Future[Any]) -> None:
    """Takes note of an error that nobody waits for."""
    if not done.cancelled():
        done.exception()
