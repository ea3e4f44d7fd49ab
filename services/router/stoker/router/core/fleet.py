"""One model's replicas and all that the router knows of them."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from stoker.router.core.health import Health, HealthConfig, Outcome
from stoker.router.core.index import BlockIndex
from stoker.router.core.load import LoadLedger
from stoker.router.core.ring import Ring
from stoker.router.core.speculation import Speculation
from stoker.router.core.values import (
    Decision,
    Delta,
    Dispatched,
    Replica,
    Request,
    Role,
    RoutingConfig,
    Snapshot,
    Sync,
)

_FIT_LIMIT = 256  # adapter names come from callers: what is remembered of them is bounded
_ASSUMED_RATE = 10_000.0  # tokens/s while no replica of the pool was measured
_RATE_NOISE = 2.0  # the factor by which measured rates of equal machines may differ


class Fleet:
    """The view that `decide` reads: one pool, one served model. Not shared between models.

    Membership, digests, loads and outcomes come in through the methods below, each with the router's own
    monotonic `now` in seconds. Nothing in here waits, logs or reads a clock.
    """

    def __init__(self, config: RoutingConfig | None = None, health: HealthConfig | None = None) -> None:
        self.config = config or RoutingConfig()
        self.index = BlockIndex(self.config.digest_fresh_s, self.config.digest_stale_s)
        self.speculation = Speculation(self.config.speculation_ttl_s, self.config.speculation_limit)
        self.load = LoadLedger()
        self.health = Health(health)
        self.turn = 0  # the round-robin policy's position
        self._replicas: dict[str, Replica] = {}
        self._ring: Ring | None = None
        self._fit: dict[tuple[str, Role], tuple[Replica, ...]] = {}
        self._rates: dict[str, float] = {}

    @property
    def replicas(self) -> Mapping[str, Replica]:
        """Every announced replica by id, routable or not."""
        return self._replicas

    @property
    def ring(self) -> Ring:
        """The ring of all announced replicas: draining or ejected ones keep their place, so that keys stay."""
        if self._ring is None:
            weights = {replica.id: replica.capacity for replica in self._replicas.values()}
            self._ring = Ring(weights, self.config.vnodes)
        return self._ring

    def fit(self, adapter: str, role: Role) -> tuple[Replica, ...]:
        """The replicas that announce themselves able and willing to serve this adapter and role."""
        found = self._fit.get((adapter, role))
        if found is None:
            found = tuple(
                replica
                for replica in self._replicas.values()
                if replica.ready
                and not replica.draining
                and (not adapter or adapter in replica.adapters)
                and (replica.role is Role.BOTH or role in (Role.BOTH, replica.role))
            )
            if len(self._fit) >= _FIT_LIMIT:
                self._fit.clear()
            self._fit[adapter, role] = found
        return found

    @property
    def rates(self) -> Mapping[str, float]:
        """Each replica's prefill rate as decisions use it, in tokens per second.

        Rates are measured under load: between equal machines they differ by chance, and following that
        chance sends prefixes away from their blocks. So within a factor of the median all are equal, and one
        that was not measured yet counts as the median.
        """
        if not self._rates and self._replicas:
            measured = {name: r.prefill_rate for name, r in self._replicas.items() if r.prefill_rate is not None}
            middle = median(measured.values()) if measured else _ASSUMED_RATE
            for name in self._replicas:
                rate = measured.get(name, middle)
                self._rates[name] = min(max(middle, rate / _RATE_NOISE), rate * _RATE_NOISE)
        return self._rates

    def put(self, replica: Replica) -> None:
        """Add a replica or replace what was announced of it."""
        old = self._replicas.get(replica.id)
        if old is None or old.capacity != replica.capacity:
            self._ring = None
        self._replicas[replica.id] = replica
        self._fit.clear()
        self._rates = {}

    def remove(self, replica: str) -> None:
        """Drop a replica that left; its requests in flight may still be released."""
        if self._replicas.pop(replica, None) is None:
            return
        self._ring = None
        self._fit.clear()
        self._rates = {}
        self.index.forget(replica)
        self.speculation.forget(replica)
        self.load.forget(replica)
        self.health.forget(replica)

    def snapshot(self, replica: str, message: Snapshot, now: float) -> Sync:
        """Take a replica's whole digest; a new epoch also ends what was believed of the old one."""
        before = self.index.epoch(replica)
        result = self.index.snapshot(replica, message, now)
        if result is Sync.APPLIED and before is not None and before != message.epoch:
            self.speculation.forget(replica)
        return result

    def delta(self, replica: str, message: Delta, now: float) -> Sync:
        """Apply one step of a replica's digest."""
        result = self.index.delta(replica, message, now)
        if result is Sync.APPLIED:
            for keys in message.removed.values():
                self.speculation.discard(replica, keys)
        return result

    def busy(self, replica: str, now: float) -> bool:
        """Whether a replica has so much prefill before it that a newcomer had better wait in the router."""
        return self.load.backlog(replica, self.rates[replica], now) > self.config.hold_s

    def dispatch(self, request: Request, decision: Decision, now: float) -> int:
        """Count a request as sent where the decision says. Returns its flight id.

        Every flight must reach `release`, on every path. A retry is a new dispatch after a release.
        """
        self.speculation.add(decision.replica, request.keys, now)
        kv = self.config.kv_weight * (request.prompt_tokens + request.output_tokens)
        prefill, rate = decision.prefill_tokens, self.rates.get(decision.replica, _ASSUMED_RATE)
        drains_s = None if request.streamed else prefill / rate
        return self.load.dispatch(decision.replica, prefill, kv, now, drains_s=drains_s)

    def overhear(self, told: Dispatched, at: float, now: float) -> None:
        """Note what another router dispatched at `at` (own monotonic seconds). Needs no release.

        Its blocks count as speculated, like own ones. Its load counts until a report seen after `at`, which has
        it, or until it has aged.
        """
        if told.replica not in self._replicas:
            return
        self.speculation.add(told.replica, told.keys, now)
        tokens = told.prefill_tokens + self.config.kv_weight * told.kv_tokens
        drains_s = told.prefill_tokens / self.rates[told.replica]
        self.load.overhear(told.replica, tokens, at, now, drains_s=drains_s, hold_s=self.config.hold_s)

    def first_token(self, flight: int, now: float) -> None:
        """The first token came: the prefill no longer counts as load."""
        self.load.first_token(flight, now)

    def release(self, flight: int, now: float) -> None:
        """The request ended: finish, cancel, error or timeout. Harmless when repeated."""
        self.load.release(flight, now)

    def observe(self, replica: str, outcome: Outcome, now: float) -> bool:
        """Record how a call ended for the replica's health; True when it is ejected by it."""
        return self.health.observe(replica, outcome, self._replicas.keys(), now)
