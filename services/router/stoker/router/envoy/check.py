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
from stoker.router.prompt import RESPONSES
from stoker.router.relay import told
from stoker.router.routing import Router

ENDPOINT_HEADER = "x-gateway-destination-endpoint"
TIMEOUT_HEADER = "x-envoy-upstream-rq-timeout-ms"

# Who has stored a response is read from the response, which does not come this way.
CHECKED = {path: api for path, api in ROUTES.items() if api != RESPONSES}


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
        with contextlib.ExitStack() as held:
            held.enter_context(self._router.admit())
            asked = await read_body(api, ask.body)
            plan = await self._router.plan(
                asked,
                self._router.tenants.caller(ask.headers, asked.priority),
                policy=ask.headers.get("x-stoker-policy", ""),
                told_late=True,
            )
            try:
                async with asyncio.timeout_at(deadline):
                    flight = await self._router.board(plan, request_id)
                    held.enter_context(flight)
                    endpoint = await self._addresses.of(flight.decided.target.url)
            except TimeoutError:
                raise no_room_in_time() from None
            name = self._flights.open(flight, held.pop_all(), api, stream=asked.stream)
        left_ms = max(1, int(1000 * (deadline - asyncio.get_running_loop().time())))
        return Answer(
            200,
            {
                ENDPOINT_HEADER: endpoint,
                FLIGHT_HEADER: name,
                TIMEOUT_HEADER: str(left_ms),
                **told(flight.decided, request_id),
            },
            undo=functools.partial(self._flights.undo, name),
        )
