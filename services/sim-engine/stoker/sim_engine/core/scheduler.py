"""Continuous batching with chunked prefill, as vLLM schedules it: a token budget a step, running first.

`schedule` plans one step and reserves its blocks; `complete` ends it and says which tokens came out. When
blocks run out, the request that came last gives up its own and starts over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from stoker.sim_engine.core.blocks import BlockPool, TokenSequence

NextToken = Callable[["Request"], int]
"""Chooses a request's next token."""


@dataclass
class Request:
    """One sequence to generate. The scheduler owns it from `add` until it is finished or aborted."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    arrived_s: float
    salt: str | None = None
    priority: int = 0
    """Smaller is sooner; used only when the scheduler goes by priority."""
    seed: int = 0
    script: tuple[int, ...] = ()
    """Tokens it must produce; it stops when they are out. Empty: any tokens, up to `max_tokens`."""
    generated: int = 0
    computed: int = 0
    """Tokens whose KV is in blocks."""
    cached_tokens: int | None = None
    """Prompt tokens found in the cache when first scheduled."""
    scheduled_s: float | None = None
    """When it first entered a batch."""
    preemptions: int = 0
    sequence: TokenSequence = field(init=False)

    def __post_init__(self) -> None:
        self.sequence = TokenSequence(list(self.prompt), self.salt)

    @property
    def finish_reason(self) -> str | None:
        """`stop`, `length`, or `None` while there is more to come."""
        if self.script and self.generated >= len(self.script):
            return "stop"
        return "length" if self.generated >= self.max_tokens else None


@dataclass(frozen=True)
class Planned:
    """A request's share of a step."""

    request: Request
    tokens: int


@dataclass(frozen=True)
class Step:
    """One forward pass."""

    planned: tuple[Planned, ...]
    prefill_tokens: int
    decoding: int
    attended: int
    """Sum, over the tokens computed, of the tokens each looks back at."""


@dataclass(frozen=True)
class Output:
    """A token that came out of a step."""

    request: Request
    token: int
    finish_reason: str | None


@dataclass
class Totals:
    """Counters since the start."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0


class Scheduler:
    """Who computes what in the next step."""

    def __init__(self, pool: BlockPool, *, max_running: int, budget: int, by_priority: bool = False) -> None:
        self.pool = pool
        self.totals = Totals()
        self.running: list[Request] = []
        self._waiting: deque[Request] = deque()
        self._max_running = max_running
        self._budget = budget
        self._by_priority = by_priority

    @property
    def waiting(self) -> int:
        """Requests that are not in the batch."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request. Raises `ValueError` if its prompt can never fit."""
        if -(-(len(request.prompt) + 1) // self.pool.block_size) > self.pool.capacity - 1:
            raise ValueError(f"{len(request.prompt)} tokens do not fit into {self.pool.capacity - 1} blocks")
        self._waiting.append(request)
        self._sort()

    def abort(self, request: Request) -> None:
        """Forget a request, whatever its state, and free its blocks."""
        if request in self.running:
            self.running.remove(request)
        elif request in self._waiting:
            self._waiting.remove(request)
        self.pool.free(request.sequence)

    def schedule(self, now: float) -> Step | None:
        """The next step, or `None` if there is nothing to do."""
        planned: list[Planned] = []
        budget, preempted = self._schedule_running(planned)
        if not preempted:
            self._schedule_waiting(planned, budget, now)
        if not planned:
            return None
        prefill = decoding = attended = 0
        for share in planned:
            before, tokens = share.request.computed, share.tokens
            attended += tokens * before + tokens * (tokens + 1) // 2
            if tokens == 1 and share.request.generated:
                decoding += 1
            else:
                prefill += tokens
        return Step(tuple(planned), prefill, decoding, attended)

    def complete(self, step: Step, choose: NextToken) -> list[Output]:
        """End a step: requests whose tokens are all computed get one more. Aborted ones get nothing."""
        outputs: list[Output] = []
        alive = set(map(id, self.running))
        for share in step.planned:
            request = share.request
            if id(request) not in alive:
                continue
            request.computed += share.tokens
            if request.computed < len(request.sequence.tokens):
                continue
            token = choose(request)
            request.sequence.tokens.append(token)
            request.generated += 1
            outputs.append(Output(request, token, request.finish_reason))
            if request.finish_reason is not None:
                self.running.remove(request)
                self.pool.free(request.sequence)
        return outputs

    def _schedule_running(self, planned: list[Planned]) -> tuple[int, bool]:
        budget, preempted, at = self._budget, False, 0
        while at < len(self.running) and budget > 0:
            request = self.running[at]
            tokens = min(len(request.sequence.tokens) - request.computed, budget)
            while not self.pool.allocate(request.sequence, (), request.computed + tokens):
                victim = self._victim()
                preempted = True
                self._preempt(victim)
                budget += sum(share.tokens for share in planned if share.request is victim)
                planned[:] = [share for share in planned if share.request is not victim]
                if victim is request:
                    break
            else:
                planned.append(Planned(request, tokens))
                budget -= tokens
                at = self.running.index(request) + 1
        return budget, preempted

    def _schedule_waiting(self, planned: list[Planned], budget: int, now: float) -> None:
        while self._waiting and budget > 0 and len(self.running) < self._max_running:
            request = self._waiting[0]
            hits = self.pool.lookup(request.sequence)
            reused = len(hits) * self.pool.block_size
            total = len(request.sequence.tokens)
            tokens = min(total - reused, budget)
            # A prompt enters only when all of it fits, or it would be thrown out half-way.
            if self.pool.blocks_to_take(request.sequence, hits, total) > self.pool.free_blocks:
                return
            if not self.pool.allocate(request.sequence, hits, reused + tokens):
                return
            self._waiting.popleft()
            if not request.preemptions:
                self.totals.prefix_queries += total
                self.totals.prefix_hits += reused
                request.cached_tokens = reused
                request.scheduled_s = now
            request.computed = reused
            self.running.append(request)
            planned.append(Planned(request, tokens))
            budget -= tokens

    def _victim(self) -> Request:
        if self._by_priority:
            return max(self.running, key=lambda request: (request.priority, request.arrived_s))
        return self.running[-1]

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.free(request.sequence)
        request.computed = 0
        request.preemptions += 1
        self.totals.preemptions += 1
        self._waiting.appendleft(request)
        self._sort()

    def _sort(self) -> None:
        if self._by_priority:
            self._waiting = deque(sorted(self._waiting, key=lambda request: (request.priority, request.arrived_s)))
