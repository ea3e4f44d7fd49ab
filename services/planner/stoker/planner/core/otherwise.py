"""A facility and a placement as they might be: nodes that fail or are added, other places for a replica."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from stoker.planner.core import placement
from stoker.planner.core.elevation import Elevation
from stoker.planner.core.facility.values import Facility, Gpu, Node
from stoker.planner.core.placement import Conflict, Member, Need, Placed, Placement, PlacementProblem, Score
from stoker.planner.core.placement.ground import Ground


def nodes_named(facility: Facility, names: Iterable[str]) -> frozenset[str]:
    """The nodes that are named, and those in racks that are. Raises KeyError with a name that is neither."""
    found: set[str] = set()
    for name in names:
        if name in facility.nodes:
            found.add(name)
        elif name in facility.racks:
            found |= {node.name for node in facility.nodes.values() if node.rack == name}
        else:
            raise KeyError(name)
    return frozenset(found)


def with_nodes(facility: Facility, node_type: str, rack: str, count: int) -> Facility:
    """The facility with more nodes in a rack, cabled and laid out as one of that type there, or else anywhere."""
    kind = facility.node_types[node_type]
    alike = [node for node in facility.nodes.values() if node.type == node_type]
    like = next((node for node in alike if node.rack == rack), alike[0] if alike else None)
    nodes, links = dict(facility.nodes), list(facility.links)
    free = (f"{rack}-new{number}" for number in range(1, len(nodes) + count + 1))
    for name in [name for name in free if name not in nodes][:count]:
        gpus = tuple(Gpu(index, name) for index in range(kind.gpus))
        if like is not None:
            gpus = tuple(replace(gpu, scale_up=_renamed(gpu.scale_up, like, rack, name)) for gpu in like.gpus)
            links += [replace(link, lower=name) for link in facility.links if link.lower == like.name]
        nodes[name] = Node(name, rack, node_type, gpus, labels=like.labels if like is not None else {})
    return replace(facility, nodes=nodes, links=tuple(links))


def room_for(facility: Facility, node_type: str, rack: str) -> int:
    """How many more nodes of a type find free units in a rack, beside those that stand there."""
    standing = (node for node in facility.nodes.values() if node.rack == rack)
    elevation = Elevation(facility.racks[rack], standing, facility.node_types)
    return elevation.room(facility.node_types[node_type].height_u)


def _renamed(scale_up: str, like: Node, rack: str, name: str) -> str:
    """The NVLink domain of a node that is like another: shared with the rack's, or one of its own."""
    if not scale_up:
        return ""
    spans = like.rack == rack and like.name not in scale_up
    return scale_up if spans else name


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Another place for a replica: what the whole placement would be worth with it there."""

    members: tuple[Member, ...]
    scores: tuple[Score, ...]


@dataclass(frozen=True, slots=True)
class Alternatives:
    """Places beside the one a replica has, best first. `conflicts` say why there are no more; empty where there may
    be."""

    found: tuple[Elsewhere, ...] = ()
    conflicts: tuple[Conflict, ...] = ()


def alternatives(
    problem: PlacementProblem, placed: Sequence[Placed], replica: Placed, surface: Ground, most: int
) -> Alternatives:
    """Where else a replica could be while all others stay: up to `most` places, each on other nodes than those
    before."""
    others = tuple(each for each in placed if each.replica != replica.replica)
    needs = _as_placed(problem, placed)
    passed = {member.node for member in replica.members}
    found: list[Elsewhere] = []
    while len(found) < most:
        asked = replace(problem, needs=needs, standing=others, movable=frozenset(), closed=problem.closed | passed)
        made = placement.greedy(asked, ground=surface)
        here = next((each for each in made.placed if each.replica in made.fresh), None)
        if here is None:
            return Alternatives(tuple(found), _conflicts(made, replica.deployment))
        found.append(Elsewhere(here.members, made.scores))
        passed |= {member.node for member in here.members}
    return Alternatives(tuple(found))


def one_more(problem: PlacementProblem, placed: Sequence[Placed], deployment: str, surface: Ground) -> Alternatives:
    """Where one more replica of a deployment would be, beside all that is placed."""
    needs = _as_placed(problem, placed)
    needs = tuple(
        replace(need, replicas=need.replicas + 1) if need.deployment == deployment else need for need in needs
    )
    made = placement.greedy(
        replace(problem, needs=needs, standing=tuple(placed), movable=frozenset()), ground=surface
    )
    new = [each for each in made.placed if each.replica in made.fresh]
    found = tuple(Elsewhere(each.members, made.scores) for each in new)
    return Alternatives(found, _conflicts(made, deployment))


def _as_placed(problem: PlacementProblem, placed: Sequence[Placed]) -> tuple[Need, ...]:
    """As many of each deployment as have a place."""
    counts = Counter(each.deployment for each in placed)
    return tuple(replace(need, replicas=counts[need.deployment]) for need in problem.needs)


def _conflicts(made: Placement, deployment: str) -> tuple[Conflict, ...]:
    return next((each.conflicts for each in made.unplaced if each.deployment == deployment), ())


def first_difference(scores: Sequence[Score], than: Sequence[Score]) -> tuple[Score, Score] | None:
    """The first goal in which `scores` differ from `than`, with both values; None where they are alike."""
    known = {score.goal: score for score in than}
    for score in scores:
        other = known.get(score.goal)
        if other is not None and abs(score.value - other.value) > 1e-9 * max(1.0, abs(other.value)):
            return score, other
    return None
