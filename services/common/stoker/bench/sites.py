"""Router processes in simulated time, and what reaches them late: digests, load reports, each other's dispatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from stoker.bench.replicas import Clock, Engine
from stoker.common.blocks import xor_digest
from stoker.common.errors import StokerError
from stoker.router.core import (
    ROUND_ROBIN,
    AdmissionQueue,
    Decision,
    Delta,
    Dispatched,
    Fleet,
    Replica,
    Request,
    Role,
    RoutingConfig,
    Snapshot,
    Sync,
    Tier,
    decide,
)


@dataclass(frozen=True, slots=True)
class Delays:
    """How late the router learns what happened, in seconds."""

    digest_every_s: float = 0.1
    digest_s: float | None = 0.1
    """None: replicas tell no digests at all."""
    report_every_s: float = 0.5
    report_s: float = 0.05
    end_s: float = 0.002
    """From a first token or an end to the router's knowing of it."""
    announce_s: tuple[float, float] | None = (0.02, 0.06)
    """From one router's dispatch to the others' knowing of it, shortest and longest; None: they never do."""


@dataclass(frozen=True, slots=True)
class Granted:
    """A request that need not wait any more: where it goes, or why nowhere."""

    ticket: int
    decision: Decision | None
    error: StokerError | None = None


class RouterSite:
    """One router process: its own fleet view, fed late."""

    def __init__(
        self,
        config: RoutingConfig,
        policy: str,
        seed: int,
        *,
        queue: int = 1_000_000,
        longest_s: float = float("inf"),
        checked: bool = True,
    ) -> None:
        """At most `queue` requests wait, `longest_s` seconds. `checked`: each decision is held to its own bound."""
        self.fleet = Fleet(config)
        self.queue = AdmissionQueue(queue, self.fleet.fairness, longest_s)
        self.longest_s = longest_s
        self.policy = policy
        self.rng = Random(seed)  # noqa: S311 (repeatable on purpose)
        self._checked = checked

    def _open(self) -> bool:
        """Whether any replica takes requests: with none they wait, and are not refused."""
        return len(self.fleet.panel("", Role.BOTH)) > 0

    def route(self, request: Request, now: float) -> tuple[Decision | None, int]:
        """Decide, or queue: returns a decision, or None and the ticket under which it will be granted.

        Raises Exhausted (reason QUEUE_FULL).
        """
        if not len(self.queue) and self._open():
            decision = decide(request, self.fleet, now, self.rng, policy=self.policy, explain=self._checked)
            if self.policy == ROUND_ROBIN or not self.fleet.busy(decision.replica, now):
                return self._within_bound(decision), 0
        return None, self.queue.join(request, self.fleet, now)

    def grant(self, now: float) -> Granted | None:
        """The next request that may go, or that must go for others."""
        grant = self.queue.grant(self.fleet, now, self.rng, explain=self._checked) if self._open() else None
        if grant is None:
            return None
        if grant.decision is not None:
            return Granted(grant.ticket, self._within_bound(grant.decision))
        if isinstance(grant.error, StokerError):
            return Granted(grant.ticket, None, grant.error)
        raise grant.error or AssertionError(grant)

    def _within_bound(self, decision: Decision) -> Decision:
        """Hold a decision to its own bound."""
        for candidate in decision.candidates:
            if candidate.replica == decision.replica and not decision.over_bound:
                assert candidate.load + candidate.weight <= candidate.bound, candidate  # noqa: S101
        return decision


def announced(engine: Engine, ready_at: float | None = None) -> Replica:
    """A replica as routers hear of it; None: ready for long."""
    hardware = engine.hardware
    return Replica(
        engine.name,
        hardware.block_size,
        prefill_rate=hardware.prefill_rate,
        kv_blocks=hardware.kv_blocks,
        ready_at=ready_at,
    )


class Announcements:
    """How routers hear of each other's dispatches: late, each sender's in order."""

    def __init__(self, sites: Sequence[RouterSite], clock: Clock, delays: Delays, seed: int) -> None:
        self._sites = sites
        self._clock = clock
        self._delays = delays
        self._rng = Random(seed)  # noqa: S311 (repeatable on purpose)
        self._arrived: dict[int, float] = {}

    def tell(self, sender: RouterSite, told: Dispatched) -> None:
        """Announce a dispatch that happens now."""
        if self._delays.announce_s is None or len(self._sites) == 1:
            return
        at = self._clock.now
        arrives = max(at + self._rng.uniform(*self._delays.announce_s), self._arrived.get(id(sender), 0.0))
        self._arrived[id(sender)] = arrives

        def deliver() -> None:
            for site in self._sites:
                if site is not sender:
                    site.fleet.overhear(told, at, self._clock.now)

        self._clock.after(arrives - at, deliver)


class Digester:
    """A node agent's digest of one replica: gathers changes, delivers them in order to every router."""

    def __init__(
        self,
        engine: Engine,
        sites: Sequence[RouterSite],
        clock: Clock,
        delays: Delays,
        told: Callable[[str, Delta], None] = lambda replica, delta: None,
    ) -> None:
        """`told` hears of each change when the routers do."""
        self._engine = engine
        self._sites = sites
        self._clock = clock
        self._delays = delays
        self._told = told
        self._sequence = 1
        self._held: set[int] = set()
        self._digest = 0
        if delays.digest_s is not None:
            for site in sites:
                site.fleet.snapshot(engine.name, Snapshot(1, 1, {}), clock.now)

    def tick(self) -> None:
        """Send what changed since the last tick, then come again."""
        late = self._delays.digest_s
        if late is None:
            return
        if not self.send():
            self._clock.after(late, self._beat)
        self._clock.after(self._delays.digest_every_s, self.tick)

    def send(self) -> bool:
        """Send what changed since the last time, if anything did; whether it did."""
        engine, late = self._engine, self._delays.digest_s
        if late is None or not (engine.stored or engine.removed):
            return False
        # A block can be stored and evicted within one tick, or the reverse: the set decides.
        removed = [key for key in dict.fromkeys(engine.removed) if key in self._held]
        self._held.difference_update(removed)
        stored = [key for key in dict.fromkeys(engine.stored) if key not in self._held and engine.cache.hit((key,))]
        self._held.update(stored)
        engine.stored, engine.removed = [], []
        self._digest = xor_digest(removed, xor_digest(stored, self._digest))
        self._sequence += 1
        delta = Delta(1, self._sequence, {Tier.GPU: stored}, {Tier.GPU: removed}, {Tier.GPU: self._digest})
        self._clock.after(late, lambda: self._deliver(delta))
        return True

    def _deliver(self, delta: Delta) -> None:
        for site in self._sites:
            if self._engine.name in site.fleet.replicas:
                result = site.fleet.delta(self._engine.name, delta, self._clock.now)
                assert result is Sync.APPLIED, result  # noqa: S101
        self._told(self._engine.name, delta)

    def _beat(self) -> None:
        for site in self._sites:
            site.fleet.index.vouch(self._engine.name, self._clock.now)


class Reporter:
    """A node agent's load reports of one replica, to every router."""

    def __init__(
        self, engine: Engine, sites: Sequence[RouterSite], clock: Clock, delays: Delays, kv_weight: float
    ) -> None:
        self._engine = engine
        self._sites = sites
        self._clock = clock
        self._delays = delays
        self._kv_weight = kv_weight

    def tick(self) -> None:
        """Send the load as it is, then come again."""
        self.send()
        self._clock.after(self._delays.report_every_s, self.tick)

    def send(self) -> None:
        """Send the load as it is."""
        seen_at, tokens = self._clock.now, self._engine.load(self._kv_weight)

        def deliver() -> None:
            for site in self._sites:
                if self._engine.name in site.fleet.replicas:
                    site.fleet.load.report(self._engine.name, tokens, seen_at)

        self._clock.after(self._delays.report_s, deliver)
