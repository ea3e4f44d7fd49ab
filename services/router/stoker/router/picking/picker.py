"""One pick: as a relayed request until its replica has room, then its caller's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping
from typing import Any

import msgspec

from stoker.common import otel
from stoker.common.errors import DeadlineExceeded, Exhausted
from stoker.common.otel import Span
from stoker.router import tracing
from stoker.router.decisions.decided import Decided
from stoker.router.fleet.pools import Target
from stoker.router.flights.flight import Flight
from stoker.router.flights.routing import Admission, Router
from stoker.router.flights.tenants import Caller
from stoker.router.picking.picks import Picks
from stoker.router.picking.signing import Signer
from stoker.router.prompts.plan import TOKENS, Plan
from stoker.router.prompts.prompt import Asked
from stoker.router.workers.siblings import Siblings

MOST_ALTERNATIVES = 8
_SPAN = "pick"
_NO_HEADERS: Mapping[str, str] = {}


class Picked(msgspec.Struct, frozen=True):
    """Where a request goes. Times are in seconds; `tokens` are None where they could not be counted."""

    pick_id: str
    request_id: str
    decided: Decided
    places: list[Target]
    """The replica chosen, then the others to try."""
    ticket: str
    expires_in: float
    waited: float

    @property
    def tokens(self) -> int | None:
        """Of the prompt."""
        return self.decided.plan.tokens

    @property
    def cached_tokens(self) -> int | None:
        """Of the prompt, as expected in the cache of the replica chosen."""
        known = self.decided.plan.source == TOKENS
        return self.decided.decision.cached_tokens if known else None


class _Wanted(msgspec.Struct, frozen=True):
    """What a caller asks a pick for, and how."""

    asked: Asked
    caller: Caller
    request_id: str
    policy: str
    wait_s: float | None
    alternatives: int | None


class Picker:
    """Picks for both transports."""

    def __init__(self, router: Router, picks: Picks, signer: Signer, alternatives: int, siblings: Siblings) -> None:
        """`alternatives` are named beside the first place where the caller does not say how many."""
        self.picks = picks
        self._router = router
        self._signer = signer
        self._nonce = siblings.nonce
        self._alternatives = alternatives

    def pick(
        self,
        asked: Asked,
        caller: Caller,
        request_id: str,
        *,
        policy: str = "",
        wait_s: float | None = None,
        alternatives: int | None = None,
        carrier: Mapping[str, str] = _NO_HEADERS,
    ) -> Picked | Coroutine[Any, Any, Picked]:
        """Choose, wait for room and count: at once where nothing has to be waited for.

        `wait_s` is the longest wait, None for as long as the queue lets it. Raises what a relayed request would get,
        and Exhausted (HELD) when `wait_s` is over. `carrier` may have a trace context.
        """
        span = otel.begin(_SPAN, carrier)
        wanted = _Wanted(asked, caller, request_id, policy, wait_s, alternatives)
        return self._traced(span, wanted) if span.recording else self._pick(wanted)

    async def _traced(self, span: Span, wanted: _Wanted) -> Picked:
        with span:
            tracing.asked(span, wanted.request_id, wanted.asked)
            picked = self._pick(wanted)
            if not isinstance(picked, Picked):
                with tracing.waiting(span):
                    picked = await picked
            tracing.decided(span, picked.decided)
            return picked

    def _pick(self, wanted: _Wanted) -> Picked | Coroutine[Any, Any, Picked]:
        router = self._router
        admission = router.admit()
        plan = router.draft_at_once(wanted.asked, wanted.policy)
        if plan is not None:
            # Who shall tell the first token may not: the prefill is taken to run off by the replica's rate.
            plan = router.charge(plan, wanted.caller, told_late=True)
            flight = router.board_at_once(plan, wanted.request_id)
            if flight is not None:
                admission.begin()
                return self._opened(flight, admission, wanted, 0.0)
        return self._later(plan, wanted)

    async def _later(self, plan: Plan | None, wanted: _Wanted) -> Picked:
        router, wait_s = self._router, wanted.wait_s
        admission = router.admit()
        with contextlib.ExitStack() as held:
            held.enter_context(admission)
            began = router.clock()
            if plan is None:
                await self._hold(wanted.asked.model, wanted.caller, wait_s)
                draft = await router.draft(wanted.asked, wanted.policy)
                plan = router.charge(draft, wanted.caller, told_late=True)
            left_s = None if wait_s is None else max(0.0, wait_s - (router.clock() - began))
            flight = await self._board(plan, wanted.request_id, left_s)
            held.pop_all()  # the pick's from here on
        return self._opened(flight, admission, wanted, router.clock() - began)

    def _opened(self, flight: Flight, admission: Admission, wanted: _Wanted, waited: float) -> Picked:
        try:
            picked = self._named(flight, wanted, waited)
        except BaseException:
            flight.abandon()
            admission.end()
            raise
        places = tuple(target.id for target in picked.places)
        self.picks.open(picked.pick_id, flight, admission, wanted.request_id, places)
        return picked

    async def _hold(self, model: str, caller: Caller, wait_s: float | None) -> None:
        """Wait for a first replica where there is none."""
        until = None if wait_s is None else asyncio.get_running_loop().time() + wait_s
        try:
            await self._router.holding.wait(model, caller, until)
        except DeadlineExceeded as late:
            raise Exhausted(late.message, reason="HELD", retry_after_s=late.retry_after_s) from None

    async def _board(self, plan: Plan, request_id: str, wait_s: float | None) -> Flight:
        if wait_s is None:
            return await self._router.board(plan, request_id)
        try:
            async with asyncio.timeout(wait_s):
                return await self._router.board(plan, request_id)
        except TimeoutError:
            raise Exhausted(
                f"no replica of {plan.pool.model} had room within {wait_s:g} s; pick again after the delay, allow a "
                "longer wait, or scale the deployment up",
                reason="HELD",
                retry_after_s=self._router.turns.drain_s(plan.pool),
            ) from None

    def _named(self, flight: Flight, wanted: _Wanted, waited: float) -> Picked:
        decided, alternatives = flight.decided, wanted.alternatives
        count = self._alternatives if alternatives is None else min(alternatives, MOST_ALTERNATIVES)
        targets = [decided.target, *self._router.others(decided, count)]
        nonce = self._nonce()
        ticket = self._signer.ticket(decided.plan, targets, nonce)
        return Picked(nonce.hex(), wanted.request_id, decided, targets, ticket, self._signer.life_s, waited)
