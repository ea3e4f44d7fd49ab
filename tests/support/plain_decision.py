"""The routing decision spelt out: sets and loops, replica by replica.

It says what `stoker.router.core` has to decide; the property test holds both against each other.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from statistics import median

import numpy as np

from stoker.router.core import (
    Candidate,
    Decision,
    Delta,
    Dispatched,
    Health,
    Outcome,
    Reason,
    Replica,
    Request,
    Ring,
    Role,
    RoutingConfig,
    Snapshot,
    Tier,
)

OVERHEARD_S = 2.0
RANKS = 8


@dataclass
class Digest:
    """What a replica told of one tier."""

    epoch: int
    keys: set[int]
    heard_at: float


@dataclass
class Load:
    """The ledger of one replica."""

    own: float = 0.0
    reported: float = 0.0
    reported_at: float = -math.inf
    log: list[tuple[float, float]] = field(default_factory=list)
    since: float = 0.0
    others: list[tuple[float, float]] = field(default_factory=list)
    others_tokens: float = 0.0

    def change(self, tokens: float, now: float) -> None:
        self.own += tokens
        self.since += tokens
        self.log.append((now, tokens))

    def forget_until(self, at: float) -> None:
        if any(when <= at for when, _ in self.others):
            self.others = [(when, tokens) for when, tokens in self.others if when > at]
            self.others_tokens = sum(tokens for _, tokens in self.others)

    def report(self, tokens: float, seen_at: float) -> None:
        if seen_at >= self.reported_at:
            self.reported, self.reported_at = tokens, seen_at
            self.log = [(at, change) for at, change in self.log if at > seen_at]
            self.since = sum(change for _, change in self.log)
            self.forget_until(seen_at)

    def overhear(self, tokens: float, at: float, now: float) -> None:
        at = min(at, now)
        if at > max(self.reported_at, now - OVERHEARD_S) and tokens > 0:
            self.others = sorted([*self.others, (at, tokens)])
            self.others_tokens += tokens

    def tokens(self, now: float) -> float:
        self.forget_until(now - OVERHEARD_S)
        return max(self.own, self.reported + self.since) + self.others_tokens


@dataclass
class Flight:
    load: Load
    prefill: float
    kv: float


class PlainFleet:
    """Takes the same calls as `Fleet`, and decides by itself."""

    def __init__(self, config: RoutingConfig) -> None:
        self.config = config
        self.health = Health()
        self.replicas: dict[str, Replica] = {}
        self.digests: dict[str, dict[Tier, Digest]] = {}
        self.loads: dict[str, Load] = {}
        self.young: dict[int, set[str]] = {}
        self.old: dict[int, set[str]] = {}
        self.turned_at = 0.0
        self.flights: dict[int, Flight] = {}

    # --- what is told --------------------------------------------------------------------------------------

    def put(self, replica: Replica) -> None:
        self.replicas[replica.id] = replica

    def remove(self, replica: str) -> None:
        if self.replicas.pop(replica, None) is not None:
            self.digests.pop(replica, None)
            self.loads.pop(replica, None)
            self.health.forget(replica)
            self.doubt(replica)

    def snapshot(self, replica: str, message: Snapshot, now: float) -> None:
        told = self.digests.setdefault(replica, {})
        before = max((digest.epoch for digest in told.values()), default=None)
        if before is not None and message.epoch < before:
            return
        for tier, keys in message.keys.items():
            told[tier] = Digest(message.epoch, set(keys), now)
        for tier in [tier for tier, digest in told.items() if digest.epoch < message.epoch]:
            del told[tier]
        if before is not None and before != message.epoch:
            self.doubt(replica)

    def delta(self, replica: str, message: Delta, now: float) -> None:
        for tier in {*message.stored, *message.removed}:
            digest = self.digests[replica][tier]
            digest.keys = digest.keys - set(message.removed.get(tier, ())) | set(message.stored.get(tier, ()))
            digest.heard_at = now
        for keys in message.removed.values():
            for key in keys:
                self.young.get(key, set()).discard(replica)
                self.old.get(key, set()).discard(replica)

    def vouch(self, replica: str, now: float) -> None:
        for digest in self.digests.get(replica, {}).values():
            digest.heard_at = now

    def doubt(self, replica: str) -> None:
        for held in (*self.young.values(), *self.old.values()):
            held.discard(replica)

    def speculate(self, replica: str, keys: Sequence[int], now: float) -> None:
        ttl = self.config.speculation_ttl_s
        sighted = all(self.trust(name, now) == 1.0 for name in self.replicas)
        room = 0 if sighted else 2 * sum(each.kv_blocks for each in self.replicas.values())
        ttl = 600.0 if len(self.young) < room else ttl
        turns = 2 if now - self.turned_at >= 2 * ttl else int(now - self.turned_at >= ttl)
        turns += len(keys) + (0 if turns else len(self.young)) > self.config.speculation_limit
        for _ in range(turns):
            self.young, self.old, self.turned_at = {}, self.young, now
        for key in keys:
            self.young.setdefault(key, set()).add(replica)

    def load(self, replica: str) -> Load:
        return self.loads.setdefault(replica, Load())

    def report(self, replica: str, tokens: float, seen_at: float) -> None:
        self.load(replica).report(tokens, seen_at)

    def dispatch(self, flight: int, request: Request, decision: Decision, now: float) -> None:
        self.speculate(decision.replica, request.keys, now)
        kv = self.config.kv_weight * (request.prompt_tokens + request.output_tokens)
        prefill = decision.prefill_tokens + (self.step(decision.replica) if request.streamed else 0.0)
        held = self.flights[flight] = Flight(self.load(decision.replica), prefill, kv)
        held.load.change(held.prefill + held.kv, now)

    def step(self, replica: str) -> float:
        """What a request is worth beside its tokens, until its first one."""
        return self.rates().get(replica, 10_000.0) * self.config.step_s

    def overhear(self, told: Dispatched, at: float, now: float) -> None:
        if told.replica in self.replicas:
            self.speculate(told.replica, told.keys, now)
            tokens = told.prefill_tokens + self.step(told.replica) + self.config.kv_weight * told.kv_tokens
            self.load(told.replica).overhear(tokens, at, now)

    def first_token(self, flight: int, now: float) -> None:
        held = self.flights.get(flight)
        if held and held.prefill:
            held.load.change(-held.prefill, now)
            held.prefill = 0.0

    def release(self, flight: int, now: float) -> None:
        held = self.flights.pop(flight, None)
        if held:
            held.load.change(-(held.prefill + held.kv), now)

    def observe(self, replica: str, outcome: Outcome, now: float) -> None:
        self.health.observe(replica, outcome, self.replicas.keys(), now)

    # --- what is decided -----------------------------------------------------------------------------------

    def candidates(self, request: Request, now: float) -> tuple[list[Replica], bool]:
        """Who may serve a request, and whether that took panic mode; the first is empty for nobody."""
        able = [
            each
            for each in self.replicas.values()
            if each.ready
            and not each.draining
            and (not request.adapter or request.adapter in each.adapters)
            and (Role.BOTH in (each.role, request.role) or each.role is request.role)
            and each.id not in request.exclude
        ]
        staying = [each for each in able if not each.retiring or self.alone_holds(each, request, able)]
        if len(staying) < len(able) and staying:
            admitted, panic = self.admitted(staying, now)
            if not panic:
                return admitted, False
        return self.admitted(able, now)

    def alone_holds(self, replica: Replica, request: Request, able: Sequence[Replica]) -> bool:
        """Whether half of a prompt or more is there, and more of it than on any replica that stays."""
        elsewhere = max((self.depths(each.id, request.keys)[-1] for each in able if not each.retiring), default=0)
        held = self.depths(replica.id, request.keys)[-1]
        alike = replica.block_size == request.block_size
        return alike and held > elsewhere and 2 * held * request.block_size >= request.prompt_tokens

    def ring(self) -> Ring:
        staying = {each.id: each.capacity for each in self.replicas.values() if not each.retiring}
        return Ring(staying or {each.id: each.capacity for each in self.replicas.values()}, self.config.vnodes)

    def admitted(self, able: list[Replica], now: float) -> tuple[list[Replica], bool]:
        admitted = [each for each in able if not self.health.ejected(each.id, now)]
        if not admitted or len(admitted) < self.config.panic_share * len(able):
            return able, True
        return admitted, False

    def decide(self, request: Request, now: float, rng: Random) -> Decision | None:
        """The decision with its explanation; None where nobody can serve."""
        replicas, panic = self.candidates(request, now)
        replicas = sorted(replicas, key=lambda each: each.id)
        if not replicas:
            return None
        views, home = self.weigh(request, replicas, now, rng)
        opened = [view for view in views if view.load + view.weight <= view.bound]
        best = min(opened, key=preference) if opened else min(views, key=excess)
        if reason(best, views, bool(opened), home) in (Reason.SPILL, Reason.RING):
            best = self.successor(request, best, opened, home, now)
        cached = round(best.cached)
        return Decision(
            replica=best.replica,
            reason=Reason.PANIC if panic else reason(best, views, bool(opened), home),
            cached_tokens=cached,
            prefill_tokens=request.prompt_tokens - cached,
            over_bound=not opened,
            candidates=tuple(sorted(views, key=preference)),
            shown_tokens=best.exact if best.trust == 1.0 else 0,
            cost=best.cost,
            considered=len(views),
        )

    def successor(
        self, request: Request, best: Candidate, opened: list[Candidate], home: str | None, now: float
    ) -> Candidate:
        """Where a prefix that spills to `best` gets its next copy."""
        sure = {name: self.depths(name, request.keys)[-1] for name in self.digests if self.trust(name, now) == 1.0}
        size, shown = request.block_size, max(sure.values(), default=0)
        deepest = max([shown, *(self.believed(name, request.keys, sure.get(name, 0)) for name in self.replicas)])
        unknown = max(0, request.prompt_tokens - size * deepest)

        def lacking(view: Candidate) -> float:
            return shown - max(view.exact, view.speculative) / size

        if size * lacking(best) <= 32 * unknown:
            return best
        credit = self.config.home_credit if best.replica == home else 0.0
        most = best.cost + 0.001 + credit * self.config.miss_weight * unknown / self.rates()[best.replica]
        near = {view.replica: view for view in opened if lacking(view) > 0 and view.cost <= most}
        ring = self.ring()
        chosen = first(ring, request.keys[shown - 1], near) if shown else None
        return near[chosen] if chosen else best

    def trust(self, replica: str, now: float) -> float:
        heard = [digest.heard_at for digest in self.digests.get(replica, {}).values()]
        if not heard:
            return 0.0
        age, fresh, stale = now - min(heard), self.config.digest_fresh_s, self.config.digest_stale_s
        return 1.0 if age <= fresh else max(0.0, 1.0 - (age - fresh) / (stale - fresh))

    def depths(self, replica: str, keys: Sequence[int]) -> tuple[int, ...]:
        """Leading blocks in each tier or a faster one."""
        told, union, depths = self.digests.get(replica, {}), set[int](), []
        for tier in Tier:
            union |= told[tier].keys if tier in told else set()
            depths.append(leading(key in union for key in keys))
        return tuple(depths)

    def believed(self, replica: str, keys: Sequence[int], known: int) -> int:
        nobody: set[str] = set()
        return leading(
            position < known or replica in self.young.get(key, nobody) or replica in self.old.get(key, nobody)
            for position, key in enumerate(keys)
        )

    def rates(self) -> Mapping[str, float]:
        measured = [each.prefill_rate for each in self.replicas.values() if each.prefill_rate is not None]
        middle = median(measured) if measured else 10_000.0
        rates = {name: each.prefill_rate or middle for name, each in self.replicas.items()}
        return {name: min(max(middle, rate / 2.0), rate * 2.0) for name, rate in rates.items()}

    def weigh(
        self, request: Request, replicas: Sequence[Replica], now: float, rng: Random
    ) -> tuple[list[Candidate], str | None]:
        config, keys = self.config, request.keys
        everyone = {*self.replicas, *self.digests}
        depths = {name: self.depths(name, keys) for name in everyone}
        trust = {name: self.trust(name, now) for name in everyone}
        sure = {name: depths[name][-1] if trust[name] == 1.0 else 0 for name in everyone}
        believed = {name: self.believed(name, keys, sure[name]) for name in everyone}
        unseen = {each.id: 1.0 - trust[each.id] for each in replicas}
        key = self.ring_key(request, max(sure.values()), sum(unseen.values()) > len(replicas) / 2, rng)
        ring = self.ring()
        rank = {name: rank for rank, name in enumerate(islice(ring.order(key), RANKS))}
        home = first(ring, key, unseen)
        homes = {first(ring, keys[2**power - 1], unseen): 2**power for power in range(len(keys).bit_length())}
        loads = [self.load(each.id).tokens(now) for each in replicas]
        total = float(np.array(loads).sum())  # in that order: the last digit is no matter of principle
        warmth = [self.warmth(each, now) for each in replicas]
        warmth = [warm / max(warmth) for warm in warmth]
        capacity = [each.capacity * warm for each, warm in zip(replicas, warmth, strict=True)]
        slack = (1.0 + config.epsilon) / float(np.array(capacity).sum())
        kv = config.kv_weight * (request.prompt_tokens + request.output_tokens)
        unknown = max(0, request.prompt_tokens - request.block_size * max(believed.values()))
        rates = self.rates()
        views = []
        for each, load, warm, part in zip(replicas, loads, warmth, capacity, strict=True):
            name = each.id
            exact, speculative, cached = 0, 0, 0.0
            if each.block_size == request.block_size:
                exact = each.block_size * depths[name][-1]
                speculative = max(exact, each.block_size * believed[name])
                cached = self.worth(request, depths[name], believed[name], trust[name])
            prefill = request.prompt_tokens - cached
            weight = prefill + kv
            share = math.ceil(slack * (total + weight) * part)
            place = rank.get(name, RANKS)
            credit = config.home_credit * unknown if name == home else 0.0
            guess = unseen[name] * warm * request.block_size * homes.get(name, 0)
            credit = max(credit, config.ring_credit * max(0.0, guess - cached))
            cost = (load + config.miss_weight * (prefill - credit)) / rates[name]
            bound = max(share, config.floor_tokens * warm)
            views.append(Candidate(name, cost, load, weight, bound, exact, speculative, cached, trust[name], place))
        return views, home

    def warmth(self, replica: Replica, now: float) -> float:
        start, ramp_s = self.config.ramp_start, self.config.ramp_s
        if replica.ready_at is None or ramp_s == 0.0:
            return 1.0
        return start + (1.0 - start) * max(0.0, min(1.0, (now - replica.ready_at) / ramp_s))

    def worth(self, request: Request, tiers: tuple[int, ...], believed: int, trust: float) -> float:
        held, before, size = 0.0, 0, request.block_size
        for credit, depth in zip(self.config.tier_credit, tiers, strict=True):
            held += credit * size * (depth - before)
            before = depth
        guessed = self.config.speculative_credit * size
        worth = held + guessed * max(0, believed - before) if trust == 1.0 else max(trust * held, guessed * believed)
        return min(worth, max(0.0, request.prompt_tokens - 1.0))

    def ring_key(self, request: Request, shown: int, blind: bool, rng: Random) -> int:
        if not request.keys:
            return request.session or rng.getrandbits(64)
        if blind:
            return request.keys[(1 << (len(request.keys).bit_length() - 1)) - 1]
        return request.keys[min(shown, len(request.keys) - 1)]


def first(ring: Ring, key: int, among: Collection[str]) -> str | None:
    """The first on the ring that is a candidate, among the first few."""
    return next((name for name in islice(ring.order(key), RANKS) if name in among), None)


def leading(held: Iterable[bool]) -> int:
    """How many are held before the first that is not."""
    count = 0
    for one in held:
        if not one:
            break
        count += 1
    return count


def preference(view: Candidate) -> tuple[float, int]:
    return (round(view.cost, 3), view.ring_rank)


def excess(view: Candidate) -> tuple[float, int]:
    return (view.load + view.weight - view.bound, view.ring_rank)


def reason(best: Candidate, views: list[Candidate], opened: bool, home: str | None) -> Reason:
    if not opened:
        return Reason.LEAST_LOADED
    if any(view.cached > best.cached for view in views):
        return Reason.SPILL
    if best.cached:
        return Reason.EXACT if 2 * best.trust * best.exact >= best.cached else Reason.SPECULATIVE
    return Reason.RING if best.replica == home else Reason.SPILL
