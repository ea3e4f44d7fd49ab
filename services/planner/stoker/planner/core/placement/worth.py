"""What a placement is worth, goal by goal: the definitions, in the plainest form."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from fractions import Fraction

from stoker.planner.core.placement.gpus import badness, choose
from stoker.planner.core.placement.state import State
from stoker.planner.core.placement.values import Domain, Goal, Need, Placed


def worth(state: State) -> dict[Goal, float]:
    """The value of each goal, in the order of the goals. Moves are counted against what stood."""
    flows = list(uplink_flows(state))
    domains = state.ground.fabric.domains
    return {
        Goal.SHORTFALL: sum(
            need.weight * max(0, need.replicas - state.counts[need.deployment]) for need in state.problem.needs
        ),
        Goal.LOCALITY: sum(straddling(state, placed) for placed in state.placed.values()),
        Goal.OVERSUBSCRIBED: float(sum(rate for number, rate in flows if domains[number].oversubscribed)),
        Goal.ADJACENCY: float(sum(kv_leaving(state, need) for need in state.problem.needs)),
        Goal.RAILS: sum(off_rail(state, placed) for placed in state.placed.values()),
        Goal.REGIONS: sum(region_excess(state, need) for need in state.problem.needs),
        Goal.SPREAD: sum(
            max(
                (n for (kind, _), n in state.touched[need.deployment].items() if kind == Domain.RACK.value), default=0
            )
            for need in state.problem.needs
        ),
        Goal.STRANDED: float(stranded(state)),
        Goal.COST: cost(state),
        Goal.MOVES: sum(
            state.placed[old.replica].members != old.members
            for old in state.problem.standing
            if old.replica in state.placed and stays(state, old)
        ),
    }


def stays(state: State, old: Placed) -> bool:
    """Whether all nodes and GPUs of a standing replica are still there."""
    return all(
        member.node in state.free
        and member.node not in state.problem.lost
        and {gpu.index for gpu in state.ground.facility.nodes[member.node].gpus} >= set(member.gpus)
        for member in old.members
    )


def uplink_flows(state: State) -> Iterator[tuple[int, Fraction]]:
    """Of each switch domain what goes out and in over its uplinks, in bytes per second, both together."""
    for number, rate in enumerate(state.rings):
        if rate:
            yield number, Fraction(2 * rate)
    for need in state.problem.needs:
        for level in range(state.ground.tiers):
            for place, share in kv_shares(state, need, level).items():
                if need.pair is not None and isinstance(place, int):
                    yield place, abs(share) * need.pair.rate


def kv_shares(state: State, need: Need, level: int) -> dict[int | str, Fraction]:
    """In each domain of a tier the share of a prefill deployment that is there, less that of its decode deployment.

    Tier -1 are NVLink domains of several nodes.
    KV flows to the nearest that can take it: only the difference has to leave the domain, or to come in.
    """
    shares: defaultdict[int | str, Fraction] = defaultdict(Fraction)
    decode = state.needs.get(need.pair.deployment) if need.pair else None
    if decode is None:
        return shares
    for side, sign in ((need, 1), (decode, -1)):
        for place, members in state.members_by(side.deployment, level).items():
            shares[place] += Fraction(sign * members, max(1, side.replicas * side.members))
    return shares


def kv_leaving(state: State, need: Need) -> Fraction:
    """KV that leaves its NVLink domain of several nodes, or its switch domain of any tier, in bytes per second."""
    if need.pair is None:
        return Fraction(0)
    leaving = (share for level in range(-1, state.ground.tiers) for share in kv_shares(state, need, level).values())
    return need.pair.rate * sum((share for share in leaving if share > 0), Fraction(0))


def off_rail(state: State, placed: Placed) -> int:
    """GPUs of a gang on another rail than those of the same rank in its first member."""
    rails = [state.rails(member) for member in placed.members]
    return sum(one != other for own in rails[1:] for one, other in zip(rails[0], own, strict=False))


def straddling(state: State, placed: Placed) -> int:
    """How much worse a replica's groups lie than they would on free nodes."""
    need = state.needs.get(placed.deployment)
    if need is None or need.gpus < 2 or need.tensor_parallel < 2:
        return 0
    total = 0
    for member in placed.members:
        positions = state.positions(member)
        if len(positions) == need.gpus:
            layout = state.ground.layouts[member.node]
            best = choose(layout, (1 << len(layout)) - 1, need.gpus, need.tensor_parallel)
            total += max(0, badness(layout, positions, need.tensor_parallel) - (best[1] if best else 0))
    return total


def wanted_by_region(need: Need) -> dict[str, int]:
    """`need.regions` in whole replicas: the largest remainders are rounded up, ties by name."""
    total = sum(need.regions.values())
    if total <= 0:
        return {}
    exact = {region: need.replicas * share / total for region, share in need.regions.items()}
    whole = {region: int(count + 1e-9) for region, count in exact.items()}
    rest = need.replicas - sum(whole.values())
    for region in sorted(exact, key=lambda region: (whole[region] - exact[region], region))[:rest]:
        whole[region] += 1
    return whole


def region_excess(state: State, need: Need) -> int:
    """Replicas beyond what their region is wanted to have."""
    wanted = wanted_by_region(need)
    if not wanted:
        return 0
    found = {key: n for (kind, key), n in state.touched[need.deployment].items() if kind == Domain.REGION.value}
    return sum(max(0, n - wanted.get(region, 0)) for region, n in found.items())


def stranded(state: State) -> Fraction:
    """Watts that free GPUs of a rack could draw, but no member of the largest size that is asked for there could."""
    by_rack: defaultdict[str, list[str]] = defaultdict(list)
    for name in usable(state):
        by_rack[state.ground.facility.nodes[name].rack].append(name)
    total = Fraction(0)
    for rack, nodes in by_rack.items():
        room = state.headroom(rack)
        pieces: Counter[int] = Counter()
        wholes: Counter[int] = Counter()
        for name in nodes:
            draw, size = state.ground.gpu_draw(None, name), state.largest_member(name)
            free = state.free[name].bit_count()
            pieces[draw] += free
            wholes[draw * size] += free // size
        loose = sum(draw * count for draw, count in pieces.items())
        loose = loose if room is None else min(loose, room)
        whole = 0
        for draw in sorted(wholes, reverse=True):
            fit = wholes[draw] if room is None or not draw else min(wholes[draw], max(0, room - whole) // draw)
            whole += draw * fit
        total += Fraction(max(0, loose - whole), state.ground.quanta)
    return total


def usable(state: State) -> Iterable[str]:
    """Nodes with GPUs that are open to new replicas."""
    shut = state.problem.closed | state.problem.lost
    return (name for name, layout in state.ground.layouts.items() if layout and name not in shut)


def cost(state: State) -> float:
    """What the nodes of all placed GPUs cost per hour, by the share of their GPUs, at their provider's price."""
    total = 0.0
    for placed in state.placed.values():
        for member in placed.members:
            if member.node in state.free:
                total += len(member.gpus) * state.ground.gpu_cost(member.node)
    return round(total, 6)
