"""A replica in simulated time, step by step and token by token: the plain account that the quick one is held to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from stoker.bench.cache import Cache
from stoker.bench.replicas import Clock, Hardware, Job, Machine, Outcome


@dataclass(slots=True)
class _Run:
    """A job on its way through a replica."""

    job: Job
    arrived: float
    done: Callable[[bool], None]  # called at the first token (False) and at the end (True)
    uncached: float = 0.0
    came: list[int] = field(default_factory=list)
    decoded: int = 0


class StepwiseEngine:
    """A replica: a queue, a cache, and steps that compute."""

    def __init__(self, name: str, hardware: Hardware, clock: Clock, machine: Machine, outcome: Outcome) -> None:
        self.name = name
        self.hardware = hardware
        self.cache = Cache(hardware.kv_blocks)
        self.stored: list[int] = []
        self.removed: list[int] = []
        self._clock = clock
        self._machine = machine
        self._outcome = outcome
        self._queue: deque[_Run] = deque()
        self._running: list[_Run] = []
        self._busy = False

    def load(self, kv_weight: float) -> float:
        """Queued prefill and active KV, in tokens, as an agent would report it."""
        waiting = sum(
            run.job.prompt_tokens
            - min(run.job.prompt_tokens, self.hardware.block_size * self.cache.hit(run.job.keys))
            for run in self._queue
        )
        kv = sum(run.job.prompt_tokens + run.job.output_tokens for run in (*self._queue, *self._running))
        return waiting + sum(run.uncached for run in self._running) + kv_weight * kv

    def submit(self, job: Job, done: Callable[[bool], None], arrived: float) -> None:
        """Queue a job that came at `arrived`; `done(False)` follows at its first token, `done(True)` at its end."""
        self._queue.append(_Run(job, arrived, done))
        self._wake()

    def _wake(self) -> None:
        if self._busy:
            return
        self._admit()
        if self._running:
            self._busy = True
            self._machine.busy += 1
            self._step()

    def _admit(self) -> None:
        while self._queue and (self.hardware.batching or not self._running):
            run = self._queue[0]
            if self._running and not self.cache.fits(run.job.keys):
                return
            self._queue.popleft()
            self._begin(run)

    def _begin(self, run: _Run) -> None:
        job, outcome = run.job, self._outcome
        hit = self.cache.hit(job.keys)
        outcome.hit_blocks += hit
        outcome.blocks += len(job.keys)
        outcome.waits.append(self._clock.now - run.arrived)
        outcome.served[self.name] = outcome.served.get(self.name, 0) + 1
        run.uncached = job.prompt_tokens - min(job.prompt_tokens, hit * self.hardware.block_size)
        run.came, went = self.cache.take(job.keys)
        self.removed += went
        self._running.append(run)

    def _step(self) -> None:
        """Compute one chunk (batching) or one whole prefill, and decode once for the rest."""
        hardware = self.hardware
        budget = float(hardware.chunk_tokens) if hardware.batching else float("inf")
        plan: list[tuple[_Run, float]] = []
        seconds = 0.0
        decoding = context = 0
        for run in self._running:
            if run.decoded:
                decoding += 1
                context += run.job.prompt_tokens + run.decoded
                plan.append((run, 0.0))
            elif budget > 0:
                tokens = min(budget, run.uncached)
                budget -= tokens
                before = run.job.prompt_tokens - run.uncached
                seconds += tokens / hardware.prefill_rate + tokens * (before + tokens / 2) * hardware.attended_s
                seconds += hardware.request_s if run.uncached - tokens <= 0 else 0.0
                plan.append((run, tokens))
        if decoding:
            seconds += hardware.decode_s + decoding * hardware.sequence_s + context * hardware.context_s
        self._clock.after(seconds * self._machine.slowdown, lambda: self._finish(plan))

    def _finish(self, plan: list[tuple[_Run, float]]) -> None:
        for run, tokens in plan:
            run.uncached -= tokens
            if run.uncached <= 0:
                if not run.decoded:
                    self._outcome.ttfts.append(self._clock.now - run.arrived)
                    self.stored += run.came
                    run.done(False)
                run.decoded += 1
                if run.decoded >= run.job.output_tokens or not self.hardware.decode_s:
                    self._running.remove(run)
                    self.cache.free(run.job.keys)
                    run.done(True)
        self._admit()
        if self._running:
            self._step()
        else:
            self._busy = False
            self._machine.busy -= 1
