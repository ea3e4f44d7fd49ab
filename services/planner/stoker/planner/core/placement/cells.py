"""Nodes that are alike but for what is free on them: whoever searches looks at cells, not at nodes."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stoker.planner.core.placement.state import State
from stoker.planner.core.placement.values import Need


@dataclass(frozen=True, slots=True)
class Cell:
    """Nodes of one rack, type and place in the fabric, with the same labels as far as anybody asks for them, in
    natural order. `scale_up` is their NVLink domain where that reaches over nodes, else ""."""

    number: int
    rack: str
    path: tuple[int, ...]
    scale_up: str
    nodes: tuple[str, ...]


def cells(state: State) -> list[Cell]:
    """The cells of all nodes that may get something new, in natural order of their first nodes."""
    problem, ground = state.problem, state.ground
    asked = sorted({key for need in problem.needs for key in need.node_selector})
    found: defaultdict[tuple[object, ...], list[str]] = defaultdict(list)
    for name in sorted(ground.facility.nodes, key=ground.order.__getitem__):
        if name in problem.closed or name in problem.lost:
            continue
        node = ground.facility.nodes[name]
        scale_up = ground.scale_up.get(name, "")
        labels = tuple(node.labels.get(key) for key in asked)
        engines = problem.engines.get(name) if problem.engines is not None else None
        path = ground.fabric.of[name]
        found[node.rack, node.type, path, scale_up, labels, engines, ground.layouts[name]].append(name)
    return [
        Cell(number, ground.facility.nodes[nodes[0]].rack, ground.fabric.of[nodes[0]], str(key[3]), tuple(nodes))
        for number, (key, nodes) in enumerate(found.items())
    ]


def unfit(state: State, need: Need, node: str) -> str | None:
    """What about `node` itself, not its room, keeps `need` off it: the word of a limit, None where nothing does."""
    problem, ground = state.problem, state.ground
    record, kind = ground.facility.nodes[node], ground.type_of(node)
    if node in problem.lost:
        return "lost"
    if problem.engines is not None and need.engine and need.engine not in problem.engines.get(node, frozenset()):
        return "engine"
    if any(record.labels.get(key) != value for key, value in need.node_selector.items()):
        return "selector"
    if need.gpu_types and kind.gpu not in need.gpu_types:
        return "gpu_type"
    if bool(need.gpus) != bool(ground.layouts[node]) or need.gpus > len(ground.layouts[node]):
        return "size"
    if need.near and need.reach_s is not None:
        latency = ground.latency_s(need.near, ground.region(node))
        if latency is None or latency > need.reach_s:
            return "reach"
    return "closed" if node in problem.closed else None


class Shelf:
    """What is free in each cell, as classes of nodes that have the very same GPUs free. `sync` after each change;
    `version` counts the changes of each cell."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.cells = cells(state)
        self._of = {node: cell for cell in self.cells for node in cell.nodes}
        self._seen = {node: state.free[node] for node in self._of}
        self._classes: list[dict[int, list[tuple[int, str]]]] = [{} for _ in self.cells]
        self.version = [0] * len(self.cells)
        self._wholes: dict[tuple[str, int], tuple[int, int]] = {}
        self._in_rack: defaultdict[str, list[int]] = defaultdict(list)
        for cell in self.cells:
            self._in_rack[cell.rack].append(cell.number)
        self._fitting: dict[str, list[Cell]] = {}
        for cell in self.cells:
            for node in cell.nodes:
                self._classes[cell.number].setdefault(state.free[node], []).append((state.ground.order[node], node))

    def sync(self, nodes: Iterable[str]) -> None:
        """Look again at what is free on `nodes`."""
        for node in nodes:
            if node not in self._of or self._seen[node] == self.state.free[node]:
                continue
            classes, entry = self._classes[self._of[node].number], (self.state.ground.order[node], node)
            self.version[self._of[node].number] += 1
            old = classes[self._seen[node]]
            del old[bisect_left(old, entry)]
            if not old:
                del classes[self._seen[node]]
            self._seen[node] = self.state.free[node]
            insort(classes.setdefault(self._seen[node], []), entry)

    def classes(self, cell: Cell) -> Iterator[tuple[int, list[tuple[int, str]]]]:
        """Free GPUs as a bit set, and the nodes with just these by their order; none that are full."""
        return ((free, nodes) for free, nodes in self._classes[cell.number].items() if free)

    def wholes(self, rack: str, size: int) -> int:
        """For how many members of `size` GPUs a rack has room."""
        cells = self._in_rack[rack]
        version = sum(self.version[cell] for cell in cells)
        known, number = self._wholes.get((rack, size), (-1, 0))
        if known != version:
            number = sum(
                free.bit_count() // size * len(nodes) for cell in cells for free, nodes in self._classes[cell].items()
            )
            self._wholes[rack, size] = version, number
        return number

    def fitting(self, need: Need) -> list[Cell]:
        """The cells that suit `need`, whatever is free in them."""
        if need.deployment not in self._fitting:
            self._fitting[need.deployment] = [
                cell for cell in self.cells if unfit(self.state, need, cell.nodes[0]) is None
            ]
        return self._fitting[need.deployment]
