"""Metrics of the node agent."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

ENGINE_STARTS = Counter("stoker_agent_engine_starts_total", "Engine processes started.")
ENGINE_EXITS = Counter(
    "stoker_agent_engine_exits_total", "Engine processes that ended, by whether they were asked to.", ["why"]
)
ADOPTIONS = Counter("stoker_agent_engine_adoptions_total", "Engines taken over from an earlier agent.")
MEMBERS = Gauge("stoker_agent_members", "Members on this host, by state.", ["state"])

SCRAPE_FAILURES = Counter("stoker_agent_scrape_failures_total", "Scrapes of an engine's metrics that failed.")

DIGEST_EVENTS = Counter(
    "stoker_agent_digest_events_total",
    "KV-block events by what became of them: blocks stored and removed, caches cleared, events ignored, blocks "
    "with unknown parent, removals of unknown blocks, digests begun anew for holding more than the engine has.",
    ["kind"],
)
DIGEST_GAPS = Counter("stoker_agent_digest_gaps_total", "Times that KV events were lost for good.")
DIGEST_BLOCKS = Gauge("stoker_agent_digest_blocks", "KV blocks held by the engines of this host, by tier.", ["tier"])

TICKETS = Counter("stoker_agent_tickets_total", "Requests by what became of their tickets.", ["result"])
RELAY_STREAMS = Gauge("stoker_agent_relay_streams", "Generate calls in the relay now.")
RELAY_ENDED = Counter("stoker_agent_relay_ended_total", "Generate calls that ended, by reason.", ["reason"])
RELAY_DELTAS = Counter("stoker_agent_relay_deltas_total", "Deltas relayed.")

WARMINGS = Counter(
    "stoker_agent_warmings_total",
    "Prompt prefixes of retiring replicas by what became of them: computed on the successor, unknown here, unfunded "
    "(the budget is used up), refused by the successor, too late.",
    ["result"],
)
WARMED_TOKENS = Counter("stoker_agent_warmed_tokens_total", "Tokens that successors computed for retiring replicas.")
PROMPT_BYTES = Gauge("stoker_agent_prompt_bytes", "Memory for the token ids of KV blocks, in bytes, about.")
