"""Whatever the order and the losses on the way, views end up true, and are never emptied in between."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

from hypothesis import given, note, settings
from hypothesis import strategies as st

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import records_pb2, registry_pb2
from stoker.common.blocks import unpack_keys
from stoker.registry.core import keys, records
from stoker.registry.core.digests import DigestStore, Outcome, Series
from stoker.registry.core.expiry import ExpiryGuard
from stoker.registry.core.fleet import Entry, FleetState
from stoker.registry.core.merge import DigestMerge, FleetView, Verdict
from stoker.registry.core.outflow import Interest, Outflow
from stoker.registry.core.records import Kind, Name, Record
from tests.support.registry import ALL_TOPICS, assignment, delta, node, snapshot, spec, status

NODES = [f"n{i}" for i in range(4)]
REPLICAS = [f"chat-{i}" for i in range(3)]
ALL = Interest.of(registry_pb2.WatchRequest(topics=ALL_TOPICS))


class History:
    """A random but lawful history of etcd, remembered revision by revision."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.revision = 0
        self.kvs: dict[str, Entry] = {}
        self.steps: list[tuple[list[Entry], list[str]]] = []

    def step(self) -> None:
        self.revision += 1
        key, value = self._choose()
        if value is None:
            gone = [key] if key in self.kvs else []
            for each in gone:
                del self.kvs[each]
            self.steps.append(([], gone))
            return
        created = self.kvs[key].create_revision if key in self.kvs else self.revision
        self.kvs[key] = Entry(key, value, created, self.revision)
        self.steps.append(([self.kvs[key]], []))

    def _choose(self) -> tuple[str, bytes | None]:
        rng, replica = self._rng, self._rng.choice(REPLICAS)
        gone = rng.random() < 0.3
        match rng.randrange(5):
            case 0:
                n = node(rng.choice(NODES), rng.randrange(1, 4))
                return keys.node(n.node_id), None if gone else n.SerializeToString()
            case 1:
                on = rng.sample(NODES, rng.randrange(1, 3))
                return keys.assignment(replica), None if gone else assignment(replica, *on).SerializeToString()
            case 2:
                entry = self.kvs.get(keys.assignment(replica))
                of = records_pb2.Assignment.FromString(entry.value) if entry else assignment(replica, "n0")
                of.created_revision = entry.create_revision if entry else 0
                rank = rng.randrange(len(of.members))
                said = status(node(of.members[rank].node_id), of, rng.choice(records_pb2.State.values()), rank)
                return keys.member(replica, rank), None if gone else said.SerializeToString()
            case 3:
                d = records_pb2.Deployment(spec=spec("chat", replicas=rng.randrange(5)), generation=self.revision)
                return keys.deployment("chat"), None if gone else d.SerializeToString()
            case _:
                return keys.node_draining(rng.choice(NODES)), None if gone else b""


def fresh(history: History) -> FleetState:
    state = FleetState(ExpiryGuard(share=1.0))
    state.apply(history.kvs.values(), (), history.revision, 0.0)
    return state


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_a_state_followed_step_by_step_is_the_state_read_at_once(seed: int) -> None:
    history = History(random.Random(seed))
    state = FleetState(ExpiryGuard(share=1.0))
    told: dict[Name, Record] = {}
    for revision in range(1, 80):
        history.step()
        puts, gone = history.steps[-1]
        change = state.apply(puts, gone, revision, float(revision) * 100).change
        told.update(change.upserts)
        for name in change.removals:
            del told[name]
        assert told == state.records
    assert state.records == fresh(history).records
    for node_id in NODES:
        assert state.assignments_of(node_id) == fresh(history).assignments_of(node_id)


@dataclass
class Registry:
    """One registry as a watcher meets it: lags behind etcd, coalesces, restarts."""

    history: History
    state: FleetState = field(default_factory=lambda: FleetState(ExpiryGuard(share=1.0)))
    flow: Outflow = field(default_factory=lambda: Outflow(ALL))

    def advance(self, steps: int) -> None:
        for puts, gone in self.history.steps[self.state.revision : self.state.revision + steps]:
            self.flow.change(self.state.apply(puts, gone, self.state.revision + 1, 0.0).change, self.state.revision)

    def speak(self, view: FleetView) -> None:
        """Tell all that waits, as the client takes it: together, at the revision of the Freshness."""
        upserts: dict[Name, Record] = {}
        removals: dict[Name, None] = {}
        for message in self.flow.take_records():
            upserts.update(records.unpack(message.upserts))
            removals.update(dict.fromkeys(records.unpack_removals(message.removals)))
        view.delta(upserts.items(), removals, self.flow.told_revision)

    def reconnect(self, view: FleetView) -> None:
        self.flow = Outflow(ALL, told_revision=self.state.revision)
        view.snapshot(dict(self.state.records), self.state.revision)


@given(st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_a_view_of_several_lagging_registries_ends_true_and_never_goes_back(seed: int) -> None:
    note(f"seed {seed}")
    rng = random.Random(seed)
    history, view = History(rng), FleetView()
    registries = [Registry(history) for _ in range(3)]
    truths: list[dict[Name, Record]] = [{}]
    follower = FleetState(ExpiryGuard(share=1.0))
    for each in registries:
        each.reconnect(view)
    for _ in range(120):
        history.step()
        follower.apply(*history.steps[-1], history.revision, 0.0)
        truths.append(dict(follower.records))
        registry = rng.choice(registries)
        match rng.randrange(6):
            case 0 | 1:
                registry.advance(rng.randrange(1, 30))
            case 2 | 3:
                registry.advance(rng.randrange(1, 30))
                before = view.revision
                registry.speak(view)
                assert view.revision >= before
            case 4:
                registry.reconnect(view)
            case 5:
                # Killed and started again: it reads etcd as it is now.
                registry.state = FleetState(ExpiryGuard(share=1.0))
                registry.advance(history.revision)
                registry.reconnect(view)
        shown = {(kind, name): r for kind in Kind for name, r in getattr(view, kind.value).items()}
        assert shown == truths[view.revision], "exactly what was true at that revision, at every moment"
    for registry in registries:
        registry.advance(history.revision)
        registry.speak(view)
    assert view.revision == history.revision


SERIES = Series("chat-0", 0, common_pb2.TIER_GPU)


class Digests:
    """An agent, two registries and one watcher, and all that can go wrong between them."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.truth: set[int] = set()
        self.seen: set[int] = set()
        self._sequence = 0
        self._merge = DigestMerge()
        self._stores = {"a": DigestStore(), "b": DigestStore()}
        self._flows = {name: Outflow(ALL, max_digest_bytes=600) for name in self._stores}
        self._here = "a"

    def change(self) -> None:
        removed = set(self._rng.sample(sorted(self.truth), min(len(self.truth), self._rng.randrange(3))))
        added = {self._rng.randrange(2**64) for _ in range(self._rng.randrange(4))}
        self.truth = (self.truth | added) - removed
        self._sequence += 1
        if self._rng.random() < 0.9:  # else lost on the way
            self._report(delta("chat-0", self.truth, self._sequence, added, removed))

    def move(self) -> None:
        """The registry that the agent leaves forgets, the next is told all."""
        self._stores[self._here].forget("chat-0")
        self._flows[self._here] = Outflow(ALL, max_digest_bytes=600)
        self._here = "b" if self._here == "a" else "a"
        self.restate()

    def restate(self) -> None:
        self._report(snapshot("chat-0", self.truth, self._sequence))

    def watch(self) -> None:
        for name in self._rng.sample(sorted(self._stores), 2):
            updates = [m.digest for m in self._flows[name].take_soft()]
            if self._flows[name].take_untold():
                updates += list(self._stores[name].snapshot(SERIES, 3))
            for update in updates:
                self._see(name, update)

    def _see(self, name: str, update: registry_pb2.DigestUpdate) -> None:
        verdict, whole = self._merge.offer(name, update, lambda source, _: source == self._here)
        assert verdict is not Verdict.GAP
        if verdict is Verdict.TAKE:
            added, removed = set(unpack_keys(whole.added)), set(unpack_keys(whole.removed))
            self.seen = (added if whole.snapshot else self.seen | added) - removed

    def _report(self, update: registry_pb2.DigestUpdate) -> None:
        match self._stores[self._here].apply(update):
            case Outcome.APPLIED if update.snapshot:
                self._flows[self._here].replaced(SERIES)
            case Outcome.APPLIED:
                self._flows[self._here].digest(update)
            case Outcome.RESYNC:
                self.restate()


@given(st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_digests_survive_losses_moves_and_slow_watchers(seed: int) -> None:
    note(f"seed {seed}")
    rng = random.Random(seed)
    digests = Digests(rng)
    for _ in range(80):
        rng.choice([digests.change, digests.change, digests.change, digests.watch, digests.move])()
    digests.restate()
    digests.watch()
    assert digests.seen == digests.truth


@given(
    st.integers(0, 2**32),
    st.integers(1, 50),
    st.floats(0, 1),
)
@settings(max_examples=100, deadline=None)
def test_the_guard_never_lets_more_than_a_share_go_at_once(seed: int, count: int, share: float) -> None:
    rng = random.Random(seed)
    guard = ExpiryGuard(share=share, grace_s=30, pace_s=1)
    alive = {f"n{i}" for i in range(count)}
    held: set[str] = set()
    drops: list[tuple[float, bool]] = []
    now = 0.0
    for _ in range(200):
        now += rng.random() * 5
        if alive and rng.random() < 0.5:
            lost = rng.choice(sorted(alive))
            alive.remove(lost)
            if guard.lost(lost, len(alive) + len(held) + 1, now):
                drops.append((now, True))
            else:
                held.add(lost)
        elif held and rng.random() < 0.3:
            back = rng.choice(sorted(held))
            guard.returned(back)
            held.remove(back)
            alive.add(back)
        if (released := guard.due(now)) is not None:
            held.remove(released)
            drops.append((now, False))
        assert guard.held == held
    at_once = [at for at, unasked in drops if unasked]
    for start in at_once:
        assert sum(start <= at < start + 30 for at in at_once) <= max(1, share * count)
    paced = [at for at, unasked in drops if not unasked]
    assert all(later - earlier >= 1 for earlier, later in itertools.pairwise(paced))
