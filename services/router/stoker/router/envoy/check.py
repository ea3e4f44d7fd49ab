"""What Envoy asks: whether a request may pass, and to which engine."""

from __future__ import annotations

import asyncio
import contextlib
import functools

from stoker.common.errors import NotFound, StokerError
from stoker.router import metrics
from stoker.router.config import LimitsConfig
from stoker.router.envoy.access_log import FLIGHT_HEADER
from stoker.router.envoy.addresses import Addresses
from stoker.router.envoy.flights import Flights
from stoker.router.envoy.protocol import Answer, Ask, refusal
from stoker.router.http import (
    ROUTES,
    internal_error,
    no_room_in_time,
    read_body,
    request_id_of,
    seconds_allowed,
)
from stoker.router.openai_errors import MethodNotAllowed
from stoker.router.plan import Plan
from stoker.router.pools import Target
from stoker.router.prompt import RESPONSES
from stoker.router.relay import told
from stoker.router.routing import Flight, Router

TIMEOUT_HEADER = "x-envoy-upstream-rq-timeout-ms"
RETRIES_HEADER = "x-envoy-max-retries"

# Who has stored a response is read from the response, which does not come this way.
CHECKED = {path: api for path, api in ROUTES.items() if api != RESPONSES}


def endpoint_header(number: int) -> str:
    """The header with the engine of a try, the first of which is 1."""
    return "x-gateway-destination-endpoint" if number == 1 else f"x-stoker-endpoint-{number}"


def replica_header(number: int) -> str:
    """The header with the replica of a try."""
    return f"x-stoker-replica-{number}"


class Checks:
    """Answers Envoy's checks with the router's decisions."""

    def __init__(self, router: Router, flights: Flights, limits: LimitsConfig, addresses: Addresses) -> None:
        self._router = router
        self._flights = flights
        self._limits = limits
        self._addresses = addresses

    async def decide(self, ask: Ask) -> Answer:
        """One check. Never raises, but for being cancelled: then nothing stays behind."""
        api = CHECKED.get(ask.target.partition("?")[0], "other")
        request_id = request_id_of(ask.headers)
        try:
            return await self._decided(ask, api, request_id)
        except asyncio.CancelledError:
            metrics.of(metrics.REQUESTS, api, "cancelled").inc()
            raise
        except StokerError as error:
            metrics.of(metrics.REQUESTS, api, metrics.outcome_of(error)).inc()
            return refusal(error, {"x-request-id": request_id})
        except Exception as error:  # noqa: BLE001 - one bad request must not cost the process
            metrics.of(metrics.REQUESTS, api, "failed").inc()
            internal = internal_error("envoy.internal_error", ask.target, error)
            return refusal(internal, {"x-request-id": request_id})

    async def _decided(self, ask: Ask, api: str, request_id: str) -> Answer:
        path = ask.target.partition("?")[0]
        if api == "other":
            raise NotFound(f"{path} is not decided here; these are: POST {', POST '.join(CHECKED)}")
        if ask.method != "POST":
            raise MethodNotAllowed(path, "POST", ask.method)
        now = asyncio.get_running_loop().time()
        deadline = now + seconds_allowed(ask.headers, self._limits.request_s)
        admission = self._router.admit()
        admission.__enter__()
        try:
            asked = await read_body(api, ask.body)
            plan = await self._router.plan(
                asked,
                self._router.tenants.caller(ask.headers, asked.priority),
                policy=ask.headers.get("x-stoker-policy", ""),
                told_late=True,
            )
            flight, headers, spares = await self._boarded(plan, request_id, deadline)
        except BaseException:
            admission.__exit__(None, None, None)
            raise
        name = self._flights.open(flight, admission, api, stream=asked.stream, request_id=request_id, spares=spares)
        headers[FLIGHT_HEADER] = name
        headers[TIMEOUT_HEADER] = str(max(1, int(1000 * (deadline - asyncio.get_running_loop().time()))))
        return Answer(200, headers, undo=functools.partial(self._flights.undo, name))

    async def _boarded(
        self, plan: Plan, request_id: str, deadline: float
    ) -> tuple[Flight, dict[str, str], list[Target]]:
        """A flight; what Envoy is told of its replica and of the spare ones; and those of these with an address."""
        try:
            async with asyncio.timeout_at(deadline):
                flight = await self._router.board(plan, request_id)
                try:
                    rank = flight.decided.target.headers
                    headers = {**told(flight.decided, request_id), **rank}
                    headers[replica_header(1)] = headers.pop("x-stoker-replica")
                    headers[endpoint_header(1)] = await self._addresses.of(flight.decided.target.url)
                    spares: list[Target] = []
                    most = self._limits.retries if self._router.budget.left else 0
                    for target in self._router.others(flight.decided, most):
                        if target.headers != rank:
                            continue  # Envoy says the same to whichever it asks
                        with contextlib.suppress(StokerError):
                            headers[endpoint_header(len(spares) + 2)] = await self._addresses.of(target.url)
                            headers[replica_header(len(spares) + 2)] = target.id
                            spares.append(target)
                    headers[RETRIES_HEADER] = str(len(spares))
                except BaseException:
                    flight.abandon()
                    raise
        except TimeoutError:
            raise no_room_in_time() from None
        return flight, headers, spares
