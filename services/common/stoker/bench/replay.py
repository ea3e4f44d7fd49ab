"""A fleet in simulated time, routed by the router's real core.

Replicas are models; the router is not: digests, load reports, completions and what other routers dispatch reach
it late, in order, as they would from node agents and registries. Everything follows from the jobs, the
configuration and the seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from stoker.bench.replicas import Cache, Clock, Engine, Hardware, Job, Machine, Outcome
from stoker.bench.sites import Announcements, Delays, Digester, Reporter, RouterSite
from stoker.router.core import RETRY_S, Decision, Dispatched, Replica, Request, RoutingConfig

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
    _announce(engines.values(), sites, hardware)
    _report(engines.values(), sites, clock, delays, config.kv_weight)
    desk = _Desk(engines, sites, Announcements(sites, clock, delays, seed), hardware, delays, clock, outcome, sent)
    if clients:
        _closed_loop(jobs, clients, desk.start)
    else:
        for job in jobs:
            clock.after(job.at, partial(desk.start, job, _nothing))
    clock.run(until=lambda: desk.finished == len(jobs))
    clock.run_for(delays.end_s)
    assert all(site.fleet.load.in_flight == 0 for site in sites)  # noqa: S101
    return outcome


def _announce(engines: Iterable[Engine], sites: Iterable[RouterSite], hardware: Hardware) -> None:
    for site in sites:
        for engine in engines:
            site.fleet.put(
                Replica(
                    engine.name, hardware.block_size, prefill_rate=hardware.prefill_rate, kv_blocks=hardware.kv_blocks
                )
            )


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


@dataclass(slots=True)
class _Asked:
    """A job at a router's door."""

    job: Job
    request: Request
    at: float
    ended: Callable[[], None]


@dataclass
class _Desk:
    """Hands jobs to the routers in turn, and follows each to its end."""

    engines: Mapping[str, Engine]
    sites: Sequence[RouterSite]
    announcements: Announcements
    hardware: Hardware
    delays: Delays
    clock: Clock
    outcome: Outcome
    sent: Callable[[Job, Decision], None]
    finished: int = 0

    def __post_init__(self) -> None:
        self._turns = itertools.cycle(self.sites)
        self._waiting: dict[tuple[int, int], _Asked] = {}
        self._ticking: set[int] = set()

    def start(self, job: Job, ended: Callable[[], None]) -> None:
        """Route a job now; `ended` is called when it has been served."""
        site = next(self._turns)
        request = Request(
            job.keys,
            job.prompt_tokens,
            self.hardware.block_size,
            job.output_tokens if job.asked_tokens is None else job.asked_tokens,
            session=job.session,
            priority=job.priority,
            tenant=job.tenant,
            weight=job.weight,
        )
        asked = _Asked(job, request, self.clock.now, ended)
        decision, ticket = site.route(request, self.clock.now)
        if decision is None:
            self._waiting[id(site), ticket] = asked
            self._grant(site)
        else:
            self._send(site, asked, decision)

    def _grant(self, site: RouterSite) -> None:
        """Send what waits and has a replica with room."""
        while len(site.queue) and (granted := site.grant(self.clock.now)) is not None:
            decision, ticket = granted
            self._send(site, self._waiting.pop((id(site), ticket)), decision)
        if len(site.queue) and id(site) not in self._ticking:
            self._ticking.add(id(site))
            self.clock.after(RETRY_S, partial(self._tick, site))

    def _tick(self, site: RouterSite) -> None:
        self._ticking.discard(id(site))
        self._grant(site)

    def _send(self, site: RouterSite, asked: _Asked, decision: Decision) -> None:
        request, now = asked.request, self.clock.now
        self.announcements.tell(site, Dispatched.of(request, decision))
        flight = site.fleet.dispatch(request, decision, now)
        self.sent(asked.job, decision)
        self.outcome.over_bound += decision.over_bound
        self.outcome.predicted_blocks += decision.cached_tokens / self.hardware.block_size

        def heard(end: bool) -> None:
            if end:
                site.fleet.release(flight, self.clock.now)
            else:
                site.fleet.first_token(flight, self.clock.now)
            self._grant(site)

        def done(end: bool) -> None:
            self.clock.after(self.delays.end_s, partial(heard, end))
            if end:
                self.outcome.makespan = self.clock.now
                self.finished += 1
                asked.ended()

        self.engines[decision.replica].submit(asked.job, done, asked.at)


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
