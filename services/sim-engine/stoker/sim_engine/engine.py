"""Runs the core against the clock: requests in, tokens out when a real engine would have them."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from stoker.sim_engine.config import SimConfig
from stoker.sim_engine.core import text
from stoker.sim_engine.core.blocks import BlockPool
from stoker.sim_engine.core.scheduler import Output, Request, Scheduler, Step
from stoker.sim_engine.metrics import Metrics
from stoker.sim_engine.publisher import Publisher

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Token:
    """One token of one of a call's sequences."""

    index: int
    """Which of the call's `n` sequences, from 0."""
    id: int
    finish_reason: str | None


@dataclass
class Call:
    """A generation call: one or more sequences, whose tokens arrive in one queue.

    The queue holds at most the tokens that were asked for.
    """

    requests: list[Request]
    tokens: asyncio.Queue[Token] = field(default_factory=asyncio.Queue)
    last_token_s: dict[str, float] = field(default_factory=dict)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens of the first sequence that were found in the cache."""
        return self.requests[0].cached_tokens or 0


class SimEngine:
    """One data-parallel rank: a scheduler, a clock, and whoever waits for tokens."""

    def __init__(self, config: SimConfig, sayable: Sequence[int], publisher: Publisher | None, rank: int = 0) -> None:
        self.config = config
        self.metrics = Metrics(config.served_names[0], rank)
        pool = BlockPool(config.blocks, config.block_size, seed=config.seed, caching=config.prefix_caching)
        self.scheduler = Scheduler(
            pool,
            max_running=config.max_num_seqs,
            budget=config.max_num_batched_tokens,
            by_priority=config.by_priority,
        )
        self._sayable = sayable
        self._publisher = publisher
        self._calls: dict[str, tuple[Call, int]] = {}
        self._work = asyncio.Event()
        self._accepted = 0

    def submit(self, call: Call) -> None:
        """Start a call. Raises `ValueError` if a prompt can never fit into the cache."""
        self._accepted += 1
        if 0 < self.config.faults.crash_after <= self._accepted:
            log.error("crashing as told, after %d requests", self._accepted)
            os._exit(1)
        added: list[Request] = []
        try:
            for index, request in enumerate(call.requests):
                self.scheduler.add(request)
                added.append(request)
                self._calls[request.id] = (call, index)
        except ValueError:
            for request in added:
                self.abort(request)
            raise
        self._work.set()

    def abort(self, request: Request, reason: str = "abort") -> None:
        """Stop one sequence, if it still runs, and free its blocks."""
        if self._calls.pop(request.id, None) is not None:
            self.scheduler.abort(request)
            self.metrics.finished[reason] += 1

    async def run(self) -> None:
        """Step until cancelled."""
        ready = time.monotonic()
        while True:
            step = None if self._hangs() else self.scheduler.schedule(time.monotonic())
            if step is None:
                self._work.clear()
                await self._work.wait()
                ready = time.monotonic()
                continue
            # Deadlines add up, so that a timer that fires late does not slow the engine down.
            ready = max(ready, time.monotonic() - 0.05) + self._seconds(step)
            await asyncio.sleep(max(0.0, ready - time.monotonic()))
            self._finish(step)

    def page(self) -> str:
        """The `/metrics` page."""
        totals = self.scheduler.totals
        return self.metrics.render(
            gauges={
                "num_requests_running": len(self.scheduler.running),
                "num_requests_waiting": self.scheduler.waiting,
                "kv_cache_usage_perc": self.scheduler.pool.usage,
            },
            counters={
                "prefix_cache_queries": totals.prefix_queries,
                "prefix_cache_hits": totals.prefix_hits,
                "num_preemptions": totals.preemptions,
            },
            cache={
                "block_size": self.config.block_size,
                "cache_dtype": "auto",
                "enable_prefix_caching": self.config.prefix_caching,
                "num_gpu_blocks": self.config.blocks * self.config.data_parallel,
            },
        )

    def reset_prefix_cache(self) -> bool:
        """Forget cached blocks, if no request holds any."""
        done = self.scheduler.pool.reset()
        self._publish()
        return done

    def _hangs(self) -> bool:
        return 0 < self.config.faults.hang_after <= self._accepted

    def _seconds(self, step: Step) -> float:
        return self.config.profile.step_seconds(step.prefill_tokens, step.decoding, step.attended)

    def _finish(self, step: Step) -> None:
        outputs = self.scheduler.complete(step, self._choose)
        now = time.monotonic()
        for output in outputs:
            self._deliver(output, now)
        self._publish()

    def _publish(self) -> None:
        events = self.scheduler.pool.take_events()
        if events and self._publisher is not None:
            self._publisher.publish(time.time(), events)

    def _choose(self, request: Request) -> int:
        if request.script:
            return request.script[request.generated]
        return text.next_token(self._sayable, request.seed, request.sequence.tokens)

    def _deliver(self, output: Output, now: float) -> None:
        request = output.request
        call, index = self._calls[request.id]
        self._measure(output, call, now)
        if output.finish_reason is not None:
            del self._calls[request.id]
        call.tokens.put_nowait(Token(index, output.token, output.finish_reason))

    def _measure(self, output: Output, call: Call, now: float) -> None:
        metrics, request = self.metrics, output.request
        metrics.generation_tokens += 1
        scheduled = request.arrived_s if request.scheduled_s is None else request.scheduled_s
        if request.generated == 1:
            metrics.prompt_tokens += len(request.prompt)
            metrics.cached_tokens += request.cached_tokens or 0
            metrics.ttft.observe(now - request.arrived_s)
            metrics.prefill.observe(now - scheduled)
            metrics.queue.observe(scheduled - request.arrived_s)
            call.last_token_s[request.id + "/first"] = now
        else:
            metrics.itl.observe(now - call.last_token_s[request.id])
        call.last_token_s[request.id] = now
        if output.finish_reason is not None:
            metrics.finished[output.finish_reason] += 1
            metrics.e2e.observe(now - request.arrived_s)
            metrics.inference.observe(now - scheduled)
            metrics.decode.observe(now - call.last_token_s[request.id + "/first"])
