"""A request on its way to a replica: counted there until it ends, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from stoker.router import core, metrics
from stoker.router.decisions.decided import Decided
from stoker.router.decisions.recorder import Ended

if TYPE_CHECKING:
    from stoker.router.flights.routing import Router

_NOT_IMPLEMENTED = 501  # asks for what this engine cannot do: no replica is at fault


class Usage(NamedTuple):
    """What an engine says of a request, in tokens; None for what it does not say."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    generated_tokens: int | None = None


_UNTOLD = Usage()


class Flight:
    """A request on its way to one replica. Leaving the `with` block releases it, however that happens."""

    __slots__ = (
        "_clock",
        "_end",
        "_first_token_at",
        "_id",
        "_leave",
        "_outcome",
        "_router",
        "_tally",
        "decided",
        "moved",
        "usage",
    )

    def __init__(self, router: Router, decided: Decided) -> None:
        self._router = router
        self._clock = router.clock
        self._outcome = core.Outcome.CALLER
        self._leave: Callable[[], None] | None = None
        self._first_token_at: float | None = None
        self.usage = _UNTOLD
        self.decided = decided
        self.moved = False
        """Its replica was found dead, and a retry is taken for it."""
        fleet = decided.plan.pool.fleet
        self._end = fleet.release
        self._id = fleet.dispatch(decided.plan.request, decided.decision, self._clock())
        decided.target.in_flight += 1
        self._tally = router.demand.departed(decided)

    def first_token(self) -> None:
        """The engine's first byte of output is here."""
        self.stay()
        pool, now = self.decided.plan.pool, self._clock()
        if self._first_token_at is None:
            self._first_token_at = now
        pool.fleet.first_token(self._id, now)
        self._router.turns.pump(pool)

    def used(self, prompt_tokens: int, cached_tokens: int | None, generated_tokens: int | None) -> None:
        """The engine said what it found in its cache and generated; None for what it did not say."""
        self.usage = Usage(prompt_tokens, cached_tokens, generated_tokens)
        if cached_tokens is not None:
            model = self.decided.plan.pool.model
            metrics.of(metrics.COMPARED, model).inc(prompt_tokens)
            metrics.of(metrics.ACTUAL, model).inc(cached_tokens)

    def first_token_after(self, seconds: float) -> None:
        """Of a stream that is over: its first byte came so long after the request, as who carried it measured."""
        self._first_token_at = self.decided.since + seconds

    def first_token_ago_s(self) -> float | None:
        """How many seconds ago the first token came; None where none did."""
        return None if self._first_token_at is None else self._clock() - self._first_token_at

    def served(self) -> None:
        """The engine did its part."""
        self._outcome = core.Outcome.OK
        self._router.confirmations.served(self.decided.plan, self.decided.target, self._clock())

    def faulted(self) -> None:
        """The engine's connection failed, or it fell silent."""
        self._outcome = core.Outcome.FAULT

    def erred(self) -> None:
        """The engine answered that it failed.

        That can be the request's own doing, so such answers take out one replica at a time: whoever sends what no
        engine can serve would otherwise take out one after the other.
        """
        pool, now = self.decided.plan.pool, self._clock()
        others = pool.targets.keys() - self.decided.target.siblings
        if not any(pool.fleet.health.ejected(name, now) for name in others):
            self._outcome = core.Outcome.FAULT

    def answered(self, status: int) -> str:
        """The engine answered to the end, with this HTTP status; returns the outcome as metrics call it."""
        if status >= 500:
            if status != _NOT_IMPLEMENTED:
                self.erred()
            return "failed"
        if status >= 400:
            return "client_error"
        self.served()
        return "ok"

    def may_retry(self, tried: frozenset[str]) -> bool:
        """Spend a retry, now that it failed here too, if there is one left."""
        return self._router.may_retry(tried | self.decided.target.siblings)

    def movable(self, until: asyncio.Timeout, tried: frozenset[str], may_retry: Callable[[], bool]) -> None:
        """Until its first token, let `until` run out at once where the replica is found dead and another can serve.

        `may_retry` is asked then, and spends the retry. The waiter sees by `moved` why its time ran out.
        """

        def leave() -> None:
            if until.expired() or not self._router.elsewhere(self.decided, tried) or not may_retry():
                return
            self.stay()
            self.moved = True
            until.reschedule(asyncio.get_running_loop().time())

        self.stay()
        self._leave = leave
        self.decided.target.waiting.add(leave)

    def stay(self) -> None:
        """Something of the answer is here: it moves no more."""
        if self._leave is not None:
            self.decided.target.waiting.discard(self._leave)
            self._leave = None

    def unheard(self) -> None:
        """Nobody will tell how it ends: its replica's reports alone have it from here on."""
        self._end = self.decided.plan.pool.fleet.hand_over

    def abandon(self) -> None:
        """It will not be sent after all."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Flight:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stay()
        now = self._clock()
        pool = self.decided.plan.pool
        self._end(self._id, now)
        self.decided.target.in_flight -= 1
        first = self._first_token_at
        ends = self._tally.ends
        if first is None:
            ends.append((self._outcome, self.usage, None, 0.0))
        else:
            ends.append((self._outcome, self.usage, first - self.decided.since, now - first))
        if len(ends) >= core.MOST_ENDS:
            self._tally.fold()
        pool.fleet.observe(self.decided.target.id, self._outcome, now)
        recorder = self._router.recorder
        if recorder is not None:
            replica = pool.fleet.replicas.get(self.decided.target.id)
            recorder.tell(Ended(self.decided, replica, self._outcome, now, self._first_token_at, *self.usage[1:]))
        self._router.turns.pump(pool)
