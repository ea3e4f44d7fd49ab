"""Flights whose tokens travel by Envoy: held until its access log says that they ended, or says nothing any more."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stoker.common.errors import StokerError
from stoker.router import metrics
from stoker.router.decisions.decided import Decided
from stoker.router.fleet.pools import Target
from stoker.router.flights.flight import Flight
from stoker.router.flights.routing import Admission

_RETRIED_STATUSES = frozenset({502, 503, 504})


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended, as Envoy tells. `status` is 0 where no answer went out."""

    status: int
    fault: bool = False
    """The engine's connection failed, or it fell silent."""
    refused: bool = False
    """Nothing listens at the engine's port."""
    gone: bool = False
    """The client went away."""
    late: bool = False
    """The time ran out that its caller may have set, or that its reader may have used: no sign of a fault."""
    first_byte_s: float | None = None
    """To the client's first byte, seconds; of a stream its headers, which say nothing of a token."""
    tries: int = 0
    """Engines that were tried; 0 where Envoy does not say."""


@dataclass(slots=True)
class OpenFlight:
    """One of them."""

    flight: Flight | None
    """None after a move to a replica that has left meanwhile."""
    admission: Admission
    api: str
    stream: bool
    heard: float
    request_id: str
    spares: list[Target]
    """Engines that Envoy tries next, in order."""
    moves: int = 0
    known: bool = False
    """Envoy has told of it."""
    token_seen: bool = False

    def release(self) -> None:
        """Count it no more."""
        if self.flight is not None:
            self.flight.abandon()
        self.admission.end()


Move = Callable[[Decided, Target, str], Flight]


class Flights:
    """All of one router. Each has a secret name, that nobody can end another's."""

    def __init__(
        self,
        silence_s: float,
        clock: Callable[[], float],
        move: Move,
        refused: Callable[[str], None] = lambda replica: None,
        nonce: Callable[[], bytes] = lambda: secrets.token_bytes(12),
    ) -> None:
        """`silence_s`: a flight not heard of for so long has ended. `move` counts one as sent to a spare engine.

        `refused` hears of dead engines; the hex of a `nonce` is a flight's name.
        """
        self._silence_s = silence_s
        self._clock = clock
        self._move = move
        self._refused = refused
        self._nonce = nonce
        self._open: dict[str, OpenFlight] = {}

    def __len__(self) -> int:
        return len(self._open)

    def now(self) -> tuple[OpenFlight, ...]:
        """Those that are open now."""
        return tuple(self._open.values())

    def open(
        self,
        flight: Flight,
        admission: Admission,
        api: str,
        *,
        stream: bool,
        request_id: str = "",
        spares: Sequence[Target] = (),
    ) -> str:
        """Take over a flight and its stay in the router. Returns its name."""
        name = self._nonce().hex()
        self._open[name] = OpenFlight(flight, admission, api, stream, self._clock(), request_id, list(spares))
        return name

    def goes_on(self, name: str, *, answered: bool) -> None:
        """It is still under way; `answered`: the answer's body has begun."""
        found = self._open.get(name)
        if found is None:
            return
        found.heard, found.known = self._clock(), True
        # Of an answer that is no stream the first byte is the end, which is told anyway.
        if answered and found.stream and not found.token_seen:
            found.token_seen = True
            if found.flight is not None:
                found.flight.first_token()

    def failed_try(self, name: str, ending: Ending) -> None:
        """An engine failed. Before its first byte Envoy goes on with the next one that it was told of."""
        found = self._open.get(name)
        if found is None or not found.spares or (ending.status and ending.status not in _RETRIED_STATUSES):
            return
        found.heard, found.known = self._clock(), True
        target = found.spares.pop(0)
        found.moves += 1
        failed, found.flight = found.flight, None
        if failed is not None:
            self._settle(failed, ending)
            failed.abandon()
            with contextlib.suppress(StokerError):  # it has just left: nobody's load
                found.flight = self._move(failed.decided, target, found.request_id)

    def ended(self, name: str, ending: Ending) -> None:
        """It has ended."""
        found = self._open.pop(name, None)
        if found is None:
            return
        try:
            first_s = self._first_token_s(found, ending)
            if first_s is not None:
                metrics.of(metrics.TTFT, found.api).observe(first_s)
            # Where tries do not match, it ended elsewhere than it is counted: to nobody's credit or blame.
            flight = found.flight if ending.tries in (0, found.moves + 1) else None
            if flight is not None and found.stream and first_s is not None:
                flight.first_token_after(first_s)
            metrics.of(metrics.REQUESTS, found.api, self._settle(flight, ending)).inc()
        finally:
            found.release()

    def _first_token_s(self, found: OpenFlight, ending: Ending) -> float | None:
        """From arrival to the first token, None where none came; of a stream when a report or its end told of it."""
        if not found.stream or found.flight is None or ending.first_byte_s is None or ending.status >= 400:
            return ending.first_byte_s
        ago_s = found.flight.first_token_ago_s() or 0.0
        return max(ending.first_byte_s, self._clock() - found.flight.decided.since - ago_s)

    def _settle(self, flight: Flight | None, ending: Ending) -> str:
        """Tell a flight how it ended; returns the outcome as metrics call it."""
        if ending.fault:
            if flight is not None:
                flight.faulted()
                if ending.refused:
                    self._refused(flight.decided.target.id)
            return "interrupted" if 0 < ending.status < 400 else "failed"
        if ending.gone or not ending.status:
            return "cancelled"
        if ending.late:
            return "timeout"
        if flight is None:
            return "failed" if ending.status >= 500 else "client_error" if ending.status >= 400 else "ok"
        return flight.answered(ending.status)

    def drop(self, name: str) -> None:
        """It never began."""
        found = self._open.pop(name, None)
        if found is not None:
            found.release()
            metrics.of(metrics.REQUESTS, found.api, "cancelled").inc()

    def undo(self, name: str) -> None:
        """Its decision may not have arrived: it never began, unless Envoy has told of it."""
        found = self._open.get(name)
        if found is not None and not found.known:
            self.drop(name)

    def sweep(self) -> None:
        """Release those that nothing is heard of any more: their Envoy is gone."""
        late = self._clock() - self._silence_s
        for name in [name for name, found in self._open.items() if found.heard < late]:
            metrics.ENVOY_SILENT.inc()
            self.drop(name)

    def close(self) -> None:
        """Release all."""
        for name in list(self._open):
            self.drop(name)
