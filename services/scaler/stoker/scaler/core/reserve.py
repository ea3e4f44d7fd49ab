"""How much more than now must be there for what nobody can foresee.

What comes within the time of a start finds what is there already. The past tells how often, and by how much, the load
was above what had stood one start before and what had come a season before (that is foreseen): the growth that no
more than the allowed share of the requests exceeded is the reserve. Where it never grew so fast, or so seldom that
the allowed share covers it, there is none. The longer a start takes, the more a load grows meanwhile, and the more
requests each jump takes along. In the midst of a jump none of its size is expected on top: the reserve ends at the
load that as few requests came in more of.

A short past tells little. `prior` times twenty minutes are taken to lie before it with as many jumps, whose sizes
are Pareto's: (1 + g) to the power of -3 of them exceed g, one in eight doubles the load. What was seen outweighs it:
without any jump the reserve is gone within `prior` times forty starts at 95 % attainment.

Sources: quantiles of what forecasts missed, as in R. J. Hyndman, G. Athanasopoulos, "Forecasting: Principles and
Practice", 3rd ed., §5.5, here of the forecast that nothing changes; made-up experience that counts like experience is
a conjugate prior's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from stoker.scaler.core.minutes import MINUTE_S
from stoker.scaler.core.past import Past, Series
from stoker.scaler.core.signals import Minute

MOST = 3.0
"""Growth that no reserve is kept beyond."""
_LOOKED_BACK = 1_440
"""Minutes: what happens less than daily is covered by the allowed share."""
_AROUND = 5
"""Minutes by which what comes each season may come earlier or later."""
_PRIOR_MINUTES = 20.0
_TAIL = 3.0
_SEEN_S = 20.0
"""It takes so long until a rise shows, on top of the start."""
_PRECISION = 1e-3


@dataclass(frozen=True, slots=True)
class Loads:
    """The loads of the past, highest first, and the share of the requests that came in the ones up to each."""

    falling: Series = field(default_factory=lambda: np.empty(0))
    shares: Series = field(default_factory=lambda: np.empty(0))

    @classmethod
    def of(cls, loads: Series, shares: Series) -> Loads:
        """From each minute's load and its requests, as a share of the mean."""
        order = np.argsort(loads)[::-1]
        return cls(loads[order], np.cumsum(shares[order]))

    def above(self, load: float) -> float:
        """Shares that came in minutes of more than this load."""
        place = int(np.searchsorted(-self.falling, -load))
        return float(self.shares[place - 1]) if place else 0.0


@dataclass(frozen=True, slots=True)
class Reserve:
    """What may come within the time of a start."""

    growth: float = 0.0
    """Share on top of what is needed now …"""
    loads: Loads = field(default_factory=Loads)
    """… but for no more than the load that as few requests exceeded …"""
    in_jumps: float = 0.0
    """… with the jumps that nobody saw, from the load of now …"""
    most: float = 0.0
    """… as may. Both in minutes' shares."""
    missed: float = 0.0
    """Share of the requests that come in what exceeds it nevertheless."""

    def of(self, load: float) -> float:
        """The load to be ready for."""
        if self.growth <= 0.0 or load <= 0.0:
            return load

        def exceeding(growth: float) -> float:
            return self.loads.above(load * (1.0 + growth)) + self.in_jumps * _unseen(growth)

        return load * (1.0 + _least(exceeding, self.most, self.growth))


def reserve(
    minutes: Sequence[Minute],
    load: Callable[[Past], Series],
    ahead_s: float,
    *,
    settle_s: float,
    season_s: float,
    allowed: float,
    prior: float,
) -> Reserve:
    """From the last day; a start takes `ahead_s`, and what was needed stands for `settle_s` more. `allowed` is the
    share of requests, 0 to 1, that may come in what exceeds it. `load` must be hashable,
    and each minute's by itself."""
    return Past.of(minutes).once(_found, load, ahead_s, settle_s, season_s, allowed, prior)


def _found(
    past: Past,
    load: Callable[[Past], Series],
    ahead_s: float,
    settle_s: float,
    season_s: float,
    allowed: float,
    prior: float,
) -> Reserve:
    minutes = past[-_LOOKED_BACK - round(season_s / MINUTE_S) - _AROUND :]
    every = load(minutes)
    foreseen = _a_season_before(minutes.at, every, season_s)[-_LOOKED_BACK:]
    loads = every[-_LOOKED_BACK:]
    mean = float(loads.mean()) if len(loads) else 0.0
    shares = loads / mean if mean > 0.0 else np.zeros(len(loads))
    grown = _grown(loads, math.ceil((ahead_s + _SEEN_S) / MINUTE_S), 1 + int(settle_s // MINUTE_S), foreseen)
    in_jumps, total = prior * ahead_s / MINUTE_S, len(loads) + prior * _PRIOR_MINUTES
    if not total:
        return Reserve()

    def exceeding(growth: float) -> float:
        return float(shares[grown > growth].sum()) + in_jumps * _unseen(growth)

    most = allowed * total
    growth = _least(exceeding, most, MOST)
    missed = min(allowed, exceeding(growth) / total)
    return Reserve(growth, Loads.of(loads, shares), in_jumps, most, missed)


def _unseen(growth: float) -> float:
    """Share of the jumps nobody saw that exceed a growth: Pareto's."""
    return math.pow(1.0 + growth, -_TAIL)


def _least(exceeding: Callable[[float], float], most: float, highest: float) -> float:
    """The least growth, up to the highest, that no more than `most` exceeds."""
    if exceeding(0.0) <= most:
        return 0.0
    low, high = 0.0, highest
    while high - low > _PRECISION:
        middle = (low + high) / 2.0
        low, high = (low, middle) if exceeding(middle) <= most else (middle, high)
    return high


def _a_season_before(at: Series, loads: Series, season_s: float) -> Series:
    """The highest load around this minute one season before each; 0 where that is not known."""
    if not len(loads):
        return loads
    around = np.lib.stride_tricks.sliding_window_view(np.pad(loads, _AROUND), 2 * _AROUND + 1).max(axis=1)
    places = np.searchsorted(at, at - season_s - MINUTE_S / 2)
    known = np.abs(at[places] - (at - season_s)) <= MINUTE_S
    return np.where(known, around[places], 0.0)


def _grown(loads: Series, horizon: int, kept: int, foreseen: Series) -> Series:
    """By which share each load was above what was foreseen and the least that stood in the `horizon` minutes before
    it: at each of these the highest of `kept` minutes. The first load has not grown."""
    if not len(loads):
        return loads
    windows = np.lib.stride_tricks.sliding_window_view
    stood = windows(np.concatenate((np.full(kept - 1, -np.inf), loads)), kept).max(axis=1)
    least = windows(np.concatenate((np.full(horizon, np.inf), stood[:-1])), horizon).min(axis=1)
    least[0] = loads[0]
    least = np.maximum(least, foreseen)
    return np.asarray(loads / np.maximum(least, 1e-9 + 0.05 * float(loads.mean())) - 1.0)
