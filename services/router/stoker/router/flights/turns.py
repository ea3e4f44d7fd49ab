"""Requests that wait in this router for a replica with room; `core.admission` says whose turn it is."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from stoker.common.errors import Exhausted
from stoker.router import core, metrics
from stoker.router.config import QueueConfig
from stoker.router.fleet.pools import Pool
from stoker.router.flights.demand import Waiting

# After a look at who may go, at least so many times as long for everything else: ends come by the thousand a second.
_REST = 3.0


class Boarded(Protocol):
    """A request that has its replica and is counted there."""

    def abandon(self) -> None:
        """It will not be sent after all."""
        ...


F = TypeVar("F", bound=Boarded)


@dataclass(slots=True)
class _Waiting(Generic[F]):
    depart: Callable[[core.Decision], F]
    turn: asyncio.Future[F]


@dataclass(slots=True)
class _Line:
    """Those who wait for one pool."""

    queue: core.AdmissionQueue
    waiting: dict[int, _Waiting[Any]]
    timer: asyncio.TimerHandle | None = None
    rests_until: float = float("-inf")


class Turns:
    """The lines before all pools. A pool has one only while somebody waits in it."""

    def __init__(self, config: QueueConfig, rng: random.Random, clock: Callable[[], float]) -> None:
        self._config = config
        self._rng = rng
        self._clock = clock
        self._lines: dict[Pool, _Line] = {}

    def before(self, pool: Pool) -> bool:
        """Whether anybody waits for a pool: a newcomer must not pass."""
        return pool in self._lines

    def drain_s(self, pool: Pool) -> float:
        """In how many seconds those who wait for a pool are served, as far as can be said; at least 0.1."""
        line = self._lines.get(pool)
        return max(0.1, line.queue.drain_s(pool.fleet, self._clock())) if line is not None else 0.1

    def __len__(self) -> int:
        return sum(len(line.queue) for line in self._lines.values())

    def waiting(self) -> Iterator[Waiting]:
        """Those who wait now."""
        for pool, line in self._lines.items():
            for request, since in line.queue.waiting():
                yield Waiting(request.adapter or pool.model, since)

    async def wait(
        self,
        pool: Pool,
        request: core.Request,
        depart: Callable[[core.Decision], F],
        since: float | None,
    ) -> F:
        """Wait for a turn, taken by `depart` in the moment it comes; return what that returned.

        `since` is when a request first came that was sent already and came back; None for any other.
        Raises Exhausted (QUEUE_FULL, QUEUE_TIMEOUT), and what the decision raises.
        """
        joined = self._clock()
        line = self._lines.get(pool) or _Line(
            core.AdmissionQueue(self._config.limit, pool.fleet.fairness, self._config.longest_s), {}
        )
        ticket = line.queue.join(request, pool.fleet, joined, since=since)
        self._lines[pool] = line
        turn: asyncio.Future[F] = asyncio.get_running_loop().create_future()
        line.waiting[ticket] = _Waiting(depart, turn)
        self.pump(pool)
        try:
            async with asyncio.timeout(self._config.longest_s):
                return await _taken(turn)
        except TimeoutError:
            raise Exhausted(
                f"no replica of {pool.model} had room within {self._config.longest_s:g} s (queue.longest_s); "
                "try again later, or scale the deployment up",
                reason="QUEUE_TIMEOUT",
                retry_after_s=max(0.1, line.queue.drain_s(pool.fleet, self._clock())),
            ) from None
        finally:
            line.queue.leave(ticket)
            line.waiting.pop(ticket, None)
            self._close_if_empty(pool, line)
            metrics.QUEUE_WAIT.observe(self._clock() - joined)

    def pump(self, pool: Pool) -> None:
        """Something changed at a pool: let those go whose turn it is."""
        line = self._lines.get(pool)
        if line is None:
            return
        began = self._clock()
        if began >= line.rests_until:
            self._grant(pool, line)
            ended = self._clock()
            line.rests_until = ended + _REST * (ended - began)
        self._close_if_empty(pool, line)
        if len(line.queue) and line.timer is None:
            line.timer = asyncio.get_running_loop().call_later(core.RETRY_S, self._again, pool, line)

    def _grant(self, pool: Pool, line: _Line) -> None:
        while (grant := line.queue.grant(pool.fleet, self._clock(), self._rng, explain=True)) is not None:
            waiting = line.waiting.pop(grant.ticket, None)
            if waiting is None or waiting.turn.done():
                continue
            if grant.decision is None:
                waiting.turn.set_exception(grant.error or AssertionError("a grant is a decision or an error"))
                continue
            try:
                waiting.turn.set_result(waiting.depart(grant.decision))
            except Exception as error:  # noqa: BLE001 - it is the waiter's, not that of whoever made room
                waiting.turn.set_exception(error)

    def _again(self, pool: Pool, line: _Line) -> None:
        line.timer = None
        if self._lines.get(pool) is line:
            self.pump(pool)

    def _close_if_empty(self, pool: Pool, line: _Line) -> None:
        if not len(line.queue) and self._lines.get(pool) is line:
            del self._lines[pool]
            if line.timer is not None:
                line.timer.cancel()
                line.timer = None


async def _taken(turn: asyncio.Future[F]) -> F:
    """What a turn gave. Whoever is cancelled in the moment it comes gives it back."""
    try:
        return await turn
    except asyncio.CancelledError:
        if turn.done() and not turn.cancelled() and turn.exception() is None:
            turn.result().abandon()
        raise
