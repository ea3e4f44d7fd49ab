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
import sys
from collections.abc import Iterator, Sequence
from itertools import combinations
from math import sqrt
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.scale_down_world import AFTER_S, GOING, REPLICAS, Measured, Pair, World
from stoker.bench.published import mooncake_prompts
from stoker.bench.replicas import Hardware
from stoker.bench.traces import tenants_trace

_AT_ONCE = 2

Fork = tuple[str, Pair, int]
WAYS = ("keep", "late", "warmed", "warmed first", "all warmed first", "copied", "more cache")
"""All seven stay; the pair goes half a minute later; it goes while others compute what it held; it goes after they
did; the same with all that fits the budget, likely or not; the others have all that it held, at no cost; they have
none of it, but as much room for blocks as all seven had."""


def forked(world: World, forks: Sequence[Fork]) -> dict[Fork, Measured]:
    """What each way to go on leads to, two processes at once. Raises EOFError where one failed."""
    left, results = list(reversed(forks)), dict[Fork, Measured]()
    running: dict[Connection, Fork] = {}
    while left or running:
        while left and len(running) < _AT_ONCE:
            fork = left.pop()
            running[_begun(world, fork)] = fork
        for reader in wait(list(running)):
            assert isinstance(reader, Connection)
            with reader:
                results[running.pop(reader)] = reader.recv()
        print(f"\r  {len(results)} of {len(forks)} ways on", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return results


def _begun(world: World, fork: Fork) -> Connection:
    """Go on in one way in a process that is a copy of this one; where to read what it measures."""
    context = get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    with writer:
        context.Process(target=lambda: writer.send(world.after(*fork)), daemon=True).start()
    return reader


class Moment(NamedTuple):
    """What became of one decision, beside the mean of all pairs: hit rates as multiples of it, TTFT p95 in seconds.

    `draw` is the pair that came out best in one replay; `best` the one best on the mean of all replays; `beforehand`
    what a pair is worth in a replay that was best in the others. `noise` and `spread` are the standard deviations of
    a pair's hit rate from replay to replay, and of the pairs' means, beside the mean: by chance alone the second is
    the first over the root of the number of replays. None: one replay alone says nothing of that.
    """

    hit: float
    ttft_s: float
    chosen: float
    chosen_ttft_s: float
    knowing: float
    draw: float
    best: float
    beforehand: float | None
    noise: float | None
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
        beforehand=fmean(_beforehand(hits, replay) for replay in rows) / mean if replays > 1 else None,
        noise=sqrt(fmean(variance(draws) for draws in hits.values())) / mean if replays > 1 else None,
        spread=stdev(means.values()) / mean,
        ways=ways,
    )


def _beforehand(hits: dict[Pair, list[float]], replay: int) -> float:
    """The hit rate in one replay of the pair that was best in the others."""
    others = {pair: sum(draws) - draws[replay] for pair, draws in hits.items()}
    return hits[max(others, key=lambda pair: others[pair])][replay]


COLUMNS = {
    "mean of pairs": ("hit", ".4f"),
    "chosen": ("chosen", ".3f"),
    "knowing": ("knowing", ".3f"),
    "best draw": ("draw", ".3f"),
    "best mean": ("best", ".3f"),
    "best of others": ("beforehand", ".3f"),
    "noise": ("noise", ".4f"),
    "spread": ("spread", ".4f"),
}


def table(moments: dict[str, Moment], replays: int) -> Iterator[str]:
    """Lines of Markdown, without the columns that so few replays leave unknown."""
    mean = _mean(list(moments.values()))
    columns = {title: column for title, column in COLUMNS.items() if getattr(mean, column[0]) is not None}
    yield f"| decision | {' | '.join(columns)} |"
    yield "|---|" + "---|" * len(columns)
    for name, moment in [*moments.items(), ("mean", mean)]:
        yield f"| {name} | {' | '.join(format(getattr(moment, what), form) for what, form in columns.values())} |"
    yield ""
    pairs = REPLICAS * (REPLICAS - 1) // 2
    often = "one replay" if replays == 1 else f"{replays} replays"
    yield f"Hit rates as multiples of the mean of all {pairs} pairs, {often} of each."
    yield ""
    yield "| way | hit rate | net of warming | TTFT p95, s | blocks warmed |"
    yield "|---|---|---|---|---|"
    yield f"| any pair | 1 | 1 | {mean.ttft_s:.2f} | 0 |"
    yield f"| the chosen pair | {mean.chosen:.3f} | {mean.chosen:.3f} | {mean.chosen_ttft_s:.2f} | 0 |"
    for way in WAYS:
        hit, net, ttft_s, warmed = mean.ways[way]
        yield f"| {way} | {hit:.3f} | {net:.3f} | {ttft_s:.2f} | {warmed} |"


def _mean(moments: Sequence[Moment]) -> Moment:
    plain: dict[str, Any] = {}
    for name in Moment._fields:
        if name != "ways":
            figures = [getattr(moment, name) for moment in moments]
            plain[name] = None if None in figures else fmean(figures)
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
        jobs = mooncake_prompts(args.trace)
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
    plain = {
        name: value if value is None else round(value, 4)
        for name, value in moment._asdict().items()
        if name != "ways"
    }
    ways = {way: tuple(round(value, 3) for value in figures) for way, figures in moment.ways.items()}
    print(f"{world.clock.now:.0f} s: {plain} {ways}", file=sys.stderr)
    return moment


if __name__ == "__main__":
    main()
