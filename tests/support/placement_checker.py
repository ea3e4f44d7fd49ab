"""Verifies a placement against its facility, limit by limit, in the plainest arithmetic there is.

Shares no code with the planner's core beyond the values that go in and come out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from stoker.planner.core.facility.values import Facility, Link, Node, Rack
from stoker.planner.core.placement.values import Need, Placed, PlacementProblem


def faults(problem: PlacementProblem, placed: tuple[Placed, ...]) -> list[str]:
    """All that is wrong with `placed`, in words; empty where every limit holds."""
    return [
        *_gpus(problem, placed),
        *_fresh_on_the_wrong_nodes(problem, placed),
        *_groups(problem, placed),
        *_power(problem, placed),
        *_spread(problem, placed),
        *_traffic(problem, placed),
        *_standing(problem, placed),
    ]


def _needs(problem: PlacementProblem) -> dict[str, Need]:
    return {need.deployment: need for need in problem.needs}


def _stood(problem: PlacementProblem, one: Placed) -> bool:
    return any(old.replica == one.replica and old.members == one.members for old in problem.standing)


def _gpus(problem: PlacementProblem, placed: tuple[Placed, ...]) -> Iterator[str]:
    owner: dict[tuple[str, int], str] = {}
    slots: defaultdict[str, int] = defaultdict(int)
    seen: set[str] = set()
    for one in placed:
        if one.replica in seen:
            yield f"{one.replica} is there twice"
        seen.add(one.replica)
        if len({member.node for member in one.members}) != len(one.members):
            yield f"{one.replica} has two members on one node"
        for member in one.members:
            node = problem.facility.nodes.get(member.node)
            if not member.gpus:
                slots[member.node] += 1
            for gpu in member.gpus:
                if (member.node, gpu) in owner:
                    yield f"GPU {gpu} of {member.node} belongs to {owner[member.node, gpu]} and {one.replica}"
                owner[member.node, gpu] = one.replica
                if node is not None and gpu not in {g.index for g in node.gpus} and not _stood(problem, one):
                    yield f"{member.node} has no GPU {gpu}"
    stood = Counter(m.node for one in placed if _stood(problem, one) for m in one.members if not m.gpus)
    for node_name, used in slots.items():
        allowed = max(problem.slots.get(node_name, 0), stood[node_name])
        if node_name in problem.facility.nodes and used > allowed:
            yield f"{used} replicas share {problem.slots.get(node_name, 0)} slots of {node_name}"


def _fresh_on_the_wrong_nodes(problem: PlacementProblem, placed: tuple[Placed, ...]) -> Iterator[str]:
    facility, needs = problem.facility, _needs(problem)
    for one in placed:
        if _stood(problem, one):
            continue
        need = needs.get(one.deployment)
        if need is None:
            yield f"nobody asked for {one.replica}"
            continue
        if len(one.members) != need.members:
            yield f"{one.replica} has {len(one.members)} members"
        for member in one.members:
            node = facility.nodes.get(member.node)
            if node is None or member.node in problem.lost or member.node in problem.closed:
                yield f"{one.replica} is on {member.node}, which is lost or closed"
                continue
            if len(set(member.gpus)) != need.gpus:
                yield f"{one.replica} has {len(set(member.gpus))} GPUs on {member.node}"
            if need.gpu_types and facility.node_types[node.type].gpu not in need.gpu_types:
                yield f"{one.replica} has the wrong GPUs"
            if any(node.labels.get(k) != v for k, v in need.node_selector.items()):
                yield f"{one.replica} is on {member.node}, which lacks its labels"
            if problem.engines is not None and need.engine and need.engine not in problem.engines.get(node.name, ()):
                yield f"{one.replica} is on {member.node}, which lacks its engine"
            if need.near and need.reach_s is not None and not _reached(facility, node, need.near, need.reach_s):
                yield f"{one.replica} is on {member.node}, too far from {need.near}"


def _reached(facility: Facility, node: Node, near: str, reach_s: float) -> bool:
    region = facility.sites[facility.racks[node.rack].site].region
    ways = [way.latency_s for way in facility.distances if {way.one, way.other} == {near, region}]
    return min([0.0, *ways] if region == near else ways, default=float("inf")) <= reach_s


def _groups(problem: PlacementProblem, placed: tuple[Placed, ...]) -> Iterator[str]:
    """Tensor-parallel groups inside one NVLink domain, and as local as the node allows."""
    needs, nodes = _needs(problem), problem.facility.nodes
    used = {(member.node, gpu) for one in placed for member in one.members for gpu in member.gpus}
    for one in placed:
        need = needs.get(one.deployment)
        there = all(member.node in nodes for member in one.members)
        if need is None or _stood(problem, one) or need.tensor_parallel < 2 or not there:
            continue
        flat = [(member.node, gpu) for member in one.members for gpu in member.gpus]
        for start in range(0, len(flat), need.tensor_parallel):
            group = flat[start : start + need.tensor_parallel]
            domains = set()
            for name, index in group:
                gpu = next(g for g in nodes[name].gpus if g.index == index)
                domains.add(gpu.scale_up or f"inside {name}")
            if len(domains) > 1:
                yield f"{one.replica}: a tensor-parallel group spans {sorted(domains)}"
        for member in one.members:
            if need.tensor_parallel < need.gpus or need.tensor_parallel > need.gpus:
                continue
            node = nodes[member.node]
            own = [g for g in node.gpus if g.index in member.gpus]
            free = [g for g in node.gpus if (node.name, g.index) not in used] + own
            for what in ("pcie_root", "numa"):
                if len({getattr(g, what) for g in own}) > 1 and _local(free, what, need.gpus):
                    yield f"{one.replica} straddles {what} on {node.name} though it need not"


def _local(free: list, what: str, size: int) -> bool:  # type: ignore[type-arg]
    places: defaultdict[tuple[str, int], int] = defaultdict(int)
    for gpu in free:
        if getattr(gpu, what) >= 0:
            places[gpu.scale_up, getattr(gpu, what)] += 1
    return any(count >= size for count in places.values())


def node_watts(problem: PlacementProblem, placed: tuple[Placed, ...]) -> dict[str, Fraction]:
    """What each node draws with what is placed on it."""
    facility, needs = problem.facility, _needs(problem)
    watts = {name: Fraction(facility.node_types[node.type].idle_power) for name, node in facility.nodes.items()}
    for one in placed:
        need = needs.get(one.deployment)
        for member in one.members:
            if member.node not in watts:
                continue
            kind = facility.node_types[facility.nodes[member.node].type]
            each = Fraction(kind.max_power - kind.idle_power, kind.gpus) if kind.gpus else Fraction(0)
            if need is not None and need.busy_power is not None:
                each = Fraction(need.busy_power)
            watts[member.node] += each * len(member.gpus)
    return watts


def feed_watts(facility: Facility, racks: dict[str, Fraction], lost: str | None) -> dict[str, Fraction]:
    """What each feed carries when all feeds of source `lost` are dead; a rack left without any draws nothing."""
    carried: defaultdict[str, Fraction] = defaultdict(Fraction)
    for name, watts in racks.items():
        rack = facility.racks[name]
        alive = [feed for feed in rack.feeds if facility.feeds[feed].source != lost]
        if not alive or (len(alive) < len(rack.feeds) and not rack.survives_loss):
            continue
        for feed in alive:
            at: str = feed
            while at:
                carried[at] += watts / len(alive)
                at = facility.feeds[at].parent
    return carried


def _power(problem: PlacementProblem, placed: tuple[Placed, ...]) -> Iterator[str]:
    """Overloads that what is new adds to: what stands may have been too much before anybody asked."""
    facility = problem.facility
    before, now = (
        node_watts(problem, tuple(one for one in placed if _stood(problem, one))),
        node_watts(problem, placed),
    )
    for name, node in facility.nodes.items():
        limit = facility.node_types[node.type].max_power
        if limit and now[name] > max(Fraction(limit), before[name]):
            yield f"node {name} draws {float(now[name])} W of {limit}"
    racks = {name: _rack_watts(facility, rack, now) for name, rack in facility.racks.items()}
    stood = {name: _rack_watts(facility, rack, before) for name, rack in facility.racks.items()}
    for name, rack in facility.racks.items():
        if rack.cooling is not None and racks[name] > max(Fraction(rack.cooling), stood[name]):
            yield f"rack {name} gives off {float(racks[name])} W, cooled for {rack.cooling}"
    for site in facility.sites.values():
        mine = [name for name, rack in facility.racks.items() if rack.site == site.name]
        total = sum((racks[name] for name in mine), Fraction(0))
        earlier_total = sum((stood[name] for name in mine), Fraction(0))
        if site.supply is not None and total > max(Fraction(site.supply - site.reserved), earlier_total):
            yield f"site {site.name} draws {float(total)} W"
    for lost in (None, *sorted({feed.source for feed in facility.feeds.values()})):
        earlier = feed_watts(facility, stood, lost)
        for feed, watts in feed_watts(facility, racks, lost).items():
            capacity = facility.feeds[feed].capacity
            if capacity is not None and watts > max(Fraction(capacity), earlier[feed]):
                yield f"feed {feed} carries {float(watts)} W of {capacity} when {lost or 'nothing'} is lost"


def _rack_watts(facility: Facility, rack: Rack, nodes: dict[str, Fraction]) -> Fraction:
    own = (nodes[name] for name, node in facility.nodes.items() if node.rack == rack.name)
    return sum(own, Fraction(rack.base_power))


def domains_of(facility: Facility, node: Node) -> set[tuple[str, str]]:
    """The failure domains of one node, by kind."""
    rack = facility.racks[node.rack]
    site = facility.sites[rack.site]
    found = {("node", node.name), ("rack", rack.name), ("site", rack.site)}
    if rack.suite:
        found.add(("suite", f"{rack.site}/{rack.suite}"))
    if rack.row:
        found.add(("row", f"{rack.site}/{rack.suite}/{rack.row}"))
    if site.region:
        found.add(("region", site.region))
    if site.provider:
        found.add(("provider", site.provider))
    sources = {facility.feeds[feed].source for feed in rack.feeds}
    if len(sources) == 1 or not rack.survives_loss:
        found |= {("source", source) for source in sources}
    return found


def lost_share(problem: PlacementProblem, placed: tuple[Placed, ...], need: Need) -> dict[tuple[str, str], int]:
    """By failure domain, how many replicas of `need` end with it."""
    hit: defaultdict[tuple[str, str], int] = defaultdict(int)
    for one in placed:
        if one.deployment == need.deployment:
            nodes = [problem.facility.nodes[m.node] for m in one.members if m.node in problem.facility.nodes]
            for domain in set().union(*(domains_of(problem.facility, node) for node in nodes)):
                hit[domain] += 1
    return hit


def _spread(problem: PlacementProblem, placed: tuple[Placed, ...]) -> Iterator[str]:
    standing = tuple(one for one in placed if _stood(problem, one))
    for need in problem.needs:
        mine = [one for one in placed if one.deployment == need.deployment]
        if len(mine) < 2 or all(_stood(problem, one) for one in mine):
            continue
        kinds = {kind.value for kind in need.spread_over}
        before = lost_share(problem, standing, need)
        for domain, hit in lost_share(problem, placed, need).items():
            allowed = max(1, int(need.largest_share * len(mine) + 1e-9))
            if domain[0] in kinds and hit > max(allowed, before[domain]):
                yield f"{need.deployment}: {hit} of {len(mine)} replicas end with {domain[0]} {domain[1]}"


def _traffic(problem: PlacementProblem, placed: tuple[Placed, ...]) -> Iterator[str]:
    """Each node's cables, and the uplinks of each switch domain, one way; a gang within one fabric."""
    facility = replace(problem.facility, links=_plugged(problem.facility))
    standing = tuple(one for one in placed if _stood(problem, one))
    cables: defaultdict[str, int] = defaultdict(int)
    for link in facility.links:
        cables[link.lower] += link.rate * link.count
    before = _through(problem, standing)
    for (node, way), rate in _through(problem, placed).items():
        if node in cables and rate > max(Fraction(cables[node]), before[node, way]):
            yield f"node {node} {way} {float(rate)} B/s over {cables[node]}"
    tiers = sorted({switch.tier for switch in facility.switches.values()})
    for tier in tiers:
        of = reach(facility, tier)
        up: defaultdict[str, int] = defaultdict(int)
        for link in facility.links:
            if of[link.lower] != of[link.upper]:
                up[of[link.lower]] += link.rate * link.count
        earlier = _leaving(problem, standing, of)
        for home, rate in _leaving(problem, placed, of).items():
            if up[home] and rate > max(Fraction(up[home]), earlier[home]):
                yield f"{float(rate)} B/s leave {home} over {up[home]}"
    for one in placed if tiers else ():
        whole = reach(facility, tiers[-1])
        parts = {whole[member.node] for member in one.members if member.node in whole}
        if len(parts) > 1 and not _stood(problem, one):
            yield f"{one.replica} has members that no cable connects: {sorted(parts)}"


def _plugged(facility: Facility) -> tuple[Link, ...]:
    """Cables for whose whole number both ends have ports left."""
    left = {switch.name: switch.radix for switch in facility.switches.values()}
    plugged = []
    for link in facility.links:
        ends = [end for end in (link.lower, link.upper) if end in left]
        if min((left[end] for end in ends), default=link.count) >= link.count:
            plugged.append(link)
            for end in ends:
                left[end] -= link.count
    return tuple(plugged)


def _through(problem: PlacementProblem, placed: tuple[Placed, ...]) -> defaultdict[tuple[str, str], Fraction]:
    """Bytes per second over the cables of each node, either way."""
    needs = _needs(problem)
    through: defaultdict[tuple[str, str], Fraction] = defaultdict(Fraction)
    for one in placed:
        need = needs.get(one.deployment)
        if need is None:
            continue
        out = need.pair.rate if need.pair else 0
        coming = sum(n.pair.rate for n in problem.needs if n.pair and n.pair.deployment == need.deployment)
        for member in one.members:
            for way, rate in (("sends", out), ("gets", coming)):
                through[member.node, way] += Fraction(rate, max(1, need.replicas * need.members))
                through[member.node, way] += need.peer_rate if need.members > 1 else 0
    return through


def _leaving(problem: PlacementProblem, placed: tuple[Placed, ...], of: dict[str, str]) -> defaultdict[str, Fraction]:
    """Bytes per second that leave each switch domain."""
    needs = _needs(problem)
    out = defaultdict(Fraction, _ring_out(needs, placed, of))
    for need in problem.needs:
        if need.pair is not None and need.pair.deployment in needs:
            for home, share in _kv_excess(need, needs[need.pair.deployment], placed, of).items():
                out[home] += max(Fraction(0), share) * need.pair.rate
    return out


def _ring_out(needs: dict[str, Need], placed: tuple[Placed, ...], of: dict[str, str]) -> dict[str, Fraction]:
    out: defaultdict[str, Fraction] = defaultdict(Fraction)
    for one in placed:
        need = needs.get(one.deployment)
        homes = [of[member.node] for member in one.members if member.node in of]
        if need is not None and need.peer_rate and len(set(homes)) > 1:
            for here, there in zip(homes, homes[1:] + homes[:1], strict=True):
                if here != there:
                    out[here] += need.peer_rate
    return out


def _kv_excess(need: Need, decode: Need, placed: tuple[Placed, ...], of: dict[str, str]) -> dict[str, Fraction]:
    """By switch domain, the share of prefill in it less that of decode."""
    excess: defaultdict[str, Fraction] = defaultdict(Fraction)
    for side, sign in ((need, 1), (decode, -1)):
        for one in placed:
            if one.deployment == side.deployment:
                for member in one.members:
                    if member.node in of:
                        excess[of[member.node]] += Fraction(sign, max(1, side.replicas * side.members))
    return excess


def reach(facility: Facility, tier: int) -> dict[str, str]:
    """For each node and switch the first name that it reaches over switches up to `tier`."""
    beside: defaultdict[str, set[str]] = defaultdict(set)
    for link in facility.links:
        ends = (link.lower, link.upper)
        if all(end not in facility.switches or facility.switches[end].tier <= tier for end in ends):
            beside[ends[0]].add(ends[1])
            beside[ends[1]].add(ends[0])
    found: dict[str, str] = {}
    for start in sorted((*facility.nodes, *facility.switches)):
        queue = [start] if start not in found else []
        while queue:
            at = queue.pop()
            if at not in found:
                found[at] = start
                queue += beside[at] - found.keys()
    return found


def _standing(problem: PlacementProblem, placed: tuple[Placed, ...]) -> Iterator[str]:
    """What can stay and may not be moved is where it was."""
    now = {one.replica: one for one in placed}
    for old in problem.standing:
        there = all(
            member.node in problem.facility.nodes
            and member.node not in problem.lost
            and set(member.gpus) <= {gpu.index for gpu in problem.facility.nodes[member.node].gpus}
            for member in old.members
        )
        if there and old.replica not in problem.movable and now.get(old.replica) != old:
            yield f"{old.replica} stood and was moved"
