"""Lines on two logarithmic axes, as an SVG file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, floor, log10

from stoker.common import svg

Line = Sequence[tuple[float, float]]
"""Points (x, y), both above zero."""

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 400, 76, 216, 40, 52
_LEAST_GAP = 15.0  # between two labels at the lines' ends


def drawn(title: str, x_name: str, y_name: str, lines: Mapping[str, Line], notes: Mapping[str, float]) -> str:
    """Return the drawing; `notes` are horizontal marks by their text. Each line is labelled where it ends."""
    xs = [x for line in lines.values() for x, _ in line]
    ys = [y for line in lines.values() for _, y in line] + list(notes.values())
    ticks = sorted(set(xs))
    low, high = floor(log10(min(ys))), ceil(log10(max(ys)))
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    span = (log10(ticks[-1]) - log10(ticks[0])) or 1.0

    def across(x: float) -> float:
        return _LEFT + width * (log10(x) - log10(ticks[0])) / span

    def down(y: float) -> float:
        return _TOP + height * (high - log10(y)) / (high - low)

    parts = [
        svg.text(_LEFT, 22, title, size=15),
        svg.text(_LEFT + width / 2, _HEIGHT - 12, x_name, anchor="middle"),
        f'<g transform="rotate(-90 16 {_TOP + height / 2})">'
        + svg.text(16, _TOP + height / 2, y_name, anchor="middle")
        + "</g>",
    ]
    for power in range(low, high + 1):
        at = down(10.0**power)
        parts += [
            svg.rule(_LEFT, at, _LEFT + width, at),
            svg.text(_LEFT - 8, at + 4, svg.number(10.0**power), anchor="end"),
        ]
    for tick in ticks:
        at = across(tick)
        parts += [
            svg.rule(at, _TOP, at, _TOP + height),
            svg.text(at, _TOP + height + 18, svg.number(tick), anchor="middle"),
        ]
    for text, y in notes.items():
        parts += [svg.rule(_LEFT, down(y), _LEFT + width, down(y), dash="4 4", colour="#888")]
        parts += [svg.text(_LEFT + 6, down(y) - 5, text, colour="#666")]
    placed = _TOP - _LEAST_GAP
    coloured = dict(zip(lines, svg.COLOURS, strict=False))
    for name, line in sorted(lines.items(), key=lambda item: down(item[1][-1][1])):
        parts.append(svg.line([(across(x), down(y)) for x, y in line], coloured[name]))
        parts += [f'<circle cx="{across(x):.1f}" cy="{down(y):.1f}" r="3" fill="{coloured[name]}"/>' for x, y in line]
        placed = max(placed + _LEAST_GAP, down(line[-1][1]))
        parts.append(svg.text(across(line[-1][0]) + 10, placed + 4, name, colour=coloured[name]))
    return svg.document(_WIDTH, _HEIGHT, parts)
