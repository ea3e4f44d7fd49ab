"""Load of a replica from two scrapes of its engine. Unknown stays unknown: it is never zero."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from stoker.node_agent.engine.protocol import EngineLoad, Histogram

_MEMORY_S = 30.0
"""Seconds of prefill after which what was measured has faded to 1/e."""
_MIN_PREFILL_TOKENS = 128
"""Shorter prefills measure the overhead of a request, not the rate of prefill."""
_PROMPT_SMOOTHING = 0.1
"""Weight of the newest interval in the mean prompt."""


@dataclass(frozen=True)
class Rate:
    """Tokens and the seconds they took, both fading."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: float, seconds: float) -> Rate:
        """With one more interval, the older ones faded by its length."""
        if seconds <= 0:
            return self
        fade = math.exp(-seconds / _MEMORY_S)
        return Rate(self.tokens * fade + tokens, self.seconds * fade + seconds)

    @property
    def per_s(self) -> float | None:
        """Tokens per second, None before anything was measured."""
        return self.tokens / self.seconds if self.tokens > 0 and self.seconds > 0 else None


@dataclass(frozen=True)
class Load:
    """Load of a replica at `at`; `None` is unknown. Counters count from the start of the epoch."""

    at: float
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    active_tokens: int | None = None
    queued_prefill_tokens: int | None = None
    prefill_tokens_per_s: float | None = None
    cache_query_tokens: int | None = None
    cache_hit_tokens: int | None = None
    prompt_tokens: int | None = None
    generation_tokens: int | None = None
    requests: int | None = None
    ttft_sum_s: float | None = None
    ttft_count: int | None = None
    itl_sum_s: float | None = None
    itl_count: int | None = None
    queue_sum_s: float | None = None
    queue_count: int | None = None
    prefill_sum_s: float | None = None
    prefill_count: int | None = None
    cached_prompt_tokens: int | None = None
    preemptions: int | None = None


@dataclass(frozen=True)
class Meter:
    """What is carried from scrape to scrape of one life of an engine."""

    block_size: int | None
    blocks: int | None
    last: EngineLoad | None = None
    last_at: float = 0.0
    backlogged: Rate = Rate()
    """Uncached prompt tokens by the clock, while requests waited all the time."""
    alone: Rate = Rate()
    """Uncached prompt tokens by summed time to first token, while none waited."""
    first_token_at: float = 0.0
    """Scrape that last showed a first token."""
    uncached_per_request: float | None = None
    """Uncached prompt tokens of a request, smoothed."""

    @property
    def prefill_rate(self) -> float | None:
        """Uncached prompt tokens per second of prefill.

        Both measures fall short of the truth (decoding shares the clock; prefills that overlap are summed), so
        the greater one is nearer to it.
        """
        rates = [rate for rate in (self.backlogged.per_s, self.alone.per_s) if rate is not None]
        return max(rates, default=None)


def measure(meter: Meter, scrape: EngineLoad, now: float) -> tuple[Meter, Load]:
    """The load that a scrape shows, and the meter for the next one."""
    meter = _learn(meter, scrape, now)
    tokens = meter.block_size * meter.blocks if meter.block_size and meter.blocks else None
    usage = scrape.kv_cache_usage
    waiting = scrape.waiting
    queued = None
    if waiting == 0:
        queued = 0
    elif waiting is not None and meter.uncached_per_request is not None:
        queued = round(waiting * meter.uncached_per_request)
    load = Load(
        at=now,
        running=scrape.running,
        waiting=waiting,
        kv_usage=usage,
        active_tokens=round(usage * tokens) if usage is not None and tokens is not None else None,
        queued_prefill_tokens=queued,
        prefill_tokens_per_s=meter.prefill_rate,
        cache_query_tokens=_whole(scrape.prefix_cache_queries),
        cache_hit_tokens=_whole(scrape.prefix_cache_hits),
        prompt_tokens=_whole(scrape.prompt_tokens),
        generation_tokens=_whole(scrape.generation_tokens),
        requests=_count(scrape.e2e_seconds),
        ttft_sum_s=_sum(scrape.ttft_seconds),
        ttft_count=_count(scrape.ttft_seconds),
        itl_sum_s=_sum(scrape.itl_seconds),
        itl_count=_count(scrape.itl_seconds),
        queue_sum_s=_sum(scrape.queue_seconds),
        queue_count=_count(scrape.queue_seconds),
        prefill_sum_s=_sum(scrape.prefill_seconds),
        prefill_count=_count(scrape.prefill_seconds),
        cached_prompt_tokens=_whole(scrape.cached_prompt_tokens),
        preemptions=_whole(scrape.preemptions),
    )
    return meter, load


def in_flight(load: Load | None) -> int | None:
    """Requests in the engine, None where unknown."""
    if load is None or load.running is None or load.waiting is None:
        return None
    return load.running + load.waiting


def _learn(meter: Meter, scrape: EngineLoad, now: float) -> Meter:
    """Update what is measured between two scrapes. A counter that fell means a restart: nothing is learnt."""
    before, after = meter.last, replace(meter, last=scrape, last_at=now)
    if before is None:
        return replace(after, first_token_at=now)
    if _fell(before, scrape):
        return after
    uncached = _uncached(before, scrape)
    if uncached is None:
        return after
    if before.waiting and scrape.waiting:
        after = replace(after, backlogged=meter.backlogged.add(uncached, now - meter.last_at))
    elif before.waiting == 0 and scrape.waiting == 0:
        after = replace(after, alone=_alone(meter, before, scrape, uncached, now))
    return _prompts(after, before, scrape, uncached, now)


def _alone(meter: Meter, before: EngineLoad, scrape: EngineLoad, uncached: float, now: float) -> Rate:
    prompts, seconds = _first_tokens(before, scrape)
    if prompts <= 0 or uncached < prompts * _MIN_PREFILL_TOKENS:
        return meter.alone
    # Prefills that overlap are summed: no more time than the clock's since the last first token can be theirs.
    return meter.alone.add(uncached, min(seconds, now - meter.first_token_at))


def _prompts(meter: Meter, before: EngineLoad, scrape: EngineLoad, uncached: float, now: float) -> Meter:
    prompts, _ = _first_tokens(before, scrape)
    if prompts <= 0:
        return meter
    old, new = meter.uncached_per_request, uncached / prompts
    mean = new if old is None else old + _PROMPT_SMOOTHING * (new - old)
    return replace(meter, uncached_per_request=mean, first_token_at=now)


def _first_tokens(before: EngineLoad, after: EngineLoad) -> tuple[float, float]:
    """First tokens between two scrapes, and their summed times in seconds."""
    if before.ttft_seconds is None or after.ttft_seconds is None:
        return 0.0, 0.0
    return after.ttft_seconds.count - before.ttft_seconds.count, after.ttft_seconds.sum - before.ttft_seconds.sum


def _uncached(before: EngineLoad, after: EngineLoad) -> float | None:
    prompt = _grown(before.prompt_tokens, after.prompt_tokens)
    cached = _grown(before.cached_prompt_tokens, after.cached_prompt_tokens)
    if cached is None:
        cached = _grown(before.prefix_cache_hits, after.prefix_cache_hits)
    if prompt is None:
        return None
    return max(0.0, prompt - (cached or 0.0))


def _grown(before: float | None, after: float | None) -> float | None:
    return after - before if before is not None and after is not None else None


def _fell(before: EngineLoad, after: EngineLoad) -> bool:
    pairs = [
        (before.prompt_tokens, after.prompt_tokens),
        (before.generation_tokens, after.generation_tokens),
        (before.prefix_cache_queries, after.prefix_cache_queries),
        (before.prefix_cache_hits, after.prefix_cache_hits),
        (before.cached_prompt_tokens, after.cached_prompt_tokens),
    ]
    if before.ttft_seconds is not None and after.ttft_seconds is not None:
        pairs.append((before.ttft_seconds.count, after.ttft_seconds.count))
    return any(a is not None and b is not None and b < a for a, b in pairs)


def _sum(times: Histogram | None) -> float | None:
    return None if times is None else times.sum


def _count(times: Histogram | None) -> int | None:
    return None if times is None else int(times.count)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
