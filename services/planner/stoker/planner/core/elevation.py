"""Where in a rack its nodes stand: the units that they say, and for the rest the lowest that are free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from stoker.planner.core.facility.values import Node, NodeType, Rack
from stoker.planner.core.ordering import natural


class Elevation:
    """The units of one rack, counted from 1 at the bottom. Its reserved units are the highest."""

    def __init__(self, rack: Rack, nodes: Iterable[Node], types: Mapping[str, NodeType]) -> None:
        self.usable = max(0, rack.height_u - rack.reserved_u)
        """Units for nodes."""
        self.used = 0
        """Units that nodes take."""
        self.bottoms: dict[str, int] = {}
        """The lowest unit of each node; 0 for one that found no place."""
        self._free = [(1, self.usable)] if self.usable else []  # (lowest, how many), from the bottom up
        standing = sorted(nodes, key=lambda node: natural(node.name))
        for node in standing:
            if node.bottom_u:
                self._take(node.bottom_u, types[node.type].height_u)
                self.bottoms[node.name] = node.bottom_u
        for node in standing:
            if not node.bottom_u:
                self.bottoms[node.name] = self.place(types[node.type].height_u)

    def room(self, height_u: int) -> int:
        """How many more nodes of that height find a place, between those that stand there."""
        if height_u <= 0:
            return self.usable
        return sum(length // height_u for _, length in self._free)

    def place(self, height_u: int) -> int:
        """Takes the lowest free units for a node of that height; returns the lowest of them, 0 where none are."""
        for bottom, length in self._free:
            if length >= height_u:
                self._take(bottom, height_u)
                return bottom
        return 0

    def _take(self, bottom: int, height_u: int) -> None:
        self.used += height_u
        left = []
        for low, length in self._free:
            below, above = bottom - low, low + length - (bottom + height_u)
            if below >= length or above >= length:
                left.append((low, length))
                continue
            left += [(low, below)] if below > 0 else []
            left += [(bottom + height_u, above)] if above > 0 else []
        self._free = left
