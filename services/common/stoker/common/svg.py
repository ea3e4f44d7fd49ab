"""The parts that drawings are made of, as SVG elements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#7f7f7f")
"""Told apart by all (Okabe and Ito)."""


def document(width: float, height: float, parts: Iterable[str], *, size: int = 12) -> str:
    """A whole drawing on white, text of `size` where nothing else is said."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-family="sans-serif" '
        f'font-size="{size}" fill="#222">'
    )
    return "\n".join([head, f'<rect width="{width:g}" height="{height:g}" fill="#fff"/>', *parts, "</svg>", ""])


def text(x: float, y: float, said: str, *, size: int = 12, anchor: str = "start", colour: str = "#222") -> str:
    """A line of text; `y` is that of its foot."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" fill="{colour}">{escape(said)}</text>'


def rule(x1: float, y1: float, x2: float, y2: float, *, dash: str = "", colour: str = "#e4e4e4") -> str:
    """A thin straight line."""
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashed}/>'


def line(points: Iterable[tuple[float, float]], colour: str, *, width: float = 2.0) -> str:
    """A line through points."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"/>'


def area(points: Iterable[tuple[float, float]], colour: str, *, opacity: float = 1.0) -> str:
    """What lies within points."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polygon points="{path}" fill="{colour}" fill-opacity="{opacity:g}"/>'


def box(x: float, y: float, width: float, height: float, colour: str, *, title: str = "") -> str:
    """A filled box; `title` shows where a pointer rests on it."""
    place = f'x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}"'
    if not title:
        return f'<rect {place} fill="{colour}"/>'
    return f'<rect {place} fill="{colour}"><title>{escape(title)}</title></rect>'


def number(value: float) -> str:
    """A tick's label."""
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def round_ticks(most: float, wanted: int) -> Sequence[float]:
    """About so many round numbers from 0 to at least `most`."""
    least = max(most, 1e-9) / wanted
    power = 1e-9
    while power * 10 <= least:
        power *= 10
    step = next(power * times for times in (1, 2, 2.5, 5, 10) if power * times >= least * (1 - 1e-9))
    ticks = [0.0]
    while ticks[-1] < most:
        ticks.append(ticks[-1] + step)
    return ticks
