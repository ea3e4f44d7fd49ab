"""Replicas as models in simulated time: a queue, a cache, and steps that compute."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


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


@dataclass(slots=True)
class Outcome:
    """What a replay measured. Hit rate is in blocks; times in seconds."""

    hit_blocks: int = 0
    blocks: int = 0
    waits: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)
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
        return _quantile(self.waits, share)

    def ttft(self, share: float) -> float:
        """A quantile of the time to the first token."""
        return _quantile(self.ttfts, share)


def _quantile(values: list[float], share: float) -> float:
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


class Cache:
    """A replica's KV blocks: least recently used out first, a prompt's tail before its head, pins stay."""

    def __init__(self, blocks: int) -> None:
        self._limit = blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._pins: dict[int, int] = {}

    @property
    def pinned(self) -> int:
        """Blocks in use by running requests."""
        return len(self._pins)

    def hit(self, keys: Sequence[int]) -> int:
        """How many leading blocks are here."""
        depth = 0
        for key in keys:
            if key not in self._blocks:
                break
            depth += 1
        return depth

    def fits(self, keys: Sequence[int]) -> bool:
        """Whether the prompt fits beside what is pinned."""
        return sum(key not in self._pins for key in keys) + len(self._pins) <= self._limit

    def take(self, keys: Sequence[int]) -> tuple[list[int], list[int]]:
        """Pin a prompt's blocks, evicting what must go; return the keys that came and those that went."""
        for key in keys:
            self._pins[key] = self._pins.get(key, 0) + 1
        came = [key for key in keys if key not in self._blocks]
        for key in reversed(keys):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        went = []
        if len(self._blocks) > self._limit:
            excess = len(self._blocks) - self._limit
            loose = (key for key in self._blocks if key not in self._pins)
            went = list(itertools.islice(loose, excess))
            for key in went:
                del self._blocks[key]
        return came, went

    def free(self, keys: Sequence[int]) -> None:
        """Unpin a prompt's blocks and make them the most recently used."""
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)
            left = self._pins[key] - 1
            if left:
                self._pins[key] = left
            else:
                del self._pins[key]


@dataclass(slots=True)
class _Run:
    """A job on its way through a replica."""

    job: Job
    arrived: float
    done: Callable[[bool], None]  # called at the first token (False) and at the end (True)
    uncached: float = 0.0
    came: list[int] = field(default_factory=list)
    decoded: int = 0


class Machine:
    """The host of all replicas: how many compute at this moment."""

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self.busy = 0

    @property
    def slowdown(self) -> float:
        """How much longer a step takes for having to share."""
        return max(1.0, self.busy / self._cores) if self._cores else 1.0


class Engine:
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
