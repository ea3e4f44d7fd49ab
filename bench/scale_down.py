"""Seven replicas become five: which two go, and what is lost with them, in simulated time.

    python bench/scale_down.py mooncake TRACE [--starts 20] [--replays 1]
    python bench/scale_down.py tenants [--seeds 8] [--over 0.8]

Traffic runs on seven replicas until the moment of the decision; there the simulation forks, once for each pair that
may go and once for each other way to go on, and each fork counts the ten minutes after. All is routed by the router's
real core, and the pair is chosen by the scaler's from what routers and digests tell it. `--replays` runs each pair
again with every later arrival shifted by up to a quarter of a second: what differs then is luck.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from math import sqrt
from operator import attrgetter
from pathlib import Path
from random import Random
from statistics import fmean, stdev, variance
from typing import NamedTuple

from stoker.bench.desk import Asked, Desk
from stoker.bench.replicas import Clock, Engine, Hardware, Job, Machine, Outcome, quantile
from stoker.bench.sites import Delays, Digester, Reporter, RouterSite
from stoker.bench.traces import mooncake_trace, tenants_trace
from stoker.common.errors import StokerError
from stoker.router.core import Decision, Delta, Replica, RoutingConfig
from stoker.scaler.core import victims, warming
from stoker.scaler.core.values import Load, Standing
from stoker.scaler.core.values import Replica as Member
from stoker.scaler.core.warmth import Warmth

REPLICAS, GOING = 7, 2
AFTER_S = 600.0
WARM_S = 30.0
BUDGET = 0.5
_AT_ONCE = 2
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


class _Overheard(Digester):
    """Digests that reach the scaler as well."""

    def __init__(
        self, engine: Engine, sites: Sequence[RouterSite], clock: Clock, delays: Delays, warmth: Warmth
    ) -> None:
        super().__init__(engine, sites, clock, delays)
        self._warmth = warmth

    def _deliver(self, delta: Delta) -> None:
        super()._deliver(delta)
        for keys in delta.stored.values():
            self._warmth.stored(self._engine.name, keys, self._clock.now)
        for keys in delta.removed.values():
            self._warmth.removed(self._engine.name, keys, self._clock.now)


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
            self.site.fleet.put(_announced(engine, hardware))
            digester = _Overheard(engine, [self.site], self.clock, delays, self.warmth)
            reporter = Reporter(engine, [self.site], self.clock, delays, config.kv_weight)
            self.clock.after(delays.digest_every_s * number / REPLICAS, digester.tick)
            self.clock.after(delays.report_every_s * number / REPLICAS, reporter.tick)
        self._desk = Desk(self.engines, [self.site], None, self.clock, delays, self)
        self._jobs = list(reversed(jobs))
        self._next()

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
        members = [Member(name, "model", Standing.READY) for name in self.engines]
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


def _announced(engine: Engine, hardware: Hardware) -> Replica:
    return Replica(engine.name, hardware.block_size, prefill_rate=hardware.prefill_rate, kv_blocks=hardware.kv_blocks)


Fork = tuple[str, Pair, int]
WAYS = ("keep", "late", "warmed", "warmed first", "all warmed first", "copied", "more cache")
"""All seven stay; the pair goes half a minute later; it goes while others compute what it held; it goes after they
did; the same with all that fits the budget, likely or not; the others have all that it held, at no cost; they have
none of it, but as much room for blocks as all seven had."""


def forked(world: World, forks: Sequence[Fork]) -> dict[Fork, Measured]:
    """What each way to go on leads to, two processes at once."""
    left, results = list(reversed(forks)), dict[Fork, Measured]()
    running: dict[int, tuple[Fork, int]] = {}
    while left or running:
        while left and len(running) < _AT_ONCE:
            fork = left.pop()
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    os.write(writer, json.dumps(world.after(*fork)).encode())
                finally:
                    os._exit(0)
            os.close(writer)
            running[child] = fork, reader
        child, _ = os.wait()
        fork, reader = running.pop(child)
        with os.fdopen(reader) as answer:
            results[fork] = Measured(*json.loads(answer.read()))
        print(f"\r  {len(results)} of {len(forks)} ways on", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return results


class Moment(NamedTuple):
    """What became of one decision, beside the mean of all pairs: hit rates as multiples of it, TTFT p95 in seconds.

    `draw` is the pair that came out best in one replay; `best` the one best on the mean of all replays; `beforehand`
    what a pair is worth in a replay that was best in the others. `noise` and `spread` are the standard deviations of
    a pair's hit rate from replay to replay, and of the pairs' means, beside the mean: by chance alone the second is
    the first over the root of the number of replays.
    """

    hit: float
    ttft_s: float
    chosen: float
    chosen_ttft_s: float
    knowing: float
    draw: float
    best: float
    beforehand: float
    noise: float
    spread: float
    ways: dict[str, tuple[float, float, float, int]]


def decided(world: World, replays: int) -> Moment:
    """One decision, gone through in every way."""
    pairs = list(combinations(world.engines, GOING))
    chosen, knowing = world.chosen(), world.knowing()
    forks = [("go", pair, replay) for replay in range(replays) for pair in pairs]
    forks += [(way, () if way == "keep" else chosen, replay) for way in WAYS for replay in range(replays)]
    results = forked(world, forks)
    hits = {pair: [results["go", pair, replay].hit for replay in range(replays)] for pair in pairs}
    mean = fmean(hit for draws in hits.values() for hit in draws)
    means = {pair: fmean(draws) for pair, draws in hits.items()}
    rows = range(replays)
    ways = {}
    for way in WAYS:
        each = [results[way, () if way == "keep" else chosen, replay] for replay in rows]
        hit, net = fmean(m.hit for m in each) / mean, fmean(m.net for m in each) / mean
        ways[way] = hit, net, fmean(m.ttft_s for m in each), round(fmean(m.warmed for m in each))
    return Moment(
        hit=mean,
        ttft_s=fmean(results["go", pair, replay].ttft_s for pair in pairs for replay in rows),
        chosen=means[chosen] / mean,
        chosen_ttft_s=fmean(results["go", chosen, replay].ttft_s for replay in rows),
        knowing=means[knowing] / mean,
        draw=fmean(max(hits[pair][replay] for pair in pairs) for replay in rows) / mean,
        best=max(means.values()) / mean,
        beforehand=fmean(_beforehand(hits, replay) for replay in rows) / mean if replays > 1 else float("nan"),
        noise=sqrt(fmean(variance(draws) for draws in hits.values())) / mean if replays > 1 else float("nan"),
        spread=stdev(means.values()) / mean,
        ways=ways,
    )


def _beforehand(hits: dict[Pair, list[float]], replay: int) -> float:
    """The hit rate in one replay of the pair that was best in the others."""
    others = {pair: sum(draws) - draws[replay] for pair, draws in hits.items()}
    return hits[max(others, key=lambda pair: others[pair])][replay]


HEAD = ("mean of pairs", "chosen", "knowing", "best draw", "best mean", "best of others", "noise", "spread")


def table(moments: dict[str, Moment], replays: int) -> Iterator[str]:
    """Lines of Markdown."""
    yield f"| decision | {' | '.join(HEAD)} |"
    yield "|---|" + "---|" * len(HEAD)
    for name, m in [*moments.items(), ("mean", _mean(list(moments.values())))]:
        cells = [f"{m.hit:.4f}", *(f"{x:.3f}" for x in (m.chosen, m.knowing, m.draw, m.best, m.beforehand))]
        yield f"| {name} | {' | '.join(cells)} | {m.noise:.4f} | {m.spread:.4f} |"
    m = _mean(list(moments.values()))
    yield ""
    pairs = REPLICAS * (REPLICAS - 1) // 2
    yield f"Hit rates as multiples of the mean of all {pairs} pairs, {replays} replays of each."
    yield ""
    yield "| way | hit rate | net of warming | TTFT p95, s | blocks warmed |"
    yield "|---|---|---|---|---|"
    yield f"| any pair | 1 | 1 | {m.ttft_s:.2f} | 0 |"
    yield f"| the chosen pair | {m.chosen:.3f} | {m.chosen:.3f} | {m.chosen_ttft_s:.2f} | 0 |"
    for way in WAYS:
        hit, net, ttft_s, warmed = m.ways[way]
        yield f"| {way} | {hit:.3f} | {net:.3f} | {ttft_s:.2f} | {warmed} |"


def _mean(moments: Sequence[Moment]) -> Moment:
    def over(figure: Callable[[Moment], float]) -> float:
        return fmean(figure(moment) for moment in moments)

    names = [name for name in Moment._fields if name != "ways"]
    plain = {name: over(attrgetter(name)) for name in names}
    ways = {}
    for way in WAYS:
        hit, net, ttft_s, warmed = (fmean(column) for column in zip(*(m.ways[way] for m in moments), strict=True))
        ways[way] = hit, net, ttft_s, round(warmed)
    return Moment(**plain, ways=ways)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    mooncake = kinds.add_parser("mooncake", help="the published trace, decisions evenly spread over it")
    mooncake.add_argument("trace", type=Path)
    mooncake.add_argument("--starts", type=int, default=20)
    tenants = kinds.add_parser("tenants", help="tenants that differ in liveliness, a decision a seed")
    tenants.add_argument("--seeds", type=int, default=8)
    tenants.add_argument("--over", type=float, default=0.8, help="share of the tenants that have gone")
    tenants.add_argument("--at", type=float, default=1_450.0, help="second of the decision")
    for kind in (mooncake, tenants):
        kind.add_argument("--replays", type=int, default=1)
    args = parser.parse_args()
    moments: dict[str, Moment] = {}
    if args.kind == "mooncake":
        jobs = mooncake_trace(args.trace)
        world, first, last = World(jobs, Hardware()), 150.0, jobs[-1].at - AFTER_S
        for number in range(args.starts):
            world.reach(first + (last - first) * number / max(1, args.starts - 1))
            moments[f"{world.clock.now:.0f} s"] = _told(world, args.replays)
    else:
        for seed in range(args.seeds):
            world = World(tenants_trace(seed, over=args.over), Hardware())
            world.reach(args.at)
            moments[f"seed {seed}"] = _told(world, args.replays)
    print("\n".join(table(moments, args.replays)))


def _told(world: World, replays: int) -> Moment:
    moment = decided(world, replays)
    plain = {name: round(value, 4) for name, value in moment._asdict().items() if name != "ways"}
    ways = {way: tuple(round(value, 3) for value in figures) for way, figures in moment.ways.items()}
    print(f"{world.clock.now:.0f} s: {plain} {ways}", file=sys.stderr)
    return moment


if __name__ == "__main__":
    main()
