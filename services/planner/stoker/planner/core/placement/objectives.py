"""The goals as sums over a model's variables, in whole numbers of a unit each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stoker.planner.core.placement.cells import Cell
from stoker.planner.core.placement.model import Expression, Model
from stoker.planner.core.placement.values import Domain, Goal, Need
from stoker.planner.core.placement.worth import wanted_by_region

KILOBYTES = 1_000.0


@dataclass(frozen=True, slots=True)
class Objective:
    """`value` times `unit` is the goal's value, less what no choice of the model changes. `exact` where it is just
    that, and a bound on it bounds the goal."""

    goal: Goal
    value: Expression
    unit: float
    exact: bool = True


def objectives(model: Model) -> Iterator[Objective]:
    """In the order of the goals; those that the model does not see (rails) are not among them."""
    yield Objective(Goal.SHORTFALL, _shortfall(model), 1.0)
    yield Objective(Goal.LOCALITY, _straddling(model), 1.0)
    over, leaving = _traffic(model)
    yield Objective(Goal.OVERSUBSCRIBED, over, KILOBYTES)
    yield Objective(Goal.ADJACENCY, leaving, KILOBYTES)
    yield Objective(Goal.REGIONS, _regions(model), 1.0)
    yield Objective(Goal.SPREAD, _worst(model), 1.0)
    yield Objective(Goal.STRANDED, _stranded(model), 1.0 / model.base.ground.quanta, exact=_plenty(model))
    yield Objective(Goal.COST, _cost(model), 0.01)
    if model.base.problem.movable:
        yield Objective(Goal.MOVES, _moves(model), 1.0, exact=False)


def _shortfall(model: Model) -> Expression:
    return sum(need.weight * (model.wanted[need.deployment] - model.placed[need.deployment]) for need in model.needs)


def _straddling(model: Model) -> Expression:
    return sum(mix.straddling * variable for chosen in model.mixes.values() for mix, variable in chosen)


def _traffic(model: Model) -> tuple[Expression, Expression]:
    """Over narrow uplinks, and of KV that leaves racks and domains; keeps uplinks below what they carry."""
    domains = model.base.ground.fabric.domains
    over: list[Expression] = []
    leaving: list[Expression] = []
    out: dict[int, list[Expression]] = {}
    coming: dict[int, list[Expression]] = {}
    for need in model.needs:
        if need.members > 1 and need.peer_rate:
            for number, crossing in _rings(model, need):
                rate = round(need.peer_rate / KILOBYTES)
                out.setdefault(number, []).append(rate * crossing)
                coming.setdefault(number, []).append(rate * crossing)
                if domains[number].oversubscribed:
                    over.append(2 * rate * crossing)
    for need in model.base.problem.needs:
        for place, positive, negative, worth in _pair(model, need):
            leaving.append(worth * positive)
            if isinstance(place, int):
                out.setdefault(place, []).append(worth * positive)
                coming.setdefault(place, []).append(worth * negative)
                if domains[place].oversubscribed:
                    over.append(worth * (positive + negative))
    for flows in (out, coming):
        for number, sums in flows.items():
            if domains[number].up:
                carried = int((domains[number].up - model.base.rings[number]) / KILOBYTES)
                model.cp.add(sum(sums) <= max(0, carried))
    return sum(over), sum(leaving)


def _rings(model: Model, need: Need) -> Iterator[tuple[int, Expression]]:
    """For each gang and switch domain whether its ring goes through the domain's uplinks."""
    for number in range(len(model.gangs[need.deployment])):
        touches = model.touches[need.deployment, number]
        for tier in range(model.base.ground.tiers):
            own = {int(place): t for (kind, place), t in touches.items() if kind == f"tier{tier}"}
            if len(own) < 2:
                continue
            crossing = model.cp.new_bool_var("")
            there = model.there[need.deployment][number]
            model.cp.add(sum(own.values()) - there <= (min(need.members, len(own)) - 1) * crossing)
            for domain, touched in own.items():
                through = model.cp.new_bool_var("")
                model.cp.add(through >= touched + crossing - 1)
                yield domain, through


def _pair(model: Model, need: Need) -> Iterator[tuple[str | int, Expression, Expression, int]]:
    """For each NVLink and switch domain by how much prefill exceeds decode there, the other way, and what one of it
    is worth, in kB/s."""
    decode = model.base.needs.get(need.pair.deployment) if need.pair else None
    if need.pair is None or decode is None or not need.pair.rate:
        return
    if not model.wanted[need.deployment] and not model.wanted[decode.deployment]:
        return
    prefills, decodes = need.replicas * need.members, decode.replicas * decode.members
    worth = round(need.pair.rate / KILOBYTES / max(1, prefills * decodes))
    for tier in range(-1, model.base.ground.tiers):
        held = model.base.members_by(need.deployment, tier)
        held_decode = model.base.members_by(decode.deployment, tier)
        for (_, place), cells in model.by_place("scale_up" if tier < 0 else f"tier{tier}"):
            prefill = _members(model, need, cells) + held[place]
            decoding = _members(model, decode, cells) + held_decode[place]
            most = prefills * decodes
            positive, negative = model.cp.new_int_var(0, most, ""), model.cp.new_int_var(0, most, "")
            model.cp.add(positive - negative == decodes * prefill - prefills * decoding)
            yield place, positive, negative, worth


def _members(model: Model, need: Need, cells: list[int]) -> Expression:
    return model.members_in(need, cells) if model.wanted[need.deployment] else 0


def _regions(model: Model) -> Expression:
    excess: list[Expression] = []
    for need in model.needs:
        wanted = wanted_by_region(need)
        if not wanted:
            continue
        for place, cells in model.by_place(Domain.REGION.value):
            over = model.cp.new_int_var(0, need.replicas, "")
            held = model.base.touched[need.deployment][place]  # type: ignore[index]
            model.cp.add(over >= held + model.replicas_in(need, place, cells) - wanted.get(str(place[1]), 0))
            excess.append(over)
    return sum(excess)


def _worst(model: Model) -> Expression:
    worst: list[Expression] = []
    racks = list(model.by_place(Domain.RACK.value))
    for need in model.needs:
        touched, held = model.base.touched[need.deployment], model.base.worst[need.deployment]
        most = model.cp.new_int_var(held, max(held, need.replicas), "")
        # Implied by the rest, and what a relaxation does not see by itself.
        everywhere = model.base.counts[need.deployment] + model.placed[need.deployment]
        model.cp.add(len(model.all_racks) * most >= everywhere)
        for place, cells in racks:
            model.cp.add(most >= touched[place] + model.replicas_in(need, place, cells))  # type: ignore[index]
        worst.append(most)
    return sum(worst)


def _stranded(model: Model) -> Expression:
    """Of each rack what its free GPUs could draw, less what whole members of the largest size could.

    Both the free GPUs and the power left shrink by one for each GPU that is taken: only how many whole members still
    fit is for the search to find.
    """
    by_kind: dict[tuple[int, int], list[list[Cell]]] = {}
    for cells in _by_rack(model):
        node = cells[0].nodes[0]
        by_kind.setdefault((model.base.largest_member(node), model.base.ground.gpu_draw(None, node)), []).append(
            cells
        )
    parts: list[Expression] = []
    for (size, draw), racks in by_kind.items():
        found = [_rack(model, cells, size, draw) for cells in racks]
        wholes = [fitting for _, _, fitting in found]
        taken = sum(there for _, there, _ in found)
        if len(by_kind) == 1:
            # The same, but known as soon as all have a place.
            taken = sum(need.gpus * need.members * model.placed[need.deployment] for need in model.needs)
        rest = sum(powered for powered, _, _ in found) - taken
        # As one number: it goes in steps of a whole member, which bounds the rest better than all parts do.
        total = model.cp.new_int_var(0, 1 << 20, "")
        model.cp.add(total == sum(wholes))
        model.cp.add(size * total <= rest)
        parts.append(draw * (rest - size * total))
    return sum(parts)


def _by_rack(model: Model) -> list[list[Cell]]:
    found: dict[str, list[Cell]] = {}
    for cell in model.cells:
        if model.base.ground.layouts[cell.nodes[0]]:
            found.setdefault(cell.rack, []).append(cell)
    return list(found.values())


def _rack(model: Model, cells: list[Cell], size: int, draw: int) -> tuple[int, Expression, Expression]:
    """Of one rack: GPUs that are free and have power, how many are taken of them, and how many members of `size`
    still fit then."""
    free = sum(model.base.free[node].bit_count() for cell in cells for node in cell.nodes)
    room = model.base.headroom(cells[0].rack)
    powered = free if room is None or not draw else min(free, room // draw)
    own = {cell.number for cell in cells}
    taken = sum(need.gpus * model.members_in(need, own) for need in model.needs)
    fitting = sum(_wholes(model, cell, size) for cell in cells)
    if powered == free:
        return powered, taken, fitting
    whole = model.cp.new_int_var(0, max(0, powered // size), "")
    model.cp.add(whole <= fitting)
    model.cp.add(size * whole + taken <= powered)
    return powered, taken, whole


def _wholes(model: Model, cell: Cell, size: int) -> Expression:
    mixed = (
        mix.left // size * variable
        for (number, _), chosen in model.mixes.items()
        if number == cell.number
        for mix, variable in chosen
    )
    halved = (
        own.units - own.opened - sum(count for shape, count in own.counts.items() if shape[0] == own.unit)
        for (number, _), own in model.halved.items()
        if number == cell.number
    )
    return sum(mixed) + sum(halved)


def _plenty(model: Model) -> bool:
    """Whether what racks share carries all their GPUs, racks are of one kind, and no deployment draws otherwise: then
    what is stranded in one rack is told by this rack alone."""
    base = model.base
    kinds: dict[str, set[tuple[str, int]]] = {}
    most: dict[str, int] = {}
    for cell in model.cells:
        node = cell.nodes[0]
        kinds.setdefault(cell.rack, set()).add((base.ground.type_of(node).name, len(base.ground.layouts[node])))
        free = sum(base.free[name].bit_count() for name in cell.nodes)
        most[cell.rack] = most.get(cell.rack, 0) + free * base.ground.gpu_draw(None, node)
    shared = (
        (number, limit)
        for number, limit in enumerate(base.ground.limits)
        if len(limit.weights.keys() & most.keys()) > 1
    )
    return (
        all(len(own) == 1 for own in kinds.values())
        and all(need.busy_power is None for need in base.problem.needs)
        and all(
            sum(weight * most.get(rack, 0) for rack, weight in limit.weights.items()) <= base.slack[number]
            for number, limit in shared
        )
    )


def _cost(model: Model) -> Expression:
    prices = {model.base.ground.gpu_cost(cell.nodes[0]) for cell in model.cells}
    if len(prices) == 1:
        return 0
    return sum(
        round(100 * need.gpus * model.base.ground.gpu_cost(cell.nodes[0])) * model.members_in(need, [cell.number])
        for need in model.needs
        for cell in model.cells
    )


def _moves(model: Model) -> Expression:
    """Movable replicas that leave their cell; within it they keep their place."""
    movable = model.base.problem.movable
    moved: list[Expression] = []
    for need in model.needs:
        own = {p.replica for p in model.loose if p.deployment == need.deployment and p.replica in movable}
        if need.members > 1 or not own:
            continue
        by_cell: dict[int, int] = {}
        for placed in model.base.problem.standing:
            if placed.replica in own and placed.members[0].node in model.of:
                number = model.of[placed.members[0].node]
                by_cell[number] = by_cell.get(number, 0) + 1
        for number, stood in by_cell.items():
            left = model.cp.new_int_var(0, stood, "")
            model.cp.add(left >= stood - model.members_in(need, [number]))
            moved.append(left)
    return sum(moved)
