"""A digest against a model of an engine: real copies, several tiers, replays, losses, restarts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.common.blocks import block_keys, root_key, xor_digest
from stoker.node_agent.core.digest import CacheDigest, Delta, Piece
from stoker.node_agent.engine.events import Cleared, Event, Removed, Stored

SIZE = 4


@dataclass
class Engine:
    """What an engine holds: copies by (tier, path), a path being the tokens from the root to a block."""

    seed: int
    copies: Counter[tuple[str, tuple[int, ...]]] = field(default_factory=Counter)

    def hash(self, path: tuple[int, ...]) -> bytes:
        return Random(f"{self.seed} {path}").randbytes(8)

    def store(self, tier: str, path: tuple[int, ...], blocks: int) -> Stored | None:
        """Stores the last `blocks` blocks of `path`; None where their parent is not held in that tier."""
        starts = [len(path) - SIZE * (blocks - at) for at in range(blocks)]
        parent = path[: starts[0]]
        if parent and not any(self.copies[other, parent] for other in ("GPU", "CPU")):
            return None
        paths = [path[: start + SIZE] for start in starts]
        for one in paths:
            self.copies[tier, one] += 1
        return Stored(
            hashes=tuple(self.hash(one) for one in paths),
            parent=self.hash(parent) if parent else None,
            tokens=path[starts[0] :],
            block_size=SIZE,
            lora=None,
            salt=None,
            extras=((),) * blocks,
            tier=tier,
        )

    def remove(self, tier: str, path: tuple[int, ...]) -> Removed | None:
        if not self.copies[tier, path]:
            return None
        self.copies[tier, path] -= 1
        return Removed((self.hash(path),), tier)

    def keys(self, tier: str) -> frozenset[int]:
        root = root_key("m")
        return frozenset(
            block_keys(path, SIZE, root)[-1] for (held, path), n in self.copies.items() if n and held == tier
        )


@dataclass
class Reader:
    """What somebody knows who applies deltas and snapshots by the rules."""

    keys: dict[str, set[int]] = field(default_factory=dict)
    at: dict[str, tuple[int, int]] = field(default_factory=dict)

    def take(self, update: Delta | Piece) -> bool:
        """False asks for a snapshot: nothing is known of that tier yet."""
        if isinstance(update, Piece):
            self.keys[update.tier] = set(update.keys)
        elif update.tier not in self.at:
            return False
        else:
            assert self.at[update.tier] == (update.epoch, update.sequence - 1), "a delta out of order"
            keys = self.keys[update.tier]
            assert keys.isdisjoint(update.added)
            assert keys.issuperset(update.removed)
            keys |= set(update.added)
            keys -= set(update.removed)
        self.at[update.tier] = (update.epoch, update.sequence)
        assert (xor_digest(self.keys[update.tier]), len(self.keys[update.tier])) == (update.xor, update.count)
        return True

    def hear(self, digest: CacheDigest, limit: int) -> None:
        """Take all deltas, and snapshots where one is needed."""
        trusted = [self.take(delta) for delta in digest.deltas(limit)]
        if not all(trusted):
            for piece in digest.snapshot():
                self.take(piece)


_paths = st.integers(1, 4).flatmap(
    lambda blocks: st.tuples(st.just(blocks), st.lists(st.integers(0, 1), min_size=blocks, max_size=blocks))
)
_steps = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "store", "remove", "remove", "clear", "flush", "resync", "restart"]),
        st.sampled_from(["GPU", "GPU", "CPU"]),
        _paths,
        st.integers(1, 3),
    ),
    max_size=40,
)


def _event(engine: Engine, what: str, tier: str, path: tuple[int, ...], run: int) -> Event | None:
    if what == "store":
        return engine.store(tier, path, run)
    if what == "remove":
        return engine.remove(tier, path)
    if what == "clear":
        engine.copies.clear()
        return Cleared()
    return None


def _heir(digest: CacheDigest) -> CacheDigest:
    heir = CacheDigest("m", prompt_bytes=1 << 20)
    heir.begin(digest.epoch, sequence=digest.version + 100)
    assert heir.restore(digest.export())
    return heir


def check_prompts(digest: CacheDigest, engine: Engine) -> None:
    """What is rebuilt is what was computed, and nothing is kept that no tier holds."""
    held = {block_keys(path, SIZE, root_key("m"))[-1]: path for (_, path), n in engine.copies.items() if n}
    rebuilt = {key: prompt for key in held if (prompt := digest.prompts.prompt(key)) is not None}
    assert all(tuple(prompt.tokens) == held[key] for key, prompt in rebuilt.items())
    assert len(digest.prompts) <= len(held)
    assert bool(digest.prompts.bytes) == bool(len(digest.prompts))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(_steps, st.integers(1, 5))
def test_readers_know_exactly_what_the_engine_holds(
    steps: list[tuple[str, str, tuple[int, list[int]], int]], limit: int
) -> None:
    engine, digest, reader = Engine(0), CacheDigest("m", prompt_bytes=1 << 20), Reader()
    digest.begin(1, sequence=7)
    for what, tier, (blocks, shape), run in steps:
        path = tuple(token for branch in shape for token in [branch] * SIZE)
        event = _event(engine, what, tier, path, min(run, blocks))
        if event is not None:
            digest.apply([event])
        elif what in {"flush", "resync", "restart"}:
            reader.hear(digest, limit)
        if what == "restart":
            digest = _heir(digest)
            reader.at.clear()
        if what in {"resync", "restart"}:
            for piece in digest.snapshot():
                reader.take(piece)
        for each in ("GPU", "CPU"):
            assert digest.held(each) == engine.keys(each), what
        check_prompts(digest, engine)
    reader.hear(digest, limit)
    for each in ("GPU", "CPU"):
        assert reader.keys.get(each, set()) == engine.keys(each)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(1, 100), st.integers(0, 2**32))
def test_memory_is_bounded_whatever_comes(blocks: int, seed: int) -> None:
    digest, rng = CacheDigest("m", blocks=blocks), Random(seed)
    digest.begin(1)
    for _ in range(60):
        tokens = tuple(rng.randrange(1000) for _ in range(64 * SIZE))
        hashes = tuple(rng.randbytes(8) for _ in range(64))
        digest.apply([Stored(hashes, None, tokens, SIZE, None, None, ((),) * 64, "GPU")])
        assert digest.count() <= blocks * 1.25 + 1024 + 64
    assert digest.counts.overflows > 0
