"""What the KV blocks of a deployment's replicas are worth: is anybody going to ask for them again in time?"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from stoker.common.blocks import SAMPLE
from stoker.scaler.core.warming import Held

_FINE = 2
"""Buckets of a gap for each time it doubles."""
_BUCKETS = 40
_LEAST = 2.0**-4
"""Upper edge of the first bucket: seconds, or shares of a block's own longest gap."""
_KINDS = 4
"""Blocks asked for once, two or three times, four to seven times, more often: each kind learns for itself."""
_EVICTIONS = 4_096
_FEW_WAITED, _FEW_SHARE = 20, 0.01
_FEW_EVICTIONS = 100
_LATELY_S = 120.0
_LATE = 0.9
_FORGETS = 0.9
_SHORTEST_S = 1e-3

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Part = tuple[str, str]
"""A replica, and which of its caches: a tier, a data-parallel rank."""


@dataclass(frozen=True, slots=True)
class WarmthConfig:
    """How blocks are followed."""

    sample: int = SAMPLE
    """Of so many keys one is followed, always the same: those that it divides. All values are scaled up by it."""
    limit: int = 65_536
    """Blocks remembered, those asked for last: about 16 MiB."""
    longest_s: float = 3_600.0
    """A reuse later than this counts for nothing, whatever the caches could keep."""
    halve_s: float = 1_800.0
    """What was learnt of gaps counts half after this long."""


@dataclass(slots=True)
class _Block:
    """A followed block: when it was last asked for, and how often in all."""

    last: float
    uses: int = 1
    gap: float = 0.0
    """Its longest gap between two uses, seconds; one long ago counts less."""
    parent: int = 0
    """The followed block before it in its prompt; 0 for none."""
    holders: int = 0
    """Replicas that hold it, by bit."""

    @property
    def scale(self) -> float:
        """What its waiting is measured in, seconds."""
        return max(self.gap, _SHORTEST_S) if self.uses > 1 else 1.0


@dataclass(frozen=True, slots=True)
class Worth:
    """What is held at one moment, in tokens that are expected to be asked for while their replicas keep them.

    `by_holders` sums it by the set of replicas that hold the same blocks (bits; `bits` names them).
    """

    by_holders: Mapping[int, float] = field(default_factory=dict)
    bits: Mapping[str, int] = field(default_factory=dict)

    def lost_with(self, replicas: Iterable[str]) -> float:
        """Tokens that go when all these replicas go: those of blocks that nobody else holds."""
        going = sum(self.bits.get(replica, 0) for replica in replicas)
        return sum(tokens for holders, tokens in self.by_holders.items() if not holders & ~going)

    def within(self, replicas: Collection[str], most: int) -> Worth:
        """What can be lost at all when at most `most` of these replicas go: the same answers, sooner."""
        able = sum(self.bits.get(replica, 0) for replica in replicas)
        losable = {
            holders: tokens
            for holders, tokens in self.by_holders.items()
            if not holders & ~able and holders.bit_count() <= most
        }
        return Worth(losable, self.bits)


class Warmth:
    """What is known of one deployment's blocks. Times are monotonic seconds, keys are u64 block keys.

    The chance that a block is asked for again is learnt from how long others of its kind took: of those asked for
    once by the time since, of others by that time over their own longest gap (a conversation whose turns came each
    minute is over after five; one that comes each ten is not). The estimate is Kaplan's and Meier's (1958), for
    most blocks still wait and may do so for ever: they are among those at risk for as long as they have waited.
    Where next to none has ever waited so long, nothing is concluded from those that came.
    """

    def __init__(self, block_tokens: int, config: WarmthConfig | None = None) -> None:
        self.block_tokens = block_tokens
        self.config = config or WarmthConfig()
        self.limit = self.config.limit
        """Blocks remembered. May be changed at any time; takes effect with the next call."""
        self._blocks: OrderedDict[int, _Block] = OrderedDict()
        self._bits: dict[Part, int] = {}
        self._ended = np.zeros((_KINDS, _BUCKETS))
        self._held: dict[Part, int] = {}
        self._evicted: dict[Part, deque[tuple[float, float]]] = {}
        self._faded_at: float | None = None

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def replicas(self) -> Collection[str]:
        """Those of which anything was told."""
        return {replica for replica, _ in self._bits}

    def used(self, keys: Iterable[int], now: float) -> None:
        """A request asked for the prompt with these blocks, in order."""
        self._fade(now)
        parent = 0
        for key in keys:
            if key % self.config.sample:
                continue
            block = self._blocks.get(key)
            if block is None:
                self._blocks[key] = _Block(now, parent=parent)
            else:
                self._learn(block, now)
                self._blocks.move_to_end(key)
            parent = key
        self._trim()

    def stored(self, replica: str, keys: Iterable[int], now: float, cache: str = "") -> None:
        """A replica holds these blocks now, in one of its caches. Those of which no use is known count as used now,
        for once."""
        part = (replica, cache)
        bit = self._bit(part)
        for key in keys:
            if key % self.config.sample == 0:
                block = self._blocks.get(key)
                if block is None:
                    block = self._blocks[key] = _Block(now)
                self._held[part] += not block.holders & bit
                block.holders |= bit
        self._trim()

    def removed(self, replica: str, keys: Iterable[int], now: float, cache: str = "") -> None:
        """A replica has evicted these blocks from one of its caches."""
        part = (replica, cache)
        bit = self._bit(part)
        for key in keys:
            block = self._blocks.get(key) if key % self.config.sample == 0 else None
            if block is not None and block.holders & bit:
                block.holders &= ~bit
                self._held[part] -= 1
                self._evicted[part].append((now, now - block.last))

    def holds(self, replica: str, keys: Iterable[int], now: float, cache: str = "") -> None:
        """A replica holds these blocks in one of its caches, and no others."""
        if (replica, cache) in self._bits:
            self._clear((replica, cache))
        self.stored(replica, keys, now, cache)

    def forget(self, replica: str) -> None:
        """A replica is gone, and what it held with it."""
        for part in [part for part in self._bits if part[0] == replica]:
            self._clear(part)
            del self._bits[part], self._held[part], self._evicted[part]

    def keep_s(self, replica: str, now: float) -> float:
        """How long a replica keeps a block that nobody asks for; of several caches the longest."""
        return max((self._keep_s(part, now) for part in self._bits if part[0] == replica), default=0.0)

    def worth(self, now: float, *, staying: float = 1.0) -> Worth:
        """What each set of replicas holds alone. `staying` is the share of the caches that will be left: they keep
        blocks for so much shorter."""
        bits = {name: 1 << place for place, name in enumerate(sorted(self.replicas))}
        held = [block for block in self._blocks.values() if block.holders]
        chances: dict[int, float] = {}
        for block, chance in zip(held, self._chances(held, now, staying), strict=True):
            chances[block.holders] = chances.get(block.holders, 0.0) + chance
        by_holders: dict[int, float] = {}
        for holders, sum_ in chances.items():
            together = sum(bits[name] for name in self._names(holders))
            by_holders[together] = by_holders.get(together, 0.0) + self.block_tokens * self.config.sample * sum_
        return Worth(by_holders, bits)

    def held_by(self, going: Collection[str], now: float, *, staying: float = 1.0) -> dict[int, Held]:
        """The followed blocks of replicas that go, by key: what `warming.plan` takes, each for `block_tokens` times
        `sample` tokens."""
        bits = sum(bit for (name, _), bit in self._bits.items() if name in going)
        mine = {key: block for key, block in self._blocks.items() if block.holders & bits}
        elsewhere = {others: self._names(others) for others in {block.holders & ~bits for block in mine.values()}}
        holder = {held: min(self._names(held)) for held in {block.holders & bits for block in mine.values()}}
        chances = self._chances(list(mine.values()), now, staying)
        return {
            key: Held(block.parent, chance, elsewhere[block.holders & ~bits], holder[block.holders & bits])
            for (key, block), chance in zip(mine.items(), chances, strict=True)
        }

    def _learn(self, block: _Block, now: float) -> None:
        gap = max(0.0, now - block.last)
        self._ended[_kind(block.uses), _bucket(gap / block.scale)] += 1
        block.gap = max(gap, _FORGETS * block.gap)
        block.uses += 1
        block.last = now

    def _fade(self, now: float) -> None:
        if self._faded_at is None:
            self._faded_at = now
        elif now - self._faded_at > self.config.halve_s / 16:
            self._ended *= 0.5 ** ((now - self._faded_at) / self.config.halve_s)
            self._faded_at = now

    def _trim(self) -> None:
        while len(self._blocks) > self.limit:
            _, block = self._blocks.popitem(last=False)
            for part, bit in self._bits.items() if block.holders else ():
                self._held[part] -= bool(block.holders & bit)

    def _bit(self, part: Part) -> int:
        bit = self._bits.get(part)
        if bit is None:
            taken = sum(self._bits.values())
            bit = self._bits[part] = ~taken & (taken + 1)
            self._held[part] = 0
            self._evicted[part] = deque(maxlen=_EVICTIONS)
        return bit

    def _clear(self, part: Part) -> None:
        self._held[part] = 0
        for block in self._blocks.values():
            block.holders &= ~self._bits[part]

    def _names(self, holders: int) -> frozenset[str]:
        return frozenset(name for (name, _), bit in self._bits.items() if bit & holders)

    def _keep_s(self, part: Part, now: float) -> float:
        """As old as those blocks were that it evicted; or, when it has got less to do since, as long as it needs to
        evict all that it holds. `longest_s` while it evicts nothing."""
        evicted = self._evicted[part]
        if len(evicted) < _FEW_EVICTIONS / self.config.sample:
            return self.config.longest_s
        lately = [at for at, _ in evicted if now - at <= _LATELY_S]
        over_s = _LATELY_S if len(lately) < len(evicted) else now - evicted[0][0]
        turnover_s = self._held[part] * over_s / max(1, len(lately))
        age_s = float(np.quantile([age for _, age in evicted], _LATE))
        return max(0.0, min(self.config.longest_s, max(age_s, turnover_s)))

    def _chances(self, blocks: Sequence[_Block], now: float, staying: float) -> list[float]:
        """For each block the chance that it is asked for between now and its eviction."""
        if not blocks:
            return []
        keep_s = {part: staying * self._keep_s(part, now) for part in self._bits}
        kept: dict[int, float] = {}
        for holders in {block.holders for block in blocks}:
            kept[holders] = max(keep_s[part] for part, bit in self._bits.items() if bit & holders)
        until = np.array([kept[block.holders] for block in blocks])
        kinds, ages, scales = _waits(blocks, now)
        survival = self._survival(now)
        still = _at(survival, kinds, ages / scales)
        later = _at(survival, kinds, np.maximum(ages, until) / scales)
        chances = 1.0 - np.divide(later, still, out=np.ones_like(still), where=still > 0)
        return [float(chance) for chance in np.clip(chances, 0.0, 1.0)]

    def _survival(self, now: float) -> Floats:
        """By kind and each bucket's lower edge: the share of blocks that nobody has asked for by then."""
        waiting = np.zeros((_KINDS, _BUCKETS))
        kinds, ages, scales = _waits(list(self._blocks.values()), now)
        np.add.at(waiting, (kinds, _buckets(ages / scales)), 1.0)
        at_risk = np.cumsum((self._ended + waiting)[:, ::-1], axis=1)[:, ::-1]
        known = (at_risk >= _FEW_WAITED) & (at_risk >= _FEW_SHARE * at_risk[:, :1])
        going_on = 1.0 - np.divide(self._ended, at_risk, out=np.zeros_like(at_risk), where=known)
        survival: Floats = np.concatenate([np.ones((_KINDS, 1)), np.cumprod(going_on, axis=1)], axis=1)
        return survival


def _waits(blocks: Sequence[_Block], now: float) -> tuple[Ints, Floats, Floats]:
    """Of each block its kind, how long it waits, and in what that is measured."""
    kinds = np.array([_kind(block.uses) for block in blocks], dtype=np.int64)
    ages = np.maximum(0.0, now - np.array([block.last for block in blocks], dtype=np.float64))
    return kinds, ages, np.array([block.scale for block in blocks], dtype=np.float64)


def _kind(uses: int) -> int:
    return min(_KINDS - 1, uses.bit_length() - 1)


def _place(lengths: Floats) -> Floats:
    """Where lengths lie among the buckets: the whole part is the bucket."""
    places = 1.0 + _FINE * np.log2(np.maximum(lengths, _LEAST / 2) / _LEAST)
    return np.clip(places, 0.0, _BUCKETS - 1e-6)


def _buckets(lengths: Floats) -> Ints:
    return _place(lengths).astype(np.int64)


def _bucket(length: float) -> int:
    return min(_BUCKETS - 1, 1 + int(_FINE * math.log2(length / _LEAST))) if length > _LEAST else 0


def _at(survival: Floats, kinds: Ints, lengths: Floats) -> Floats:
    """The share that waits longer than each length; between the edges in proportion to the logarithm."""
    places = _place(lengths)
    edges = places.astype(np.int64)
    before, after = survival[kinds, edges], survival[kinds, edges + 1]
    between: Floats = before + (after - before) * (places - edges)
    return between
