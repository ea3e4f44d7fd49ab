"""Which KV blocks a cache holds, by their public keys, from the events of its engine.

Engines name blocks by hashes of their own; `CacheDigest` maps them to keys (`stoker.common.blocks`). An engine
announces each copy of a block and each copy's removal, so copies are counted and a key is held while any copy is.
A replica has one cache, or with data parallelism one for each rank.

Memory: bounded by the engine's own block count with slack; more than that means that events were lost, and
then the digest starts again from nothing, because holding too little is the cheaper lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from stoker.common.blocks import block_keys, pack_tokens, packed_block_keys, root_key
from stoker.node_agent.core.prompts import Prompts
from stoker.node_agent.engine.events import BlockHash, Cleared, Event, Ignored, Removed, Stored

TIERS = ("GPU", "CPU", "STORAGE")
_PARTIAL_KINDS = {"sliding_window", "chunked_local_attention", "mamba"}
"""Attention kinds whose blocks say nothing of a whole prefix."""
_UNBOUNDED = 8_000_000
"""Copies held at most where the engine does not say how many blocks it has: about 2 GB here."""


@dataclass(frozen=True)
class Delta:
    """One step of one tier. Applies only to `sequence` − 1 of the same tier and epoch."""

    epoch: int
    sequence: int
    tier: str
    added: tuple[int, ...]
    removed: tuple[int, ...]
    xor: int
    count: int


@dataclass(frozen=True)
class Piece:
    """A part of a snapshot of one tier; the last one says `more=False`. All have one sequence."""

    epoch: int
    sequence: int
    tier: str
    keys: tuple[int, ...]
    xor: int
    count: int
    more: bool


@dataclass
class Counts:
    """What happened since the start, for metrics."""

    stored: int = 0
    removed: int = 0
    cleared: int = 0
    ignored: int = 0
    """Events of unknown kind or without sense."""
    orphans: int = 0
    """Blocks whose parent is not known: their key cannot be made."""
    strangers: int = 0
    """Removals of blocks not known."""
    overflows: int = 0
    """Times that more blocks were held than the engine has."""


@dataclass
class _Tier:
    copies: dict[BlockHash, int] = field(default_factory=dict)
    names: dict[int, int] = field(default_factory=dict)
    """Names that hold each key."""
    xor: int = 0
    sequence: int = 0
    used: bool = False
    """Whether anything was ever held: a tier that never was is not told of."""
    added: set[int] = field(default_factory=set)
    removed: set[int] = field(default_factory=set)


class CacheDigest:
    """The digest of one cache, from its engine's first event on.

    `model` is the served model's name, as clients ask for it; `blocks` the engine's block count, 0 if unknown;
    `prompt_bytes` bounds the memory for what the blocks were computed from.
    """

    def __init__(self, model: str, blocks: int = 0, slack: float = 1.25, prompt_bytes: int = 0) -> None:
        self._model = model
        self._prompt_bytes = prompt_bytes
        self.prompts = Prompts(model, prompt_bytes)
        self._slack = slack
        self._limit = _UNBOUNDED
        self._keys: dict[BlockHash, int] = {}
        self._tiers = {name: _Tier() for name in TIERS}
        self._group: int | None = None
        self.epoch = 0
        self.block_size: int | None = None
        self.counts = Counts()
        if blocks:
            self.bound(blocks)

    def bound(self, blocks: int) -> None:
        """The engine has this many blocks: a digest that holds many more is wrong."""
        self._limit = int(blocks * self._slack) + 1024

    # --- events -------------------------------------------------------------------------------------------

    def begin(self, epoch: int, sequence: int = 0) -> None:
        """A new life of the engine, or of its agent: nothing is held.

        `sequence` must be above every sequence told before in this epoch.
        """
        self._keys = {}
        self.prompts = Prompts(self._model, self._prompt_bytes)
        self._tiers = {name: _Tier(sequence=sequence, used=name == "GPU") for name in TIERS}
        self.epoch = epoch
        self._group = None

    def apply(self, events: Iterable[Event]) -> None:
        """Take over the events of one batch, in order."""
        for event in events:
            match event:
                case Stored():
                    self._store(event)
                case Removed():
                    self._remove(event)
                case Cleared():
                    self.counts.cleared += 1
                    self._drop_all()
                case Ignored():
                    self.counts.ignored += 1

    def lost(self) -> None:
        """Events are missing for good: what is held cannot be told from what is not."""
        self._drop_all()

    def _store(self, event: Stored) -> None:
        tier = self._tiers.get(event.tier)
        if tier is None or not self._whole(event.kind, event.group):
            self.counts.ignored += 1
            return
        keys = self._keys_of(event)
        if keys is None:
            self.counts.orphans += len(event.hashes)
            return
        for name, key in zip(event.hashes, keys, strict=True):
            self._keys[name] = key
            copies = tier.copies.get(name, 0)
            tier.copies[name] = copies + 1
            if not copies:
                self._hold(tier, key)
        self.counts.stored += len(keys)
        # The engine's own count is of GPU blocks; a tier of host memory or disk may hold many times as many.
        if len(tier.copies) > (self._limit if event.tier == "GPU" else _UNBOUNDED):
            self.counts.overflows += 1
            self._drop_all()

    def _keys_of(self, event: Stored) -> list[int] | None:
        if event.parent is not None:
            parent = self._keys.get(event.parent)
            if parent is None:
                return None
        else:
            parent = root_key(self._model, lora=event.lora or "", cache_salt=event.salt or "")
            self.prompts.begin(event.lora or "")
        if event.tier == "GPU":
            self.block_size = event.block_size
        extras = {at: _extra_bytes(extra) for at, extra in enumerate(event.extras) if extra}
        if extras:
            return block_keys(event.tokens, event.block_size, parent, extras)
        packed = pack_tokens(event.tokens)
        keys = packed_block_keys(packed, event.block_size, parent)
        self.prompts.add(parent, keys, packed)
        return keys

    def _whole(self, kind: str | None, group: int) -> bool:
        """Whether this KV-cache group tells what prefixes are held: the first that attends to everything."""
        if kind in _PARTIAL_KINDS:
            return False
        if self._group is None:
            self._group = group
        return group == self._group

    def _remove(self, event: Removed) -> None:
        tier = self._tiers.get(event.tier)
        if tier is None or (self._group is not None and event.group != self._group):
            return
        for name in event.hashes:
            copies = tier.copies.get(name, 0)
            if copies > 1:
                tier.copies[name] = copies - 1
            elif copies == 1:
                self._let_go(tier, name)
            else:
                self.counts.strangers += 1
        self.counts.removed += len(event.hashes)

    def _hold(self, tier: _Tier, key: int) -> None:
        held = tier.names.get(key, 0)
        tier.names[key] = held + 1
        tier.used = True
        if held:
            return
        tier.xor ^= key
        if key in tier.removed:
            tier.removed.remove(key)
        else:
            tier.added.add(key)

    def _let_go(self, tier: _Tier, name: BlockHash) -> None:
        del tier.copies[name]
        key = self._keys[name]
        if not any(name in other.copies for other in self._tiers.values()):
            del self._keys[name]
        held = tier.names[key]
        if held > 1:
            tier.names[key] = held - 1
            return
        del tier.names[key]
        if not any(key in other.names for other in self._tiers.values()):
            self.prompts.remove(key)
        tier.xor ^= key
        if key in tier.added:
            tier.added.remove(key)
        else:
            tier.removed.add(key)

    def _drop_all(self) -> None:
        for tier in self._tiers.values():
            for name in list(tier.copies):
                self._let_go(tier, name)

    # --- what others are told -----------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Changes not yet taken by `deltas`."""
        return sum(len(tier.added) + len(tier.removed) for tier in self._tiers.values())

    def deltas(self, limit: int = 65_536) -> list[Delta]:
        """All changes since the last call, at most `limit` keys a delta."""
        deltas: list[Delta] = []
        for name, tier in self._tiers.items():
            if not tier.added and not tier.removed:
                continue
            added, removed = sorted(tier.added), sorted(tier.removed)
            tier.added, tier.removed = set(), set()
            deltas += self._split(name, tier, added, removed, limit)
        return deltas

    def _split(self, name: str, tier: _Tier, added: list[int], removed: list[int], limit: int) -> Iterator[Delta]:
        # Each part carries the digest as it stands after that part: start from the set before all of them.
        xor, count = tier.xor, len(tier.names) - len(added) + len(removed)
        for key in (*added, *removed):
            xor ^= key
        changes = [(key, True) for key in added] + [(key, False) for key in removed]
        for start in range(0, len(changes), limit):
            part = changes[start : start + limit]
            for key, adds in part:
                xor ^= key
                count += 1 if adds else -1
            tier.sequence += 1
            yield Delta(
                self.epoch,
                tier.sequence,
                name,
                tuple(key for key, adds in part if adds),
                tuple(key for key, adds in part if not adds),
                xor,
                count,
            )

    def snapshot(self, limit: int = 65_536) -> list[Piece]:
        """Every tier ever used, in pieces of at most `limit` keys. Take `deltas` first: it shares their sequence."""
        pieces = []
        for name, tier in self._tiers.items():
            if not tier.used:
                continue
            keys = sorted(tier.names)
            for at in range(0, max(len(keys), 1), limit):
                part, more = tuple(keys[at : at + limit]), at + limit < len(keys)
                pieces.append(Piece(self.epoch, tier.sequence, name, part, tier.xor, len(keys), more))
        return pieces

    @property
    def tiers(self) -> tuple[str, ...]:
        """Tiers that ever held anything."""
        return tuple(name for name, tier in self._tiers.items() if tier.used)

    @property
    def version(self) -> int:
        """Rises with each delta."""
        return sum(tier.sequence for tier in self._tiers.values())

    def held(self, tier: str = "GPU") -> frozenset[int]:
        """Keys held in a tier."""
        return frozenset(self._tiers[tier].names)

    def count(self, tier: str = "GPU") -> int:
        """Number of keys held in a tier."""
        return len(self._tiers[tier].names)

    # --- surviving the agent ------------------------------------------------------------------------------

    def export(self) -> Image:
        """A copy to write to disk."""
        blocks = [
            (name, key, [tier.copies.get(name, 0) for tier in self._tiers.values()])
            for name, key in self._keys.items()
        ]
        return Image(self._model, self.epoch, self.block_size, self._group, blocks)

    def restore(self, image: Image) -> bool:
        """Take over a copy after `begin`. False, and nothing taken, when it is of another life or model."""
        if (image.model, image.epoch) != (self._model, self.epoch):
            return False
        self.block_size, self._group = image.block_size, image.group
        for name, key, copies in image.blocks:
            self._keys[name] = key
            for tier, number in zip(self._tiers.values(), copies, strict=True):
                if number:
                    tier.copies[name] = number
                    self._hold(tier, key)
        for tier in self._tiers.values():  # told in a snapshot, not as changes
            tier.added.clear()
        return True


@dataclass(frozen=True)
class Image:
    """A digest as it is kept on disk."""

    model: str
    epoch: int
    block_size: int | None
    group: int | None
    blocks: list[tuple[bytes | int, int, list[int]]]
    """(engine hash, key, copies by tier)."""


def nothing(epoch: int, tiers: Iterable[str]) -> list[Piece]:
    """The snapshot of an engine that is no more."""
    return [Piece(epoch, 0, tier, (), 0, 0, more=False) for tier in tiers]


def _extra_bytes(extra: Sequence[object]) -> list[bytes]:
    """What else a block depends on, spelled so that equal values give equal bytes."""
    return [item if isinstance(item, bytes) else _spell(item) for item in extra]


def _spell(item: object) -> bytes:
    if isinstance(item, (tuple, list)):
        return b"(" + b",".join(_spell(part) for part in item) + b")"
    return item if isinstance(item, bytes) else str(item).encode("utf-8", "surrogatepass")
