"""Whatever etcd does to the stream, the consumer sees the same history."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from stoker.etcd import wire
from stoker.etcd.core.endpoints import Endpoints
from stoker.etcd.core.lease import Term, extend
from stoker.etcd.core.types import Delta, KeyValue
from stoker.etcd.core.watch import Event, Resume, advance, complete, deltas, diff

KEYS = st.sampled_from("abcdefg")


@dataclass
class Store:
    """A model of etcd: every revision's events, and the state after it."""

    events: list[list[Event]]
    states: list[dict[str, KeyValue]]


@st.composite
def stores(draw: st.DrawFn) -> Store:
    state: dict[str, KeyValue] = {}
    events: list[list[Event]] = []
    states = [dict(state)]
    for revision in range(1, draw(st.integers(1, 25)) + 1):
        changes = []
        for key in sorted(draw(st.sets(KEYS, min_size=1, max_size=4))):
            old = state.get(key)
            if old and draw(st.booleans()):
                del state[key]
                changes.append(Event(revision, key, None))
            else:
                created, version = (old.create_revision, old.version + 1) if old else (revision, 1)
                state[key] = KeyValue(key, b"%d" % revision, created, revision, version)
                changes.append(Event(revision, key, state[key]))
        events.append(changes)
        states.append(dict(state))
    return Store(events, states)


def apply(view: dict[str, KeyValue], delta: Delta) -> None:
    for key in delta.deletes:
        del view[key]
    view.update({kv.key: kv for kv in delta.puts})


def known(state: dict[str, KeyValue]) -> dict[str, int]:
    return {kv.key: kv.mod_revision for kv in state.values()}


@given(stores(), st.data())
def test_fragments_never_split_a_revision_and_lose_nothing(store: Store, data: st.DataObject) -> None:
    flat = [event for changes in store.events for event in changes]
    held: list[Event] = []
    out: list[Delta] = []
    at = 0
    while at < len(flat):
        end = data.draw(st.integers(at + 1, len(flat)))
        ready, held = complete(held, flat[at:end], more=end < len(flat))
        assert len({event.revision for event in held}) <= 1, "memory: one revision at most"
        out += deltas(ready, out[-1].revision if out else 0)
        at = end
    assert not held
    assert out == deltas(flat, 0)
    assert [delta.revision for delta in out] == list(range(1, len(store.events) + 1))


@given(stores(), st.data())
def test_resuming_anywhere_with_overlap_gives_the_same_history(store: Store, data: st.DataObject) -> None:
    view: dict[str, KeyValue] = {}
    seen = 0
    while seen < len(store.events):
        # A new endpoint may send again what was delivered; it breaks off somewhere.
        start = data.draw(st.integers(0, seen))
        end = data.draw(st.integers(seen + 1, len(store.events)))
        for delta in deltas([event for changes in store.events[start:end] for event in changes], seen):
            assert delta.revision == seen + 1
            apply(view, delta)
            seen = delta.revision
    assert view == store.states[-1]


@given(stores(), st.data())
def test_a_compaction_anywhere_ends_in_the_same_state(store: Store, data: st.DataObject) -> None:
    last = len(store.states) - 1
    seen = data.draw(st.integers(0, last))
    now = data.draw(st.integers(seen, last))
    how = data.draw(st.sampled_from([Resume.RELOAD, Resume.RELOAD_ALL]))
    view = dict(store.states[seen])
    track = known(view)
    jump = diff(track, sorted(store.states[now].values(), key=lambda kv: kv.key), now, how)
    if how is Resume.RELOAD:
        assert all(view.get(kv.key) != kv for kv in jump.puts), "nothing that did not change"
    apply(view, jump)
    advance(track, jump)
    for delta in deltas([event for changes in store.events[now:] for event in changes], jump.revision):
        apply(view, delta)
        advance(track, delta)
    assert view == store.states[-1]
    assert track == known(view)


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 60))), st.floats(0, 200))
def test_a_lease_never_outlives_its_best_renewal(renewals: list[tuple[float, int]], now: float) -> None:
    term = Term(0.0, 10.0)
    for sent, ttl in renewals:
        term = extend(term, sent, ttl)
    assert term.deadline == max([10.0, *(sent + ttl for sent, ttl in renewals)])
    assert now + term.attempt_timeout(now) <= max(now, term.deadline) + 1e-9
    assert term.sent < term.renew_at < term.deadline


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.floats(0, 5)), max_size=30))
def test_a_good_endpoint_is_picked_whenever_there_is_one(count: int, history: list[tuple[int, bool, float]]) -> None:
    endpoints = Endpoints(count)
    until = [float("-inf")] * count
    for now, (index, works, wait) in enumerate(history):
        index %= count
        until[index] = float("-inf") if works else now + wait
        if works:
            endpoints.succeeded(index)
        else:
            endpoints.failed(index, now + wait)
        picked = endpoints.pick(now)
        good = [each for each in range(count) if until[each] <= now]
        assert endpoints.has_good(now) == bool(good)
        assert picked in good if good else until[picked] == min(until)


@given(st.binary(min_size=1, max_size=6), st.binary(max_size=8))
def test_the_end_of_a_prefix_takes_in_exactly_what_starts_with_it(prefix: bytes, other: bytes) -> None:
    end = wire.prefix_end(prefix)

    def inside(key: bytes) -> bool:
        return prefix <= key and (end == b"\0" or key < end)

    assert inside(prefix + other)
    assert inside(other) == other.startswith(prefix)


@given(st.binary(max_size=12))
def test_any_key_survives_the_round_trip(key: bytes) -> None:
    assert wire.encode(wire.decode(key)) == key
