"""A placement while it is made: what is taken, what is left, and whether one more member fits."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from math import floor

from stoker.planner.core.placement.gpus import choose
from stoker.planner.core.placement.ground import Ground, Key
from stoker.planner.core.placement.values import Domain, Member, Need, Placed, PlacementProblem


def most_in_one(need: Need, replicas: int) -> int:
    """How many of `replicas` may fail together."""
    return max(1, floor(need.largest_share * replicas + 1e-9))


class State:
    """What is taken of a facility. `release` undoes `take`.

    GPUs of a node are bits of a number, by position in `Node.gpus`; slots of hosts without GPUs likewise. Power is in
    quanta (see `Ground`).
    """

    def __init__(self, ground: Ground, problem: PlacementProblem) -> None:
        self.ground = ground
        self.problem = problem
        self.needs = {need.deployment: need for need in problem.needs}
        self.placed: dict[str, Placed] = {}
        self.free = {
            node.name: (1 << (len(node.gpus) or problem.slots.get(node.name, 0))) - 1
            for node in ground.facility.nodes.values()
        }
        self.power_left = {name: ground.power_of(name) for name in self.free}
        self.slack = list(ground.slack)
        self.sent = dict.fromkeys(self.free, 0)
        self.rings = [0] * len(ground.fabric.domains)
        self.touched: defaultdict[str, Counter[Key]] = defaultdict(Counter)
        self.worst: Counter[str] = Counter()
        """Of each deployment, the replicas in the rack that has most of them."""
        self.counts: Counter[str] = Counter()
        self.members: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._rates = {need.deployment: _rate(need, problem.needs) for need in problem.needs}
        self._largest: dict[tuple[str, int], int] = {}
        self._draws: dict[tuple[str, str], int] = {}
        self._bounds = {need.deployment: _bounds(need) for need in problem.needs}
        self._slots_of: dict[tuple[str, int], int] = {}
        self._positions = {
            name: {gpu.index: position for position, gpu in enumerate(node.gpus)}
            for name, node in ground.facility.nodes.items()
        }

    # --- taking and giving back ---

    def take(self, placed: Placed) -> None:
        """Books all that a replica uses; members on unknown nodes and GPUs that are gone are passed over."""
        self.placed[placed.replica] = placed
        self._book(placed, 1)

    def release(self, replica: str) -> Placed:
        """Gives back what a replica uses."""
        placed = self.placed.pop(replica)
        self._book(placed, -1)
        return placed

    def _book(self, placed: Placed, sign: int) -> None:
        need = self.needs.get(placed.deployment)
        for rank, member in enumerate(placed.members):
            if member.node not in self.free:
                continue
            bits = self._bits(placed, rank)
            if sign > 0:
                self.free[member.node] &= ~bits
            else:
                self.free[member.node] |= bits
            self.add_draw(member.node, sign * len(member.gpus) * self.ground.gpu_draw(need, member.node))
            self.members[placed.deployment][member.node] += sign
        self.counts[placed.deployment] += sign
        for key in self.keys(member.node for member in placed.members):
            self.touched[placed.deployment][key] += sign
            if key[0] == Domain.RACK.value:
                self._note_worst(placed.deployment, key, sign)
        if need is not None:
            self._send(need, placed.members, sign)

    def _note_worst(self, deployment: str, key: Key, sign: int) -> None:
        touched = self.touched[deployment]
        if sign > 0:
            self.worst[deployment] = max(self.worst[deployment], touched[key])
        elif touched[key] + 1 == self.worst[deployment]:
            self.worst[deployment] = max(n for (kind, _), n in touched.items() if kind == Domain.RACK.value)

    def _bits(self, placed: Placed, rank: int) -> int:
        """The units of one member: its GPUs, or for one without any a slot that is remembered."""
        member = placed.members[rank]
        if member.gpus:
            positions = self._positions[member.node]
            return sum(1 << positions[index] for index in member.gpus if index in positions)
        slot = self._slots_of.pop((placed.replica, rank), None)
        if slot is None:
            slot = 0 if self.ground.layouts[member.node] else self.free[member.node] & -self.free[member.node]
            self._slots_of[placed.replica, rank] = slot
        return slot

    def add_draw(self, node: str, draw: int) -> None:
        """Books `draw` more at a node and on all that feeds it."""
        self.power_left[node] -= draw
        for number, weight in self.ground.limits_of[self.ground.facility.nodes[node].rack]:
            self.slack[number] -= weight * draw

    def _send(self, need: Need, members: Sequence[Member], sign: int) -> None:
        for member in members:
            if member.node in self.sent:
                self.sent[member.node] += sign * self.rate(need)
        for number in self.crossed(member.node for member in members):
            self.rings[number] += sign * need.peer_rate

    def rate(self, need: Need) -> int:
        """What one member of `need` sends or gets over its node's cables, the larger, in bytes per second."""
        return self._rates[need.deployment]

    # --- asking ---

    def keys(self, nodes: Iterable[str]) -> set[Key]:
        """The failure domains that a replica on `nodes` touches."""
        return {key for node in nodes for key in self.ground.keys.get(node, ())}

    def crossed(self, nodes: Iterable[str]) -> set[int]:
        """The switch domains through whose uplinks a ring over `nodes` goes."""
        paths = {self.ground.fabric.of[node] for node in nodes if node in self.free}
        return {number for tier in zip(*paths, strict=False) if len(set(tier)) > 1 for number in tier}

    def members_by(self, deployment: str, tier: int) -> Counter[int | str]:
        """How many members of a deployment are in each switch domain of `tier`; for tier -1, in each NVLink domain of
        several nodes."""
        found: Counter[int | str] = Counter()
        for node, members in self.members[deployment].items():
            if tier >= 0:
                found[self.ground.fabric.of[node][tier]] += members
            elif node in self.ground.scale_up:
                found[self.ground.scale_up[node]] += members
        return found

    def member(self, node: str, need: Need, rails: tuple[int, ...] = ()) -> tuple[Member, int] | None:
        """The GPUs that a member would get on `node` and how badly its groups lie; None where they do not fit."""
        layout = self.ground.layouts[node]
        if not need.gpus:
            return (Member(node), 0) if not layout and self.free[node] else None
        found = choose(layout, self.free[node], need.gpus, need.tensor_parallel, rails) if layout else None
        if found is None:
            return None
        gpus = self.ground.facility.nodes[node].gpus
        return Member(node, tuple(gpus[position].index for position in found[0])), found[1]

    def positions(self, member: Member) -> tuple[int, ...]:
        """Where the GPUs of a member are in `Node.gpus`, by rank; without those that are gone."""
        known = self._positions.get(member.node, {})
        return tuple(known[index] for index in member.gpus if index in known)

    def rails(self, member: Member) -> tuple[int, ...]:
        """The rails of a member's GPUs, by rank; none where one is unknown."""
        rails = tuple(self.ground.layouts[member.node][position][3] for position in self.positions(member))
        return () if -1 in rails else rails

    def lacks(self, rack: str, draw: int) -> int | None:
        """The number of a limit that `draw` more in `rack` would break, None where none would be."""
        for number, weight in self.ground.limits_of[rack]:
            if self.slack[number] < weight * draw and draw:
                return number
        return None

    def headroom(self, rack: str) -> int | None:
        """What `rack` alone could draw more; None where nothing limits it."""
        rooms = [self.slack[number] // weight for number, weight in self.ground.limits_of[rack]]
        return max(0, min(rooms)) if rooms else None

    def draw_of(self, need: Need, node: str) -> int:
        """What one member of `need` draws on `node`."""
        kind = self.ground.facility.nodes[node].type
        found = self._draws.get((need.deployment, kind))
        if found is None:
            found = self._draws[need.deployment, kind] = need.gpus * self.ground.gpu_draw(need, node)
        return found

    def bounds(self, need: Need) -> tuple[frozenset[str], int]:
        """The kinds of failure domains that matter to `need`, and how many of its replicas may be in each."""
        return self._bounds[need.deployment]

    def largest_member(self, node: str) -> int:
        """The most GPUs that one member may ask of `node`; all of it where nobody asks."""
        kind, size = self.ground.type_of(node), len(self.ground.layouts[node])
        if (kind.name, size) not in self._largest:
            sizes = [
                need.gpus
                for need in self.problem.needs
                if 0 < need.gpus <= size and (not need.gpu_types or kind.gpu in need.gpu_types)
            ]
            self._largest[kind.name, size] = max(sizes, default=max(1, size))
        return self._largest[kind.name, size]

    def full(self, need: Need, node: str, but: str = "") -> Key | None:
        """A failure domain of `node` that holds as many replicas of `need` as it may; none of the kind `but`."""
        kinds, most = self._bounds[need.deployment]
        touched = self.touched[need.deployment]
        for key in self.ground.keys[node]:
            if key[0] in kinds and key[0] != but and touched[key] >= most:
                return key
        return None

    def node_carries(self, need: Need, node: str) -> bool:
        """Whether the cables of `node` carry one more member of `need`; unknown ones carry everything."""
        rates = self.ground.fabric.rates
        return node not in rates or self.sent[node] + self.rate(need) <= rates[node]

    def chokes(self, need: Need, nodes: Sequence[str]) -> str:
        """What cannot carry the traffic of a replica on `nodes`: a node, a switch domain, or "" where all can."""
        fabric = self.ground.fabric
        for node in nodes:
            if not self.node_carries(need, node):
                return f"the cables of node {node}"
        if need.members > 1:
            if len({fabric.whole[node] for node in nodes}) > 1:
                return "no fabric between its nodes"
            for number in sorted(self.crossed(nodes)):
                if self.rings[number] + need.peer_rate > fabric.domains[number].up:
                    return f"the uplinks of {fabric.domains[number].name}"
        return ""


def _bounds(need: Need) -> tuple[frozenset[str], int]:
    """The kinds of failure domains that matter, and how many replicas may be in each."""
    most = most_in_one(need, need.replicas)
    if most >= need.replicas:
        return frozenset(), most
    return frozenset(kind.value for kind in need.spread_over), most


def _rate(need: Need, needs: Iterable[Need]) -> int:
    ring = need.peer_rate if need.members > 1 else 0
    received = sum(n.pair.rate for n in needs if n.pair and n.pair.deployment == need.deployment)
    # Cables carry as much either way at once.
    kv = max(need.pair.rate if need.pair else 0, received)
    return ring + -(-kv // max(1, need.replicas * need.members))
