"""From a job's arrival to its end in simulated time: routed, queued, sent, answered."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from stoker.bench.replicas import Clock, Engine, Job
from stoker.bench.sites import Announcements, Delays, RouterSite
from stoker.common.errors import StokerError
from stoker.router.core import RETRY_S, Decision, Dispatched, Request


@dataclass(slots=True, eq=False)
class Asked:
    """A job at a router's door, and what became of it. Times are simulated seconds, None while not yet."""

    job: Job
    request: Request
    at: float
    over: Callable[[], None]
    replica: str = ""
    sent_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None


class Listener(Protocol):
    """Who hears what becomes of each job, the moment it happens."""

    def sent(self, asked: Asked, decision: Decision) -> None:
        """It was sent to a replica."""

    def first_token(self, asked: Asked) -> None:
        """Its first token was generated."""

    def ended(self, asked: Asked) -> None:
        """Its last token was."""

    def refused(self, asked: Asked, error: StokerError | None) -> None:
        """It will not be served: the router's error, or None where it has waited as long as it may."""


class Desk:
    """Hands jobs to the routers in turn, and follows each to its end."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        sites: Sequence[RouterSite],
        announcements: Announcements | None,
        clock: Clock,
        delays: Delays,
        listener: Listener,
    ) -> None:
        """`engines` by replica; it may change while the desk is open."""
        self._engines = engines
        self._announcements = announcements
        self._clock = clock
        self._delays = delays
        self._listener = listener
        self._turns = itertools.cycle(sites)
        self._waiting: dict[tuple[int, int], Asked] = {}
        self._flights: dict[str, dict[int, tuple[Asked, RouterSite, Callable[[], None]]]] = {}
        self._ticking: set[int] = set()

    @property
    def waiting(self) -> int:
        """Requests held by routers."""
        return len(self._waiting)

    def longest_wait_s(self) -> float:
        """How long the first of these has been held; 0 where there is none."""
        return self._clock.now - next(iter(self._waiting.values())).at if self._waiting else 0.0

    def start(self, job: Job, block_size: int, over: Callable[[], None] = lambda: None) -> None:
        """Route a job now; `over` is called when it has been served or refused."""
        site = next(self._turns)
        request = Request(
            job.keys,
            job.prompt_tokens,
            block_size,
            job.output_tokens if job.asked_tokens is None else job.asked_tokens,
            session=job.session,
            priority=job.priority,
            tenant=job.tenant,
            weight=job.weight,
        )
        self._route(site, Asked(job, request, self._clock.now, over))

    def lost(self, replica: str, told: Callable[[Asked], None]) -> None:
        """A replica died, and the routers know it: what it had is asked for again elsewhere, from the beginning, once
        `told` has heard of it. A first token that was there is not taken back."""
        for asked, site, release in self._flights.pop(replica, {}).values():
            release()
            told(asked)
            asked.replica, asked.sent_at = "", None
            self._route(site, asked)

    def _route(self, site: RouterSite, asked: Asked) -> None:
        try:
            decision, ticket = site.route(asked.request, self._clock.now)
        except StokerError as error:
            self._refuse(asked, error)
            return
        if decision is not None:
            self._send(site, asked, decision)
            return
        self._waiting[id(site), ticket] = asked
        if site.longest_s < float("inf"):
            self._clock.after(site.longest_s, partial(self._give_up, site, ticket))
        self.grant(site)

    def _refuse(self, asked: Asked, error: StokerError | None) -> None:
        self._listener.refused(asked, error)
        asked.over()

    def _give_up(self, site: RouterSite, ticket: int) -> None:
        asked = self._waiting.pop((id(site), ticket), None)
        if asked is not None:
            site.queue.leave(ticket)
            self._refuse(asked, None)

    def grant(self, site: RouterSite) -> None:
        """Send what waits and has a replica with room."""
        while len(site.queue) and (granted := site.grant(self._clock.now)) is not None:
            asked = self._waiting.pop((id(site), granted.ticket))
            if granted.decision is not None:
                self._send(site, asked, granted.decision)
            else:
                self._refuse(asked, granted.error)
        if len(site.queue) and id(site) not in self._ticking:
            self._ticking.add(id(site))
            self._clock.after(RETRY_S, partial(self._tick, site))

    def _tick(self, site: RouterSite) -> None:
        self._ticking.discard(id(site))
        self.grant(site)

    def _send(self, site: RouterSite, asked: Asked, decision: Decision) -> None:
        clock, fleet = self._clock, site.fleet
        asked.replica, asked.sent_at = decision.replica, clock.now
        if self._announcements is not None:
            self._announcements.tell(site, Dispatched.of(asked.request, decision))
        flight = fleet.dispatch(asked.request, decision, clock.now)
        flights = self._flights.setdefault(decision.replica, {})
        flights[id(asked)] = asked, site, lambda: fleet.release(flight, clock.now)
        self._listener.sent(asked, decision)

        def heard(end: bool) -> None:
            if end:
                fleet.release(flight, clock.now)
            else:
                fleet.first_token(flight, clock.now)
            self.grant(site)

        def done(end: bool) -> None:
            clock.after(self._delays.end_s, partial(heard, end))
            if end:
                del flights[id(asked)]
                asked.ended_at = clock.now
                self._listener.ended(asked)
                asked.over()
            elif asked.first_token_at is None:  # else it was there before its replica died
                asked.first_token_at = clock.now
                self._listener.first_token(asked)

        self._engines[decision.replica].submit(asked.job, done, asked.at)
