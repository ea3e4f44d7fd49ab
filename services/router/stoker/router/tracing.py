"""What the router's spans say of a request: OpenTelemetry's names for generative AI, and its own for the decision.

One span for the request, and where that is recorded one for its plan, one for its wait if it waited, and one for each
try on an engine, whose trace context the engine gets.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from urllib.parse import urlsplit

from stoker.common import otel
from stoker.common.otel import Span
from stoker.router.decisions.decided import Decided
from stoker.router.flights.flight import Flight
from stoker.router.prompts.plan import Plan
from stoker.router.prompts.prompt import CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, Asked

_OPERATIONS = {
    CHAT: "chat",
    RESPONSES: "chat",
    COMPLETIONS: "text_completion",
    EMBEDDINGS: "embeddings",
}
_A_WAIT_NS = 1_000_000
"""What is shorter is no wait."""


def asked(span: Span, request_id: str, asked: Asked) -> None:
    """What a request asks for."""
    if not span.recording:
        return
    span.set(otel.OPERATION_NAME, _OPERATIONS.get(asked.api, asked.api))
    span.set(otel.REQUEST_MODEL, asked.model)
    span.set(otel.REQUEST_MAX_TOKENS, asked.prompt.max_output_tokens)
    span.set(otel.REQUEST_ID, request_id)


def planned(span: Span, plan: Plan) -> None:
    """What was found out about its prompt."""
    if span.recording:
        span.set(otel.USAGE_INPUT_TOKENS, plan.tokens)
        span.set(otel.KEYS_SOURCE, plan.source)


def decided(span: Span, decided: Decided) -> None:
    """Where it goes, and why."""
    if not span.recording:
        return
    decision, plan = decided.decision, decided.plan
    span.set(otel.REPLICA, decided.target.id)
    span.set(otel.REASON, decision.reason.value)
    span.set(otel.CANDIDATES, decision.considered)
    span.set(otel.ATTEMPT, decided.attempt)
    span.set(otel.WAITED_S, round(decided.at - decided.since, 6))
    if plan.tokens is not None:
        span.set(otel.PREDICTED_CACHED_TOKENS, decision.cached_tokens)
        span.set(otel.MATCHED_BLOCKS, decision.cached_tokens // plan.request.block_size)


def waiting(span: Span) -> AbstractContextManager[object]:
    """Around what may have to wait for a replica with room."""
    return _waiting(span) if span.recording else span


@contextlib.contextmanager
def _waiting(span: Span) -> Iterator[None]:
    since_ns = time.time_ns()
    try:
        yield
    except BaseException as error:
        with span.child("queue", since_ns=since_ns) as waited:
            waited.failed(error)
        raise
    if time.time_ns() - since_ns >= _A_WAIT_NS:
        span.child("queue", since_ns=since_ns).end()


def attempt(span: Span, flight: Flight) -> AbstractContextManager[Span]:
    """A try on the replica of `flight`, which is to end after it; the span whose context the replica gets."""
    return _attempt(span, flight) if span.recording else span


@contextlib.contextmanager
def _attempt(span: Span, flight: Flight) -> Iterator[Span]:
    decided(span, flight.decided)
    with span.child("engine", calls=True) as tried:
        decided(tried, flight.decided)
        url = urlsplit(flight.decided.target.url)
        tried.set(otel.SERVER_ADDRESS, url.hostname)
        tried.set(otel.SERVER_PORT, url.port)
        try:
            yield tried
        finally:
            if (ago_s := flight.first_token_ago_s()) is not None:
                tried.event("first_token", time.time_ns() - int(1e9 * ago_s))
            for each in (span, tried):
                each.set(otel.USAGE_INPUT_TOKENS, flight.usage.prompt_tokens)
                each.set(otel.USAGE_CACHED_TOKENS, flight.usage.cached_tokens)
                each.set(otel.USAGE_OUTPUT_TOKENS, flight.usage.generated_tokens)
