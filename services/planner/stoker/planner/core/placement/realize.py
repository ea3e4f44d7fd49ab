"""From how many in which cell to which GPUs: mixes go to nodes, members into mixes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stoker.planner.core.ordering import natural
from stoker.planner.core.placement.model import Expression, Model, shape_of
from stoker.planner.core.placement.packing import Shape, settle, stack
from stoker.planner.core.placement.state import State
from stoker.planner.core.placement.values import Member, Need, Placed

Value = Callable[[Expression], int]
"""Reads a variable off a solution."""


@dataclass(slots=True)
class _Slot:
    """Room for one member: its GPUs, and the deployment that has just these now, if any."""

    node: str
    shape: Shape
    gpus: tuple[int, ...]
    holder: str = ""


def realize(model: Model, value: Value) -> list[Placed] | None:
    """The replicas of a solution; None where a gang would need one node twice."""
    slots: defaultdict[tuple[int, Shape], list[_Slot]] = defaultdict(list)
    holders = {
        (member.node, member.gpus): old.deployment for old in model.loose for member in old.members if member.gpus
    }
    for slot in _slots(model, value):
        slot.holder = holders.get((slot.node, slot.gpus), slot.holder)
        slots[model.of[slot.node], slot.shape].append(slot)
    names = {need.deployment: _names(model, need) for need in model.needs}
    placed: list[Placed] = []
    # Gangs choose first: they need nodes that differ.
    for need in sorted(model.needs, key=lambda need: -need.members):
        for members in _chosen(model, need, value):
            taken = _take(model, need, members, slots)
            if taken is None:
                return None
            placed.append(Placed(next(names[need.deployment]), need.deployment, taken))
    return _named_as_before(model, placed)


def _slots(model: Model, value: Value) -> Iterator[_Slot]:
    """Every node gets a mix: its present one where a solution has it, so that what need not change does not."""
    now: defaultdict[str, list[_Slot]] = defaultdict(list)
    for placed in model.loose:
        shape = shape_of(model.base.needs[placed.deployment])
        for member in placed.members:
            now[member.node].append(_Slot(member.node, shape, member.gpus, placed.deployment))
    for (number, free), chosen in model.mixes.items():
        left = Counter({mix.shapes: value(variable) for mix, variable in chosen})
        rest = []
        for node in _nodes(model, number, free):
            shapes = tuple(sorted((slot.shape for slot in now[node]), reverse=True))
            if left[shapes] > 0:
                left[shapes] -= 1
                yield from now[node]
            else:
                rest.append(node)
        for node, shapes in zip(rest, left.elements(), strict=True):
            yield from _fresh(model.base, node, free, shapes)
    for (number, free), halved in model.halved.items():
        counts = Counter({shape: value(variable) for shape, variable in halved.counts.items()})
        room = free.bit_count()
        rest = []
        for node in _nodes(model, number, free):
            there = Counter(slot.shape for slot in now[node])
            # A node that is full may stay as it is, whatever the others do.
            if sum(max(1, gpus) * n for (gpus, _), n in there.items()) == room and there <= counts:
                counts -= there
                yield from now[node]
            else:
                rest.append(node)
        for node, shapes in zip(rest, stack(counts, len(rest), room), strict=True):
            yield from _fresh(model.base, node, free, shapes)


def _nodes(model: Model, cell: int, free: int) -> list[str]:
    return [node for node in model.shelf.cells[cell].nodes if model.base.free[node] == free]


def _fresh(base: State, node: str, free: int, shapes: tuple[Shape, ...]) -> Iterator[_Slot]:
    gpus = base.ground.facility.nodes[node].gpus
    for shape in shapes:
        found = settle(base.ground.layouts[node], free, shape)
        if found is None:
            raise AssertionError(f"{shapes} fitted on {node} and now does not")
        for position in found[0]:
            free &= ~(1 << position)
        yield _Slot(node, shape, tuple(gpus[position].index for position in found[0]) if shape[0] else ())


def _chosen(model: Model, need: Need, value: Value) -> Iterator[dict[int, int]]:
    """For each replica how many members are in which cell."""
    if need.members > 1:
        for gang in model.gangs[need.deployment]:
            members = {cell: value(variable) for cell, variable in gang.items() if value(variable)}
            if members:
                yield members
        return
    for (deployment, cell), variable in model.counts.items():
        if deployment == need.deployment:
            yield from ({cell: 1} for _ in range(value(variable)))


def _take(
    model: Model, need: Need, members: dict[int, int], slots: dict[tuple[int, Shape], list[_Slot]]
) -> tuple[Member, ...] | None:
    ground, taken = model.base.ground, []
    for cell, number in members.items():
        free = slots[cell, shape_of(need)]
        # What is its own first, what is another's last; then nodes with most slots: a gang needs different ones.
        per_node = Counter(slot.node for slot in free)
        free.sort(key=lambda s: (_claim(s, need), -per_node[s.node], ground.order[s.node], s.gpus))
        used: set[str] = set()
        mine: list[_Slot] = []
        for slot in free:
            if slot.node not in used and len(mine) < number:
                used.add(slot.node)
                mine.append(slot)
        if len(mine) < number:
            return None
        for slot in mine:
            free.remove(slot)
        taken += mine
    cells = model.shelf.cells
    taken.sort(
        key=lambda slot: (
            ground.fabric.of[slot.node][::-1],
            cells[model.of[slot.node]].scale_up,
            cells[model.of[slot.node]].rack,
            ground.order[slot.node],
        )
    )
    return tuple(Member(slot.node, slot.gpus) for slot in taken)


def _claim(slot: _Slot, need: Need) -> int:
    if slot.holder == need.deployment:
        return 0
    return 2 if slot.holder else 1


def _names(model: Model, need: Need) -> Iterator[str]:
    yield from sorted((p.replica for p in model.loose if p.deployment == need.deployment), key=natural)
    taken = {p.replica for p in model.loose} | model.base.placed.keys()
    standing = {p.replica for p in model.base.problem.standing if p.deployment == need.deployment}
    yield from sorted(standing - taken, key=natural)
    number = 0
    while True:
        name = f"{need.deployment}-{number}"
        if name not in taken and name not in standing and name not in model.base.problem.reserved:
            yield name
        number += 1


def _named_as_before(model: Model, placed: list[Placed]) -> list[Placed]:
    """Replicas on the very GPUs that one of their deployment has now keep its name."""
    names = {(old.deployment, old.members): old.replica for old in model.loose}
    kept = {names[new.deployment, new.members] for new in placed if (new.deployment, new.members) in names}
    pools: defaultdict[str, list[str]] = defaultdict(list)
    for new in placed:
        if new.replica not in kept:
            pools[new.deployment].append(new.replica)
    result = []
    for new in placed:
        name = names.get((new.deployment, new.members))
        result.append(Placed(name or pools[new.deployment].pop(0), new.deployment, new.members))
    return result
