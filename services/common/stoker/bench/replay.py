"""A fleet in simulated time, routed by the router's real core.

Replicas are models; the router is not: digests, load reports, completions and what other routers dispatch reach
it late, in order, as they would from node agents and registries. Everything follows from the jobs, the
configuration and the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from stoker.bench.cache import Cache
from stoker.bench.desk import Asked, Desk
from stoker.bench.replicas import Clock, Engine, Hardware, Job, Machine, Outcome
from stoker.bench.sites import Announcements, Delays, Digester, Reporter, RouterSite, announced
from stoker.common.errors import StokerError
from stoker.router.core import Decision, RoutingConfig

__all__ = ["Delays", "Hardware", "Job", "Outcome", "pooled_hit_rate", "replay"]


def replay(
    jobs: Sequence[Job],
    *,
    replicas: int | Sequence[str],
    hardware: Hardware,
    policy: str = "stoker",
    config: RoutingConfig | None = None,
    delays: Delays | None = None,
    clients: int = 0,
    routers: int = 1,
    seed: int = 1,
    sent: Callable[[Job, Decision], None] = lambda job, decision: None,
) -> Outcome:
    """Route and serve all jobs; return what was measured. `replicas` is their number, or the id of each.

    With `clients` = 0 jobs arrive at their times; otherwise that many closed-loop clients take them in
    order, each waiting for its own to end. Several routers take jobs in turn; they share what replicas report
    and, unless `delays.announce_s` is None, what each of them dispatches. `sent` hears where each job goes.
    """
    config, delays = config or RoutingConfig(), delays or Delays()
    clock, outcome = Clock(), Outcome()
    sites = [RouterSite(config, policy, seed + number) for number in range(routers)]
    machine = Machine(hardware.cores)
    names = [f"replica-{number}" for number in range(replicas)] if isinstance(replicas, int) else replicas
    engines = {name: Engine(name, hardware, clock, machine, outcome) for name in names}
    _announce(engines.values(), sites)
    _report(engines.values(), sites, clock, delays, config.kv_weight)
    measured = _Measured(outcome, hardware, clock, sent)
    desk = Desk(engines, sites, Announcements(sites, clock, delays, seed), clock, delays, measured)
    if clients:
        _closed_loop(jobs, clients, lambda job, over: desk.start(job, hardware.block_size, over))
    else:
        for job in jobs:
            clock.after(job.at, partial(desk.start, job, hardware.block_size))
    clock.run(until=lambda: measured.finished == len(jobs))
    clock.run_for(delays.end_s)
    assert all(site.fleet.load.in_flight == 0 for site in sites)  # noqa: S101
    return outcome


def _announce(engines: Iterable[Engine], sites: Iterable[RouterSite]) -> None:
    for site in sites:
        for engine in engines:
            site.fleet.put(announced(engine))


def _report(
    engines: Collection[Engine], sites: Sequence[RouterSite], clock: Clock, delays: Delays, kv_weight: float
) -> None:
    """Start what every replica tells of itself, evenly spread over the interval."""
    for number, engine in enumerate(engines, 1):
        digester = Digester(engine, sites, clock, delays)
        clock.after(delays.digest_every_s * number / len(engines), digester.tick)
    for number, engine in enumerate(engines, 1):
        reporter = Reporter(engine, sites, clock, delays, kv_weight)
        clock.after(delays.report_every_s * number / len(engines), reporter.tick)


@dataclass
class _Measured:
    """What a replay counts beside what its replicas do."""

    outcome: Outcome
    hardware: Hardware
    clock: Clock
    told: Callable[[Job, Decision], None]
    finished: int = 0

    def sent(self, asked: Asked, decision: Decision) -> None:
        self.told(asked.job, decision)
        self.outcome.over_bound += decision.over_bound
        self.outcome.predicted_blocks += decision.cached_tokens / self.hardware.block_size

    def first_token(self, asked: Asked) -> None:
        ttfts = self.outcome.ttfts_by_tenant.setdefault(asked.job.tenant, [])
        ttfts.append(self.clock.now - asked.at)

    def ended(self, asked: Asked) -> None:
        self.outcome.makespan = self.clock.now
        self.finished += 1

    def refused(self, asked: Asked, error: StokerError | None) -> None:
        raise error or AssertionError(asked)  # a replay's queue has no end, and its replicas stay


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
