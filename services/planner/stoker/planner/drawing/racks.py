"""Racks from the front: units, nodes, GPUs, and a bar for each feed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

from stoker.common import svg
from stoker.planner.core.elevation import Elevation
from stoker.planner.core.facility.values import Node, Rack
from stoker.planner.core.ordering import natural
from stoker.planner.drawing import colours, feeds
from stoker.planner.drawing.parts import Block, box, cells, fitted, flowed, stacked, unhit
from stoker.planner.drawing.scene import Scene

DETAILED = 48
"""With more racks each becomes a tile: GPUs and bars, names only where a pointer rests."""

_UNIT, _RULER, _BODY, _BAR, _FEEDS = 8.0, 17.0, 130.0, 9.0, 4


def racks(scene: Scene, width: float) -> Block:
    """All racks, row by row."""
    facility = scene.facility
    ordered = sorted(facility.racks.values(), key=lambda rack: (*map(natural, _row_of(rack)), natural(rack.name)))
    greatest = max((feeds_greatest(scene, rack) for rack in ordered), default=0.0) or 1.0
    detailed = len(ordered) <= DETAILED
    blocks = []
    for row, members in groupby(ordered, key=_row_of):
        drawn = [_rack(scene, rack, greatest) if detailed else _tile(scene, rack, greatest) for rack in members]
        said = " · ".join(part for part in row if part)
        lines = flowed(_level(drawn), width, 14.0 if detailed else 8.0)
        blocks.append(Block(lines.width, lines.height + 20, [svg.text(0, 11, said, size=12), lines.at(0, 20)]))
    return stacked(blocks, 18)


def feeds_greatest(scene: Scene, rack: Rack) -> float:
    """The most that a bar of the rack has to show, in watts."""
    return max((max(bar.capacity or 0.0, bar.worst) for bar in feeds.of_rack(scene, rack)), default=0.0)


def _row_of(rack: Rack) -> tuple[str, str, str]:
    return (rack.site, rack.suite, rack.row)


def _level(blocks: Sequence[Block]) -> list[Block]:
    """Racks stand on one floor: the lower ones get air above."""
    tall = max(block.height for block in blocks)
    return [Block(block.width, tall, [block.at(0, tall - block.height)]) for block in blocks]


# --- in detail ---


def _rack(scene: Scene, rack: Rack, greatest: float) -> Block:
    bars = feeds.of_rack(scene, rack)[:_FEEDS]
    tall, top = rack.height_u * _UNIT, 18.0
    elevation = Elevation(rack, scene.standing[rack.name], scene.facility.node_types)
    free = f"{elevation.used} of {elevation.usable} U"
    said = fitted(rack.name, _BODY - len(free) * 5 - 4, 11)
    parts = [
        svg.text(_RULER, 12, said, size=11),
        svg.text(_RULER + _BODY, 12, free, size=9, anchor="end", colour=colours.FAINT),
        box(_RULER, top, _BODY, tall, "#ffffff", stroke=colours.INK, title=_about(scene, rack)),
        *_ruler(rack, top),
    ]
    if rack.reserved_u:
        held = rack.reserved_u * _UNIT
        parts.append(box(_RULER + 1, top + 1, _BODY - 2, held - 1, "url(#reserved)", title="kept for switches"))
    for node in scene.standing[rack.name]:
        bottom = elevation.bottoms[node.name]
        if bottom:
            parts += _node(scene, rack, node, bottom, top)
    for number, bar in enumerate(bars):
        x = _RULER + _BODY + 6 + number * (_BAR + 3)
        parts += feeds.standing(bar, x, top, (_BAR, tall), greatest)
    foot = top + tall
    for number, bar in enumerate(bars):
        colour = colours.OVER if bar.over else colours.INK
        parts.append(svg.text(_RULER, foot + 12 + 11 * number, f"{bar.name}  {bar.told}", size=9, colour=colour))
    if not bars:
        drawn = f"{scene.by_rack[rack.name] / 1e3:,.4g} kW"
        parts.append(svg.text(_RULER, foot + 12, f"{drawn}, feeds unknown", size=9, colour=colours.FAINT))
    width = _RULER + _BODY + 6 + max(1, len(bars)) * (_BAR + 3)
    return Block(width, foot + 6 + 11 * max(1, len(bars)), parts)


def _about(scene: Scene, rack: Rack) -> str:
    cooling = f", cooling {rack.cooling / 1e3:,.4g} kW" if rack.cooling is not None else ""
    return f"{rack.name}: {rack.height_u} U, draws {scene.by_rack[rack.name] / 1e3:,.4g} kW{cooling}"


def _ruler(rack: Rack, top: float) -> Iterable[str]:
    """Every fifth unit's number, counted from the bottom."""
    for unit in range(5, rack.height_u + 1, 5):
        y = top + (rack.height_u - unit) * _UNIT + _UNIT - 1
        yield svg.text(_RULER - 3, y, str(unit), size=7, anchor="end", colour=colours.FAINT)


def _node(scene: Scene, rack: Rack, node: Node, bottom: int, top: float) -> list[str]:
    kind = scene.facility.node_types[node.type]
    y = top + (rack.height_u - bottom - kind.height_u + 1) * _UNIT
    tall, x, wide = kind.height_u * _UNIT, _RULER + 1.5, _BODY - 3
    title = f"{node.name}: {node.type}, U{bottom}, draws {scene.draws[node.name] / 1e3:,.4g} kW"
    more = f'class="node" data-node="{escape(node.name)}"'
    fill = colours.NODE if kind.gpus else colours.HOST
    edge, dashed = colours.EDGE, node.name in scene.new
    parts = [box(x, y + 0.5, wide, tall - 1, fill, stroke=edge, dashed=dashed, title=title, more=more, round_by=1.5)]
    if node.name in scene.closed:
        parts.append(box(x, y + 0.5, wide, tall - 1, "url(#closed)", title=f"{node.name} is closed"))
    gpus = len(scene.cells(node))
    if tall >= 28:
        columns = min(max(gpus, 1), 8)
        lines = -(-gpus // columns)
        high = min(28.0, (tall - 18) / lines - 1) if lines else 0.0
        size = ((wide - 6) / columns - 1, high)
        parts.append(_label(x + 4, y + 11, node.name, wide - 8, 9))
        parts += cells(scene, node, (x + 3, y + tall - lines * (high + 1) - 2), size, columns)
        return parts
    columns = max(1, -(-gpus // max(1, -(-gpus // 8))))
    lines = -(-gpus // columns)
    high = (tall - 2) / max(1, lines) - 1
    wide_cells = wide * 0.5 if gpus else 0.0
    parts.append(_label(x + 3, y + tall / 2 + 2.5, node.name, wide - wide_cells - 6, min(8.0, tall - 1)))
    size = (wide_cells / columns - 1, high)
    return parts + cells(scene, node, (x + wide - wide_cells - 1, y + 1.5), size, columns)


def _label(x: float, y: float, said: str, width: float, size: float) -> str:
    return unhit(svg.text(x, y, fitted(said, width, size), size=round(size), colour=colours.INK))


# --- as tiles ---

_CELL, _TILE_BAR = 5.0, 3.0


def _tile(scene: Scene, rack: Rack, greatest: float) -> Block:
    """A rack's nodes one below the other, without their units."""
    nodes = scene.standing[rack.name]
    columns = min(8, max((len(scene.cells(node)) for node in nodes), default=8) or 8)
    wide = columns * (_CELL + 1) + 3
    bars = feeds.of_rack(scene, rack)[:_FEEDS]
    parts: list[str] = []
    y, top = 12.0, 11.0
    for node in nodes:
        gpus = len(scene.cells(node))
        if not gpus:
            continue
        lines = -(-gpus // columns)
        fill = "url(#closed)" if node.name in scene.closed else colours.NODE
        parts.append(box(1, y, wide - 2, lines * (_CELL + 1) + 1, fill, title=node.name))
        parts += cells(scene, node, (2, y + 1), (_CELL, _CELL), columns)
        y += lines * (_CELL + 1) + 2
    tall = max(y - top, 20.0)
    for number, bar in enumerate(bars):
        parts += feeds.standing(bar, wide + 2 + number * (_TILE_BAR + 2), top, (_TILE_BAR + 1.5, tall), greatest)
    width = wide + 3 + max(1, len(bars)) * (_TILE_BAR + 2)
    over = any(bar.over for bar in bars)
    name = svg.text(0, 8, fitted(rack.name, width, 8), size=8, colour=colours.OVER if over else colours.INK)
    frame = box(
        0, top, wide, tall, "#ffffff", stroke=colours.OVER if over else colours.INK, title=_about(scene, rack)
    )
    return Block(width, top + tall, [name, frame, *parts])
