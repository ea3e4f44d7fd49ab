"""What Envoy asks: whether a request may pass, and to which engine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable
from dataclasses import dataclass

from msgspec.structs import replace

from stoker.common import otel
from stoker.common.errors import NotFound, StokerError
from stoker.common.headers import POLICY
from stoker.common.otel import Span
from stoker.router import metrics, tracing
from stoker.router.config import LimitsConfig
from stoker.router.decisions.decided import DECISION_HEADER, Decided, described
from stoker.router.envoy.access_log import FLIGHT_HEADER
from stoker.router.envoy.addresses import Addresses
from stoker.router.envoy.flights import Flights
from stoker.router.fleet.pools import Target
from stoker.router.flights.flight import Flight
from stoker.router.flights.planning import planned
from stoker.router.flights.routing import Admission, Router
from stoker.router.http.errors import MethodNotAllowed
from stoker.router.http.port import Answer, Ask, refusal
from stoker.router.http.reading import (
    ROUTES,
    internal_error,
    no_room_in_time,
    read_body,
    request_id_of,
    seconds_allowed,
)
from stoker.router.prompts.plan import Plan
from stoker.router.prompts.prompt import RESPONSES

_SPAN = "envoy check"
TIMEOUT_HEADER = "x-envoy-upstream-rq-timeout-ms"
RETRIES_HEADER = "x-envoy-max-retries"
STAND_INS = {status: status - 50 for status in (500, 501, 503, 504)}
"""What is said for a status: Envoy takes any 5xx for a failed check and drops its body. It says the real one then."""

# Who has stored a response is read from the response, which does not come this way.
CHECKED = {path: api for path, api in ROUTES.items() if api != RESPONSES}


@functools.cache
def endpoint_header(number: int) -> str:
    """The header with the engine of a try, the first of which is 1."""
    return "x-gateway-destination-endpoint" if number == 1 else f"x-stoker-endpoint-{number}"


@functools.cache
def replica_header(number: int) -> str:
    """The header with the replica of a try."""
    return f"x-stoker-replica-{number}"


@dataclass(slots=True)
class _Check:
    """One check, as far as it is read."""

    ask: Ask
    api: str
    request_id: str
    deadline: float
    span: Span
    stream: bool = False


class Checks:
    """Answers Envoy's checks with the router's decisions."""

    def __init__(self, router: Router, flights: Flights, limits: LimitsConfig, addresses: Addresses) -> None:
        self._router = router
        self._flights = flights
        self._limits = limits
        self._addresses = addresses

    def decide(self, ask: Ask) -> Answer | Awaitable[Answer]:
        """One check: the answer, where nothing has to be waited for. Never raises, nor does what is to be awaited,
        but for being cancelled: then nothing stays behind.
        """
        api = CHECKED.get(ask.target.partition("?")[0], "other")
        check = _Check(ask, api, request_id_of(ask.headers), float("inf"), otel.begin(_SPAN, ask.headers))
        return self._traced(check) if check.span.recording else self._decided(check)

    async def _traced(self, check: _Check) -> Answer:
        with check.span as span:
            answer = self._decided(check)
            if not isinstance(answer, Answer):
                answer = await answer
            span.set(otel.RESPONSE_STATUS, answer.status)
            return answer

    def _decided(self, check: _Check) -> Answer | Awaitable[Answer]:
        try:
            return self._begun(check)
        except Exception as error:  # noqa: BLE001 - one bad request must not cost the process
            return self._refused(check, error)

    def _begun(self, check: _Check) -> Answer | Awaitable[Answer]:
        ask = check.ask
        if check.api == "other":
            path = ask.target.partition("?")[0]
            raise NotFound(f"{path} is not decided here; these are: POST {', POST '.join(CHECKED)}")
        if ask.method != "POST":
            raise MethodNotAllowed(ask.target.partition("?")[0], "POST", ask.method)
        now = asyncio.get_running_loop().time()
        check.deadline = now + seconds_allowed(ask.headers, self._limits.request_s)
        admission = self._router.admit()
        plan = self._recalled(check)
        if plan is not None:
            flight = self._router.board_at_once(plan, check.request_id, self._barred(check, plan))
            if flight is not None:
                address = self._addresses.known(flight.decided.target.url)
                if address is not None:
                    admission.begin()
                    return self._answer(check, flight, admission, address)
                flight.abandon()
        return self._later(check, plan)

    def _recalled(self, check: _Check) -> Plan | None:
        """The plan of a body that was read before, charged to its caller."""
        headers, router = check.ask.headers, self._router
        known = router.recalled(check.api, check.ask.body, headers.get(POLICY, ""))
        if known is None:
            return None
        check.stream = known.stream
        check.span.set(otel.REQUEST_MODEL, known.model)
        tracing.planned(check.span, known.plan)
        return router.charge(known.plan, router.tenants.caller(headers, known.priority), told_late=True)

    def _barred(self, check: _Check, plan: Plan) -> frozenset[str]:
        """Replicas that who asks does not want."""
        only = check.ask.only
        if only is None:
            return frozenset()
        return frozenset(name for name, target in plan.pool.targets.items() if self._known(target) not in only)

    def _known(self, target: Target) -> str | None:
        try:
            return self._addresses.known(target.url)
        except StokerError:
            return None

    def _refused(self, check: _Check, error: Exception) -> Answer:
        if not isinstance(error, StokerError):
            error = internal_error("envoy.internal_error", check.ask.target, error)
        metrics.of(metrics.REQUESTS, check.api, metrics.outcome_of(error)).inc()
        check.span.failed(error)
        answer = refusal(error, {"x-request-id": check.request_id})
        return replace(answer, status=STAND_INS.get(answer.status, answer.status))

    # --- where something has to be waited for --------------------------------------------------------------

    async def _later(self, check: _Check, plan: Plan | None) -> Answer:
        """Read it, wait for its turn, and answer."""
        try:
            with contextlib.ExitStack() as held:
                admission = self._router.admit()
                held.enter_context(admission)
                if plan is None:
                    plan = await self._read(check)
                barred = self._barred(check, plan)
                try:
                    async with asyncio.timeout_at(check.deadline):
                        with tracing.waiting(check.span):
                            boarded = await self._router.board(plan, check.request_id, barred)
                        flight = held.enter_context(boarded)
                        address = await self._addresses.of(flight.decided.target.url)
                except TimeoutError:
                    raise no_room_in_time() from None
                held.pop_all()  # the answer's from here on
            return self._answer(check, flight, admission, address)
        except asyncio.CancelledError:
            metrics.of(metrics.REQUESTS, check.api, "cancelled").inc()
            raise
        except Exception as error:  # noqa: BLE001 - as above
            return self._refused(check, error)

    async def _read(self, check: _Check) -> Plan:
        ask = check.ask
        asked = await read_body(check.api, ask.body)
        check.stream = asked.stream
        until = check.deadline
        return await planned(
            self._router, asked, ask.headers, check.span, check.request_id, until=until, told_late=True, body=ask.body
        )

    # --- the answer ----------------------------------------------------------------------------------------

    def _answer(self, check: _Check, flight: Flight, admission: Admission, address: str) -> Answer:
        """Let it pass, and leave its flight and its stay in the router to the access log."""
        try:
            target = flight.decided.target
            headers = {endpoint_header(1): address, replica_header(1): target.id, **target.headers}
            spares = self._spares(flight.decided, headers, check.ask.only)
            left_s = check.deadline - asyncio.get_running_loop().time()
            headers[DECISION_HEADER] = described(flight.decided)
            headers.update(check.span.headers)
            tracing.decided(check.span, flight.decided)
            headers["x-request-id"] = check.request_id
            headers[TIMEOUT_HEADER] = str(max(1, int(1000 * left_s)))
        except BaseException:
            flight.abandon()
            admission.end()
            raise
        name = self._flights.open(
            flight, admission, check.api, stream=check.stream, request_id=check.request_id, spares=spares
        )
        headers[FLIGHT_HEADER] = name
        undo = functools.partial(self._flights.undo, name)
        return Answer(200, headers, undo=undo, undo_late=undo)

    def _spares(self, decided: Decided, headers: dict[str, str], only: frozenset[str] | None) -> list[Target]:
        """Name the engines to try next in the headers."""
        most = self._limits.retries if self._router.budget.left else 0
        spares: list[Target] = []
        for target in self._router.others(decided, most):
            if target.rank != decided.target.rank:
                continue  # Envoy says the same to whichever it asks
            # One that would have to be looked up is left out; it is known once something has gone there.
            address = self._known(target)
            if address is not None and (only is None or address in only):
                spares.append(target)
                headers[endpoint_header(len(spares) + 1)] = address
                headers[replica_header(len(spares) + 1)] = target.id
        headers[RETRIES_HEADER] = str(len(spares))
        return spares
