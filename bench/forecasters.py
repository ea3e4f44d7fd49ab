"""Forecasts of a load's next minutes: the scaler's own beside models of statsforecast, by their loss.

    python bench/forecasters.py --data PATH [--origins 40] [--horizons 1 2 10] [--quantile 0.9]

`PATH` holds azure_llm_2023_code.csv and mooncake_synthetic_trace.jsonl. Each load is a series of tokens that arrive,
minute by minute. At many moments each forecaster is shown what came before and says the highest load within the next
minutes at the quantile; the loss is the mean pinball loss over the mean load, in percent. `ours` is all that the
policy uses (the one that did best, and what it missed added), `level` the quantile of the last hour's loads without
any smoothing. The models say the highest of their upper bounds, of an interval with the quantile as its upper end.
Without statsforecast, which is no dependency, ours stand alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from bench.scaling import SHAPES, SOURCES
from stoker.bench.replicas import Job
from stoker.scaler.core import forecasting
from stoker.scaler.core.past import Past, Series
from stoker.scaler.core.signals import Minute
from stoker.simulate import loads

Forecaster = Callable[[Series, int, float], float]
_LEAST = 24
"""Minutes that are shown at least."""
_OUTPUT = 4.0  # a generated token keeps a replica busy as long as so many of a prompt


@dataclass(frozen=True)
class Tokens:
    def __call__(self, minutes: Past) -> Series:
        return minutes.prefill_tokens_per_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the two traces")
    parser.add_argument("--origins", type=int, default=40, help="moments at which a series is forecast")
    parser.add_argument("--horizons", type=int, nargs="+", default=[1, 2, 10], help="minutes")
    parser.add_argument("--quantile", type=float, default=0.9)
    options = parser.parse_args()
    forecasters = {"unchanged": unchanged, "ours": ours, "level": level, **models()}
    print(f"{'load':>10} {'ahead':>5} " + " ".join(f"{name:>14}" for name in forecasters))
    spent = dict.fromkeys(forecasters, 0.0)
    for name, series in series_of(options.data).items():
        for horizon in options.horizons:
            losses = {}
            for each, forecaster in forecasters.items():
                began = time.process_time()
                losses[each] = loss(series, forecaster, horizon, options.quantile, options.origins)
                spent[each] += time.process_time() - began
            told = (f"{'–' if lost is None else f'{100 * lost:.1f}':>14}" for lost in losses.values())
            print(f"{name:>10} {horizon:>5} " + " ".join(told), flush=True)
    print(f"{'CPU, s':>16} " + " ".join(f"{seconds:>14.1f}" for seconds in spent.values()))


def series_of(data: Path) -> dict[str, Series]:
    """Loads by the minute, the last one left out as it may be cut."""
    made: dict[str, Callable[[], object]] = {
        "azure": lambda: SOURCES["azure"][1](data / SOURCES["azure"][0]),
        "mooncake": lambda: SOURCES["mooncake"][1](data / SOURCES["mooncake"][0]),
        "ramp": lambda: SHAPES["ramp"][0](1),
        "burst": lambda: loads.burst(1, low=2.0, high=8.0, seconds=7_200.0),
        "diurnal": lambda: loads.diurnal(1, low=0.5, high=6.0, day_s=1_200.0, seconds=7_200.0),
        "flapping": lambda: loads.flapping(1, low=2.0, high=6.0, seconds=7_200.0),
    }
    return {name: by_minute(jobs()) for name, jobs in made.items()}  # type: ignore[arg-type]


def by_minute(jobs: Sequence[Job]) -> Series:
    series: list[float] = []
    for job in jobs:
        while len(series) <= int(job.at // 60.0):
            series.append(0.0)
        series[-1] += (job.prompt_tokens + _OUTPUT * job.output_tokens) / 60.0
    return np.array(series[:-1])


def loss(series: Series, forecaster: Forecaster, horizon: int, quantile: float, origins: int) -> float | None:
    """Mean pinball loss over the mean load; None where the series is too short."""
    last = len(series) - horizon
    first = min(_LEAST, last // 2)
    if last - first < 3:
        return None
    lost = []
    for origin in sorted({int(place) for place in np.linspace(first, last - 1, origins)}):
        came = float(series[origin + 1 : origin + 1 + horizon].max())
        off = came - forecaster(series[: origin + 1], horizon, quantile)
        lost.append(max(quantile * off, (quantile - 1.0) * off))
    return float(np.mean(lost) / series.mean())


def unchanged(past: Series, horizon: int, quantile: float) -> float:
    """The load stays."""
    return float(past[-1])


def ours(past: Series, horizon: int, quantile: float) -> float:
    """What the policy uses; its day is as long as that of the made loads."""
    minutes = tuple(Minute(60.0 * place, 0.0, load, 0.0, 0.0) for place, load in enumerate(past))
    now = 60.0 * len(past)
    ahead_s = 60.0 * horizon
    return forecasting.highest(
        minutes, Tokens(), now, float(past[-1]), ahead_s, season_s=1_200.0, quantile=quantile
    ).expected


def level(past: Series, horizon: int, quantile: float) -> float:
    """The quantile of the highest loads within as many minutes, over the last hour: where bursts come out of nothing,
    how high they are is known, and not when."""
    highest = np.lib.stride_tricks.sliding_window_view(past, min(horizon, len(past))).max(axis=1)
    return float(np.quantile(highest[-60:], quantile))


def models() -> dict[str, Forecaster]:
    """Of statsforecast; none where it is not installed, which is said."""
    try:
        from statsforecast.models import MSTL, AutoARIMA, AutoETS, SeasonalNaive
    except ImportError as error:
        print(f"statsforecast is not here ({error}); `pip install statsforecast` into a venv of its own to compare")
        return {}
    season = 20

    def said(make: Callable[[], object], least: int, past: Series, horizon: int, quantile: float) -> float:
        if len(past) < least:
            return float(past[-1])
        level = 100.0 * (2.0 * quantile - 1.0)
        try:
            found = make().forecast(y=past, h=horizon, level=[level])  # type: ignore[attr-defined]
        except NotImplementedError:  # statsforecast itself raises it, for series that are too short
            return float(past[-1])
        upper = np.asarray(next(value for name, value in found.items() if name.startswith("hi")))
        highest = float(np.nanmax(upper)) if np.isfinite(upper).any() else float(past[-1])
        return max(0.0, highest)

    return {
        "AutoETS": partial(said, lambda: AutoETS(season_length=1), 5),
        "AutoARIMA": partial(said, lambda: AutoARIMA(season_length=1), 10),
        "MSTL": partial(said, lambda: MSTL(season_length=season), 2 * season + 1),
        "SeasonalNaive": partial(said, lambda: SeasonalNaive(season_length=season), season + 2),
    }


if __name__ == "__main__":
    main()
