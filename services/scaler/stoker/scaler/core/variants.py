"""How the demand of a group is shared among its deployments: one model on different hardware.

One replica of a deployment that alone would need n of them carries 1/n of the demand. What is missing is added
where a unit of demand is cheapest, what is too much is taken where it is dearest, never both in one round. Counts
are those desired: what is starting counts as if it were there, so that no second deployment starts for a spike
that a first one will carry.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stoker.scaler.core.limits import Room
from stoker.scaler.core.policy import Caps, Price
from stoker.scaler.core.values import Because, Reason

_EPS = 1e-9
_SPARE = 0.1
"""Replicas asked for in place of lost ones, as a share of the need (one at least): a model that starts nowhere must
not take the whole fleet."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One deployment of a group. `start` is its count, within bounds; it may move within `room`.

    `need` is what it alone would need now, `settled` the most of that lately; both None where unknown. `ready` of
    its replicas serve, `lost` of them failed or should long have been ready.
    """

    name: str
    start: int
    room: Room
    need: float | None = None
    settled: float | None = None
    margin: float = 0.0
    price: Price = field(default_factory=Price)
    ready: int = 0
    lost: int = 0
    least: int = 0
    own: bool = False
    """It serves a demand of its own (a fixed count) and shares only the caps."""
    paused: bool = False
    """It stands as it is, whatever the caps say."""


@dataclass(frozen=True, slots=True)
class _Use:
    """A cap of the group, how much of it is taken, and what one replica of each deployment takes."""

    reason: Reason
    cap: float
    taken: float
    each: Mapping[str, float]


@dataclass(slots=True)
class Share:
    """What one deployment gets, and each limit that had a part in it."""

    count: int
    because: list[Because] = field(default_factory=list)


def share(variants: Sequence[Variant], caps: Caps, *, keep: int, woken: float) -> dict[str, Share]:
    """The counts of a group. At least `keep` replicas stay of those there are; `woken`, where there is none and
    this many requests wait, starts one. Caps hold before all else, lower bounds included."""
    sharing = _Sharing(variants, caps)
    sharing.cut()
    sharing.wake(woken)
    sharing.trim()
    if not sharing.grow():
        sharing.shrink(keep)
    return sharing.shares


class _Sharing:
    """A group's counts while they are found, one replica at a time."""

    def __init__(self, variants: Sequence[Variant], caps: Caps) -> None:
        self._variants = variants
        self._caps = caps
        self.shares = {variant.name: Share(variant.start) for variant in variants}
        self._sharing = [variant for variant in variants if not variant.own]
        self._moving = [v for v in self._sharing if v.need is not None and not v.paused]
        self._now = _assumed({v.name: v.need for v in self._sharing})
        self._lately = _assumed({v.name: v.settled for v in self._sharing})

    def cut(self) -> None:
        """Takes away what the caps do not allow: what is above lower bounds, dearest first; if that is not enough,
        then lower bounds or not, what takes most of the cap first, fixed counts last."""
        able = [variant for variant in self._variants if not variant.paused]
        for bounded in (True, False):
            while over := self._over():
                left = [v for v in able if over.each[v.name] and self._count(v) > (v.least if bounded else 0)]
                if not left:
                    break
                going = max(
                    left, key=lambda v: (not v.own, self._dearness(v) if bounded else over.each[v.name], v.name)
                )
                self._take(going, over)

    def _take(self, variant: Variant, over: _Use) -> None:
        mine = self.shares[variant.name]
        mine.because = [because for because in mine.because if because.reason is not over.reason]
        mine.because.append(Because(over.reason, {"cap": over.cap, "taken": over.taken}))
        mine.count -= 1

    def wake(self, waiting: float) -> None:
        if waiting <= 0 or any(self._count(v) for v in self._sharing):
            return
        able = [v for v in self._sharing if not v.paused and v.room.high and self._beyond(v) is None]
        if able:
            first = min(able, key=lambda v: (v.need is None, self._dearness(v), v.price.per_hour, v.name))
            self.shares[first.name].count += 1
            self.shares[first.name].because.append(Because(Reason.WOKEN, {"waiting": waiting}))

    def grow(self) -> bool:
        """Adds until all of the demand is carried or no limit allows more; False where it is carried already."""
        if self._missing() <= _EPS:
            self._tell_coming()
            return False
        grown: dict[str, float] = {}
        while (missing := self._missing()) > _EPS and (able := [v for v in self._moving if not self._stop(v)]):
            chosen = self._cheapest(able, missing)
            self.shares[chosen.name].count += 1
            grown[chosen.name] = grown.get(chosen.name, 0) + 1
        for variant in self._moving:
            if missing > _EPS and (stop := self._stop(variant)):
                self.shares[variant.name].because.append(stop)
            elif grown and variant.name not in grown:
                self.shares[variant.name].because.append(Because(Reason.VARIANT, dict(grown)))
            elif variant.lost:
                self.shares[variant.name].because.append(Because(Reason.LOST, {"lost": variant.lost}))
        return True

    def _cheapest(self, able: Sequence[Variant], missing: float) -> Variant:
        """Whom to give one more: the cheapest a unit of demand; for the last piece the cheapest that carries it."""
        best = min(able, key=lambda v: (_failing(v), self._dearness(v), v.name))
        if missing * self._now[best.name] > 1.0 + _EPS or _failing(best):
            return best
        enough = [v for v in able if missing * self._now[v.name] <= 1.0 + _EPS and not _failing(v)]
        return min(enough, key=lambda v: (v.price.per_hour, self._dearness(v), v.name))

    def _stop(self, variant: Variant) -> Because | None:
        """Why it gets not one more."""
        count = self._count(variant)
        if count >= variant.room.high:
            return variant.room.above
        if count >= math.ceil(self._now[variant.name] - _EPS) + self._spare(variant, self._now):
            return Because(Reason.LOST, {"lost": variant.lost})
        return self._beyond(variant)

    def trim(self) -> None:
        """Takes lost replicas away that nobody would ask for anew: they carry nothing, so that `shrink` is not for
        them."""
        for variant in self._moving:
            mine, need = self.shares[variant.name], self._lately[variant.name]
            most = math.ceil(need / (1.0 - variant.margin) - _EPS) + self._spare(variant, self._lately)
            kept = max(variant.room.low, min(mine.count, most))
            if variant.lost and kept < mine.count:
                mine.because.append(Because(Reason.LOST, {"lost": variant.lost}))
                mine.count = kept

    def shrink(self, keep: int) -> None:
        """Takes away what is not needed, dearest first."""
        order = sorted(self._moving, key=lambda v: (-self._dearness(v), v.name))
        while going := self._next_to_go(order, keep):
            self.shares[going.name].count -= 1
        if not self._total() and (ended := [v for v in order if v.start]):
            self.shares[ended[0].name].because.append(Because(Reason.IDLE))
        for variant in order:
            if held := self._held(variant, keep):
                self.shares[variant.name].because.append(held)

    def _next_to_go(self, order: Sequence[Variant], keep: int) -> Variant | None:
        """The dearest that may go. While that is held by nothing but what was needed a while ago it is waited for:
        else the cheaper ones would go piece by piece before it."""
        for variant in order:
            if self._count(variant) <= variant.room.low or self._total() <= keep:
                continue
            if self._without_one(variant, self._lately, variant.margin):
                return variant
            if self._without_one(variant, self._now, variant.margin):
                return None
        return None

    def _held(self, variant: Variant, keep: int) -> Because | None:
        """Why it keeps a replica that the demand of this moment does not need; None where it needs all."""
        count = self._count(variant)
        if not count or not self._without_one(variant, self._now, 0.0):
            return None
        if count <= variant.room.low:
            return variant.room.below
        if self._total() <= keep:
            return Because(Reason.NOT_IDLE)
        if not self._without_one(variant, self._now, variant.margin):
            return Because(Reason.MARGIN, {"margin": variant.margin})
        return Because(Reason.SETTLING, {"settled": variant.settled})

    def _without_one(self, variant: Variant, needs: Mapping[str, float], margin: float) -> bool:
        """Whether the demand, and `margin` of what carries it, would be carried with one replica of it less."""
        need = needs[variant.name]
        loss = 1.0 / need if need > 0.0 and not self._burdened(variant, needs) else 0.0
        return (self._carried(needs) - loss) * (1.0 - margin) >= 1.0 - _EPS

    def _tell_coming(self) -> None:
        ready = {v.name: min(v.ready, self._count(v)) for v in self._sharing}
        if self._carried(self._now, ready) < 1.0 - _EPS:
            for variant in self._moving:
                # Not what is only ordered in this round, for a request that waits.
                if (starting := min(variant.start, self._count(variant)) - ready[variant.name]) > 0:
                    self.shares[variant.name].because.append(Because(Reason.COMING, {"starting": starting}))

    def _missing(self) -> float:
        """The share of the demand that nothing carries, nor will when all is there."""
        return 1.0 - self._carried(self._now)

    def _carried(self, needs: Mapping[str, float], counts: Mapping[str, int] | None = None) -> float:
        carried = 0.0
        for variant in self._sharing:
            need = needs.get(variant.name)
            if need is None:
                continue
            if need <= 0.0:
                return math.inf
            carried += (counts[variant.name] if counts else self._carrying(variant, needs)) / need
        return carried if needs else math.inf

    def _carrying(self, variant: Variant, needs: Mapping[str, float]) -> int:
        """Its replicas that serve or will."""
        count = self._count(variant)
        gone = max(0, variant.start - count)
        return max(0, count - max(self._spare(variant, needs), variant.lost - gone))

    def _burdened(self, variant: Variant, needs: Mapping[str, float]) -> bool:
        """Whether more of it is lost than is asked for in their stead: those carry nothing, and go first."""
        gone = max(0, variant.start - self._count(variant))
        return variant.lost - gone > self._spare(variant, needs)

    def _spare(self, variant: Variant, needs: Mapping[str, float]) -> int:
        """How many of the lost others are asked for in their stead, while those may still come."""
        return min(variant.lost, max(1, math.ceil(_SPARE * needs.get(variant.name, 0.0))))

    def _dearness(self, variant: Variant) -> float:
        """Price of the whole demand."""
        return variant.price.per_hour * self._now.get(variant.name, 1.0)

    def _total(self) -> int:
        return sum(self._count(variant) for variant in self._sharing)

    def _count(self, variant: Variant) -> int:
        return self.shares[variant.name].count

    def _beyond(self, variant: Variant) -> Because | None:
        """Which cap does not allow one more of it."""
        for use in self._uses():
            if use.each[variant.name] and use.taken + use.each[variant.name] > use.cap * (1.0 + _EPS):
                return Because(use.reason, {"cap": use.cap, "taken": use.taken, "each": use.each[variant.name]})
        return None

    def _over(self) -> _Use | None:
        """A cap that the counts go beyond."""
        return next((use for use in self._uses() if use.taken > use.cap * (1.0 + _EPS)), None)

    def _uses(self) -> Iterator[_Use]:
        """Each cap and what is taken of it."""
        caps, prices = self._caps, {v.name: v.price for v in self._variants}
        if caps.per_hour is not None:
            yield self._use(Reason.CAP_COST, caps.per_hour, {name: price.per_hour for name, price in prices.items()})
        if caps.power_w is not None:
            yield self._use(Reason.CAP_POWER, caps.power_w, {name: price.power_w for name, price in prices.items()})

    def _use(self, reason: Reason, cap: float, each: Mapping[str, float]) -> _Use:
        return _Use(reason, cap, sum(self.shares[name].count * one for name, one in each.items()), each)


def _failing(variant: Variant) -> bool:
    """Most of it is lost: what is asked for there may never come."""
    return 2 * variant.lost > variant.start


def _assumed(needs: Mapping[str, float | None]) -> dict[str, float]:
    """The needs, an unknown one taken for the highest known: what was never measured carries as the weakest does."""
    known = [need for need in needs.values() if need is not None]
    return {name: max(known) if need is None else need for name, need in needs.items()} if known else {}
