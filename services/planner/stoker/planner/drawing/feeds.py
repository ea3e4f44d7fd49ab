"""Feeds as bars: what each carries while all live, and after a loss, against what it may carry for ever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from stoker.common import svg
from stoker.planner.core.facility.values import Feed, Rack
from stoker.planner.core.ordering import natural
from stoker.planner.drawing import colours
from stoker.planner.drawing.parts import Block, box, fitted, flowed
from stoker.planner.drawing.scene import Scene

MOST_ABOVE = 24
"""Feeds above racks that are drawn: the fullest."""


@dataclass(frozen=True)
class Bar:
    """One feed, in watts. `capacity` is None where nobody said."""

    feed: str
    name: str
    normal: float
    worst: float
    lost: str
    capacity: float | None

    @property
    def over(self) -> bool:
        """Whether it would carry more than it may."""
        return self.capacity is not None and self.worst > self.capacity + 0.5

    @property
    def share(self) -> float:
        """Of its capacity, at the worst; 0 where that is unknown."""
        return self.worst / self.capacity if self.capacity else 0.0

    @property
    def told(self) -> str:
        """The figures in kW."""
        figures = f"{self.normal / 1e3:,.4g}"
        if self.worst > self.normal + 0.5:
            figures += f" → {self.worst / 1e3:,.4g}"
        return f"{figures} of {self.capacity / 1e3:,.4g} kW" if self.capacity is not None else f"{figures} kW"

    @property
    def title(self) -> str:
        """All of it in words."""
        after = f", {self.worst / 1e3:,.5g} kW after the loss of {self.lost}" if self.lost else ""
        has = f"may carry {self.capacity / 1e3:,.5g} kW" if self.capacity is not None else "capacity unknown"
        return f"{self.feed}: {self.normal / 1e3:,.5g} kW{after}; {has}"


def of_rack(scene: Scene, rack: Rack) -> list[Bar]:
    """The lowest feeds of a rack, named within it."""
    return [_bar(scene, scene.facility.feeds[name], _within(name, rack.name)) for name in rack.feeds]


def above(scene: Scene) -> list[Bar]:
    """Feeds above racks, whole sites among them."""
    lowest = {name for rack in scene.facility.racks.values() for name in rack.feeds}
    feeds = [feed for name, feed in scene.facility.feeds.items() if name in scene.loads and name not in lowest]
    bars = [_bar(scene, feed, feed.name) for feed in sorted(feeds, key=lambda feed: natural(feed.name))]
    for site in scene.facility.sites.values():
        if site.supply is not None:
            drawn = sum(scene.by_rack[rack.name] for rack in scene.facility.racks.values() if rack.site == site.name)
            bars.append(Bar(site.name, f"site {site.name}", drawn, drawn, "", site.supply - site.reserved))
    return bars


def panel(scene: Scene, width: float) -> Block:
    """The feeds above racks as lying bars, each the full length at its own capacity."""
    bars = above(scene)
    shown = sorted(bars, key=lambda bar: -bar.share)[:MOST_ABOVE]
    shown = [bar for bar in bars if bar in shown]
    blocks = [_lying(bar, 370.0) for bar in shown]
    if not blocks:
        return Block(0, 0, ())
    drawn = flowed(blocks, width, 14)
    left = f", the {len(shown)} fullest of {len(bars)}" if len(shown) < len(bars) else ""
    head = svg.text(0, 11, f"Power above the racks{left}", size=12)
    return Block(drawn.width, drawn.height + 20, [head, drawn.at(0, 20)])


def standing(bar: Bar, x: float, top: float, size: tuple[float, float], greatest: float) -> list[str]:
    """A bar that stands on the foot of its rack; its height is to `size` as its watts are to `greatest`."""
    width, height = size
    foot = top + height

    def level(watts: float) -> float:
        return height * min(watts / greatest, 1.0)

    limit = level(bar.capacity) if bar.capacity is not None else height
    edge = colours.EDGE if bar.capacity is not None else "none"
    parts = [box(x, foot - limit, width, limit, colours.TRACK, stroke=edge, title=bar.title)]
    after = colours.OVER if bar.over else colours.AFTER
    for name, watts, fill in (("after", bar.worst, after), ("normal", bar.normal, colours.NORMAL)):
        more = f'class="power-{name}" data-feed="{escape(bar.feed)}"'
        tall = level(watts)
        parts.append(box(x + 1.5, foot - tall, width - 3, tall, fill, title=bar.title, more=more))
    return parts


def _lying(bar: Bar, width: float) -> Block:
    """A bar with its name and figures beside it; it leaves its track where it is over capacity."""
    x, track = 120.0, 120.0
    whole = bar.capacity or bar.worst or 1.0

    def length(watts: float) -> float:
        return track * min(watts / whole, 1.2)

    edge = colours.EDGE if bar.capacity is not None else "none"
    parts = [
        svg.text(x - 6, 11, fitted(bar.name, x - 8, 10), size=10, anchor="end"),
        box(x, 2, track, 11, colours.TRACK, stroke=edge, title=bar.title),
    ]
    after = colours.OVER if bar.over else colours.AFTER
    for name, watts, fill in (("after", bar.worst, after), ("normal", bar.normal, colours.NORMAL)):
        more = f'class="power-{name}" data-feed="{escape(bar.feed)}"'
        parts.append(box(x, 3.5, length(watts), 8, fill, title=bar.title, more=more))
    end = x + max(track, length(bar.worst)) + 8
    parts.append(svg.text(end, 11, bar.told, size=10, colour=colours.OVER if bar.over else colours.INK))
    return Block(width, 16, parts)


def _bar(scene: Scene, feed: Feed, name: str) -> Bar:
    load = scene.loads[feed.name]
    return Bar(feed.name, name, load.normal, load.worst, load.lost, feed.capacity)


def _within(feed: str, rack: str) -> str:
    """A feed's name without that of its rack: "a" of "row1-r1-a"."""
    short = feed.removeprefix(rack).removesuffix(rack).strip("-_/.:")
    return short or feed


def key() -> Sequence[tuple[str, str]]:
    """Colours of bars and what they mean."""
    return (
        (colours.NORMAL, "power, all feeds alive"),
        (colours.AFTER, "after the worst loss"),
        (colours.OVER, "over capacity"),
    )
