"""The OpenAI HTTP API.

Bodies pass through in both directions as they are; the router reads each request once, and no response at
all beyond looking for the usage at its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
from aiohttp import web

from stoker.common import otel
from stoker.common.errors import Code, DeadlineExceeded, NotFound, StokerError, Unavailable
from stoker.common.http1 import Exchange
from stoker.router import metrics, tracing
from stoker.router.config import LimitsConfig
from stoker.router.fleet.pools import Pool
from stoker.router.flights.flight import Flight
from stoker.router.flights.planning import planned
from stoker.router.flights.routing import Router
from stoker.router.http import errors as openai_errors
from stoker.router.http.continuation import HttpContinuation, Noted
from stoker.router.http.engines import EngineFailed, Engines, request_headers
from stoker.router.http.errors import MethodNotAllowed, TooLarge
from stoker.router.http.intake import Intake, uninvited
from stoker.router.http.reading import (
    ROUTES,
    internal_error,
    no_room_in_time,
    read_body,
    request_id_of,
    seconds_allowed,
)
from stoker.router.http.relay import Call, Relay
from stoker.router.prompts.plan import Plan
from stoker.router.prompts.prompt import RESPONSES
from stoker.router.prompts.sent import SendTokens, Sent
from stoker.router.workers.siblings import Siblings

_STORED_RESPONSE = re.compile(r"/v1/responses/([\w-]{1,128})(/cancel)?")
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[\w-]{1,128})"')
_RESPONSES_KEPT = 16_384
# The engine has not begun: another replica may do better. A 500 may be the request's own doing and is not retried.
_RETRIED_STATUSES = frozenset({502, 503, 504})


class OpenAIServer:
    """Serves the API for a router."""

    def __init__(
        self,
        router: Router,
        engines: Engines,
        limits: LimitsConfig,
        siblings: Siblings,
        send_tokens: SendTokens,
    ) -> None:
        self._router = router
        self._engines = engines
        self._limits = limits
        self._send_tokens = send_tokens
        self._continuing = HttpContinuation(router, engines, limits)
        self._intake = Intake(limits.max_body_bytes, limits.max_in_flight)
        self._responses: OrderedDict[str, str] = OrderedDict()  # stored response → replica that holds it
        self._siblings = siblings
        siblings.hears(RESPONSES, lambda said: self._keep(*msgspec.msgpack.decode(said, type=tuple[str, str])))

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """One HTTP request."""
        if request.method in ("GET", "HEAD"):
            answer = self._local(request)
            if answer is not None:
                return answer
        now = asyncio.get_running_loop().time()
        api = ROUTES.get(request.path, "other")
        call = Call(request, request_id_of(request.headers), api, now, now + self._limits.request_s)
        try:
            return await self._guarded(call)
        except asyncio.CancelledError:
            call.outcome = "cancelled"
            raise
        finally:
            metrics.of(metrics.REQUESTS, call.api, call.outcome).inc()

    async def _guarded(self, call: Call) -> web.StreamResponse:
        request = call.request
        route = "other" if call.api == "other" else request.path
        with otel.begin(f"{request.method} {route}", request.headers) as span:
            span.set(otel.REQUEST_METHOD, request.method)
            span.set(otel.ROUTE, route)
            call.span = span
            try:
                answer = await self._routed(call)
            except StokerError as error:
                call.outcome = metrics.outcome_of(error)
                span.failed(error)
                answer = _refusal(request, error, call.told)
            except ConnectionResetError:
                call.outcome = "cancelled"
                raise
            except Exception as error:  # noqa: BLE001 - one bad request must not cost the process
                span.failed(error)
                answer = _refusal(request, internal_error("http.internal_error", request.path, error), call.told)
            span.set(otel.RESPONSE_STATUS, answer.status)
            return answer

    async def _routed(self, call: Call) -> web.StreamResponse:
        request = call.request
        stored = _STORED_RESPONSE.fullmatch(request.path)
        if stored is not None:
            allowed = "POST" if stored.group(2) else "GET"
            if request.method != allowed:
                raise MethodNotAllowed(request.path, allowed, request.method)
            return await self._stored(call, stored.group(1))
        if call.api == "other":
            raise NotFound(
                f"{request.path} is not served here; these are: GET /v1/models, POST {', POST '.join(ROUTES)}"
            )
        if request.method != "POST":
            raise MethodNotAllowed(request.path, "POST", request.method)
        async with self._admitted(request) as raw:
            asked = await read_body(call.api, raw)
            call.deadline = call.arrived + seconds_allowed(request.headers, self._limits.request_s)
            call.stream = asked.stream
            pinned = self._holder(asked.fields.get("previous_response_id"))
            plan = await planned(
                self._router,
                asked,
                request.headers,
                call.span,
                call.request_id,
                until=call.deadline,
                pinned=pinned,
                body=raw,
            )
            answer = self._continuing.continuations.begin(asked, plan, asked.fields)
            noted = None if answer is None else Noted(answer)
            body = raw if noted is None else noted.asking(raw)
            sent = Sent(body, asked.api, asked.fields, plan, self._send_tokens)
            return await self._serve(call, plan, sent, noted)

    @contextlib.asynccontextmanager
    async def _admitted(self, request: web.BaseRequest) -> AsyncIterator[bytes]:
        """The body of a request that is let in. Who is slow to send it takes no place meanwhile."""
        self._router.admit()  # what has no chance need not send its body
        async with self._intake.body(request) as raw:
            with self._router.admit():
                yield raw

    # --- sending -------------------------------------------------------------------------------------------

    async def _serve(self, call: Call, plan: Plan, sent: Sent, noted: Noted | None) -> web.StreamResponse:
        """Try replicas until one answers; nothing has gone to the client before that."""
        if noted is not None:
            call.noted = noted.passed
        headers = otel.carried(request_headers(call.request.headers, call.request_id), call.span)
        tried: frozenset[str] = frozenset()
        since = self._router.clock()
        while True:
            boarded = await self._board(call, plan, tried, since)
            with boarded as flight, tracing.attempt(call.span, flight) as span:
                decided = call.decided = flight.decided
                relay = Relay(call, flight, self._limits)
                broken: StokerError
                may_retry = functools.partial(flight.may_retry, tried)
                try:
                    named = {**headers, **decided.target.headers, **span.headers}
                    body = await sent.to(decided.target)
                    opened = relay.open(self._engines, call.request.path_qs, body, named, tried, may_retry)
                    async with opened as upstream:
                        span.set(otel.RESPONSE_STATUS, upstream.status)
                        if upstream.status not in _RETRIED_STATUSES or not flight.may_retry(tried):
                            return await self._relayed(call, relay, upstream, flight)
                        flight.erred()
                except EngineFailed as error:
                    span.failed(error)
                    flight.faulted()
                    self._found(decided.target.id, error)
                    broken = error
                    if not relay.started and not error.moved and not flight.may_retry(tried):
                        raise
                except TimeoutError:
                    late = DeadlineExceeded(
                        f"replica {decided.target.id} did not answer in time; ask for less, or allow more by "
                        "x-request-timeout (seconds)"
                    )
                    span.failed(late)
                    if relay.engine_late:
                        flight.faulted()
                    if not relay.started:
                        raise late from None
                    broken = late
            if relay.started:
                return await self._go_on(call, relay, noted, tried, broken)
            tried |= decided.target.siblings

    async def _go_on(
        self, call: Call, relay: Relay, noted: Noted | None, tried: frozenset[str], failure: StokerError
    ) -> web.StreamResponse:
        """Something went out before the replica failed: have another one say the rest, or say that it is missing."""
        if noted is not None and not relay.reader_late and (relay.engine_late or isinstance(failure, EngineFailed)):
            course = noted.answer.course
            course.serving, course.tried = relay.decided.target.id, tried
            rest = await self._continuing.go_on(call, relay, noted, failure)
            if rest is None:
                call.outcome = "ok"
                return relay.out
            failure = rest
        call.outcome = "timeout" if isinstance(failure, DeadlineExceeded) else "interrupted"
        if relay.reader_late:
            call.outcome = "slow_reader"
        return await relay.interrupted(failure)

    async def _board(self, call: Call, plan: Plan, tried: frozenset[str], since: float) -> Flight:
        try:
            async with asyncio.timeout_at(call.deadline):
                with tracing.waiting(call.span):
                    return await self._router.board(plan, call.request_id, tried, since=since)
        except TimeoutError:
            raise no_room_in_time() from None
        except Unavailable:
            if tried:
                raise self._all_failed(plan, tried) from None
            raise

    async def _relayed(self, call: Call, relay: Relay, upstream: Exchange, flight: Flight) -> web.StreamResponse:
        answer = await relay.run(upstream)
        call.outcome = flight.answered(upstream.status)
        if call.outcome == "ok":
            relay.count_usage()
            if call.api == RESPONSES:
                self._remember(relay.head, relay.decided.target.id)
        return answer

    def _all_failed(self, plan: Plan, tried: frozenset[str]) -> StokerError:
        return StokerError(
            f"every replica of {plan.pool.model} that could serve was tried and failed: {', '.join(sorted(tried))}; "
            "see `stoker status`",
            code=Code.UNAVAILABLE,
            reason="ALL_REPLICAS_FAILED",
            retry_after_s=1.0,
        )

    def _found(self, replica: str, error: EngineFailed) -> None:
        target = self._router.view.targets.get(replica)
        if target is not None and error.refused:
            self._router.view.reached(target, False)

    # --- stored responses ----------------------------------------------------------------------------------

    def _holder(self, response_id: Any) -> str:
        """The replica that holds a stored response; empty where this router does not know: any may be asked."""
        holder = self._responses.get(response_id, "") if isinstance(response_id, str) else ""
        return holder if holder in self._router.view.targets else ""

    def _remember(self, head: bytes, replica: str) -> None:
        found = _RESPONSE_ID.search(head)
        if found is not None:
            held = found.group(1).decode(), replica
            self._keep(*held)
            self._siblings.tell_all(RESPONSES, msgspec.msgpack.encode(held))

    def _keep(self, response_id: str, replica: str) -> None:
        self._responses[response_id] = replica
        if len(self._responses) > _RESPONSES_KEPT:
            self._responses.popitem(last=False)

    async def _stored(self, call: Call, response_id: str) -> web.StreamResponse:
        target = self._router.view.targets.get(self._holder(response_id))
        if target is None:
            raise NotFound(f"response {response_id} is not known to this router: only the one that answered knows it")
        call.api = RESPONSES
        headers = otel.carried(request_headers(call.request.headers, call.request_id), call.span)
        async with self._admitted(call.request) as body:
            try:
                async with asyncio.timeout(self._limits.idle_s):
                    url = target.url + call.request.path_qs
                    async with await self._engines.call(call.request.method, url, body, headers) as upstream:
                        content = await upstream.read()
            except TimeoutError:
                raise DeadlineExceeded(
                    f"replica {target.id} did not answer within {self._limits.idle_s:g} s (limits.idle_s)"
                ) from None
        call.outcome = "ok" if upstream.status < 400 else "client_error"
        return web.Response(status=upstream.status, body=content, headers={"content-type": upstream.content_type})

    # --- answered here -------------------------------------------------------------------------------------

    def _local(self, request: web.BaseRequest) -> web.Response | None:
        view, path = self._router.view, request.path
        if path == "/health":
            return web.Response(text="ok")
        if path == "/ready":
            ready = view.synced and not self._router.draining
            return web.Response(status=200 if ready else 503, text="ready" if ready else "not ready")
        if path == "/v1/models":
            cards = [_card(pool, name) for pool in view.pools.values() for name in (pool.model, *pool.adapters)]
            return _json({"object": "list", "data": [*cards, *(_card(None, name) for name in view.asleep())]})
        if path.startswith("/v1/models/"):
            model = path.removeprefix("/v1/models/")
            if model in view.asleep():
                return _json(_card(None, model))
            try:
                pool, adapter = view.resolve(model)
            except StokerError as error:
                return _refusal(request, error)
            return _json(_card(pool, adapter or pool.model))
        return None


def _card(pool: Pool | None, name: str) -> dict[str, Any]:
    """A model as /v1/models lists it; without a pool it is scaled to zero."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "stoker",
        "root": name if pool is None else pool.model,
        "parent": pool.model if pool is not None and name != pool.model else None,
        "max_model_len": None if pool is None else pool.max_model_len or None,
    }


def _refusal(request: web.BaseRequest, error: StokerError, own: Mapping[str, str] | None = None) -> web.Response:
    """An error as a response; `own` are headers beside those of the error."""
    answer = web.Response(
        status=openai_errors.status(error),
        body=openai_errors.body(error),
        headers={**(own or {}), **openai_errors.headers(error)},
    )
    if isinstance(error, TooLarge) or uninvited(request):
        answer.force_close()  # whether what comes next is the body or another request cannot be told
    return answer


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
