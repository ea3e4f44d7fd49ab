"""Requests that wait in the router because the replica they want is busy.

An engine serves its queue in order of arrival; what was sent can neither be reordered nor sent elsewhere. So a
replica is sent what keeps it busy and no more, and the rest waits here: each time a replica has room, the one goes
that has least to compute there, by what the caches hold by then. Waiting counts against computing, so nobody is
overtaken for ever: after w seconds only those go first whose prefill is shorter by more than `aging` · w.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from random import Random

from stoker.common.errors import Exhausted, StokerError
from stoker.router.core.decide import candidates, decide
from stoker.router.core.fleet import Fleet
from stoker.router.core.panel import Panel
from stoker.router.core.values import Decision, Request

RETRY_S = 0.05
"""Ask for grants at least this often while requests wait: room can come by time alone, or by a report."""

# Of those that wait, so many of the oldest are considered at a time: the cost of a grant is bounded.
_WINDOW = 32


@dataclass(frozen=True, slots=True)
class Grant:
    """A request whose turn has come: its decision, or the error that ends it."""

    ticket: int
    decision: Decision | None = None
    error: StokerError | None = None


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: Request
    policy: str
    since: float


class AdmissionQueue:
    """The requests of one pool that wait for a replica with room, at most `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: dict[int, _Waiting] = {}
        self._next = 1
        self._prompt_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, request: Request, fleet: Fleet, now: float, *, policy: str, since: float | None = None) -> int:
        """Wait; returns a ticket. `since` is when it first came, for one that was sent already and came back.

        Raises Exhausted (reason QUEUE_FULL), with the time in which those that wait can be computed.
        """
        if len(self._waiting) >= self._limit:
            raise Exhausted(
                f"{len(self._waiting)} requests wait for a replica of this model, as many as may; "
                "try again later, or scale the deployment up",
                reason="QUEUE_FULL",
                retry_after_s=max(0.1, self.drain_s(fleet)),
            )
        ticket = self._next
        self._next += 1
        self._waiting[ticket] = _Waiting(request, policy, now if since is None else since)
        self._prompt_tokens += request.prompt_tokens
        return ticket

    def leave(self, ticket: int) -> None:
        """Wait no longer: granted, cancelled or timed out. Harmless when repeated."""
        gone = self._waiting.pop(ticket, None)
        if gone is not None:
            self._prompt_tokens -= gone.request.prompt_tokens

    def drain_s(self, fleet: Fleet) -> float:
        """Return how long the fleet takes to compute all that wait, if nothing is cached, in seconds."""
        rate = sum(rate for name, rate in fleet.rates.items() if fleet.replicas[name].ready)
        return self._prompt_tokens / rate if rate else 1.0

    def grant(self, fleet: Fleet, now: float, rng: Random, *, explain: bool = False) -> Grant | None:
        """Take the request that goes next out of the queue; None while all must wait.

        The caller dispatches it, then asks again: each grant changes the load that the next one sees.
        """
        best: tuple[float, int, Decision] | None = None
        room: dict[Panel, bool] = {}
        for ticket, waiting in islice(self._waiting.items(), _WINDOW):
            head_start = fleet.config.aging * (now - waiting.since)
            if best is not None and best[0] <= -head_start:
                continue  # not even a prompt with nothing to compute would go before
            try:
                panel, _ = candidates(waiting.request, fleet, now)
                if panel not in room:
                    room[panel] = not all(fleet.busy(replica, now) for replica in panel.ids)
                if not room[panel]:
                    continue
                decision = decide(waiting.request, fleet, now, rng, policy=waiting.policy, explain=explain)
            except StokerError as error:
                self.leave(ticket)
                return Grant(ticket, error=error)
            if fleet.busy(decision.replica, now):
                continue
            seconds = decision.prefill_tokens / fleet.rates[decision.replica]
            score = seconds - head_start
            if best is None or score < best[0]:
                best = (score, ticket, decision)
        if best is None:
            return None
        _, ticket, decision = best
        self.leave(ticket)
        return Grant(ticket, decision)
