"""The fast decision and the plain one, fed the same story, never differ."""

from __future__ import annotations

from random import Random
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.common.errors import Unavailable
from stoker.router.core import (
    Delta,
    Dispatched,
    Fleet,
    Outcome,
    Replica,
    Request,
    Role,
    RoutingConfig,
    Snapshot,
    Sync,
    Tier,
    decide,
)
from tests.support.plain_decision import PlainFleet

FAMILIES = 4
COMMON = 70  # blocks that all prompts begin with: more than a walk looks up at a time


def keys_of(family: int, depth: int) -> list[int]:
    return [*range(1, COMMON + 1), *(1_000 * (family + 1) + number for number in range(130))][:depth]


class Story:
    """Applies what happens to both fleets, and compares what they decide."""

    def __init__(self, seed: int, replicas: int) -> None:
        self.rng = rng = Random(seed)
        config = RoutingConfig(
            epsilon=rng.choice([0.0, 0.25, 1.0]),
            floor_tokens=rng.choice([0.0, 3_000.0, 40_960.0]),
            home_credit=rng.choice([0.0, 0.15, 0.9]),
            ring_credit=rng.choice([0.0, 0.15, 0.9]),
            speculation_limit=rng.choice([500, 262_144]),
        )
        self.fast, self.plain = Fleet(config), PlainFleet(config)
        self.names = [f"r{number}" for number in range(replicas)]
        self.sequences: dict[tuple[str, Tier], int] = {}
        self.epochs: dict[str, int] = {}
        self.flights: list[int] = []
        self.now = 100.0
        self.sizes = rng.choice([[16], [16, 32, 0]])
        self.caches = rng.choice([[0], [0, 150]])
        self.capacities = rng.choice([[1.0], [0.5, 1.0, 2.0]])
        told = rng.choice([0.0, 0.3, 0.8, 1.0])
        for name in self.names:
            self.put(name)
            if rng.random() < told:
                self.snapshot(name)
            self.report(name)

    def name(self) -> str:
        return self.rng.choice(self.names)

    def keys(self) -> list[int]:
        depth = self.rng.choice([0, 1, COMMON, COMMON, 128, self.rng.randint(1, COMMON + 130), COMMON + 130])
        return keys_of(self.rng.randrange(FAMILIES), depth)

    def some(self, keys: list[int]) -> list[int]:
        """Mostly whole, sometimes with a hole."""
        return [key for key in keys if self.rng.random() < 0.99] if self.rng.random() < 0.3 else keys

    def put(self, name: str) -> None:
        rng = self.rng
        replica = Replica(
            name,
            block_size=rng.choice(self.sizes),
            capacity=rng.choice(self.capacities),
            kv_blocks=rng.choice(self.caches),
            ready_at=rng.choice([None, None, self.now, self.now - 20.0]),
            prefill_rate=rng.choice([None, 1_000.0, 9_000.0, 20_000.0, 1.5]),
            role=rng.choice([Role.BOTH, Role.BOTH, Role.PREFILL, Role.DECODE]),
            ready=rng.random() < 0.9,
            draining=rng.random() < 0.1,
            retiring=rng.random() < 0.2,
            adapters=frozenset({"poet"}) if rng.random() < 0.5 else frozenset(),
        )
        self.fast.put(replica)
        self.plain.put(replica)

    def announce(self) -> None:
        self.put(self.name())

    def remove(self) -> None:
        name = self.name()
        self.fast.remove(name)
        self.plain.remove(name)
        self.epochs.pop(name, None)
        if self.rng.random() < 0.7:
            self.put(name)

    def snapshot(self, name: str = "") -> None:
        name = name or self.name()
        if name not in self.fast.replicas:
            return
        fresh = self.rng.random() < 0.3
        epoch = self.epochs[name] = self.epochs.get(name, 1) + fresh
        tiers = self.rng.sample(list(Tier), self.rng.choice([1, 1, 1, 2, 3]))
        message = Snapshot(epoch, 1, {tier: self.some(self.keys()) + self.keys() for tier in tiers})
        if fresh:
            self.sequences = {key: step for key, step in self.sequences.items() if key[0] != name}
        for tier in tiers:
            self.sequences[name, tier] = 1
        assert self.fast.snapshot(name, message, self.now) is Sync.APPLIED
        self.plain.snapshot(name, message, self.now)

    def delta(self) -> None:
        name, tier = self.name(), self.rng.choice([Tier.GPU, Tier.GPU, Tier.CPU, Tier.STORAGE])
        if tier not in self.plain.digests.get(name, {}):
            return
        step = self.sequences[name, tier] = self.sequences[name, tier] + 1
        message = Delta(self.epochs[name], step, {tier: self.some(self.keys())}, {tier: self.keys()[5:][-40:]})
        assert self.fast.delta(name, message, self.now) is Sync.APPLIED
        self.plain.delta(name, message, self.now)

    def vouch(self) -> None:
        for name in self.rng.sample(self.names, self.rng.randint(1, len(self.names))):
            self.fast.index.vouch(name, self.now)
            self.plain.vouch(name, self.now)

    def report(self, name: str = "") -> None:
        name = name or self.name()
        tokens, seen_at = self.rng.choice([0, 700, 700, 20_000, 0.1 * self.rng.randint(0, 9_999)]), self.now - 0.2
        if name in self.fast.replicas:
            self.fast.load.report(name, tokens, seen_at)
            self.plain.report(name, tokens, seen_at)

    def overhear(self) -> None:
        told = Dispatched(self.name(), self.keys(), self.rng.choice([0, 900]), 2_000)
        at = self.now - self.rng.choice([0.0, 0.3, 1.9])
        self.fast.overhear(told, at, self.now)
        self.plain.overhear(told, at, self.now)

    def end(self) -> None:
        if self.flights:
            flight = self.rng.choice(self.flights)
            if self.rng.random() < 0.5:
                self.fast.first_token(flight, self.now)
                self.plain.first_token(flight, self.now)
            else:
                self.fast.release(flight, self.now)
                self.plain.release(flight, self.now)

    def fault(self) -> None:
        name = self.name()
        for _ in range(3):
            self.fast.observe(name, Outcome.FAULT, self.now)
            self.plain.observe(name, Outcome.FAULT, self.now)

    def wait(self) -> None:
        self.now += self.rng.choice([0.01, 0.4, 2.0, 5.0, 14.9, 16.0, 40.0])

    def request(self) -> None:
        keys, rng = self.keys(), self.rng
        request = Request(
            keys,
            16 * len(keys) + rng.choice([0, 1, 7, 5_000]),
            output_tokens=rng.choice([0, 256]),
            adapter=rng.choice(["", "", "", "poet"]),
            role=rng.choice([Role.BOTH, Role.BOTH, Role.PREFILL]),
            exclude=frozenset(rng.sample(self.names, rng.choice([0, 0, 0, 1, len(self.names) - 1]))),
            session=rng.choice([0, 77]),
            streamed=rng.choice([True, True, False]),
        )
        draw = rng.getrandbits(32)
        wanted = self.plain.decide(request, self.now, Random(draw))
        try:
            decision = decide(request, self.fast, self.now, Random(draw), explain=True)
        except Unavailable:
            assert wanted is None
            return
        assert decision == wanted
        assert decide(request, self.fast, self.now, Random(draw)) == decision._replace(candidates=())
        if rng.random() < 0.8:
            self.flights.append(self.fast.dispatch(request, decision, self.now))
            self.plain.dispatch(self.flights[-1], request, decision, self.now)


EVENTS = (
    "announce",
    "remove",
    "snapshot",
    "delta",
    "delta",
    "vouch",
    "report",
    "overhear",
    "overhear",
    "end",
    "fault",
    "wait",
)
steps = st.lists(st.one_of(st.just("request"), st.sampled_from(EVENTS)), min_size=1, max_size=40)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 4, 5, 7, 8, 14, 40, 70]), steps)
def test_the_decision_is_the_one_spelt_out(seed: int, replicas: int, happened: list[str]) -> None:
    # Here digests have holes, as they seldom have; the long strides over long prefixes would not see them.
    with patch("stoker.router.core.walk.passed", lambda _keys, start, *_: start):
        story = Story(seed, replicas)
        for step in happened:
            getattr(story, step)()
