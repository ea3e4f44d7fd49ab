"""Parts of a drawing: boxes that know their size, cells of GPUs, text that fits, and things in rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from textwrap import wrap

from stoker.common import svg
from stoker.planner.core.facility.values import Gpu, Node
from stoker.planner.drawing import colours
from stoker.planner.drawing.scene import Scene

_PER_CHARACTER = 0.57
"""Width of a character in ems, on average."""


@dataclass(frozen=True)
class Block:
    """A drawing of known size with its corner at 0, 0."""

    width: float
    height: float
    parts: Sequence[str]

    def at(self, x: float, y: float) -> str:
        """The same with its corner elsewhere."""
        return f'<g transform="translate({x:.1f} {y:.1f})">' + "\n".join(self.parts) + "</g>"


def stacked(blocks: Iterable[Block], gap: float) -> Block:
    """Blocks below each other."""
    parts: list[str] = []
    width = height = 0.0
    for block in blocks:
        height += gap if parts else 0.0
        parts.append(block.at(0, height))
        width, height = max(width, block.width), height + block.height
    return Block(width, height, parts)


def flowed(blocks: Sequence[Block], width: float, gap: float) -> Block:
    """Blocks side by side, on as many lines as it takes."""
    parts: list[str] = []
    x = y = tall = wide = 0.0
    for block in blocks:
        if x and x + block.width > width:
            x, y, tall = 0.0, y + tall + min(gap, 8.0), 0.0
        parts.append(block.at(x, y))
        tall, wide = max(tall, block.height), max(wide, x + block.width)
        x += block.width + gap
    return Block(wide, y + tall, parts)


def fitted(said: str, width: float, size: float) -> str:
    """As much of a text as has room, its end kept: names differ there."""
    room = max(1, int(width / (size * _PER_CHARACTER)))
    if len(said) <= room:
        return said
    keep = max(1, (room - 1) // 2)
    return f"{said[: max(0, room - 1 - keep)]}…{said[-keep:]}"


def wrapped(said: str, width: float, size: float) -> list[str]:
    """A text in lines that fit; a word longer than a line is shortened."""
    room = max(1, int(width / (size * _PER_CHARACTER)))
    return [fitted(line, width, size) for line in wrap(said, room, break_long_words=False, break_on_hyphens=False)]


def unhit(text: str) -> str:
    """A text through which a pointer finds the box below it."""
    return text.replace("<text ", '<text pointer-events="none" ')


def width_of(said: str, size: float) -> float:
    """About how wide a text is."""
    return len(said) * size * _PER_CHARACTER


def box(
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    *,
    stroke: str = "",
    dashed: bool = False,
    title: str = "",
    more: str = "",
    round_by: float = 0.0,
) -> str:
    """A box with an edge; `more` are attributes as they are written."""
    place = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{fill}"'
    edge = f' stroke="{stroke}" stroke-width="0.8"' if stroke else ""
    edge += ' stroke-dasharray="3 2"' if dashed else ""
    edge += f' rx="{round_by:g}"' if round_by else ""
    head = f"<rect {place}{edge}{' ' + more if more else ''}"
    return f"{head}><title>{escape(title)}</title></rect>" if title else f"{head}/>"


def cell(scene: Scene, node: Node, gpu: Gpu, at: tuple[float, float], size: tuple[float, float]) -> str:
    """One GPU in the colour of whoever has it, with its replica's number where that is legible."""
    (x, y), (width, height) = at, size
    owner = scene.owners.get((node.name, gpu.index))
    colour = scene.palette.of(owner.replica) if owner else colours.FREE
    more = f'class="gpu" data-gpu="{escape(node.name)}:{gpu.index}"'
    if owner:
        more += f' data-replica="{escape(owner.replica)}" data-deployment="{escape(owner.deployment)}"'
    drawn = box(x, y, width, height, colour, stroke=colours.EDGE, title=scene.told(node, gpu), more=more)
    number = owner.replica.rpartition("-")[2] if owner else ""
    letters = next((each for each in (8, 6) if height > each and width_of(number, each) <= width), 0)
    if number and letters:
        foot = y + height / 2 + letters * 0.375
        drawn += unhit(
            svg.text(x + width / 2, foot, number, size=letters, anchor="middle", colour=colours.on(colour))
        )
    return drawn


def cells(scene: Scene, node: Node, at: tuple[float, float], size: tuple[float, float], columns: int) -> list[str]:
    """All GPUs of a node, `columns` to a line; `size` is that of one, and they lie one unit apart."""
    return [
        cell(scene, node, gpu, (at[0] + (n % columns) * (size[0] + 1), at[1] + (n // columns) * (size[1] + 1)), size)
        for n, gpu in enumerate(scene.cells(node))
    ]
