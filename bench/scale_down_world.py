"""The fleet of `bench/scale_down.py`: traffic on seven replicas in simulated time, until two of them go.

Replicas are models; the router's core, the scaler's choice of who goes and its warming are the real ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from random import Random
from typing import NamedTuple

from stoker.bench.desk import Asked, Desk
from stoker.bench.replicas import Clock, Engine, Hardware, Job, Machine, Outcome, quantile
from stoker.bench.sites import Delays, Digester, Reporter, RouterSite, announced
from stoker.common.errors import StokerError
from stoker.router.core import Decision, Delta, RoutingConfig
from stoker.scaler.core import victims, warming
from stoker.scaler.core.values import Load, Replica, Standing
from stoker.scaler.core.warmth import Warmth

REPLICAS, GOING = 7, 2
AFTER_S = 600.0
WARM_S = 30.0
BUDGET = 0.5  # share of the others' prefill in that time
_SHIFT_S = 0.25
_IDLE_S = 0.2
_STAYING = (REPLICAS - GOING) / REPLICAS

Pair = tuple[str, ...]


class Measured(NamedTuple):
    """The ten minutes after: hit rate in blocks of what was asked for; the same with blocks that were computed for
    warming counted as misses; TTFT p95 in seconds; the blocks computed for warming."""

    hit: float
    net: float
    ttft_s: float
    warmed: int


class World:
    """A fleet under traffic, and what its scaler knows of it."""

    def __init__(self, jobs: Sequence[Job], hardware: Hardware) -> None:
        config, delays = RoutingConfig(kv_weight=0.0), Delays()
        self.hardware = hardware
        self.clock, self.outcome = Clock(), Outcome()
        self.site = RouterSite(config, "stoker", 1, checked=False)
        self.warmth = Warmth(hardware.block_size)
        self.last_asked: dict[int, tuple[float, Job, int]] = {}
        machine = Machine(0)
        names = [f"replica-{number}" for number in range(REPLICAS)]
        self.engines = {name: Engine(name, hardware, self.clock, machine, self.outcome) for name in names}
        for number, engine in enumerate(self.engines.values(), 1):
            self.site.fleet.put(announced(engine))
            digester = Digester(engine, [self.site], self.clock, delays, self._overheard)
            reporter = Reporter(engine, [self.site], self.clock, delays, config.kv_weight)
            self.clock.after(delays.digest_every_s * number / REPLICAS, digester.tick)
            self.clock.after(delays.report_every_s * number / REPLICAS, reporter.tick)
        self._desk = Desk(self.engines, [self.site], None, self.clock, delays, self)
        self._jobs = list(reversed(jobs))
        self._next()

    def _overheard(self, replica: str, delta: Delta) -> None:
        """What digests tell reaches the scaler as well."""
        for keys in delta.stored.values():
            self.warmth.stored(replica, keys, self.clock.now)
        for keys in delta.removed.values():
            self.warmth.removed(replica, keys, self.clock.now)

    def _next(self) -> None:
        if self._jobs:
            self.clock.after(max(0.0, self._jobs[-1].at - self.clock.now), self._start)

    def _start(self) -> None:
        self._desk.start(self._jobs.pop(), self.hardware.block_size)
        self._next()

    def sent(self, asked: Asked, decision: Decision) -> None:
        self.warmth.used(asked.job.keys, self.clock.now)
        for place, key in enumerate(asked.job.keys):
            self.last_asked[key] = (self.clock.now, asked.job, place)

    def first_token(self, asked: Asked) -> None:
        pass

    def ended(self, asked: Asked) -> None:
        pass

    def refused(self, asked: Asked, error: StokerError | None) -> None:
        raise error or AssertionError(asked)

    def reach(self, moment: float) -> None:
        """Run until the decision."""
        self.clock.run_for(moment - self.clock.now)

    def shift(self, seed: int) -> None:
        """Let all that comes from here on come a little later, each by a time of its own."""
        rng = Random(seed)
        later = [replace(job, at=job.at + rng.uniform(0.0, _SHIFT_S)) for job in self._jobs]
        self._jobs = sorted(later, key=lambda job: -job.at)

    def drain(self, names: Pair) -> None:
        """They get nothing new; what they have they finish."""
        for name in names:
            self.site.fleet.put(replace(self.site.fleet.replicas[name], draining=True))

    def chosen(self) -> Pair:
        """Who would go by the scaler's own choice."""
        now, rate = self.clock.now, self.hardware.prefill_rate
        members = [Replica(name, "model", Standing.READY) for name in self.engines]
        loads = {
            engine.name: Load(now, engine.running, engine.waiting, int(engine.load(0.0)))
            for engine in self.engines.values()
        }
        worth = self.warmth.worth(now, staying=_STAYING)
        rates = victims.Rates(rate, self.hardware.request_s)
        choice = victims.choose(members, GOING, loads, now, fresh_s=10.0, worth=worth, rates=rates)
        return tuple(sorted(choice.victims))

    def knowing(self) -> Pair:
        """Who would go if it were known what is asked for in the ten minutes after."""
        now = self.clock.now
        asked = {key for job in self._jobs if job.at < now + AFTER_S for key in job.keys}
        holders: dict[int, set[str]] = {}
        for name, engine in self.engines.items():
            for key in engine.cache.keys():  # noqa: SIM118 (it is no mapping)
                if key in asked:
                    holders.setdefault(key, set()).add(name)

        def lost(pair: Pair) -> int:
            return sum(held <= set(pair) for held in holders.values())

        return min(combinations(self.engines, GOING), key=lambda pair: (lost(pair), pair))

    def plan(self, going: Pair, least_chance: float = warming.LEAST_CHANCE) -> tuple[warming.Warming, ...]:
        """What the scaler would have warmed elsewhere."""
        blocks = self.warmth.held_by(going, self.clock.now, staying=_STAYING)
        staying = [name for name in self.engines if name not in going]
        budget = BUDGET * WARM_S * self.hardware.prefill_rate * len(staying)
        tokens = self.hardware.block_size * self.warmth.config.sample
        return warming.plan(blocks, staying, tokens, budget, least_chance)

    def warm(self, plans: Sequence[warming.Warming]) -> None:
        """Compute these prefixes, each successor one after the other while it has nothing else to do."""
        until = self.clock.now + WARM_S
        for name in self.engines:
            self._warm_next(name, [plan.leaf for plan in reversed(plans) if plan.successor == name], until)

    def _warm_next(self, name: str, leaves: list[int], until: float) -> None:
        if not leaves or self.clock.now > until:
            return
        engine = self.engines[name]
        if engine.idle:
            leaf = leaves.pop()
            if leaf in self.last_asked:
                _, job, place = self.last_asked[leaf]
                keys, now = job.keys[: place + 1], self.clock.now
                engine.submit(Job(now, keys, len(keys) * self.hardware.block_size, warming=True), _nothing, now)
        self.clock.after(_IDLE_S, partial(self._warm_next, name, leaves, until))

    def copy(self, going: Pair) -> None:
        """All that goes lies in the other caches at once, at no cost, and the oldest of everything gives way."""
        staying = [engine for name, engine in self.engines.items() if name not in going]
        here = {engine.name: set(engine.cache.keys()) for engine in staying}
        home: dict[int, str] = {}
        moved: Counter[str] = Counter()
        theirs = {key for name in going for key in self.engines[name].cache.keys()}  # noqa: SIM118
        for key in sorted(theirs, key=lambda key: (self.last_asked[key][2], key)):
            if any(key in keys for keys in here.values()):
                continue
            _, job, place = self.last_asked[key]
            parent = job.keys[place - 1] if place else 0
            have = [engine.name for engine in staying if parent in here[engine.name]] or list(here)
            home[key] = home.get(parent) or min(have, key=lambda name: (moved[name], name))
            moved[home[key]] += 1
        for engine in staying:
            before = engine.cache.keys()
            come = [key for key, name in home.items() if name == engine.name]
            for key in sorted({*before, *come}, key=lambda key: (self.last_asked[key][0], -self.last_asked[key][2])):
                came, went = engine.cache.take((key,))
                engine.cache.free((key,))
                engine.stored += came
                engine.removed += went

    def after(self, way: str, going: Pair, replay: int) -> Measured:
        """The ten minutes after, gone on with in one way."""
        if replay:
            self.shift(replay)
        outcome, served = self.outcome, len(self.outcome.ttfts)
        hits, blocks, warmed = outcome.hit_blocks, outcome.blocks, outcome.warmed_blocks
        match way:
            case "go":
                self.drain(going)
            case "copied":
                self.copy(going)
                self.drain(going)
            case "more cache":
                self.drain(going)
                for engine in (engine for name, engine in self.engines.items() if name not in going):
                    engine.cache.grow(round(self.hardware.kv_blocks * GOING / (REPLICAS - GOING)))
            case "late":
                self.clock.after(WARM_S, partial(self.drain, going))
            case "warmed first" | "all warmed first":
                self.warm(self.plan(going, 0.0 if way == "all warmed first" else warming.LEAST_CHANCE))
                self.clock.after(WARM_S, partial(self.drain, going))
            case "warmed":
                self.warm(self.plan(going))
                self.drain(going)
        self.clock.run_for(AFTER_S)
        hits, blocks, warmed = outcome.hit_blocks - hits, outcome.blocks - blocks, outcome.warmed_blocks - warmed
        ttfts = outcome.ttfts[served:]
        return Measured(hits / blocks, (hits - warmed) / blocks, quantile(ttfts, 0.95), warmed)


def _nothing(end: bool) -> None:
    pass
