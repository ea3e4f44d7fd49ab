"""A fleet in simulated time, routed by the router's real core.

Replicas are models; the router is not: digests, load reports, completions and what other routers dispatch reach
it late, in order, as they would from node agents and registries. Everything follows from the jobs, the
configuration and the seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from stoker.bench.replicas import Cache, Clock, Engine, Hardware, Job, Machine, Outcome
from stoker.bench.sites import Announcements, Delays, Digester, Reporter, RouterSite
from stoker.router.core import Dispatched, Replica, Request, RoutingConfig

__all__ = ["Delays", "Hardware", "Job", "Outcome", "pooled_hit_rate", "replay"]


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
    order, each waiting for its own to end. Several routers take jobs in turn; they share what replicas report
    and, unless `delays.announce_s` is None, what each of them dispatches.
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
    for number, engine in enumerate(engines.values(), 1):
        digester = Digester(engine, sites, clock, delays)
        clock.after(delays.digest_every_s * number / replicas, digester.tick)
    for number, engine in enumerate(engines.values(), 1):
        reporter = Reporter(engine, sites, clock, delays, config.kv_weight)
        clock.after(delays.report_every_s * number / replicas, reporter.tick)
    announcements = Announcements(sites, clock, delays, seed)
    turns = itertools.cycle(sites)
    finished = 0

    def start(job: Job, ended: Callable[[], None]) -> None:
        nonlocal finished
        site = next(turns)
        request = Request(job.keys, job.prompt_tokens, hardware.block_size, job.output_tokens)
        decision = site.route(request, clock.now)
        announcements.tell(site, Dispatched.of(request, decision))
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


def pooled_hit_rate(jobs: Sequence[Job], blocks: int) -> float:
    """The hit rate in blocks of one LRU cache as large as all replicas' together, in order of arrival."""
    cache = Cache(blocks)
    hits = 0
    for job in jobs:
        hits += cache.hit(job.keys)
        cache.take(job.keys)
        cache.free(job.keys)
    return hits / max(1, sum(len(job.keys) for job in jobs))
