"""A fleet in simulated time, routed by the router's real core.

Replicas are models; the router is not: digests, load reports and completions reach it late, in order, as
they would from node agents. Everything follows from the jobs, the configuration and the seed.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

from stoker.common.blocks import xor_digest
from stoker.router.core import (
    Decision,
    Delta,
    Fleet,
    Replica,
    Request,
    RoutingConfig,
    Snapshot,
    Sync,
    Tier,
    decide,
)


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
    """Time of one decode step."""
    batching: bool = False
    """False: first come, first served, one at a time. True: continuous batching with chunked prefill."""
    chunk_tokens: int = 2_048
    """Tokens a step computes at most, with batching."""
    cores: int = 0
    """Replicas that can compute at once without slowing each other; 0: all of them."""


@dataclass(frozen=True, slots=True)
class Delays:
    """How late the router learns what happened, in seconds."""

    digest_every_s: float = 0.1
    digest_s: float = 0.1
    report_every_s: float = 0.5
    report_s: float = 0.05


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

    def submit(self, job: Job, done: Callable[[bool], None]) -> None:
        """Queue a job; `done(False)` follows at its first token, `done(True)` at its end."""
        self._queue.append(_Run(job, self._clock.now, done))
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
        decodes = False
        begun = 0
        for run in self._running:
            if run.decoded:
                decodes = True
                plan.append((run, 0.0))
            elif budget > 0:
                tokens = min(budget, run.uncached)
                budget -= tokens
                begun += run.uncached - tokens <= 0
                plan.append((run, tokens))
        prefill = sum(tokens for _, tokens in plan)
        seconds = prefill / hardware.prefill_rate + begun * hardware.request_s + decodes * hardware.decode_s
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


class RouterSite:
    """One router process: its own fleet view, fed late."""

    def __init__(self, config: RoutingConfig, policy: str, seed: int) -> None:
        self.fleet = Fleet(config)
        self.policy = policy
        self.rng = Random(seed)  # noqa: S311 (repeatable on purpose)

    def route(self, request: Request, now: float) -> Decision:
        """Decide, and hold the decision to its own bound."""
        decision = decide(request, self.fleet, now, self.rng, policy=self.policy, explain=True)
        for candidate in decision.candidates:
            if candidate.replica == decision.replica and not decision.over_bound:
                assert candidate.load + candidate.weight <= candidate.bound, candidate  # noqa: S101
        return decision


class Digester:
    """A node agent's digest of one replica: batches changes, delivers them in order to every router."""

    def __init__(self, engine: Engine, sites: Sequence[RouterSite], clock: Clock, delays: Delays) -> None:
        self._engine = engine
        self._sites = sites
        self._clock = clock
        self._delays = delays
        self._sequence = 1
        self._held: set[int] = set()
        self._digest = 0
        for site in sites:
            site.fleet.snapshot(engine.name, Snapshot(1, 1, {}), 0.0)

    def tick(self) -> None:
        """Send what changed since the last tick, then come again."""
        engine = self._engine
        if engine.stored or engine.removed:
            # A block can be stored and evicted within one tick, or the reverse: the set decides.
            removed = [key for key in dict.fromkeys(engine.removed) if key in self._held]
            self._held.difference_update(removed)
            stored = [
                key for key in dict.fromkeys(engine.stored) if key not in self._held and engine.cache.hit((key,))
            ]
            self._held.update(stored)
            engine.stored, engine.removed = [], []
            self._digest = xor_digest(removed, xor_digest(stored, self._digest))
            self._sequence += 1
            delta = Delta(1, self._sequence, {Tier.GPU: stored}, {Tier.GPU: removed}, {Tier.GPU: self._digest})
            self._clock.after(self._delays.digest_s, lambda: self._deliver(delta))
        else:
            sequence = self._sequence
            self._clock.after(self._delays.digest_s, lambda: self._beat(sequence))
        self._clock.after(self._delays.digest_every_s, self.tick)

    def _deliver(self, delta: Delta) -> None:
        for site in self._sites:
            result = site.fleet.delta(self._engine.name, delta, self._clock.now)
            assert result is Sync.APPLIED, result  # noqa: S101

    def _beat(self, sequence: int) -> None:
        for site in self._sites:
            site.fleet.index.heartbeat(self._engine.name, 1, sequence, self._clock.now)


def replay(
    jobs: Sequence[Job],
    *,
    replicas: int,
    hardware: Hardware,
    policy: str = "stoker",
    config: RoutingConfig | None = None,
    delays: Delays | None = None,
    clients: int = 0,
    routers: int = 1,
    seed: int = 1,
) -> Outcome:
    """Route and serve all jobs; return what was measured.

    With `clients` = 0 jobs arrive at their times; otherwise that many closed-loop clients take them in
    order, each waiting for its own to end. Several routers share nothing but what replicas report.
    """
    config, delays = config or RoutingConfig(), delays or Delays()
    clock, outcome, machine = Clock(), Outcome(), Machine(hardware.cores)
    sites = [RouterSite(config, policy, seed + number) for number in range(routers)]
    engines = {
        f"replica-{number}": Engine(f"replica-{number}", hardware, clock, machine, outcome)
        for number in range(replicas)
    }
    for site in sites:
        for name in engines:
            site.fleet.put(
                Replica(name, hardware.block_size, prefill_rate=hardware.prefill_rate, kv_blocks=hardware.kv_blocks)
            )
    digesters = [Digester(engine, sites, clock, delays) for engine in engines.values()]
    for number, digester in enumerate(digesters):
        clock.after(delays.digest_every_s * (number + 1) / replicas, digester.tick)
    for number, engine in enumerate(engines.values()):
        clock.after(delays.report_every_s * (number + 1) / replicas, _reporter(engine, sites, clock, delays, config))
    turns = itertools.cycle(sites)
    finished = 0

    def start(job: Job, ended: Callable[[], None]) -> None:
        nonlocal finished
        site = next(turns)
        request = Request(job.keys, job.prompt_tokens, hardware.block_size, job.output_tokens)
        decision = site.route(request, clock.now)
        flight = site.fleet.dispatch(request, decision, clock.now)
        outcome.over_bound += decision.over_bound
        outcome.predicted_blocks += decision.cached_tokens / hardware.block_size

        def done(end: bool) -> None:
            nonlocal finished
            if not end:
                site.fleet.first_token(flight, clock.now)
                return
            site.fleet.release(flight, clock.now)
            outcome.makespan = clock.now
            finished += 1
            ended()

        engines[decision.replica].submit(job, done)

    if clients:
        _closed_loop(jobs, clients, start)
    else:
        for job in jobs:
            clock.after(job.at, lambda job=job: start(job, _nothing))  # type: ignore[misc]
    clock.run(until=lambda: finished == len(jobs))
    assert all(site.fleet.load.in_flight == 0 for site in sites)  # noqa: S101
    return outcome


def _nothing() -> None:
    pass


def _closed_loop(jobs: Iterable[Job], clients: int, start: Callable[[Job, Callable[[], None]], None]) -> None:
    """Each client takes the first job whose predecessor has ended, and the next one when its own ends."""
    waiting = list(enumerate(jobs))
    ended: set[int] = {-1}
    idle = clients

    def hand_out() -> None:
        nonlocal idle
        while idle:
            ready = next((item for item in waiting if item[1].after in ended), None)
            if ready is None:
                return
            waiting.remove(ready)
            idle -= 1
            number, job = ready
            start(job, partial(end, number))

    def end(number: int) -> None:
        nonlocal idle
        ended.add(number)
        idle += 1
        hand_out()

    hand_out()


def _reporter(
    engine: Engine, sites: Sequence[RouterSite], clock: Clock, delays: Delays, config: RoutingConfig
) -> Callable[[], None]:
    def report() -> None:
        seen_at, tokens = clock.now, engine.load(config.kv_weight)

        def deliver() -> None:
            for site in sites:
                site.fleet.load.report(engine.name, tokens, seen_at)

        clock.after(delays.report_s, deliver)
        clock.after(delays.report_every_s, report)

    return report


def pooled_hit_rate(jobs: Sequence[Job], blocks: int) -> float:
    """The hit rate in blocks of one LRU cache as large as all replicas' together, in order of arrival."""
    cache = Cache(blocks)
    hits = 0
    for job in jobs:
        hits += cache.hit(job.keys)
        cache.take(job.keys)
        cache.free(job.keys)
    return hits / max(1, sum(len(job.keys) for job in jobs))
