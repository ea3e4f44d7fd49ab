"""Lines on two logarithmic axes, as an SVG file: all that this project draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, floor, log10

Line = Sequence[tuple[float, float]]
"""Points (x, y), both above zero."""

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#7f7f7f")  # told apart by all (Okabe and Ito)
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
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12" fill="#222">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        _text(_LEFT, 22, title, size=15),
        _text(_LEFT + width / 2, _HEIGHT - 12, x_name, anchor="middle"),
        f'<g transform="rotate(-90 16 {_TOP + height / 2})">'
        + _text(16, _TOP + height / 2, y_name, anchor="middle")
        + "</g>",
    ]
    for power in range(low, high + 1):
        at = down(10.0**power)
        parts += [_rule(_LEFT, at, _LEFT + width, at), _text(_LEFT - 8, at + 4, _number(10.0**power), anchor="end")]
    for tick in ticks:
        at = across(tick)
        parts += [_rule(at, _TOP, at, _TOP + height), _text(at, _TOP + height + 18, _number(tick), anchor="middle")]
    for text, y in notes.items():
        parts += [_rule(_LEFT, down(y), _LEFT + width, down(y), dash="4 4", colour="#888")]
        parts += [_text(_LEFT + 6, down(y) - 5, text, colour="#666")]
    placed = _TOP - _LEAST_GAP
    coloured = dict(zip(lines, _COLOURS, strict=False))
    for name, line in sorted(lines.items(), key=lambda item: down(item[1][-1][1])):
        points = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in line)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{coloured[name]}" stroke-width="2"/>')
        parts += [f'<circle cx="{across(x):.1f}" cy="{down(y):.1f}" r="3" fill="{coloured[name]}"/>' for x, y in line]
        placed = max(placed + _LEAST_GAP, down(line[-1][1]))
        parts.append(_text(across(line[-1][0]) + 10, placed + 4, name, colour=coloured[name]))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start", colour: str = "#222") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" fill="{colour}">{escape(text)}</text>'


def _rule(x1: float, y1: float, x2: float, y2: float, *, dash: str = "", colour: str = "#e4e4e4") -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashed}/>'


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"
