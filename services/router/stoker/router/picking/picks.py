"""Picked requests: each is held until its caller tells its end, or nothing is heard of it any more."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import msgspec
from msgspec.structs import replace

from stoker.common.errors import Unavailable
from stoker.router import metrics
from stoker.router.flights.flight import Flight
from stoker.router.flights.routing import Admission, Router
from stoker.router.workers.siblings import Siblings

API = "pick"
MOST_REPORTS = 10_000
"""In one call."""
_FASTEST = 10.0
"""Times the prefill rate that is measured: nobody computes a prompt faster."""


class Event(Enum):
    """What a caller can tell."""

    ALIVE = "alive"
    FIRST_TOKEN = "first_token"  # noqa: S105 - no password
    MOVED = "moved"
    SERVED = "served"
    FAILED = "failed"
    DROPPED = "dropped"


@dataclass(slots=True)
class _Pick:
    flight: Flight
    admission: Admission
    request_id: str
    places: tuple[str, ...]
    began: float
    until: float
    token_seen: bool = False


class Picks:
    """All of one router, each under a secret name, that nobody can end another's."""

    def __init__(
        self,
        router: Router,
        unheard_s: float,
        silence_s: float,
        longest_s: float,
        siblings: Siblings,
    ) -> None:
        """A pick of which nothing was heard within `unheard_s`, or within `silence_s` of the last word, is given up,
        and whatever its caller says after `longest_s`.

        Whether its request runs then, its replica's reports show: it may run for an hour, with a caller who tells
        nothing.
        """
        self._router = router
        self._unheard_s = unheard_s
        self._silence_s = silence_s
        self._longest_s = longest_s
        self._open: dict[str, _Pick] = {}
        self._siblings = siblings
        siblings.hears(API, self._hear)

    def __len__(self) -> int:
        return len(self._open)

    def open(self, name: str, flight: Flight, admission: Admission, request_id: str, places: tuple[str, ...]) -> None:
        """Take over a flight and its place in the router, under a name that nobody can guess."""
        now = self._router.clock()
        self._open[name] = _Pick(flight, admission, request_id, places, now, now + self._unheard_s)

    def tell(self, name: str, event: Event, place: int = 0, *, fault: bool = False) -> None:
        """Something happened to one. What is not known (any more) is passed over.

        With MOVED, `place` is where it goes, and `fault` says that the one before failed.
        """
        pick = self._open.get(name)
        if pick is None:
            self._siblings.pass_on(name, API, msgspec.msgpack.encode((name, event.value, place, fault)))
            return
        now = self._router.clock()
        pick.until = min(now + self._silence_s, pick.began + self._longest_s)
        match event:
            case Event.FIRST_TOKEN if not pick.token_seen:
                pick.token_seen = True
                pick.flight.first_token()
                metrics.of(metrics.TTFT, API).observe(now - pick.began)
            case Event.MOVED:
                self._move(name, pick, place, fault=fault)
            case Event.SERVED:
                if self._credible(pick, now):
                    pick.flight.served()
                self._end(name, "ok")
            case Event.FAILED:
                # Said by a caller, so it is believed of one replica at a time.
                pick.flight.erred()
                self._end(name, "interrupted" if pick.token_seen else "failed")
            case Event.DROPPED:
                self._end(name, "cancelled")

    def _credible(self, pick: _Pick, now: float) -> bool:
        """Whether that it was served may speak for its replica: for its health, and of what is in its cache now.

        Not where its caller never told a first token, or all is over before any engine could have computed the
        prompt, or the replica is out: that, a check or a relayed request ends, not somebody's word.
        """
        decided = pick.flight.decided
        replica, fleet = decided.target.id, decided.plan.pool.fleet
        rate = fleet.rates.get(replica)  # None: it has left
        if rate is None or not pick.token_seen or fleet.health.ejected(replica, now):
            return False
        return now - pick.began >= decided.decision.prefill_tokens / (_FASTEST * rate)

    def _hear(self, said: bytes) -> None:
        name, event, place, fault = msgspec.msgpack.decode(said, type=tuple[str, Event, int, bool])
        self.tell(name, event, place, fault=fault)

    def _move(self, name: str, pick: _Pick, place: int, *, fault: bool) -> None:
        """Count a request where it goes now."""
        before = pick.flight.decided
        if pick.token_seen or not 0 <= place < len(pick.places) or pick.places[place] == before.target.id:
            return
        if fault:
            pick.flight.erred()
        pick.flight.abandon()
        try:
            decided = self._router.choose(replace(before.plan, pinned=pick.places[place]))
        except Unavailable:
            del self._open[name]
            pick.admission.end()
            metrics.of(metrics.REQUESTS, API, "failed").inc()
            return
        pick.flight = self._router.fly(decided, pick.request_id)

    def _end(self, name: str, outcome: str) -> None:
        pick = self._open.pop(name)
        pick.flight.abandon()
        pick.admission.end()
        metrics.of(metrics.REQUESTS, API, outcome).inc()

    def undo(self, name: str) -> None:
        """Its answer may not have arrived."""
        if name in self._open:
            self._end(name, "cancelled")

    def sweep(self) -> None:
        """Give up those that nothing is heard of."""
        now = self._router.clock()
        for name in [name for name, pick in self._open.items() if pick.until <= now]:
            metrics.PICKS_UNHEARD.inc()
            self._open[name].flight.unheard()
            self._end(name, "unheard")

    def close(self) -> None:
        """Give up all."""
        for name in list(self._open):
            self._end(name, "cancelled")
