"""Replicas as models in simulated time: a queue, a cache, and steps that compute."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, sqrt
from operator import attrgetter

from stoker.bench.cache import Cache


@dataclass(frozen=True, slots=True)
class Job:
    """One request: when it arrives (seconds; ignored with closed-loop clients), its blocks and its size.

    `keys` are u64, one per block; with `partial` replay a last, partly filled block has one as well.
    """

    at: float
    keys: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int = 0
    after: int = -1
    """The job whose end must come first (a chat's previous turn), or −1."""
    asked_tokens: int | None = None
    """The output that the router expects; None: as much as comes."""
    tenant: str = ""
    priority: int = 0
    weight: float = 1.0
    session: int = 0
    own_blocks: int = 0
    """Blocks beside those of `keys` that it holds while it runs: of its output, or of a prompt nobody shares."""
    warming: bool = False
    """Nobody waits for it: it only brings its blocks into the cache. Counted apart."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What one replica can do, and how the machine under all of them is shared."""

    block_size: int = 512
    kv_blocks: int = 2_560
    prefill_rate: float = 15_000.0
    """Uncached prompt tokens per second."""
    request_s: float = 0.020
    """Fixed cost of a request before its first token."""
    decode_s: float = 0.0
    """Time of one decode step, whatever it decodes."""
    sequence_s: float = 0.0
    """The same for each sequence in it."""
    context_s: float = 0.0
    """The same for each token of context that these sequences have: their KV is read."""
    attended_s: float = 0.0
    """Prefill, for each token computed and each token before it that it attends to."""
    batching: bool = False
    """False: first come, first served, one at a time. True: continuous batching with chunked prefill."""
    chunk_tokens: int = 2_048
    """Tokens a step computes at most, with batching."""
    cores: int = 0
    """Replicas that can compute at once without slowing each other; 0: all of them."""
    max_seqs: int = 0
    """Requests in one batch at most, with batching; 0: as many as the cache has room for."""


@dataclass(slots=True)
class Outcome:
    """What a replay measured. Hit rate is in blocks; times in seconds."""

    hit_blocks: int = 0
    blocks: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefilled_tokens: float = 0.0
    prefill_s: float = 0.0
    """What these took, whatever was decoded beside them."""
    warmed_blocks: int = 0
    """Computed for nobody, so that a later request finds them."""
    waits: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)
    ttfts_by_tenant: dict[str, list[float]] = field(default_factory=dict)
    """From the request's arrival at a router, as `ttfts`."""
    over_bound: int = 0
    predicted_blocks: float = 0.0
    makespan: float = 0.0
    served: dict[str, int] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Cached blocks over all prompt blocks, as the replicas count them."""
        return self.hit_blocks / max(1, self.blocks)

    @property
    def requests_per_s(self) -> float:
        """Requests over the time from the first arrival to the last token."""
        return len(self.waits) / max(1e-9, self.makespan)

    def wait(self, share: float) -> float:
        """A quantile of the wait before prefill."""
        return quantile(self.waits, share)

    def ttft(self, share: float) -> float:
        """A quantile of the time to the first token."""
        return quantile(self.ttfts, share)


def quantile(values: Sequence[float], share: float) -> float:
    """A quantile of some values, not a number where there are none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


class Clock:
    """Events in order of time, then of scheduling."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def after(self, delay: float, action: Callable[[], None]) -> None:
        """Run an action `delay` seconds from now."""
        heapq.heappush(self._events, (self.now + delay, next(self._count), action))

    def run(self, until: Callable[[], bool]) -> None:
        """Run events until the condition holds or none is left."""
        while self._events and not until():
            self.now, _, action = heapq.heappop(self._events)
            action()

    def run_for(self, seconds: float) -> None:
        """Run what is due within `seconds`."""
        end = self.now + seconds
        self.run(until=lambda: not self._events or self._events[0][0] > end)


@dataclass(slots=True, eq=False)
class _Run:
    """A job on its way through a replica."""

    job: Job
    arrived: float
    done: Callable[[bool], None]  # called at the first token (False) and at the end (True)
    number: int = 0  # in order of admission
    uncached: float = 0.0
    came: list[int] = field(default_factory=list)


class Machine:
    """The host of all replicas: how many compute at this moment."""

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self.busy = 0

    @property
    def slowdown(self) -> float:
        """How much longer a step takes for having to share."""
        return max(1.0, self.busy / self._cores) if self._cores else 1.0


@dataclass(slots=True)
class _Stretch:
    """Steps that follow each other with nothing but decoding in them: they are one event."""

    began: float
    steps: int
    first_s: float  # time of the first step
    more_s: float  # by which each is longer than the one before

    def seconds(self, steps: int) -> float:
        return steps * self.first_s + self.more_s * (steps * (steps - 1) / 2)

    def begun_by(self, seconds: float) -> int:
        """How many steps have begun by then, not more than there are."""
        if self.more_s:
            half = self.first_s - self.more_s / 2
            begun = ceil((sqrt(half * half + 2 * self.more_s * seconds) - half) / self.more_s - 1e-9)
        else:
            begun = ceil(seconds / self.first_s - 1e-9)
        return min(self.steps, max(1, begun))


class Engine:
    """A replica: a queue, a cache, and steps that compute.

    Every step that prefills is an event. Those that only decode differ by the context that has grown, so all
    until the next end are one event, cut short where a request comes that can join: the times are those of a
    step-by-step account, at a cost by request and not by token.
    """

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
        self._prefilling: deque[_Run] = deque()
        self._decoding: list[tuple[int, int, _Run]] = []  # heap by the step that is the last
        self._numbers = itertools.count()
        self._step_number = 0
        self._context = 0  # of all that decode, tokens
        self._kv_tokens = 0  # that all requests here will have had in the end
        self._generated = 0
        self._stretch: _Stretch | None = None
        self._due = 0  # the event that counts: those that were cut short are passed over
        self._busy = False

    @property
    def waiting(self) -> int:
        """Requests that are not in the batch."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def idle(self) -> bool:
        """Whether nothing is here."""
        return not self._busy and not self._queue

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        if self._stretch is None:
            return self._generated
        ended = self._stretch.begun_by(self._clock.now - self._stretch.began) - 1
        return self._generated + ended * len(self._decoding)

    def load(self, kv_weight: float) -> float:
        """Queued prefill and active KV, in tokens, as an agent would report it."""
        waiting = sum(
            run.job.prompt_tokens
            - min(run.job.prompt_tokens, self.hardware.block_size * self.cache.hit(run.job.keys))
            for run in self._queue
        )
        return waiting + sum(run.uncached for run in self._prefilling) + kv_weight * self._kv_tokens

    def submit(self, job: Job, done: Callable[[bool], None], arrived: float) -> None:
        """Queue a job that came at `arrived`; `done(False)` follows at its first token, `done(True)` at its end."""
        self._kv_tokens += job.prompt_tokens + job.output_tokens
        self._queue.append(_Run(job, arrived, done))
        if self._stretch is not None:
            self._cut(self._stretch)
        elif not self._busy:
            self._busy = True
            self._machine.busy += 1
            self._admit()
            self._step()

    def die(self) -> None:
        """Stop in the midst of everything: nothing that is here is ever done."""
        self._generated, self._stretch = self.generated, None
        self._due += 1
        self._machine.busy -= self._busy
        self._busy = False
        self._queue.clear()
        self._prefilling.clear()
        self._decoding.clear()

    def _cut(self, stretch: _Stretch) -> None:
        """End the steps that only decode with the one that is under way, if who comes can then join."""
        if len(self._queue) > 1 or not self._joins(self._queue[0].job):
            return
        begun = stretch.begun_by(self._clock.now - stretch.began)
        if begun < stretch.steps:
            stretch.steps = begun
            self._finish_after(max(0.0, stretch.began + stretch.seconds(begun) - self._clock.now), ())

    def _joins(self, job: Job) -> bool:
        if not self.running:
            return True
        hardware = self.hardware
        free = hardware.batching and (not hardware.max_seqs or self.running < hardware.max_seqs)
        return free and self.cache.fits(job.keys, job.own_blocks)

    def _admit(self) -> None:
        while self._queue and self._joins(self._queue[0].job):
            self._begin(self._queue.popleft())

    def _begin(self, run: _Run) -> None:
        job, outcome = run.job, self._outcome
        hit = self.cache.hit(job.keys)
        cached = min(job.prompt_tokens, hit * self.hardware.block_size)
        if job.warming:
            outcome.warmed_blocks += len(job.keys) - hit
        else:
            outcome.hit_blocks += hit
            outcome.blocks += len(job.keys)
            outcome.waits.append(self._clock.now - run.arrived)
            outcome.served[self.name] = outcome.served.get(self.name, 0) + 1
            outcome.prompt_tokens += job.prompt_tokens
            outcome.cached_tokens += cached
        run.uncached = job.prompt_tokens - cached
        run.came, went = self.cache.take(job.keys, job.own_blocks)
        run.number = next(self._numbers)
        self.removed += went
        self._prefilling.append(run)

    def _step(self) -> None:
        """Compute one chunk (batching) or one whole prefill, and decode once for the rest; or only decode."""
        hardware, decoding = self.hardware, len(self._decoding)
        first_s = more_s = 0.0
        if decoding:
            first_s = hardware.decode_s + decoding * hardware.sequence_s + self._context * hardware.context_s
            more_s = decoding * hardware.context_s
        if self._prefilling:
            plan, seconds = self._prefill()
            self._outcome.prefilled_tokens += sum(tokens for _, tokens in plan)
            self._outcome.prefill_s += seconds
            self._finish_after((seconds + first_s) * self._machine.slowdown, plan)
            return
        # How many share the machine can change with every step.
        steps = 1 if hardware.cores else self._decoding[0][0] - self._step_number
        slowdown = self._machine.slowdown
        stretch = self._stretch = _Stretch(self._clock.now, steps, first_s * slowdown, more_s * slowdown)
        self._finish_after(stretch.seconds(steps), ())

    def _prefill(self) -> tuple[list[tuple[_Run, float]], float]:
        """Who gets how many tokens of the next step, and the seconds that these take."""
        hardware = self.hardware
        budget = float(hardware.chunk_tokens) if hardware.batching else float("inf")
        plan, seconds = [], 0.0
        for run in self._prefilling:
            if budget <= 0:
                break
            tokens = min(budget, run.uncached)
            budget -= tokens
            before = run.job.prompt_tokens - run.uncached
            seconds += tokens / hardware.prefill_rate + tokens * (before + tokens / 2) * hardware.attended_s
            seconds += hardware.request_s if run.uncached - tokens <= 0 else 0.0
            plan.append((run, tokens))
        return plan, seconds

    def _finish_after(self, seconds: float, plan: Sequence[tuple[_Run, float]]) -> None:
        self._due += 1
        due = self._due
        self._clock.after(seconds, lambda: self._finish(plan) if due == self._due else None)

    def _finish(self, plan: Sequence[tuple[_Run, float]]) -> None:
        if self._decoding:
            steps, self._stretch = self._stretch.steps if self._stretch else 1, None
            self._step_number += steps
            self._context += steps * len(self._decoding)
            self._generated += steps * len(self._decoding)
        ended = []
        while self._decoding and self._decoding[0][0] <= self._step_number:
            ended.append(heapq.heappop(self._decoding)[2])
        for run, tokens in plan:
            run.uncached -= tokens
        prefilled = [run for run, _ in plan if run.uncached <= 0]
        for run in sorted((*ended, *prefilled), key=attrgetter("number")):
            if run in prefilled:
                self._first_token(run)
            else:
                self._context -= run.job.prompt_tokens + run.job.output_tokens
                self._end(run)
        self._admit()
        if self.running:
            self._step()
        else:
            self._busy = False
            self._machine.busy -= 1

    def _first_token(self, run: _Run) -> None:
        self._prefilling.popleft()  # in order of admission: who is done has nobody before it
        if not run.job.warming:
            self._outcome.ttfts.append(self._clock.now - run.arrived)
        self._generated += 1
        self.stored += run.came
        run.done(False)
        more = run.job.output_tokens - 1
        if more > 0 and self.hardware.decode_s:
            heapq.heappush(self._decoding, (self._step_number + more, run.number, run))
            self._context += run.job.prompt_tokens + 1
        else:
            self._end(run)

    def _end(self, run: _Run) -> None:
        self._kv_tokens -= run.job.prompt_tokens + run.job.output_tokens
        self.cache.free(run.job.keys, run.job.own_blocks)
        run.done(True)
