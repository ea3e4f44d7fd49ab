"""What a load will be at most within the next minutes, from its own past.

Four forecasters: `last` (it stays as it is), `level` (it comes back to the smoothed level of the last hour), `trend`
(the slope of the last minutes goes on, damped and bounded) and `season` (what followed at this hour on earlier days,
at today's level). Each is tried on the last hour, and around this hour on earlier days; the one with the least
pinball loss at the wanted quantile is used, and that quantile of what it missed is added. So a load that has no
season, or has lost it, is not forecast by one.

Sources: simple exponential smoothing, seasonal-naive and damped trends as in R. J. Hyndman, G. Athanasopoulos,
"Forecasting: Principles and Practice", 3rd ed., §8.1, §5.2 and §8.2; the slope is Theil and Sen's, the median over
pairs, which one burst does not turn; pinball loss and the quantile of residuals as in §5.5 and §5.9.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from stoker.scaler.core.minutes import MINUTE_S
from stoker.scaler.core.past import Past, Series
from stoker.scaler.core.policy import SEASONS
from stoker.scaler.core.signals import Minute

TRIED = 60
"""Minutes on which forecasters are tried."""
_LEAST_TRIED = 5
_SLOPE = 8
"""Minutes that tell a trend."""
_LEVEL = 20
"""Minutes that tell today's level beside that of earlier days."""
_DAMPING = 0.9
"""Share of the slope that is left after each minute."""
_BOUND = 2.0
"""A trend neither doubles the load further than this, nor makes it negative."""
_RATIO = 3.0
"""Today's level is at most so many times that of an earlier day, or its inverse."""
_BEYOND = 1.25
"""What was missed lately lifts nothing further than this above all that was seen or forecast."""
_ALPHAS = (0.1, 0.3, 0.5, 0.8)
"""How much of each minute a smoothed level takes in."""
_AS_GOOD = 1.05
"""A season is used where its loss is at most so many times the least …"""
_CLEARLY = 1.25
"""… and a level where the others' are so many times its own: it alone adds what was missed at other loads."""
_DAYS = SEASONS - 1
"""Earlier days that are looked at …"""
_DAYS_TRIED = 2
"""… and those on which forecasters are tried as well …"""
_AROUND = 15
"""… so many minutes around this hour: a step that comes at nine shows in no hour before nine."""
_KNOWN = 0.9
"""Share of the minutes of a stretch that must be known."""
_PAIRS = np.array(list(combinations(range(_SLOPE), 2)))


@dataclass(frozen=True, slots=True)
class Forecast:
    """The highest load expected within the horizon, at the wanted quantile, in the unit of the load."""

    expected: float
    method: str = "last"
    missed: float = 0.0
    """What was added for what it missed lately, as a share of what it expects."""
    losses: Mapping[str, float] = field(default_factory=dict)
    """Of each forecaster that could be tried, on the last hour."""


def highest(
    minutes: Sequence[Minute],
    load: Callable[[Past], Series],
    now_wall: float,
    current: float,
    ahead_s: float,
    *,
    season_s: float,
    quantile: float,
) -> Forecast:
    """The highest load from now until `ahead_s` seconds ahead; `current` is what it is now.

    With less than some minutes of history, or when the last of them is long past, it is `current`. `load` must be
    hashable, and equal loads the same function, each minute's load by itself.
    """
    past = Past.of(minutes)
    if not past or not 0.0 <= now_wall - past[-1].at <= 5 * MINUTE_S:
        return Forecast(current)
    horizon = max(1, math.ceil((now_wall + ahead_s - past[-1].at - MINUTE_S) / MINUTE_S))
    found = past.once(_judged, load, horizon, season_s, quantile)
    if found is None:
        return Forecast(current)
    latest = current if found.method == "last" else found.latest
    if found.method == "trend":
        latest += current - found.level
    most = _BEYOND * max(latest, current, found.highest)
    return Forecast(min(most, max(0.0, latest) * (1.0 + found.missed)), found.method, found.missed, found.losses)


@dataclass(frozen=True, slots=True)
class _Judged:
    """The forecaster that did best, and what it says at the last minute."""

    method: str
    losses: Mapping[str, float]
    missed: float
    latest: float
    """The highest load that it expects."""
    level: float
    """The load of the last minute, and the highest of the minutes it was tried on."""
    highest: float


def _judged(
    past: Past, load: Callable[[Past], Series], horizon: int, season_s: float, quantile: float
) -> _Judged | None:
    """All that follows from the minutes alone; None where they are too few."""
    begin, end = float(past.at[0]), float(past.at[-1])
    first = max(begin, end - (TRIED + max(_SLOPE, _LEVEL) + horizon - 1) * MINUTE_S)
    recent = _stretch(past, load, first, round((end - first) / MINUTE_S) + 1)
    if recent is None or len(recent) < _SLOPE + horizon + _LEAST_TRIED:
        return None
    size = len(recent)
    days = {}
    for day in range(1, _DAYS + 1):
        earlier = first - day * season_s
        if earlier >= begin:
            days[day] = _stretch(past, load, earlier, size + _AROUND + horizon)

    tried = _Tried(quantile, horizon, least=max(1e-9, 0.1 * float(recent.mean())))
    origins = min(TRIED, size - horizon - _SLOPE)
    known = [stretch for stretch in days.values() if stretch is not None]
    forecasts = _forecasts(recent, known, horizon)
    tried.add(recent, forecasts, size - horizon - origins, size - horizon)
    for day in range(1, _DAYS_TRIED + 1):
        that = days.get(day)
        before = [stretch for other, stretch in days.items() if other > day and stretch is not None]
        if that is not None and before:
            tried.add(that, _forecasts(that[: size + _AROUND], before, horizon), size - _AROUND, size + _AROUND)

    method, losses = tried.best()
    latest, level, missed = float(forecasts[method][-1]), float(recent[-1]), tried.missed(method)
    if method == "level":
        missed /= max(latest, 1e-9)
    return _Judged(method, losses, missed, latest, level, float(recent.max()))


class _Tried:
    """What each forecaster would have said at many moments, and what came."""

    def __init__(self, quantile: float, horizon: int, least: float) -> None:
        self._quantile = quantile
        self._horizon = horizon
        self._least = least
        self._came: list[Series] = []
        self._said: dict[str, list[Series]] = {}

    def add(self, series: Series, forecasts: Mapping[str, Series], first: int, end: int) -> None:
        """The forecasts made at the places from `first` up to `end` of a series that goes on after them."""
        places = np.arange(first, end)
        self._came.append(np.max([series[places + step] for step in range(1, self._horizon + 1)], axis=0))
        for name, forecast in forecasts.items():
            self._said.setdefault(name, []).append(np.maximum(forecast[places], self._least))

    def best(self) -> tuple[str, dict[str, float]]:
        """The forecaster with the least loss, the season where it is as good: it knows more than the last hour."""
        losses = {name: self._loss(name) for name in self._said}
        weighed = {name: loss * (_CLEARLY if name == "level" else 1.0) for name, loss in losses.items()}
        least = min(weighed.values())
        if losses.get("season", math.inf) <= _AS_GOOD * least:
            return "season", losses
        return min(weighed, key=lambda name: weighed[name]), losses

    def missed(self, name: str) -> float:
        """By how much what came was above what it said, at the wanted quantile: as a share, of a level in its unit. A
        level misses what comes and goes, however low it is itself."""
        came, said = self._outcome(name)
        off = came - said if name == "level" else came / said - 1.0
        return float(np.quantile(off, self._quantile))

    def lifted(self, name: str, said: Series) -> Series:
        """What it says with what it missed added."""
        missed = self.missed(name)
        return said + missed if name == "level" else said * (1.0 + missed)

    def _loss(self, name: str) -> float:
        """Mean pinball loss of what it said, with what it missed added."""
        came, said = self._outcome(name)
        off = came - self.lifted(name, said)
        return float(np.mean(np.maximum(self._quantile * off, (self._quantile - 1.0) * off)))

    def _outcome(self, name: str) -> tuple[Series, Series]:
        said = np.concatenate(self._said[name])
        return np.concatenate(self._came)[: len(said)], said


def _forecasts(series: Series, days: Sequence[Series], horizon: int) -> dict[str, Series]:
    """By forecaster, at each place of the series, the highest load expected within the horizon after it."""
    forecasts = {"last": series, "level": _level(series), "trend": _trend(series, horizon)}
    if days:
        forecasts["season"] = np.median([_season(series, day, horizon) for day in days], axis=0)
    return forecasts


def _level(recent: Series) -> Series:
    """The smoothed load at each place, by the alpha whose level was nearest to the load that came next."""
    levels = np.empty((len(recent), len(_ALPHAS)))
    level = np.full(len(_ALPHAS), recent[0])
    alphas = np.array(_ALPHAS)
    for place, load in enumerate(recent):
        # Begins as the mean of what was seen: no first load weighs more than the next.
        level += np.maximum(alphas, 1.0 / (place + 1)) * (load - level)
        levels[place] = level
    errors = np.square(levels[:-1] - recent[1:, None]).sum(axis=0)
    return np.asarray(levels[:, int(np.argmin(errors))])


def _trend(recent: Series, horizon: int) -> Series:
    """The load where the slope of the minutes up to each origin leads; the load itself where it falls."""
    expected = recent.copy()
    windows = np.lib.stride_tricks.sliding_window_view(recent, _SLOPE)
    later, earlier = _PAIRS[:, 1], _PAIRS[:, 0]
    slopes = np.median((windows[:, later] - windows[:, earlier]) / (later - earlier), axis=1)
    minutes = _DAMPING * (1.0 - _DAMPING**horizon) / (1.0 - _DAMPING)
    level = recent[_SLOPE - 1 :]
    expected[_SLOPE - 1 :] = np.clip(level + np.maximum(0.0, slopes) * minutes, 0.0, _BOUND * level)
    return expected


def _season(recent: Series, day: Series, horizon: int) -> Series:
    """The highest load that followed each origin on an earlier day, times how much more there is today. The earlier
    day reaches `horizon` further than `recent`."""
    size = len(recent)
    followed = np.max([day[step : step + size] for step in range(1, horizon + 1)], axis=0)
    today, then = _running_mean(recent, _LEVEL), _running_mean(day[:size], _LEVEL)
    tiny = 1e-9 + 1e-3 * float(day.mean())
    return np.asarray(followed * np.clip((today + tiny) / (then + tiny), 1.0 / _RATIO, _RATIO))


def _running_mean(values: Series, width: int) -> Series:
    """The mean of the last `width` values up to each, of fewer at the beginning."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(0, ends - width)
    return np.asarray((sums[ends] - sums[begins]) / (ends - begins))


def _stretch(past: Past, load: Callable[[Past], Series], first: float, size: int) -> Series | None:
    """The loads of `size` minutes from the wall-clock second `first` on, gaps filled with what was before; None where
    too many are unknown."""
    values = np.full(size, np.nan)
    part = past.between(first - MINUTE_S / 2, first + size * MINUTE_S)
    places = np.rint((part.at - first) / MINUTE_S).astype(int)
    inside = places < size
    values[places[inside]] = load(part)[inside]
    known = ~np.isnan(values)
    if known.sum() < _KNOWN * size:
        return None
    filled = np.maximum.accumulate(np.where(known, np.arange(size), 0))
    filled = np.where(known[filled], filled, int(np.argmax(known)))
    return np.asarray(values[filled])
