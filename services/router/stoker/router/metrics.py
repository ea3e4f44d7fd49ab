"""The router's metrics. No label is a request, a user or a hash; `model` and `replica` are bounded by the fleet."""

from __future__ import annotations

import functools
from typing import TypeVar

from prometheus_client import Counter, Gauge, Histogram

from stoker.common.errors import Code, StokerError

_M = TypeVar("_M", Counter, Gauge, Histogram)

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

REQUESTS = Counter(
    "stoker_router_requests_total", "Requests by how they ended.", ["api", "outcome"]
)  # outcome: ok, client_error, refused, unavailable, failed, interrupted, cancelled,
#          timeout, slow_reader, unheard
DECISIONS = Counter("stoker_router_decisions_total", "Routing decisions by reason.", ["model", "reason"])
KEYS = Counter(
    "stoker_router_keys_total",
    "Requests by what their prefix was hashed from: tokens, or bytes where there were no tokens (why says why).",
    ["source", "why"],
)
RECALLED = Counter("stoker_router_recalled_total", "Requests whose very body was read before.")
PREDICTED = Counter("stoker_router_predicted_cached_tokens_total", "Prompt tokens predicted to be cached.", ["model"])
ACTUAL = Counter("stoker_router_actual_cached_tokens_total", "Prompt tokens that engines say were cached.", ["model"])
COMPARED = Counter(
    "stoker_router_compared_prompt_tokens_total",
    "Prompt tokens of requests whose engine said what was cached.",
    ["model"],
)
TTFT = Histogram(
    "stoker_router_time_to_first_token_seconds", "Arrival to first byte of the response.", ["api"], buckets=_SECONDS
)
IN_FLIGHT = Gauge("stoker_router_requests_in_flight", "Requests now in this router.")
QUEUED = Gauge("stoker_router_requests_queued", "Requests that wait in this router for a replica with room.")
HELD = Gauge("stoker_router_requests_held", "Of these, requests for models without a replica, until one has started.")
QUEUE_WAIT = Histogram(
    "stoker_router_queue_wait_seconds", "Wait for a replica with room, of those that had to.", buckets=_SECONDS
)
RETRIES = Counter("stoker_router_retries_total", "Tries on another replica.", ["result"])  # taken, no_budget
CONTINUATIONS = Counter(
    "stoker_router_continuations_total", "Answers that broke off, by whether another replica went on.", ["result"]
)  # result: continued, refused, no_tokens, too_long, reasoning, tool_calls, choices, unproved, unlike, no_room_left
TOKENIZE = Histogram(
    "stoker_router_tokenize_seconds", "Rendering, tokenizing and hashing a prompt.", ["where"],
    buckets=(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1),
)  # fmt: skip
SENT = Counter(
    "stoker_router_bodies_sent_total", "Bodies sent to engines, by what their prompts went as.", ["prompt"]
)  # prompt: text, tokens
PARITY = Gauge(
    "stoker_router_parity", "1 router and engine tokenize alike, 0 not yet known, -1 they differ.", ["replica"]
)
DIGEST_SEEN = Counter(
    "stoker_router_digest_confirmations_total",
    "Prefixes that were served, looked for in the replica's digest soon after.",
    ["model", "result"],
)  # result: seen, missing
ALARM = Gauge(
    "stoker_router_prefix_routing_alarm",
    "1 while digests do not show what was served: prefix routing has decayed.",
    ["model"],
)
UNREACHABLE = Gauge("stoker_router_replicas_unreachable", "Replicas announced as ready that this router finds dead.")
REGISTRIES = Gauge("stoker_router_registries_connected", "Registries this router hears.")
ANNOUNCING = Gauge("stoker_router_announcing", "1 while a registry passes on what this router dispatches.")
UNSAID = Gauge("stoker_router_dispatches_unsaid", "Dispatches that the other routers were never told of.")
OVERHEARD = Counter("stoker_router_dispatches_overheard_total", "Dispatches of other routers, as told by them.")
ENVOY_SILENT = Counter(
    "stoker_router_envoy_silent_total", "Requests given up because Envoy said nothing of them any more."
)
PICKS_UNHEARD = Counter(
    "stoker_router_picks_unheard_total", "Picked requests given up because their callers said nothing of them."
)
RECORDS = Counter(
    "stoker_router_records_total", "Decisions to be recorded, by what became of them.", ["result"]
)  # result: written, queue_full, write_failed
LOOP_LAG = Histogram(
    "stoker_router_loop_lag_seconds", "How late the event loop comes to what is due: for so long it stood still.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5),
)  # fmt: skip
RESYNCS = Counter("stoker_router_digest_resyncs_total", "Digests that had to be asked for anew.")


@functools.lru_cache(maxsize=4096)
def of(metric: _M, *labels: str) -> _M:
    """The metric's child with these labels; looking one up costs more than counting."""
    return metric.labels(*labels)


def outcome_of(error: StokerError) -> str:
    """What `REQUESTS` calls the end of a request that got this error from the router."""
    if error.code is Code.DEADLINE_EXCEEDED:
        return "timeout"
    if error.code in (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED):
        return "unavailable"
    return "refused" if error.code.value < 500 else "failed"
