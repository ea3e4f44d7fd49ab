"""Between the loop and the placement: who stands, who leaves, how many more of each, and where they would go."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from stoker.planner.core import placement
from stoker.planner.core.facility.observed import ObservedGpu, ObservedNode, facility_of, merged
from stoker.planner.core.facility.values import Facility
from stoker.planner.core.ordering import natural
from stoker.planner.core.placement import Clock, Domain, Member, Need, Pair, Placed, PlacementProblem
from stoker.planner.core.placement.ground import Ground, ground
from stoker.planner.core.units import Bytes, BytesPerSecond
from stoker.planner.core.values import Assignment, Deployment, Node, Problem, Wanted

_LEAVING = " (leaving)"
"""Behind a deployment's name: its replicas that hold GPUs, power and cables, and are not counted as its own."""

_HELD = "(held)"
"""What stands in part only: what is left of it is held, and nobody needs it."""


@dataclass(frozen=True, slots=True)
class Found:
    """Places by deployment, and where there were not enough, why, in words."""

    places: Mapping[str, Sequence[tuple[Member, ...]]] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)


def ground_of(nodes: Iterable[Node]) -> Ground:
    """What agents alone tell: no limit on power, each host in a rack of its own where no label names one."""
    return ground(facility_of(_observed(nodes)))


def merged_with(facility: Facility, nodes: Iterable[Node]) -> Facility:
    """A facility as written, with the GPUs that `nodes` have."""
    return merged(facility, _observed(nodes))


def whole(problem: Problem, surface: Ground, counts: Mapping[str, int]) -> PlacementProblem:
    """The fleet as one problem: what stands, and what is lacking to `counts` replicas of each deployment."""
    standing = placement_problem(problem, surface, {}, problem.assignments).standing
    have = Counter(placed.deployment for placed in standing)
    lacking = {name: max(0, count - have[name]) for name, count in counts.items()}
    return placement_problem(problem, surface, lacking, problem.assignments)


def _observed(nodes: Iterable[Node]) -> list[ObservedNode]:
    return [
        ObservedNode(node.id, tuple(ObservedGpu(index, "", Bytes(0)) for index in sorted(node.gpus)), node.labels)
        for node in nodes
    ]


def search(
    problem: Problem,
    wanted: Mapping[str, int],
    standing: Iterable[Assignment],
    leaving: Collection[str] = (),
    *,
    only: Collection[str] | None = None,
    search_s: float = 0.0,
    search_least: int = 1,
    clock: Clock | None = None,
) -> Found:
    """Places for `wanted` more replicas of each deployment beside those that are `standing`, which do not move. Those
    in `leaving` hold what they have and count as nobody's. With `only`, on these nodes alone. A batch of
    `search_least` with GPUs is searched for at most `search_s` seconds, and so is a smaller one of which something
    finds no place; others get the first places found.
    """
    surface = problem.ground or ground_of(problem.nodes)
    asked = placement_problem(problem, surface, wanted, standing, leaving)
    if only is not None:
        asked = replace(asked, closed=asked.closed | (surface.facility.nodes.keys() - set(only)))
    batch = sum(wanted.get(need.deployment, 0) for need in asked.needs if need.gpus)
    # One replica of one node has no place where the first look finds none.
    nodes = sum(wanted.get(need.deployment, 0) * need.members for need in asked.needs if need.gpus)
    made = placement.greedy(asked, ground=surface) if search_s <= 0 or batch < search_least else None
    if made is None or (search_s > 0 and nodes > 1 and made.unplaced):
        made = placement.place(asked, time_limit_s=search_s, ground=surface, clock=clock)
    places: defaultdict[str, list[tuple[Member, ...]]] = defaultdict(list)
    for each in sorted((p for p in made.placed if p.replica in made.fresh), key=lambda p: natural(p.replica)):
        places[each.deployment].append(each.members)
    return Found(places, {each.deployment: each.words for each in made.unplaced})


def placement_problem(
    problem: Problem,
    surface: Ground,
    wanted: Mapping[str, int],
    standing: Iterable[Assignment],
    leaving: Collection[str] = (),
) -> PlacementProblem:
    """The same as the placement sees it: each deployment needs what stays of it and `wanted` more."""
    shut = {node.id for node in problem.nodes if node.draining} | problem.settling | problem.unlisted
    absent = surface.facility.nodes.keys() - {node.id for node in problem.nodes}
    placed: list[Placed] = []
    staying: Counter[str] = Counter()
    leavers: set[str] = set()
    for assignment in standing:
        name = assignment.deployment
        if not _stands(assignment, surface):
            name = _HELD
        elif assignment.wanted is Wanted.RUN and assignment.replica not in leaving:
            staying[name] += 1
        else:
            leavers.add(name)
            name += _LEAVING
        placed.append(Placed(assignment.replica, name, assignment.members))
    counts = {d.name: staying[d.name] + wanted.get(d.name, 0) for d in problem.deployments}
    closed = frozenset(shut | absent)
    spread = default_spread(surface, closed) if problem.applied else frozenset()
    needs = [need_of(d, counts, spread) for d in problem.deployments]
    needs += [_unneeded(need) for need in needs if need.deployment in leavers]
    return PlacementProblem(
        facility=surface.facility,
        needs=tuple(needs),
        standing=tuple(placed),
        closed=closed,
        slots={node.id: node.cpu_slots for node in problem.nodes if not node.gpus},
        engines={node.id: node.engines for node in problem.nodes},
        reserved=frozenset(each.replica for each in placed),
    )


def need_of(deployment: Deployment, counts: Mapping[str, int], spread: frozenset[Domain]) -> Need:
    """What `counts` replicas of a deployment ask for; `spread` is over what, where it does not say."""
    wishes, replicas = deployment.wishes, counts[deployment.name]
    rate = BytesPerSecond(wishes.pair_rate * replicas)
    return Need(
        deployment=deployment.name,
        replicas=replicas,
        gpus=deployment.gpus_per_node,
        members=deployment.gang_size,
        tensor_parallel=wishes.tensor_parallel or max(1, deployment.gpus_per_node),
        gpu_types=wishes.gpu_types,
        node_selector=deployment.node_selector,
        engine=deployment.engine,
        busy_power=wishes.busy_power,
        peer_rate=wishes.peer_rate,
        pair=Pair(wishes.pair, rate) if wishes.pair in counts and replicas and counts[wishes.pair] else None,
        spread_over=spread if wishes.spread_over is None else wishes.spread_over,
        largest_share=wishes.largest_share or 0.5,
        # Of three in two racks one has two: not placing the third would leave no more when that rack is lost.
        largest_share_if_short=(replicas + 1) // 2 / replicas if replicas > 2 and not wishes.largest_share else None,
        regions=wishes.regions,
        near=wishes.near,
        reach_s=wishes.reach_s,
        weight=wishes.weight,
    )


def default_spread(surface: Ground, closed: Collection[str] = ()) -> frozenset[Domain]:
    """Racks and sources of power, each where not all nodes fail with one: nothing is spread over a single one.

    Of the nodes that are not `closed`: where only one rack is left, half of the replicas are not kept out of it.
    """
    kinds = set()
    for kind in (Domain.RACK, Domain.SOURCE):
        keys = [
            frozenset(key for key in keys if key[0] == kind.value)
            for node, keys in surface.keys.items()
            if node not in closed
        ]
        if keys and not frozenset.intersection(*keys):
            kinds.add(kind)
    return frozenset(kinds)


def _stands(assignment: Assignment, surface: Ground) -> bool:
    """Whether all its nodes and GPUs are there."""
    nodes = surface.facility.nodes
    return all(
        member.node in nodes and set(member.gpus) <= {gpu.index for gpu in nodes[member.node].gpus}
        for member in assignment.members
    )


def _unneeded(need: Need) -> Need:
    """Those of a deployment that leave: they draw and send as the others do, and no more of them are wanted."""
    return replace(need, deployment=need.deployment + _LEAVING, replicas=0, pair=None, spread_over=frozenset())
