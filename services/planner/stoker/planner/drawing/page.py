"""Whole drawings: an SVG, and a page of one file that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from html import escape

from stoker.common import svg
from stoker.planner.drawing import colours, feeds
from stoker.planner.drawing.fabric import fabric
from stoker.planner.drawing.parts import Block, box, flowed, stacked, width_of, wrapped
from stoker.planner.drawing.racks import racks
from stoker.planner.drawing.scene import Scene

WIDTH = 1180.0
"""Beyond it racks go on on the next line."""
_NARROWEST = 760.0
_MARGIN = 18.0
_LEGEND = 24
"""Deployments that a legend names: those with most GPUs."""

_DEFINITIONS = (
    '<defs><pattern id="closed" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="#f3f1ec"/><rect width="2" height="6" fill="#c9c2b0"/></pattern>'
    '<pattern id="reserved" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="5" height="5" fill="#ffffff"/><rect width="1" height="5" fill="#d5d9dd"/></pattern></defs>'
)


class View(StrEnum):
    """What is drawn."""

    ALL = "all"
    RACKS = "racks"
    FABRIC = "fabric"


def drawn(scene: Scene, view: View = View.ALL) -> str:
    """The drawing as SVG."""
    below = [racks(scene, WIDTH)] if view is not View.FABRIC else []
    if view is View.FABRIC or (view is View.ALL and scene.facility.links):
        below.append(fabric(scene))
    width = max([_NARROWEST, *(block.width for block in below)])
    above = [
        _head(scene, width, power=view is not View.FABRIC),
        *([feeds.panel(scene, width)] if view is not View.FABRIC else []),
    ]
    blocks = [block for block in (*above, *below) if block.height]
    whole = stacked(blocks, 22)
    width, height = whole.width + 2 * _MARGIN, whole.height + 2 * _MARGIN
    return svg.document(width, height, [_DEFINITIONS, whole.at(_MARGIN, _MARGIN)])


def page(scene: Scene, tables: Sequence[tuple[str, Sequence[Sequence[str]]]] = (), view: View = View.ALL) -> str:
    """A page with the drawing, in which a replica's GPUs light up where a pointer rests; `tables` follow it, each
    a title and rows of which the first is the head."""
    parts = [_START.replace("TITLE", escape(scene.title)), drawn(scene, view)]
    for title, rows in tables:
        if rows:
            parts.append(f"<h2>{escape(title)}</h2><table>{''.join(map(_row, rows, _tags(len(rows))))}</table>")
    return "\n".join([*parts, _END])


def _tags(rows: int) -> list[str]:
    return ["th", *["td"] * (rows - 1)]


def _row(cells: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(each)}</{tag}>" for each in cells) + "</tr>"


def _head(scene: Scene, width: float, *, power: bool) -> Block:
    parts = [svg.text(0, 18, scene.title, size=18)]
    y = 36.0
    for line in (line for note in scene.notes for line in wrapped(note, width, 12)):
        parts.append(svg.text(0, y, line, size=12, colour=colours.INK))
        y += 16
    power_key = [_chip(colour, said) for colour, said in feeds.key()] if power else []
    legend = flowed([*_chips(scene, racks=power), *power_key], width, 14)
    parts.append(legend.at(0, y))
    return Block(width, y + legend.height, parts)


def _chips(scene: Scene, *, racks: bool) -> list[Block]:
    palette, gpus = scene.palette, scene.gpus_of
    largest = sorted(palette.deployments, key=lambda name: -gpus[name])[:_LEGEND]
    chips = [
        _chip(colour, f"{name}: {_asked(palette.counts[name], gpus[name])}", name)
        for name, colour in palette.deployments.items()
        if name in largest
    ]
    if len(palette.deployments) > len(largest):
        chips.append(_chip("", f"and {len(palette.deployments) - len(largest)} more deployments"))
    if palette.repeats:
        chips.append(_chip("", "colours repeat: rest a pointer on a GPU"))
    if scene.free is not None:
        chips.append(_chip(colours.FREE, f"free: {scene.free:,}" if scene.owners else f"GPUs: {scene.free:,}"))
    if scene.new:
        chips.append(_chip("", f"dashed: {len(scene.new):,} nodes that are not there yet"))
    if scene.closed:
        chips.append(_chip("url(#closed)", "draining or excluded"))
    if racks and any(rack.reserved_u for rack in scene.facility.racks.values()):
        chips.append(_chip("url(#reserved)", "kept for switches"))
    return chips


def _asked(replicas: int, gpus: int) -> str:
    return f"{replicas:,} × {gpus / replicas:g} GPUs" if gpus else f"{replicas:,} without GPUs"


def _chip(colour: str, said: str, deployment: str = "") -> Block:
    left = 16.0 if colour else 0.0
    parts = [box(0, 2, 11, 11, colour, stroke=colours.EDGE)] if colour else []
    parts.append(svg.text(left, 12, said, size=11))
    more = f' class="chip" data-deployment="{escape(deployment)}"' if deployment else ""
    return Block(left + width_of(said, 11), 16, [f"<g{more}>", *parts, "</g>"])


_START = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>TITLE</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root { color-scheme: light }
body { margin: 0 auto; max-width: 1400px; padding: 12px; font: 14px sans-serif; color: #222; background: #fff }
svg { width: 100%; height: auto }
svg.asked .gpu { opacity: .15 }
svg.asked .gpu.mine { opacity: 1; stroke: #000; stroke-width: 1.6 }
table { border-collapse: collapse; margin-bottom: 1em }
th, td { text-align: left; padding: 2px 14px 2px 0; vertical-align: top }
th { border-bottom: 1px solid #999 }
</style></head><body>"""

_END = """<script>
"use strict";
const drawing = document.querySelector("svg");
function light(key, value) {
  drawing.classList.toggle("asked", value !== undefined);
  for (const gpu of drawing.querySelectorAll(".gpu")) gpu.classList.toggle("mine", gpu.dataset[key] === value);
}
drawing.addEventListener("pointerover", (event) => {
  const gpu = event.target.closest(".gpu[data-replica]"), chip = event.target.closest(".chip");
  if (gpu) light("replica", gpu.dataset.replica);
  else if (chip) light("deployment", chip.dataset.deployment);
  else light("replica", undefined);
});
</script></body></html>
"""
