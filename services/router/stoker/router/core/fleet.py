"""One model's replicas and all that the router knows of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from stoker.router.core.fairness import Fairness
from stoker.router.core.health import Health, HealthConfig, Outcome
from stoker.router.core.index import BlockIndex
from stoker.router.core.load import LoadLedger
from stoker.router.core.panel import Panel
from stoker.router.core.ramp import Ramp
from stoker.router.core.rates import ASSUMED_RATE, Rates
from stoker.router.core.ring import Ring
from stoker.router.core.seats import Seats
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

_PANELS_LIMIT = 256  # adapter names come from callers: what is remembered of them is bounded
_MOST_TOKENS = 1_000_000  # of a request, where the size of its replica's cache is not known


class Fleet:
    """The view that `decide` reads: one pool, one served model. Not shared between models.

    Membership, digests, loads and outcomes come in through the methods below, each with the router's own
    monotonic `now` in seconds. Nothing in here waits, logs or reads a clock.
    """

    def __init__(self, config: RoutingConfig | None = None, health: HealthConfig | None = None) -> None:
        self.config = config or RoutingConfig()
        self.seats = Seats()
        self.index = BlockIndex(self.config.digest_fresh_s, self.config.digest_stale_s, self.seats)
        self.speculation = Speculation(self.config.speculation_ttl_s, self.config.speculation_limit, self.seats)
        self.load = LoadLedger(self.seats)
        self.rates = Rates(self.seats)
        self.ramp = Ramp(self.seats, self.config.ramp_start, self.config.ramp_s)
        self.health = Health(health)
        self.fairness = Fairness(self.config.fair_tokens)
        self.turn = 0  # the round-robin policy's position
        self._replicas: dict[str, Replica] = {}
        self._kv_blocks = 0  # of all replicas
        self._ring = Ring({}, self.config.vnodes)
        self._ring_holds = True  # who is announced
        self.retiring: frozenset[str] = frozenset()
        self._panels: dict[tuple[str, Role, frozenset[str]], Panel] = {}

    @property
    def replicas(self) -> Mapping[str, Replica]:
        """Every announced replica by id, routable or not."""
        return self._replicas

    @property
    def ring(self) -> Ring:
        """The ring of all announced replicas that do not retire, or of all where all do.

        Draining or ejected ones keep their place, so that keys stay.
        """
        if not self._ring_holds:
            staying = self._replicas.keys() - self.retiring or self._replicas.keys()
            self._ring = self._ring.turned_to({name: self._replicas[name].capacity for name in staying})
            self._ring_holds = True
        return self._ring

    def fit(self, adapter: str, role: Role) -> tuple[Replica, ...]:
        """The replicas that announce themselves able and willing to serve this adapter and role."""
        return tuple(self._replicas[name] for name in self.panel(adapter, role).ids)

    def panel(self, adapter: str, role: Role, without: frozenset[str] = frozenset()) -> Panel:
        """The same as a panel, some left out."""
        key = (adapter, role, without)
        panel = self._panels.get(key)
        if panel is None:
            if len(self._panels) >= _PANELS_LIMIT:
                self._panels.clear()
            able = [each for each in self._replicas.values() if each.id not in without and _able(each, adapter, role)]
            panel = self._panels[key] = Panel.of(able, self.seats)
        return panel

    def put(self, replica: Replica) -> None:
        """Add a replica or replace what was announced of it."""
        old = self._replicas.get(replica.id)
        if old is None or (old.capacity, old.retiring) != (replica.capacity, replica.retiring):
            self._ring_holds = False
            self.retiring = self.retiring - {replica.id} | ({replica.id} if replica.retiring else set())
        if old is None or replace(old, prefill_rate=replica.prefill_rate) != replica:
            self._panels.clear()
        self._kv_blocks += replica.kv_blocks - (old.kv_blocks if old else 0)
        self._replicas[replica.id] = replica
        self.rates.put(replica.id, replica.prefill_rate)
        self.ramp.put(replica.id, replica.ready_at)

    def remove(self, replica: str) -> None:
        """Drop a replica that left; its requests in flight may still be released."""
        gone = self._replicas.pop(replica, None)
        if gone is None:
            return
        self._kv_blocks -= gone.kv_blocks
        self._ring_holds = False
        self.retiring -= {replica}
        self._panels.clear()
        self.rates.remove(replica)
        self.ramp.remove(replica)
        self.index.forget(replica)
        self.speculation.forget(replica)
        self.load.forget(replica)
        self.health.forget(replica)
        self.seats.free(replica)

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
        self._speculate(decision.replica, request.keys, now)
        kv = self.config.kv_weight * (request.prompt_tokens + request.output_tokens)
        prefill, rate = decision.prefill_tokens, self.rates.get(decision.replica, ASSUMED_RATE)
        drains_s = None if request.streamed else prefill / rate
        # Until the first token, where that will be seen: until the end, told late, it would drive what follows away.
        step = rate * self.config.step_s if request.streamed else 0.0
        return self.load.dispatch(decision.replica, prefill, kv, now, step=step, drains_s=drains_s)

    def overhear(self, told: Dispatched, at: float, now: float) -> None:
        """Note what another router dispatched at `at` (own monotonic seconds). Needs no release.

        Its blocks count as speculated, like own ones. Its load counts until a report seen after `at`, which has
        it, or until it has aged. Nobody can send more at once than the replica's cache holds.
        """
        replica = self._replicas.get(told.replica)
        if replica is None:
            return
        self._speculate(told.replica, told.keys, now)
        most = replica.kv_blocks * replica.block_size or _MOST_TOKENS
        prefill = min(told.prefill_tokens, most)
        rate = self.rates[told.replica]
        tokens = prefill + rate * self.config.step_s + self.config.kv_weight * min(told.kv_tokens, most)
        drains_s = prefill / rate
        self.load.overhear(told.replica, tokens, at, now, drains_s=drains_s, hold_s=self.config.hold_s)

    def _speculate(self, replica: str, keys: Sequence[int], now: float) -> None:
        self.speculation.room = 0 if self.sighted(now) else 2 * self._kv_blocks
        self.speculation.add(replica, keys, now)

    def sighted(self, now: float) -> bool:
        """Whether every replica's digest is there and fully trusted."""
        return self.index.told >= len(self._replicas) and self.index.trusts(now) is None

    def first_token(self, flight: int, now: float) -> None:
        """The first token came: the prefill no longer counts as load."""
        self.load.first_token(flight, now)

    def release(self, flight: int, now: float) -> None:
        """The request ended: finish, cancel, error or timeout. Harmless when repeated."""
        self.load.release(flight, now)

    def hand_over(self, flight: int, now: float) -> None:
        """Nobody will tell how the request ends: from here on its replica's reports alone have it."""
        self.load.hand_over(flight, now)

    def observe(self, replica: str, outcome: Outcome, now: float) -> bool:
        """Record how a call ended for the replica's health; True when it is ejected by it.

        One that has left is not blamed any more: its name may be another's soon.
        """
        return replica in self._replicas and self.health.observe(replica, outcome, self._replicas.keys(), now)


def _able(replica: Replica, adapter: str, role: Role) -> bool:
    return (
        replica.ready
        and not replica.draining
        and (not adapter or adapter in replica.adapters)
        and (replica.role is Role.BOTH or role in (Role.BOTH, replica.role))
    )
