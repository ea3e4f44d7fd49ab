"""Flights whose tokens travel by Envoy: held until its access log says that they ended, or says nothing any more."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from stoker.router import metrics
from stoker.router.routing import Flight


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
    """To the client's first byte, seconds."""


@dataclass(slots=True)
class OpenFlight:
    """One of them."""

    flight: Flight
    held: contextlib.ExitStack
    api: str
    stream: bool
    heard: float
    known: bool = False
    """Envoy has told of it."""
    token_seen: bool = False


class Flights:
    """All of one router. Each has a secret name, that nobody can end another's."""

    def __init__(
        self, silence_s: float, clock: Callable[[], float], refused: Callable[[str], None] = lambda replica: None
    ) -> None:
        """`silence_s`: a flight not heard of for so long has ended. `refused` hears of dead engines."""
        self._silence_s = silence_s
        self._clock = clock
        self._refused = refused
        self._open: dict[str, OpenFlight] = {}

    def __len__(self) -> int:
        return len(self._open)

    def now(self) -> tuple[OpenFlight, ...]:
        """Those that are open now."""
        return tuple(self._open.values())

    def open(self, flight: Flight, held: contextlib.ExitStack, api: str, *, stream: bool) -> str:
        """Take over a flight; closing `held` releases it. Returns its name."""
        name = secrets.token_hex(12)
        self._open[name] = OpenFlight(flight, held, api, stream, self._clock())
        return name

    def goes_on(self, name: str, *, answered: bool) -> None:
        """It is still under way; `answered`: the engine's first byte is there."""
        found = self._open.get(name)
        if found is None:
            return
        found.heard, found.known = self._clock(), True
        # Of an answer that is no stream the first byte is the end, which is told anyway.
        if answered and found.stream and not found.token_seen:
            found.token_seen = True
            found.flight.first_token()

    def ended(self, name: str, ending: Ending) -> None:
        """It has ended."""
        found = self._open.pop(name, None)
        if found is None:
            return
        with found.held:
            if ending.first_byte_s is not None:
                metrics.of(metrics.TTFT, found.api).observe(ending.first_byte_s)
            metrics.of(metrics.REQUESTS, found.api, self._settle(found.flight, ending)).inc()

    def _settle(self, flight: Flight, ending: Ending) -> str:
        if ending.fault:
            flight.faulted()
            if ending.refused:
                self._refused(flight.decided.target.id)
            return "interrupted" if 0 < ending.status < 400 else "failed"
        if ending.gone or not ending.status:
            return "cancelled"
        if ending.late:
            return "timeout"
        return flight.answered(ending.status)

    def drop(self, name: str) -> None:
        """It never began."""
        found = self._open.pop(name, None)
        if found is not None:
            with found.held:
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
