"""A simulation drawn: the demand, and for each policy its replicas and how the objective was met, over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stoker.common import svg
from stoker.simulate.figures import Figures, Run
from stoker.simulate.fleet import Count
from stoker.simulate.ledger import BIN_S, Bin

_WIDTH, _LEFT, _RIGHT = 980, 76, 28
_TOP, _DEMAND, _PANEL, _STRIP, _HEAD, _FOOT = 80, 110, 120, 12, 40, 48
_READY, _STARTING, _DRAINING, _DEMANDED = svg.COLOURS[0], "#f0b96b", "#b9c2cc", "#5c6b7a"
_GOOD = (0, 158, 115)
_BAD = (213, 94, 0)
_COLUMNS = 240  # at most so many columns of demand and attainment: long traces are drawn coarser

Across = Callable[[float], float]


def drawn(title: str, objective: str, runs: Sequence[Run]) -> str:
    """One SVG document; all runs are of one trace."""
    seconds = max(run.seconds for run in runs)
    width = _WIDTH - _LEFT - _RIGHT

    def across(at: float) -> float:
        return _LEFT + width * min(at, seconds) / max(seconds, 1e-9)

    most = max(count.total for run in runs for count in run.counts if count.at <= seconds)
    span = BIN_S * max(1, -(-len(runs[0].bins) // _COLUMNS))
    parts = [svg.text(_LEFT, 24, title, size=16), *_legend(objective)]
    y = _TOP
    parts += _demand(_gathered(runs[0].bins, span), span, seconds, across, y)
    y += _DEMAND
    for run in runs:
        y += _HEAD
        parts += _panel(run, _gathered(run.bins, span), span, most, across, y)
        y += _PANEL + _STRIP
    parts += _times(seconds, across, y)
    return svg.document(_WIDTH, y + _FOOT, parts)


def _legend(objective: str) -> list[str]:
    parts, x = [], _LEFT
    named = (("serving", _READY), ("starting", _STARTING), ("draining", _DRAINING))
    for name, colour in named:
        parts += [svg.box(x, 36, 12, 12, colour), svg.text(x + 17, 46, name, colour="#555")]
        x += 84
    for step in range(11):
        parts.append(svg.box(x + 6 * step, 36, 6, 12, _shade(step / 10)))
    parts.append(svg.text(x + 72, 46, f"requests within {objective}: none to all", colour="#555"))
    return parts


def _demand(bins: Sequence[Bin], span: float, seconds: float, across: Across, top: float) -> list[str]:
    rates = [bin_.prompt_tokens / span / 1_000 for bin_ in bins]
    ticks = svg.round_ticks(max(rates, default=1.0), 3)

    def down(rate: float) -> float:
        return top + _DEMAND * (1 - rate / ticks[-1])

    parts = _scale(ticks, down)
    parts.append(svg.text(_LEFT, top - 6, "demand, thousand prompt tokens per second", colour="#555"))
    edge = [(float(_LEFT), down(0.0))]
    for number, rate in enumerate(rates):
        edge += [(across(number * span), down(rate)), (across((number + 1) * span), down(rate))]
    edge.append((across(seconds), down(0.0)))
    return [*parts, svg.area(edge, _DEMANDED, opacity=0.55)]


def _panel(run: Run, bins: Sequence[Bin], span: float, most: int, across: Across, top: float) -> list[str]:
    ticks = svg.round_ticks(most, 3)

    def down(replicas: float) -> float:
        return top + _PANEL * (1 - replicas / ticks[-1])

    name, figures = _heading(run.figures)
    parts = [
        svg.text(_LEFT, top - 8, name, size=13),
        svg.text(_WIDTH - _RIGHT, top - 8, figures, anchor="end", colour="#555"),
        *_scale(ticks, down),
    ]
    layers: tuple[tuple[Callable[[Count], int], str], ...] = (
        (lambda count: count.total, _DRAINING),
        (lambda count: count.ready + count.starting, _STARTING),
        (lambda count: count.ready, _READY),
    )
    for height, colour in layers:
        parts.append(svg.area(_steps(run, height, across, down), colour))
    for number, bin_ in enumerate(bins):
        if bin_.arrived and number * span < run.seconds:
            share = bin_.within / bin_.arrived
            left, right = across(number * span), across((number + 1) * span)
            said = f"{_clock(number * span)}: {share:.1%} of {bin_.arrived:,} requests"
            parts.append(svg.box(left, top + _PANEL + 3, right - left + 0.3, _STRIP - 3, _shade(share), title=said))
    return parts


def _heading(figures: Figures) -> tuple[str, str]:
    within = "–" if figures.attainment is None else f"{figures.attainment:.2%}"
    return figures.policy, (
        f"within the objective {within} · {figures.replica_hours:,.2f} replica-hours · moved back {figures.thrashing}"
    )


def _steps(
    run: Run, height: Callable[[Count], int], across: Across, down: Callable[[float], float]
) -> list[tuple[float, float]]:
    edge, level = [(across(0.0), down(0.0))], down(0.0)
    for count in run.counts:
        if count.at > run.seconds:
            break
        x = across(count.at)
        edge += [(x, level), (x, level := down(height(count)))]
    return [*edge, (across(run.seconds), level), (across(run.seconds), down(0.0))]


def _scale(ticks: Sequence[float], down: Callable[[float], float]) -> list[str]:
    parts = []
    for tick in ticks:
        parts.append(svg.rule(_LEFT, down(tick), _WIDTH - _RIGHT, down(tick)))
        parts.append(svg.text(_LEFT - 8, down(tick) + 4, f"{tick:,g}", anchor="end", colour="#555"))
    return parts


def _times(seconds: float, across: Across, top: float) -> list[str]:
    steps = (10, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 10_800, 21_600, 43_200, 86_400, 604_800)
    step = next((each for each in steps if seconds / each <= 12), steps[-1])
    parts, at = [], 0
    while at <= seconds:
        x = across(at)
        parts += [svg.rule(x, top + 2, x, top + 7, colour="#888")]
        parts += [svg.text(x, top + 20, _clock(at), anchor="middle", colour="#555")]
        at += step
    parts.append(
        svg.text((_LEFT + _WIDTH - _RIGHT) / 2, top + 38, "time in the trace", anchor="middle", colour="#555")
    )
    return parts


def _clock(at: float) -> str:
    minutes, seconds = divmod(int(at), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def _shade(share: float) -> str:
    """From bad to good; what lies below 0.5 is as bad as it gets, so that the last few per cent show."""
    part = max(0.0, 2.0 * share - 1.0) ** 2
    return "#" + "".join(f"{round(bad + (good - bad) * part):02x}" for good, bad in zip(_GOOD, _BAD, strict=True))


def _gathered(bins: Sequence[Bin], span: float) -> list[Bin]:
    """The same in wider bins."""
    each = round(span / BIN_S)
    groups = (bins[start : start + each] for start in range(0, len(bins), each))
    return [
        Bin(
            sum(bin_.arrived for bin_ in group),
            sum(bin_.prompt_tokens for bin_ in group),
            sum(bin_.within for bin_ in group),
        )
        for group in groups
    ]
