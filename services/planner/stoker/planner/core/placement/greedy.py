"""Best fit, one replica after the other: the answer at once, and the start of every better one.

Gangs come first, then large members before small ones. Deployments that talk to each other get a home: the tightest
switch domain with room for all of it. Each replica takes the place that costs least by the order of the goals.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heapreplace
from itertools import count

from stoker.planner.core.ordering import natural
from stoker.planner.core.placement import gangs, homes
from stoker.planner.core.placement.cells import Cell, Shelf
from stoker.planner.core.placement.gpus import badness, choose
from stoker.planner.core.placement.ground import Ground
from stoker.planner.core.placement.prune import prune
from stoker.planner.core.placement.state import State
from stoker.planner.core.placement.values import Domain, Look, Member, Need, Placed, PlacementProblem, unwatched
from stoker.planner.core.placement.worth import kv_shares, stays, wanted_by_region, worth

Rank = tuple[float, ...]
_Class = tuple[int, int, int, int, int, list[tuple[int, str]]]

_TRIES = 3


@dataclass(frozen=True, slots=True)
class _Shares:
    """A pair as one side sees it: by tier, NVLink domains first, by how much the two sides' shares differ in each
    place, in parts of which each replica adds `step` and each is worth `rate` bytes per second."""

    rate: float
    step: int
    tiers: list[dict[int | str, int]]


def filled(ground: Ground, problem: PlacementProblem, look: Look = unwatched) -> State:
    """What stands, and a place for each replica that has none, as far as there is room.

    Where some find none, those are tried first once more, and again: the better of the outcomes counts.
    """
    stood = {old.replica for old in problem.standing}
    best, first = _filled(ground, problem, (), look), set[str]()
    for _ in range(_TRIES):
        short = {need.deployment for need in problem.needs if best.counts[need.deployment] < need.replicas}
        others = {p.deployment for p in best.placed.values() if p.replica not in stood} - short
        if not short or short <= first or not others:
            break
        first |= short
        other = _filled(ground, problem, first, look)
        if tuple(worth(other).values()) < tuple(worth(best).values()):
            best = other
    return best


def _filled(ground: Ground, problem: PlacementProblem, first: Collection[str], look: Look) -> State:
    """Where only some of a deployment's replicas find a place, it may have to give up more, so that no failure domain
    holds too large a share of them. What that leaves free is offered to the others."""
    state = State(ground, problem)
    for old in problem.standing:
        if old.deployment not in state.needs or stays(state, old):
            state.take(old)
    stood = set(state.placed)
    content: set[str] = set()
    while True:
        Greedy(state, look).run(content, first)
        given_up = prune(state)
        if not given_up:
            if content:
                _straighten(state, stood)
            return state
        content |= given_up


def _straighten(state: State, stood: Collection[str]) -> None:
    """Where a group got GPUs of several roots and one was given up beside it since: better ones of the same node."""
    for old in [one for one in state.placed.values() if one.replica not in stood]:
        need = state.needs[old.deployment]
        if need.tensor_parallel < 2 or not _badness(state, old, need):
            continue
        state.release(old.replica)
        found = [state.member(member.node, need) for member in old.members]
        anew = replace(old, members=tuple(each[0] for each in found if each is not None))
        better = None not in found and _badness(state, anew, need) < _badness(state, old, need)
        state.take(anew if better else old)


def _badness(state: State, placed: Placed, need: Need) -> int:
    layouts = state.ground.layouts
    return sum(badness(layouts[m.node], state.positions(m), need.tensor_parallel) for m in placed.members)


class Greedy:
    """The search on a state. `free_of` is the word of a limit that it does not keep at the moment."""

    def __init__(self, state: State, look: Look = unwatched) -> None:
        self.state = state
        self._look = look
        self.free_of = frozenset[str]()
        self.home: dict[int, int] = {}
        self._names: dict[str, Iterator[str]] = {}
        self._heaped: dict[str, int] = {}
        self._heaps: dict[str, list[tuple[Rank, int]]] = {}
        self._classes: dict[tuple[int, int, int], tuple[int, list[_Class]]] = {}
        self._paired = {name for n in state.problem.needs if n.pair for name in (n.deployment, n.pair.deployment)}

    @cached_property
    def shelf(self) -> Shelf:
        """What is free."""
        return Shelf(self.state)

    def run(self, content: Collection[str] = (), first: Collection[str] = ()) -> None:
        """Place all that is missing, `first` these, but nothing of those that have to be `content` with what they
        have."""
        groups = _groups([need for need in self.state.problem.needs if need.deployment not in content])
        for group in sorted(groups, key=lambda group: not any(need.deployment in first for need in group)):
            if all(self.state.counts[need.deployment] >= need.replicas for need in group):
                continue
            talks = len(group) > 1 or group[0].members > 1
            hopeless: set[str] = set()
            for need in _interleaved(self.state, group):
                if need.deployment in hopeless:
                    continue
                self._look()
                if talks and not self.home:
                    self.home = homes.best(self, group)
                placed = self.add(need)
                if placed is None and need.members == 1:
                    hopeless.add(need.deployment)  # what others take meanwhile makes no room
                if placed is None or any(self.is_away(member.node) for member in placed.members):
                    self.home = {}
            self.home = {}

    def add(self, need: Need) -> Placed | None:
        """Place one more replica, or return None."""
        members = self.find(need)
        if members is None:
            return None
        names = self._names.setdefault(need.deployment, _free_names(self.state, need))
        placed = Placed(next(names), need.deployment, members)
        self.state.take(placed)
        self.shelf.sync(member.node for member in members)
        return placed

    def find(self, need: Need) -> tuple[Member, ...] | None:
        """The best place for one more replica; books nothing."""
        if need.members > 1:
            return gangs.find(self, need)
        return self._scan(need) if need.deployment in self._paired or self.home else self._next(need)

    def find_without(self, limit: str, need: Need) -> tuple[Member, ...] | None:
        """The best place if `limit` were not kept: tells whether it is in the way."""
        self.free_of = frozenset({limit})
        self._heaped.clear()
        try:
            return self.find(need)
        finally:
            self.free_of = frozenset()
            self._heaped.clear()

    # --- replicas of one member ---

    def _scan(self, need: Need) -> tuple[Member, ...] | None:
        """The best cell at home, or else anywhere."""
        shares = self._shares(need)
        fitting = self.shelf.fitting(need)
        at_home = [cell for cell in fitting if not any(self._away(cell.path))]
        for cells in (at_home, fitting):
            ranked = ((self.rank(cell, need, shares), cell.number) for cell in cells)
            best = min(((rank, number) for rank, number in ranked if rank is not None), default=None)
            if best is not None:
                return self._on(self.shelf.cells[best[1]], need)
        return None

    def _next(self, need: Need) -> tuple[Member, ...] | None:
        """As `_scan`, for what talks to nobody: while its fullest rack stays as full, places only get worse."""
        if self._heaped.get(need.deployment) != self.state.worst[need.deployment]:
            self._heaped[need.deployment] = self.state.worst[need.deployment]
            ranked = ((self.rank(cell, need, []), cell.number) for cell in self.shelf.fitting(need))
            self._heaps[need.deployment] = [(rank, number) for rank, number in ranked if rank is not None]
            heapify(self._heaps[need.deployment])
        heap = self._heaps[need.deployment]
        while heap:
            rank, number = heap[0]
            now = self.rank(self.shelf.cells[number], need, [])
            if now == rank:
                return self._on(self.shelf.cells[number], need)
            if now is None:
                heappop(heap)
            else:
                heapreplace(heap, (now, number))
        return None

    def rank(self, cell: Cell, need: Need, shares: Sequence[_Shares]) -> Rank | None:
        """How bad a place in `cell` is for one more replica of a single member; None where there is none."""
        found = self._best_class(cell, need)
        if found is None:
            return None
        bad, before, after, left, node = found
        touched = self.state.touched[need.deployment]
        over, leaving = self._kv(cell, shares) if shares else (0.0, 0.0)
        too_many_there = False
        if need.regions:
            region = self.state.ground.region(node)
            too_many_there = touched["region", region] >= wanted_by_region(need).get(region, 0)
        cost = self.state.ground.gpu_cost(node)
        broken = self._broken(cell, need, after - before) if need.gpus else 0
        worse = touched["rack", cell.rack] >= self.state.worst[need.deployment]
        return bad, over, leaving, too_many_there, worse, broken, cost, left

    def _broken(self, cell: Cell, need: Need, change: int) -> int:
        """GPUs that will no longer serve a member of the largest size, for want of company or of power, but could run
        something; `change` is by how many whole members fewer the node has room."""
        size, draw = self.state.largest_member(cell.nodes[0]), self.state.ground.gpu_draw(None, cell.nodes[0])
        room = self.state.headroom(cell.rack)
        if room is None or not draw:
            return -need.gpus - size * change
        wholes, powered = self.shelf.wholes(cell.rack, size), room // draw
        fewer = min(wholes + change, (powered - need.gpus) // size) - min(wholes, powered // size)
        return -need.gpus - size * fewer

    def _best_class(self, cell: Cell, need: Need) -> tuple[int, int, int, int, str] | None:
        """The node of `cell` that suits best: how badly groups lie, whole members of the largest size for which there
        is room before and after, GPUs left, its name."""
        if not self.open(cell.nodes[0], need):
            return None
        for bad, _, before, after, left, nodes in self._ranked_classes(cell, need):
            for _, node in nodes:
                if self.carries(node, need):
                    return bad, before, after, left, node
        return None

    def _ranked_classes(self, cell: Cell, need: Need) -> list[_Class]:
        """What `_best_class` goes through, the best first; kept until the cell changes."""
        key = (cell.number, need.gpus, need.tensor_parallel)
        version, ranked = self._classes.get(key, (-1, []))
        if version == self.shelf.version[cell.number]:
            return ranked
        size, layout = self.state.largest_member(cell.nodes[0]) or 1, self.state.ground.layouts[cell.nodes[0]]
        ranked = []
        for free, nodes in self.shelf.classes(cell):
            found = choose(layout, free, need.gpus, need.tensor_parallel) if need.gpus else ((), 0)
            if found is not None:
                left = free.bit_count() - need.gpus
                before, after = (left + need.gpus) // size, left // size
                ranked.append((found[1], before - after, before, after, left if need.gpus else -left, nodes))
        ranked.sort()
        self._classes[key] = self.shelf.version[cell.number], ranked
        return ranked

    def _on(self, cell: Cell, need: Need) -> tuple[Member, ...]:
        found = self._best_class(cell, need)
        member = self.state.member(found[-1], need) if found else None
        if member is None:
            raise AssertionError(f"{need.deployment} fitted into rack {cell.rack} and now does not")
        return (member[0],)

    def open(self, node: str, need: Need) -> bool:
        """Whether the failure domains of `node`, and what feeds its rack, have room for one more member."""
        if "spread" not in self.free_of and self.state.full(need, node, but=Domain.NODE.value) is not None:
            return False
        limit = self.state.lacks(self.state.ground.facility.nodes[node].rack, self.state.draw_of(need, node))
        return limit is None or self.state.ground.limits[limit].kind in self.free_of

    def carries(self, node: str, need: Need) -> bool:
        """Whether `node` itself has the power and the cables for one more member, and may fail with it."""
        return (
            (self.state.power_left[node] >= self.state.draw_of(need, node) or "power" in self.free_of)
            and (self.state.node_carries(need, node) or "bandwidth" in self.free_of)
            and ("spread" in self.free_of or Domain.NODE not in need.spread_over or not self.state.full(need, node))
        )

    # --- what talks ---

    def is_away(self, node: str) -> bool:
        """Whether `node` is outside of the home of what is being placed."""
        return any(self._away(self.state.ground.fabric.of[node]))

    def _away(self, path: tuple[int, ...]) -> list[bool]:
        return [path[tier] != number for tier, number in self.home.items()]

    def _shares(self, need: Need) -> list[_Shares]:
        """The pairs in which `need` takes part, as they stand."""
        found = []
        for other in self.state.problem.needs:
            decode = self.state.needs.get(other.pair.deployment) if other.pair else None
            if other.pair is None or decode is None or need not in (other, decode):
                continue
            total = max(1, other.replicas * other.members) * max(1, decode.replicas * decode.members)
            step = total // (need.replicas * need.members) * (1 if need is other else -1)
            tiers = [
                {place: int(share * total) for place, share in kv_shares(self.state, other, tier).items()}
                for tier in range(-1, self.state.ground.tiers)
            ]
            found.append(_Shares(other.pair.rate / total, step, tiers))
        return found

    def _kv(self, cell: Cell, shares: Sequence[_Shares]) -> tuple[float, float]:
        """What a replica in `cell` adds to KV over narrow uplinks, and to all KV that leaves a domain."""
        over = leaving = 0.0
        for pair in shares:
            for tier, held in enumerate(pair.tiers, start=-1):
                place = cell.scale_up if tier < 0 else cell.path[tier]
                if place == "":
                    continue
                before = held.get(place, 0)
                change = pair.rate * (abs(before + pair.step) - abs(before))
                leaving += change
                if not isinstance(place, str) and self.state.ground.fabric.domains[place].oversubscribed:
                    over += change
        return over, leaving


def _free_names(state: State, need: Need) -> Iterator[str]:
    """Names for the next replicas of `need`: of those that lost their place first, then the lowest numbers."""
    mine = {old.replica for old in state.problem.standing if old.deployment == need.deployment}
    yield from sorted(mine - state.placed.keys(), key=natural)
    for number in count():
        name = f"{need.deployment}-{number}"
        if name not in mine and name not in state.problem.reserved and name not in state.placed:
            yield name


def _groups(needs: Sequence[Need]) -> list[list[Need]]:
    """Deployments that talk to each other together, those that are hard to place first."""
    groups = {need.deployment: [need] for need in needs}
    for need in needs:
        if need.pair and need.pair.deployment in groups:
            one, other = groups[need.deployment], groups[need.pair.deployment]
            if one is not other:
                one += other
                groups.update(dict.fromkeys((n.deployment for n in other), one))

    def order(group: list[Need]) -> tuple[object, ...]:
        size = sum(need.replicas * need.members * need.gpus for need in group)
        largest = max(need.gpus for need in group)
        return (
            -max(need.members * need.gpus for need in group if need.members > 1 or need.gpus == largest),
            -len(group),
            -size,
            min(natural(need.deployment) for need in group),
        )

    return sorted({id(group): group for group in groups.values()}.values(), key=order)


def _interleaved(state: State, group: Sequence[Need]) -> list[Need]:
    """Each need as often as it lacks a replica, mixed so that pairs grow together."""
    missing = {need.deployment: max(0, need.replicas - state.counts[need.deployment]) for need in group}
    turns = [
        ((turn + 0.5) / missing[n.deployment], -n.gpus, n) for n in group for turn in range(missing[n.deployment])
    ]
    return [need for *_, need in sorted(turns, key=lambda turn: (turn[0], turn[1], natural(turn[2].deployment)))]
