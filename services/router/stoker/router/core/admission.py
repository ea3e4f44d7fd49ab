"""Requests that wait in the router because the replica they want is busy.

An engine serves its queue in order of arrival; what was sent can neither be reordered nor sent elsewhere. So a
replica is sent what keeps it busy and no more, and the rest waits here: each time a replica has room, the one goes
that has least to compute there, by what the caches hold by then. Waiting counts against computing, so nobody is
overtaken for ever: after w seconds only those go first whose prefill is shorter by more than `aging` · w.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from random import Random
from typing import Protocol

from stoker.common.errors import Exhausted, StokerError
from stoker.router.core.decide import decide
from stoker.router.core.fleet import Fleet
from stoker.router.core.values import Decision, Request

RETRY_S = 0.05
"""Ask for grants at least this often while requests wait: room can come by time alone, or by a report."""

# So many of the oldest that wait are considered at a time, and so many of the others; fewer where many replicas are
# weighed for each. The cost of a grant is bounded.
_WINDOW, _WINDOW_LEAST = 32, 4
_WEIGHED = 1_000


@dataclass(frozen=True, slots=True)
class Grant:
    """A request whose turn has come: its decision, or the error that ends it."""

    ticket: int
    decision: Decision | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: Request
    policy: str
    since: float


class _Chooser(Protocol):
    def __call__(self, request: Request, *, policy: str) -> Decision: ...


class AdmissionQueue:
    """The requests of one pool that wait for a replica with room, oldest first; `limit` bounds newcomers."""

    def __init__(self, limit: int, longest_s: float = float("inf")) -> None:
        """`longest_s`: how long a request waits at most; its owner sees to that."""
        self._limit = limit
        self._longest_s = longest_s
        self._waiting: dict[int, _Waiting] = {}
        self._next = 1
        self._next_other = 0
        self._prompt_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, request: Request, fleet: Fleet, now: float, *, policy: str, since: float | None = None) -> int:
        """Wait; returns a ticket. `since` is when it first came, for one that was sent already and came back.

        Raises Exhausted (reason QUEUE_FULL), with the time in which those that wait can be computed; not for one that
        came back, which was let in before.
        """
        if since is None and len(self._waiting) >= self._limit:
            raise Exhausted(
                f"{len(self._waiting)} requests wait for a replica of this model, as many as may; "
                "try again later, or scale the deployment up",
                reason="QUEUE_FULL",
                retry_after_s=max(0.1, self.drain_s(fleet)),
            )
        ticket = self._next
        self._next += 1
        self._waiting[ticket] = _Waiting(request, policy, now if since is None else since)
        if since is not None:
            self._waiting = dict(sorted(self._waiting.items(), key=lambda item: item[1].since))
        self._prompt_tokens += request.prompt_tokens
        return ticket

    def leave(self, ticket: int) -> None:
        """Wait no longer: granted, cancelled or timed out. Harmless when repeated."""
        gone = self._waiting.pop(ticket, None)
        if gone is not None:
            self._prompt_tokens -= gone.request.prompt_tokens

    def drain_s(self, fleet: Fleet) -> float:
        """Return in how many seconds all that wait are gone: computed, if nothing is cached, or given up."""
        rate = sum(rate for name, rate in fleet.rates.items() if fleet.replicas[name].ready)
        return min(self._longest_s, self._prompt_tokens / rate) if rate else 1.0

    def grant(self, fleet: Fleet, now: float, rng: Random, *, explain: bool = False) -> Grant | None:
        """Take the request that goes next out of the queue; None while all must wait.

        The caller dispatches it, then asks again: each grant changes the load that the next one sees.
        """
        able = [replica.id for replica in fleet.replicas.values() if replica.ready and not replica.draining]
        free = frozenset(name for name in able if not fleet.busy(name, now))
        if able and not free:
            return None
        size = min(_WINDOW, max(_WINDOW_LEAST, _WEIGHED // max(1, len(able))))
        chooser = partial(decide, fleet=fleet, now=now, rng=rng, explain=explain)
        oldest = list(islice(self._waiting.items(), size))
        granted = self._shortest(oldest, fleet, now, chooser)
        if granted is None and len(self._waiting) > size:
            granted = self._shortest(self._others(size), fleet, now, chooser)
        return granted or self._spilled(oldest, free, fleet, now, chooser)

    def _others(self, size: int) -> list[tuple[int, _Waiting]]:
        """Some of those behind the oldest, in turn: the oldest may all want the same replica, and these another."""
        start = self._next_other if size <= self._next_other < len(self._waiting) else size
        self._next_other = start + size
        return list(islice(self._waiting.items(), start, start + size))

    def _shortest(
        self, window: list[tuple[int, _Waiting]], fleet: Fleet, now: float, chooser: _Chooser
    ) -> Grant | None:
        """Of those whose replica has room, the one that has least to compute there."""
        best: tuple[float, int, Decision] | None = None
        for ticket, waiting in window:
            try:
                decision = chooser(waiting.request, policy=waiting.policy)
            except Exception as error:  # noqa: BLE001 - it is the waiter's, not that of whoever made room
                self.leave(ticket)
                return Grant(ticket, error=error)
            if fleet.busy(decision.replica, now):
                continue
            seconds = decision.prefill_tokens / fleet.rates[decision.replica]
            score = seconds - fleet.config.aging * (now - waiting.since)
            if best is None or score < best[0]:
                best = (score, ticket, decision)
        if best is None:
            return None
        _, ticket, decision = best
        self.leave(ticket)
        return Grant(ticket, decision)

    def _spilled(
        self,
        oldest: list[tuple[int, _Waiting]],
        free: frozenset[str],
        fleet: Fleet,
        now: float,
        chooser: _Chooser,
    ) -> Grant | None:
        """Of those who have waited as long as a miss costs, the oldest that a replica can take which nobody wants.

        What waits here is no load anywhere: without this, all that share a hot prefix wait for the one replica that
        holds it, while the others do nothing.
        """
        free = frozenset(name for name in free if not fleet.health.ejected(name, now))
        if not free:
            return None
        rate = min(fleet.rates[name] for name in free)
        elsewhere = frozenset(fleet.replicas.keys() - free)
        for ticket, waiting in oldest:
            request = waiting.request
            if fleet.config.miss_weight * request.prompt_tokens > rate * (now - waiting.since):
                continue
            try:
                decision = chooser(replace(request, exclude=request.exclude | elsewhere), policy=waiting.policy)
            except StokerError:
                continue  # none of these can serve it
            if not decision.over_bound:
                self.leave(ticket)
                return Grant(ticket, decision)
        return None
