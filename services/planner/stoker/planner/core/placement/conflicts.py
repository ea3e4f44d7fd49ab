"""Why a replica has no place: the limits that are in its way, with their numbers, and what would help.

A limit is in conflict where the replica finds a place once that limit alone is not kept. Where no single one is to
blame, they are all told together with what is free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from stoker.planner.core.placement import gangs
from stoker.planner.core.placement.cells import unfit
from stoker.planner.core.placement.greedy import Greedy
from stoker.planner.core.placement.state import State, most_in_one
from stoker.planner.core.placement.values import Conflict, Look, Need, Unplaced, unwatched

RELAXED = ("power", "cooling", "spread", "bandwidth", "scale_up")
"""What is left out in turn, the others kept."""

_UNFIT = {
    "lost": "are lost",
    "engine": "do not offer its engine",
    "selector": "lack its labels",
    "gpu_type": "have other GPUs",
    "size": "have too few GPUs, or none, or GPUs that nobody asks for",
    "reach": "are too far from its region",
    "closed": "are closed to new replicas",
}


def unplaced(state: State, look: Look = unwatched) -> tuple[Unplaced, ...]:
    """Of each deployment that lacks replicas: how many, why, and what would help."""
    missing = [need for need in state.problem.needs if state.counts[need.deployment] < need.replicas]
    search = Greedy(state)
    return tuple(_why(search, need, look) for need in missing)


def _why(search: Greedy, need: Need, look: Look) -> Unplaced:
    look()
    conflicts, remedies = [], []
    for conflict, remedy in _conflicts(search, need):
        conflicts.append(conflict)
        remedies.append(remedy)
    lacking = need.replicas - search.state.counts[need.deployment]
    return Unplaced(need.deployment, lacking, tuple(conflicts), " or ".join(dict.fromkeys(remedies)))


def _conflicts(search: Greedy, need: Need) -> Iterator[tuple[Conflict, str]]:
    state = search.state
    verdicts = Counter(unfit(state, need, node) for node in state.free)
    if verdicts[None] < need.members:
        yield from _too_few(state, need, verdicts)
        return
    if search.find(need) is not None:
        yield _share(state, need)
        return
    found = False
    for limit in RELAXED:
        if search.find_without(limit, need) is not None:
            found = True
            yield _told(state, need, limit)
    if not found:
        yield _too_full(state, need)


def counted_nodes(count: int) -> str:
    """A number of nodes in a sentence: "1 node", "2 nodes"."""
    return f"{count} node{'s' * (count != 1)}"


def _asks(need: Need) -> str:
    one = f"{need.gpus} GPU{'s' * (need.gpus != 1)}" if need.gpus else "a slot"
    return f"one replica asks for {one}" + (f" on each of {need.members} nodes" if need.members > 1 else "")


def _too_few(state: State, need: Need, verdicts: Counter[str | None]) -> Iterator[tuple[Conflict, str]]:
    lacking = need.members - verdicts[None]
    more = f"add {counted_nodes(lacking)} that suit{'s' * (lacking == 1)} {need.deployment}"
    for verdict, number in sorted((v, n) for v, n in verdicts.items() if v is not None):
        words = f"{number} of {len(state.free)} nodes {_UNFIT[verdict]}"
        if verdict == "gpu_type":
            words += f" than {', '.join(sorted(need.gpu_types))}"
        if verdict == "selector":
            words += f" {', '.join(f'{k}={v}' for k, v in sorted(need.node_selector.items()))}"
        yield Conflict(verdict, words), more
    if not state.free:
        yield Conflict("gpus", "the facility has no nodes"), "add nodes"
    elif verdicts[None] == len(state.free):
        words = f"{_asks(need)}, and there are {len(state.free)}"
        yield Conflict("gpus", words), more


def _told(state: State, need: Need, limit: str) -> tuple[Conflict, str]:
    if limit == "spread":
        return _spread(state, need)
    if limit in ("power", "cooling"):
        return _power(state, need, limit)
    if limit == "scale_up":
        words = f"no NVLink domain has {need.tensor_parallel} free GPUs for a tensor-parallel group"
        return Conflict(limit, words), "free one NVLink domain, or ask for smaller groups"
    rate = state.rate(need) / 1e9
    words = f"no set of nodes has {rate:.3g} GB/s left on all its cables and uplinks"
    return Conflict(limit, words), "add cables, or place it where others send less"


def _spread(state: State, need: Need) -> tuple[Conflict, str]:
    most = most_in_one(need, need.replicas)
    kinds = {kind.value for kind in need.spread_over}
    full = sorted(key for key, n in state.touched[need.deployment].items() if key[0] in kinds and n >= most)
    where = ", ".join(f"{kind} {name}" for kind, name in full[:3]) + ", …" * (len(full) > 3)
    words = f"at most {most} of {need.replicas} replicas may end together"
    words += f", and {where} would hold more" if full else ""
    return (
        Conflict("spread", words),
        f"give {need.deployment} room in another {' and '.join(sorted(kinds))}, or raise its largest_share",
    )


def _share(state: State, need: Need) -> tuple[Conflict, str]:
    """There is room for one more, but not for enough of them."""
    have = state.counts[need.deployment]
    words = (
        f"{have} of {need.replicas} replicas have a place; with one more, but not all, too many would end together: "
        f"at most {need.largest_share:.0%}"
    )
    return Conflict("spread", words), f"make room for all {need.replicas}, or raise its largest_share"


def _power(state: State, need: Need, kind: str) -> tuple[Conflict, str]:
    """The limit that misses least to admit one more member."""
    ground = state.ground
    nearest: tuple[float, str, float, float] | None = None
    for node in sorted(state.free, key=ground.order.__getitem__):
        if unfit(state, need, node) is not None or state.member(node, need) is None:
            continue
        draw = state.draw_of(need, node)
        short = [(draw - state.power_left[node], f"node {node}", state.power_left[node])] if kind == "power" else []
        for number, weight in ground.limits_of[ground.facility.nodes[node].rack]:
            limit = ground.limits[number]
            if limit.kind == kind:
                left = state.slack[number] // weight
                short.append((draw - left, limit.name, left))
        worst = max(short, default=None)
        if worst is not None and worst[0] > 0:
            found = (worst[0] / ground.quanta, worst[1], worst[2] / ground.quanta, draw / ground.quanta)
            nearest = min(nearest, found) if nearest else found
    if nearest is None:
        words = "the replica as a whole draws more than its racks may"
        return Conflict(kind, words), "give its racks more power or place less beside it"
    missing_w, name, left_w, draw_w = nearest
    words = f"{name} has {max(0, round(left_w)):,} W left and one member draws {round(draw_w):,} W"
    return Conflict(kind, words), f"give {name} {round(missing_w):,} W more"


def _too_full(state: State, need: Need) -> tuple[Conflict, str]:
    nodes = [node for node in state.free if unfit(state, need, node) is None]
    free = [state.free[node].bit_count() for node in nodes]
    fitting = sum(state.member(node, need) is not None for node in nodes)
    unit = "GPUs" if need.gpus else "slots"
    words = (
        f"{_asks(need)}; {counted_nodes(len(nodes))} {'suits' if len(nodes) == 1 else 'suit'} it, {fitting} of them "
        f"{'has' if fitting == 1 else 'have'} room, the emptiest has {max(free)} free {unit}, "
        f"all together {sum(free)}"
    )
    if gangs.block(need) > 1 and fitting >= need.members:
        words += ", in too many NVLink domains"
    if sum(free) >= need.gpus * need.members > 0 and fitting < need.members:
        return Conflict("gpus", words), "move smaller replicas together (defragment), or add nodes"
    return Conflict("gpus", words), f"add {counted_nodes(max(1, need.members - fitting))} or ask for fewer replicas"
