"""The front of hit rate against wait, as an SVG file: a panel for each setting, a line for each epsilon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from stoker.common import svg

_text = partial(svg.text, size=11)

_PANEL, _HEIGHT, _LEFT, _TOP, _BOTTOM, _RIGHT = 380, 360, 64, 44, 56, 24


@dataclass(frozen=True, slots=True)
class Point:
    """What one configuration reached in one setting."""

    setting: str
    epsilon: float
    floor: int
    hit_rate: float
    wait_s: float
    chosen: bool = False
    """Whether it is the default."""


def drawn(points: Sequence[Point]) -> str:
    """Return the drawing; points come by setting, then by epsilon, then by floor."""
    panels = [list(group) for _, group in groupby(points, lambda point: point.setting)]
    width = _PANEL * len(panels)
    parts: list[str] = []
    for number, panel in enumerate(panels):
        parts += [f'<g transform="translate({number * _PANEL} 0)">', *_panel(panel), "</g>"]
    return svg.document(width, _HEIGHT, parts, size=11)


def _panel(points: Sequence[Point]) -> list[str]:
    waits, rates = _ticks([point.wait_s for point in points]), _ticks([point.hit_rate for point in points])
    right, bottom = _PANEL - _RIGHT, _HEIGHT - _BOTTOM

    def across(wait_s: float) -> float:
        return _LEFT + (right - _LEFT) * (wait_s - waits[0]) / (waits[-1] - waits[0])

    def down(rate: float) -> float:
        return bottom - (bottom - _TOP) * (rate - rates[0]) / (rates[-1] - rates[0])

    parts = [
        _text(_LEFT, 18, points[0].setting, size=14),
        _text((_LEFT + right) / 2, _HEIGHT - 14, "p99 wait, seconds; labels: floor in 1,024 tokens", anchor="middle"),
        _text(_LEFT, 36, "hit rate"),
    ]
    for wait in waits:
        parts += [svg.rule(across(wait), _TOP, across(wait), bottom)]
        parts += [_text(across(wait), bottom + 16, f"{wait:.3g}", anchor="middle")]
    for rate in rates:
        parts += [svg.rule(_LEFT, down(rate), right, down(rate))]
        parts += [_text(_LEFT - 6, down(rate) + 4, f"{rate:.3g}", anchor="end")]
    lines = groupby(points, lambda point: point.epsilon)
    for (epsilon, line), colour, place in zip(lines, svg.COLOURS, range(4), strict=False):
        at = [(across(point.wait_s), down(point.hit_rate), point) for point in line]
        parts.append(svg.line([(x, y) for x, y, _ in at], colour, width=1.5))
        for x, y, point in at:
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{6 if point.chosen else 3}" fill="{colour}"/>')
            parts.append(_text(x + 6, y - 5, f"{point.floor // 1_024}", size=9, colour=colour))
        parts.append(_text(right - 70, bottom - 8 - 14 * place, f"epsilon {epsilon:g}", colour=colour))
    return parts


def _ticks(values: Sequence[float]) -> list[float]:
    low, high = min(values), max(values)
    margin = 0.08 * (high - low) or 0.01
    return [low - margin + number * (high - low + 2 * margin) / 4 for number in range(5)]
