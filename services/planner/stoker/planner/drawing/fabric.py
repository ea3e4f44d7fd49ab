"""The fabric: nodes on the left, each tier of switches further to the right, links as wide as they are."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape

from stoker.common import svg
from stoker.planner.core.facility.values import Node, Switch
from stoker.planner.core.ordering import natural
from stoker.planner.core.placement.fabric import SwitchDomain, survey
from stoker.planner.drawing import colours
from stoker.planner.drawing.parts import Block, box, cells, fitted, flowed, unhit
from stoker.planner.drawing.scene import Scene

NAMED = 200
"""With more nodes their names show only where a pointer rests."""
_PIPES = 500
"""With more pairs of linked switches, links are drawn between groups of switches."""

_NODES, _LEAVES, _COLUMN, _SWITCH = 620.0, 150.0, 190.0, 17.0
_WIDEST = 5.0


def fabric(scene: Scene) -> Block:
    """Nodes by the switches that they hang on, and how these reach each other."""
    return _Drawing(scene).drawn()


@dataclass
class _Group:
    """The switches of one domain and tier, drawn together. `top` to `bottom` is where what hangs below it lies."""

    domain: SwitchDomain | None
    switches: list[Switch]
    top: float
    bottom: float

    @property
    def middle(self) -> float:
        return (self.top + self.bottom) / 2


class _Drawing:
    """One fabric on its way."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._facility = scene.facility
        self._survey = survey(scene.facility)
        self._parts: list[str] = []
        self._links: list[str] = []
        self._spots: dict[str, tuple[float, float, float]] = {}
        """Of each switch its left edge, the right edge of its group, and its middle height."""
        self._tiers = sorted({switch.tier for switch in scene.facility.switches.values()})
        self._narrow = {number for number, domain in enumerate(self._survey.domains) if domain.oversubscribed}

    def drawn(self) -> Block:
        """All of it."""
        tiers = len(next(iter(self._survey.of.values()), ()))
        groups = self._nodes()
        height = groups[-1].bottom if groups else 0.0
        for tier in range(tiers):
            groups = self._tier(tier, groups)
            height = max([height, *(group.bottom for group in groups)])
        if not tiers:
            self._parts.append(
                svg.text(_NODES + 20, 30, "no cables are known: no fabric to draw", size=11, colour=colours.FAINT)
            )
        else:
            self._between()
        head = svg.text(0, 11, "Fabric", size=12)
        width = max([_NODES + _LEAVES, *(right for _, right, _ in self._spots.values())])
        return Block(width, height + 6, [head, *self._links, *self._parts])

    # --- nodes ---

    def _nodes(self) -> list[_Group]:
        """Draws the nodes of each domain of the lowest tier; where there is none, of each site."""
        below: dict[int | str, list[Node]] = defaultdict(list)
        for node in sorted(self._facility.nodes.values(), key=lambda node: natural(node.name)):
            tiers = self._survey.of[node.name]
            below[tiers[0] if tiers else self._facility.racks[node.rack].site].append(node)
        groups, y = [], 22.0
        for key, nodes in below.items():
            block = flowed(self._tiles(nodes), _NODES - 16, 4)
            frame = box(0, y, _NODES, block.height + 16, "#fbfbfc", stroke="#c9ced3", round_by=3)
            self._parts += [frame, block.at(8, y + 8)]
            domain = self._survey.domains[key] if isinstance(key, int) else None
            groups.append(_Group(domain, [], y, y + block.height + 16))
            y += block.height + 30
        return groups

    def _tiles(self, nodes: Sequence[Node]) -> list[Block]:
        """Nodes, those of one NVLink domain in a box."""
        domains: dict[str, list[Node]] = defaultdict(list)
        for node in nodes:
            scale_ups = {gpu.scale_up for gpu in node.gpus if gpu.scale_up}
            one = next(iter(scale_ups)) if len(scale_ups) == 1 else ""
            domains[one if one in self._spanning else node.name].append(node)
        found = []
        for name, members in domains.items():
            tiles = [self._tile(node) for node in members]
            if name not in self._spanning:
                found += tiles
                continue
            inner = flowed(tiles, 6 * (tiles[0].width + 4), 4)
            frame = box(0, 0, inner.width + 10, inner.height + 21, "#ffffff", stroke="#76b900", round_by=3)
            head = svg.text(6, 11, fitted(f"NVLink {name}", inner.width, 9), size=9, colour=colours.FAINT)
            found.append(Block(inner.width + 10, inner.height + 21, [frame, head, inner.at(5, 16)]))
        return found

    @cached_property
    def _spanning(self) -> set[str]:
        """NVLink domains that span nodes."""
        seen: dict[str, set[str]] = defaultdict(set)
        for node in self._facility.nodes.values():
            for gpu in node.gpus:
                seen[gpu.scale_up].add(node.name)
        return {name for name, nodes in seen.items() if name and len(nodes) > 1}

    def _tile(self, node: Node) -> Block:
        named = len(self._facility.nodes) <= NAMED
        gpus = len(self._scene.cells(node))
        size = (8.0, 10.0) if named else (4.0, 5.0)
        columns = max(1, min(8, gpus))
        lines = -(-gpus // columns)
        head = 11.0 if named else 0.0
        wide = max(columns, 4 if named else 1) * (size[0] + 1) + 3
        tall = head + max(1, lines) * (size[1] + 1) + 3
        fill = "url(#closed)" if node.name in self._scene.closed else colours.NODE
        parts = [
            box(0, 0, wide, tall, fill, stroke="#d5d9dd", title=f"{node.name} in rack {node.rack}", round_by=1.5)
        ]
        if named:
            said = fitted(node.name, wide - 3, 8)
            parts.append(unhit(svg.text(2, 9, said, size=8)))
        return Block(wide, tall, [*parts, *cells(self._scene, node, (2, head + 2), size, columns)])

    # --- switches ---

    @cached_property
    def _homes(self) -> Mapping[str, tuple[int, str]]:
        """For each switch the domain that it makes, and a node below it."""
        below: dict[str, str] = {name: name for name in self._facility.nodes}
        found: dict[str, tuple[int, str]] = {}
        for link in sorted(self._facility.links, key=lambda link: self._tier_of(link.lower)):
            upper = self._facility.switches.get(link.upper)
            node = below.get(link.lower)
            if upper is not None and node is not None and upper.name not in below:
                below[upper.name] = node
                found[upper.name] = (self._survey.of[node][self._tiers.index(upper.tier)], node)
        return found

    def _tier_of(self, name: str) -> int:
        return self._facility.switches[name].tier if name in self._facility.switches else -1

    def _tier(self, tier: int, below: Sequence[_Group]) -> list[_Group]:
        """Draws the switches of a tier, each group in the middle of what hangs on it."""
        members: dict[int, list[Switch]] = defaultdict(list)
        for name, (number, _) in self._homes.items():
            if self._facility.switches[name].tier == self._tiers[tier]:
                members[number].append(self._facility.switches[name])
        spans: dict[int, list[_Group]] = defaultdict(list)
        for group, number in zip(below, self._numbers(tier, below), strict=True):
            spans[number].append(group)
        groups, least = [], 22.0
        for number, children in spans.items():
            switches = sorted(members[number], key=lambda switch: natural(switch.name))
            group = _Group(self._survey.domains[number], switches, children[0].top, children[-1].bottom)
            least = self._draw_group(tier, group, number, least) + 8
            if tier == 0:
                self._trunk(group, children[0])
            groups.append(group)
        return groups

    def _numbers(self, tier: int, below: Sequence[_Group]) -> list[int]:
        """The domain of a tier in which each group below lies."""
        index = {id(domain): number for number, domain in enumerate(self._survey.domains)}
        numbers = [index[id(group.domain)] for group in below]
        if tier == 0:
            return numbers
        of = {path[tier - 1]: path[tier] for path in self._survey.of.values()}
        return [of[number] for number in numbers]

    def _draw_group(self, tier: int, group: _Group, number: int, least: float) -> float:
        """Draws switches below each other, in columns where there are too many; returns where it ends."""
        count = len(group.switches)
        room = max(1, int((group.bottom - group.top - 14) // _SWITCH))
        columns = max(1, min(-(-count // room), 8 if tier == 0 else 4))
        lines = -(-count // columns)
        left = _NODES + 46 + tier * (_LEAVES + _COLUMN) - (60 if tier else 0)
        wide = _LEAVES / columns
        top = max(least, group.middle - lines * _SWITCH / 2 - 4)
        for place, switch in enumerate(group.switches):
            x, y = left + (place % columns) * wide, top + (place // columns) * _SWITCH
            title = f"{switch.name}: tier {switch.tier}, {switch.radix} ports" + (
                f", rail {switch.rail}" if switch.rail >= 0 else ""
            )
            self._parts.append(
                box(x, y, wide - 3, _SWITCH - 3, "#e4ecf5", stroke="#7d93ab", title=title, more='class="switch"')
            )
            said = fitted(switch.name, wide - 7, 8)
            self._parts.append(unhit(svg.text(x + 3, y + 10, said, size=8)))
            self._spots[switch.name] = (x, left + _LEAVES - 3, y + (_SWITCH - 3) / 2)
        end = top + lines * _SWITCH
        self._spots[f"group {number}"] = (left, left + _LEAVES - 3, (top + end - 3) / 2)
        if group.domain is not None and group.domain.up:
            colour = colours.NARROW if number in self._narrow else colours.FAINT
            for said in _ratio(group.domain):
                end += 11
                self._parts.append(svg.text(left, end - 2, said, size=9, colour=colour))
        return end

    def _trunk(self, group: _Group, nodes: _Group) -> None:
        """What the cables of a domain's nodes carry, as one band."""
        if group.domain is None:
            return
        y = group.middle
        self._links.append(
            f'<path d="M{_NODES:.1f} {nodes.top + 6:.1f} L{_NODES + 44:.1f} {y - 8:.1f} L{_NODES + 44:.1f} '
            f'{y + 8:.1f} L{_NODES:.1f} {nodes.bottom - 6:.1f} Z" fill="#dfe6ee"/>'
        )

    def _between(self) -> None:
        """Links between switches; where there are very many, one for each pair of groups."""
        ends = [link for link in self._facility.links if link.lower in self._spots and link.upper in self._spots]
        rates: Counter[tuple[str, str]] = Counter()
        for link in ends:
            rates[link.lower, link.upper] += link.rate * link.count
        narrow = {name for name, (number, _) in self._homes.items() if number in self._narrow}
        if len(rates) > _PIPES:
            rates, narrow = self._bundled(rates, narrow)
        most = max(rates.values(), default=1)
        for (lower, upper), rate in rates.items():
            _, x1, y1 = self._spots[lower]
            x2, _, y2 = self._spots[upper]
            thick = max(0.5, min(_WIDEST, (_WIDEST if len(rates) <= 60 else 1.5) * rate / most))
            colour = colours.NARROW if lower in narrow else "#8fa3b8"
            title = f"{self._called(lower)} – {self._called(upper)}: {_rate(rate)} each way"
            self._links.append(
                f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
                f'stroke-width="{thick:.2f}" stroke-opacity="0.55" class="link"><title>{escape(title)}</title></line>'
            )

    def _called(self, end: str) -> str:
        """A switch by its name, a group of them by that of its domain."""
        return self._survey.domains[int(end.removeprefix("group "))].name if end.startswith("group ") else end

    def _bundled(
        self, rates: Mapping[tuple[str, str], int], narrow: Iterable[str]
    ) -> tuple[Counter[tuple[str, str]], set[str]]:
        """Links between whole groups of switches, their rates together."""
        group = {name: f"group {number}" for name, (number, _) in self._homes.items()}
        found: Counter[tuple[str, str]] = Counter()
        for (lower, upper), rate in rates.items():
            found[group[lower], group[upper]] += rate
        return found, {group[name] for name in narrow}


def _ratio(domain: SwitchDomain) -> tuple[str, ...]:
    ratio = domain.down / domain.up
    said = f"{ratio:.3g} : 1 oversubscribed" if domain.oversubscribed else "not oversubscribed"
    return (said, f"{_rate(domain.down)} below, {_rate(domain.up)} up")


def _rate(bytes_per_second: float) -> str:
    bits = bytes_per_second * 8
    return f"{bits / 1e12:,.3g} Tbit/s" if bits >= 1e12 else f"{bits / 1e9:,.3g} Gbit/s"
