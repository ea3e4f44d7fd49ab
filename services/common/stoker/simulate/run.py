"""One policy on one trace, in simulated time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from stoker.bench.desk import Desk
from stoker.bench.replicas import Clock, Job
from stoker.bench.sites import RouterSite
from stoker.common.errors import InvalidRequest
from stoker.simulate.figures import Run, figures
from stoker.simulate.fleet import SimulatedFleet
from stoker.simulate.ledger import Ledger
from stoker.simulate.policies import Contender
from stoker.simulate.scaling import Scaling
from stoker.simulate.settings import Settings
from stoker.simulate.traffic import Source

_NEVER_S = 1e12
_SAID_EVERY = 128


class _Arrivals:
    """Jobs of a source, each scheduled by the one before it: a long trace is never in memory as a whole."""

    def __init__(self, jobs: Iterator[Job], clock: Clock, start: Callable[[Job], None]) -> None:
        self._jobs = jobs
        self._clock = clock
        self._start = start
        self.last_at: float | None = None
        """When the last job came, None while more are to come."""
        self._next()

    def _next(self) -> None:
        job = next(self._jobs, None)
        if job is None:
            self.last_at = self._clock.now
            return

        def arrive() -> None:
            self._start(job)
            self._next()

        self._clock.after(max(0.0, job.at - self._clock.now), arrive)


def simulate(
    source: Source,
    contender: Contender,
    settings: Settings,
    *,
    said: Callable[[Ledger], None] = lambda ledger: None,
) -> Run:
    """Serve the whole trace while the policy scales; return what was measured.

    Everything follows from the trace, the policy and the settings. `said` is shown now and then how far it is; what
    it raises ends the simulation. Raises InvalidRequest where the trace is empty, or as the source does.
    """
    # No agent fails here: a replica that tells nothing has nothing new to tell.
    routing = replace(settings.routing, digest_fresh_s=_NEVER_S, digest_stale_s=2 * _NEVER_S)
    if contender.replicas is not None:
        settings = replace(settings, initial=contender.replicas)
    bounds = replace(contender.policy.bounds, least=settings.least, most=settings.most)
    policy = replace(contender.policy, bounds=bounds)
    clock = Clock()
    site = RouterSite(
        routing, "stoker", settings.seed, queue=settings.queue, longest_s=settings.longest_s, checked=False
    )
    fleet = SimulatedFleet(settings, site, clock)
    ledger = Ledger(clock, fleet, settings.objective)
    desk = Desk(fleet.engines, [site], None, clock, settings.delays, ledger)
    fleet.died = lambda name: desk.lost(name, ledger.lost)
    scaling = Scaling(policy, settings, fleet, ledger, desk, clock, contender.plan)
    block_size = settings.hardware.block_size

    def start(job: Job) -> None:
        ledger.arrives(job)
        desk.start(job, block_size)
        if ledger.arrived % _SAID_EVERY == 0:
            said(ledger)

    arrivals = _Arrivals(source(), clock, start)
    scaling.round()
    clock.run(until=lambda: arrivals.last_at is not None and not ledger.open)
    if not ledger.arrived or arrivals.last_at is None:
        raise InvalidRequest.field("--trace", "no request is in it; name another file")
    seconds = arrivals.last_at
    shown = figures(contender.name, ledger, scaling, seconds)
    return Run(shown, seconds, tuple(fleet.counts), tuple(ledger.bins), tuple(scaling.changes))
