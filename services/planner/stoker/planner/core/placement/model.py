"""Placing as a problem in whole numbers: how many members go into which cell.

Replicas of one member are counted, so that those alike are not told apart; gangs are told apart, because it matters
which racks one of them touches. GPUs are not in it: each cell's nodes take one of the mixes that fit (`packing`), and
`realize` turns mixes into GPUs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

from stoker.planner.core.placement.cells import Cell, Shelf
from stoker.planner.core.placement.gangs import block
from stoker.planner.core.placement.packing import MOST, Mix, Shape, halves, mixes
from stoker.planner.core.placement.state import State, most_in_one
from stoker.planner.core.placement.values import Domain, Need, Placed

Expression = Any
"""What CP-SAT makes of sums of its variables."""


class TooManyMixes(Exception):
    """A node can be filled in so many ways that cells are no help."""


def shape_of(need: Need) -> Shape:
    """What a member of `need` is to its node."""
    return (need.gpus, max(1, min(need.tensor_parallel, need.gpus))) if need.gpus else (0, 1)


@dataclass(frozen=True, slots=True)
class Halved:
    """Free nodes as `units` of `unit` GPUs: members by shape, and units opened for small ones."""

    unit: int
    units: int
    counts: dict[Shape, Expression]
    opened: Expression


class Model:
    """The variables and the limits. `base` holds what stays where it is, `loose` are the replicas to be placed (as
    they are now, for a start), `missing` how many more of each deployment are wanted."""

    def __init__(self, base: State, cells: Iterable[int], loose: Sequence[Placed], missing: Counter[str]) -> None:
        from ortools.sat.python import cp_model

        self.cp = cp_model.CpModel()
        self.base, self.loose = base, loose
        self.shelf = Shelf(base)
        self.cells = [self.shelf.cells[number] for number in cells]
        self.of = {node: cell.number for cell in self.cells for node in cell.nodes}
        self.wanted = Counter(placed.deployment for placed in loose) + missing
        self.needs = [need for need in base.problem.needs if self.wanted[need.deployment]]
        own = {cell.number for cell in self.cells}
        self._fitting = {
            need.deployment: {cell.number: cell for cell in self.shelf.fitting(need) if cell.number in own}
            for need in self.needs
        }
        self.counts: dict[tuple[str, int], Expression] = {}
        self.gangs: dict[str, list[dict[int, Expression]]] = {}
        self.there: dict[str, list[Expression]] = {}
        self.placed: dict[str, Expression] = {}
        self.mixes: dict[tuple[int, int], list[tuple[Mix, Expression]]] = {}
        self.halved: dict[tuple[int, int], Halved] = {}
        self.touches: dict[tuple[str, int], dict[tuple[str, str | int], Expression]] = {}
        self._of_place: defaultdict[tuple[str, str | int], list[int]] = defaultdict(list)
        for cell in self.cells:
            for place in self._places(cell):
                self._of_place[place].append(cell.number)
        held = {base.ground.facility.nodes[node].rack for own in base.members.values() for node in own}
        self.all_racks = held | {cell.rack for cell in self.cells}
        for need in self.needs:
            self._add_need(need)
        self._pack()
        self._power()
        for need in self.needs:
            self._spread(need)
        self._hint()

    # --- variables ---

    def _add_need(self, need: Need) -> None:
        name, wanted = need.deployment, self.wanted[need.deployment]
        if need.members == 1:
            for number in self._fitting[name]:
                self.counts[name, number] = self.cp.new_int_var(0, wanted, "")
            total = sum(self.counts[name, number] for number in self._fitting[name])
            self.placed[name] = self.cp.new_int_var(0, wanted, "")
            self.cp.add(self.placed[name] == total)
            return
        self.gangs[name] = []
        self.there[name] = []
        for number in range(wanted):
            self._add_gang(need, number)
        self.placed[name] = sum(self.there[name])
        for one, other in zip(self.there[name], self.there[name][1:], strict=False):
            self.cp.add_implication(other, one)

    def _add_gang(self, need: Need, number: int) -> None:
        there = self.cp.new_bool_var("")
        members = {
            cell.number: self.cp.new_int_var(0, min(need.members, len(cell.nodes)), "")
            for cell in self._fitting[need.deployment].values()
            if block(need) == 1 or cell.scale_up
        }
        self.cp.add(sum(members.values()) == need.members * there)
        self.gangs[need.deployment].append(members)
        self.there[need.deployment].append(there)
        touches = self.touches[need.deployment, number] = {}
        places: defaultdict[tuple[str, str | int], list[int]] = defaultdict(list)
        blocks: defaultdict[str, list[int]] = defaultdict(list)
        for cell in (self.shelf.cells[c] for c in members):
            for place in self._places(cell):
                places[place].append(cell.number)
            blocks[cell.scale_up].append(cell.number)
        for place, inside in places.items():
            touched = touches[place] = self.cp.new_bool_var("")
            total = sum(members[c] for c in inside)
            self.cp.add(total <= need.members * touched)
            self.cp.add(total >= touched)
        if block(need) > 1:
            for inside in blocks.values():
                runs = self.cp.new_int_var(0, need.members // block(need), "")
                self.cp.add(sum(members[c] for c in inside) == block(need) * runs)
        wholes = [touched for (kind, _), touched in touches.items() if kind == "whole"]
        self.cp.add(sum(wholes) <= 1)

    def _places(self, cell: Cell) -> list[tuple[str, str | int]]:
        """What a gang's touching is told of: failure domains, and switch domains of each tier."""
        keys = [key for key in self.base.ground.keys[cell.nodes[0]] if key[0] != Domain.NODE.value]
        tiers = [(f"tier{tier}", number) for tier, number in enumerate(cell.path)]
        scale_up: list[tuple[str, str | int]] = [("scale_up", cell.scale_up)] if cell.scale_up else []
        return [*keys, *tiers, *scale_up, ("whole", self.base.ground.fabric.whole[cell.nodes[0]])]

    def members_in(self, need: Need, cells: Iterable[int]) -> Expression:
        """How many members of `need` are newly in `cells`."""
        if need.members == 1:
            return sum(self.counts[need.deployment, c] for c in cells if (need.deployment, c) in self.counts)
        return sum(gang[c] for gang in self.gangs[need.deployment] for c in cells if c in gang)

    def replicas_in(self, need: Need, place: tuple[str, str | int], cells: Iterable[int]) -> Expression:
        """How many new replicas of `need` touch `place`, which is made of `cells`."""
        if need.members == 1:
            return self.members_in(need, cells)
        touches = (self.touches[need.deployment, n].get(place) for n in range(len(self.gangs[need.deployment])))
        return sum(touched for touched in touches if touched is not None)

    def by_place(self, kind: str) -> Iterator[tuple[tuple[str, str | int], list[int]]]:
        """The cells of each place of a kind."""
        return ((place, cells) for place, cells in self._of_place.items() if place[0] == kind)

    # --- limits ---

    def _pack(self) -> None:
        for cell in self.cells:
            fitting = [need for need in self.needs if cell.number in self._fitting[need.deployment]]
            shapes = tuple(sorted({shape_of(need) for need in fitting}))
            per_shape: defaultdict[Shape, list[Expression]] = defaultdict(list)
            layout = self.base.ground.layouts[cell.nodes[0]]
            for free, nodes in self.shelf.classes(cell):
                unit = self.base.largest_member(cell.nodes[0]) if layout else 1
                if free == (1 << len(layout)) - 1 and shapes and halves(layout, shapes, unit):
                    self._halve(cell, free, len(nodes), shapes, unit, per_shape)
                else:
                    self._mix(cell, free, len(nodes), shapes, per_shape)
            for shape in shapes:
                asked = sum(self.members_in(need, [cell.number]) for need in fitting if shape_of(need) == shape)
                self.cp.add(asked == sum(per_shape[shape]))

    def _mix(
        self, cell: Cell, free: int, nodes: int, shapes: tuple[Shape, ...], per_shape: dict[Shape, list[Expression]]
    ) -> None:
        found = mixes(self.base.ground.layouts[cell.nodes[0]], free, shapes)
        if len(found) > MOST:
            raise TooManyMixes
        chosen = [(mix, self.cp.new_int_var(0, nodes, "")) for mix in found]
        self.cp.add(sum(variable for _, variable in chosen) == nodes)
        self.mixes[cell.number, free] = chosen
        for mix, variable in chosen:
            for shape, number in mix.counts.items():
                per_shape[shape].append(number * variable)

    def _halve(
        self,
        cell: Cell,
        free: int,
        nodes: int,
        shapes: tuple[Shape, ...],
        unit: int,
        per_shape: dict[Shape, list[Expression]],
    ) -> None:
        """Free nodes as units: each goes to one member of just its size, or is opened for smaller ones."""
        units = nodes * len(self.base.ground.layouts[cell.nodes[0]]) // unit
        counts = {shape: self.cp.new_int_var(0, units * (unit // max(1, shape[0])), "") for shape in shapes}
        opened = self._opened(counts, unit, units)
        self.cp.add(sum(count for shape, count in counts.items() if shape[0] == unit) + opened <= units)
        self.halved[cell.number, free] = Halved(unit, units, counts, opened)
        for shape, count in counts.items():
            per_shape[shape].append(count)

    def _opened(self, counts: dict[Shape, Expression], unit: int, units: int) -> Expression:
        """How many units are opened for smaller members. Each size opens whole pieces of the next larger one: an odd
        GPU leaves another that only its like can take, which a sum over all sizes does not see."""
        sizes = sorted({max(1, gpus) for gpus, _ in counts if gpus < unit} | {unit})
        pieces: Expression = 0
        for size, larger in pairwise(sizes):
            asked = pieces + sum(count for (gpus, _), count in counts.items() if max(1, gpus) == size)
            pieces = self.cp.new_int_var(0, units * (unit // larger), "")
            self.cp.add(asked * size <= larger * pieces)
        if len(sizes) == 1:
            return self.cp.new_int_var(0, 0, "")
        return pieces

    def _power(self) -> None:
        draws: defaultdict[str, list[Expression]] = defaultdict(list)
        for cell in self.cells:
            for need in self.needs:
                draw = self.base.draw_of(need, cell.nodes[0])
                if draw:
                    draws[cell.rack].append(draw * self.members_in(need, [cell.number]))
        most = {cell.rack: 0 for cell in self.cells}
        for cell in self.cells:
            node = cell.nodes[0]
            each = max((self.base.ground.gpu_draw(need, node) for need in self.needs), default=0)
            most[cell.rack] += each * sum(self.base.free[name].bit_count() for name in cell.nodes)
        for number, limit in enumerate(self.base.ground.limits):
            own = [rack for rack in draws if rack in limit.weights]
            # Limits that would hold with every GPU busy need no row.
            if own and sum(limit.weights[rack] * most[rack] for rack in own) > self.base.slack[number]:
                load = sum(limit.weights[rack] * draw for rack in own for draw in draws[rack])
                self.cp.add(load <= max(0, self.base.slack[number]))

    def _spread(self, need: Need) -> None:
        most = most_in_one(need, need.replicas)
        if most >= need.replicas:
            return
        held = self.base.counts[need.deployment]
        share = Fraction(need.largest_share).limit_denominator(1_000)
        everywhere = held + self.placed[need.deployment]
        alone = self.cp.new_bool_var("")
        self.cp.add(everywhere <= 1).only_enforce_if(alone)
        places = [found for kind in need.spread_over for found in self.by_place(kind.value)]
        for place, cells in sorted(places):
            inside = self.replicas_in(need, place, cells)
            already = self.base.touched[need.deployment][place]  # type: ignore[index]
            self.cp.add(inside <= max(0, most - already))
            if held + self.wanted[need.deployment] > 1 and share >= Fraction(1, 2) and not already:
                # With fewer placed than wanted, fewer may be together.
                self.cp.add(share.denominator * inside <= share.numerator * everywhere + share.denominator * alone)

    # --- a start ---

    def _hint(self) -> None:
        counts: Counter[tuple[str, int]] = Counter()
        gangs: defaultdict[str, list[Placed]] = defaultdict(list)
        for placed in self.loose:
            if self.base.needs[placed.deployment].members == 1:
                counts[placed.deployment, self.of[placed.members[0].node]] += 1
            else:
                gangs[placed.deployment].append(placed)
        for key, variable in self.counts.items():
            self.cp.add_hint(variable, counts[key])
        for name, members in self.gangs.items():
            for number in range(len(members)):
                self._hint_gang(name, number, gangs[name][number] if number < len(gangs[name]) else None)
        self._hint_mixes()

    def _hint_gang(self, deployment: str, number: int, placed: Placed | None) -> None:
        in_cell = Counter(self.of[member.node] for member in placed.members) if placed else Counter[int]()
        self.cp.add_hint(self.there[deployment][number], placed is not None)
        for cell, variable in self.gangs[deployment][number].items():
            self.cp.add_hint(variable, in_cell[cell])
        touched = {place for cell in in_cell for place in self._places(self.shelf.cells[cell])}
        for place, variable in self.touches[deployment, number].items():
            self.cp.add_hint(variable, place in touched)

    def _hint_mixes(self) -> None:
        per_node: defaultdict[str, list[Shape]] = defaultdict(list)
        for placed in self.loose:
            for member in placed.members:
                per_node[member.node].append(shape_of(self.base.needs[placed.deployment]))
        used: Counter[tuple[int, int, tuple[Shape, ...]]] = Counter()
        for cell in self.cells:
            for node in cell.nodes:
                used[cell.number, self.base.free[node], tuple(sorted(per_node[node], reverse=True))] += 1
        for (number, free), chosen in self.mixes.items():
            for mix, variable in chosen:
                self.cp.add_hint(variable, used[number, free, mix.shapes])
        for (number, free), halved in self.halved.items():
            own = (node for node in self.shelf.cells[number].nodes if self.base.free[node] == free)
            there = Counter(shape for node in own for shape in per_node[node])
            small = sum(max(1, shape[0]) * n for shape, n in there.items() if shape[0] < halved.unit)
            self.cp.add_hint(halved.opened, -(-small // halved.unit))
            for shape, variable in halved.counts.items():
                self.cp.add_hint(variable, there[shape])
