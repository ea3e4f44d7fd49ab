"""What is drawn: a facility, who has which of its GPUs, and what its nodes draw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from stoker.planner.core.envelope import Capacity
from stoker.planner.core.facility.values import Facility, Gpu, Node
from stoker.planner.core.ordering import natural
from stoker.planner.core.placement import Need, Placed
from stoker.planner.core.supply import Load, Supply
from stoker.planner.core.units import Watts
from stoker.planner.drawing.colours import Palette


@dataclass(frozen=True)
class Owner:
    """Who has a GPU, or a slot of a host without. `rank` counts a replica's GPUs over its members."""

    replica: str
    deployment: str
    rank: int


@dataclass(frozen=True)
class Scene:
    """`owners` are by node and GPU, or number of the slot where the node has no GPUs. `draws` are the watts of each
    node, `notes` what to write under the title. `new` nodes do not stand there yet, `closed` ones get nothing new.
    """

    title: str
    facility: Facility
    owners: Mapping[tuple[str, int], Owner]
    draws: Mapping[str, Watts]
    notes: tuple[str, ...] = ()
    new: frozenset[str] = frozenset()
    closed: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def of_capacity(cls, found: Capacity, standing: Facility, notes: tuple[str, ...] = ()) -> Scene:
        """A facility as full as it goes, each node at its most."""
        types = found.facility.node_types
        draws = {name: types[node.type].max_power for name, node in found.facility.nodes.items()}
        new = frozenset(found.facility.nodes.keys() - standing.nodes.keys())
        return cls(found.facility.name, found.facility, {}, draws, notes, new)

    @classmethod
    def of_placement(
        cls,
        facility: Facility,
        placed: Sequence[Placed],
        needs: Sequence[Need],
        notes: tuple[str, ...] = (),
        closed: frozenset[str] = frozenset(),
    ) -> Scene:
        """Replicas in their places; a node draws its idle power and that of its GPUs in use."""
        owners: dict[tuple[str, int], Owner] = {}
        slots: Counter[str] = Counter()
        busy = {need.deployment: need.busy_power for need in needs}
        draws = {name: float(facility.node_types[node.type].idle_power) for name, node in facility.nodes.items()}
        for replica in placed:
            ranks = iter(range(1 << 20))
            for member in replica.members:
                node = facility.nodes.get(member.node)
                for index in member.gpus if node is not None else ():
                    owners[member.node, index] = Owner(replica.replica, replica.deployment, next(ranks))
                if node is not None and not _gpus(facility, node):
                    owners[member.node, slots[member.node]] = Owner(replica.replica, replica.deployment, next(ranks))
                    slots[member.node] += 1
                if node is not None and member.gpus:
                    kind = facility.node_types[node.type]
                    share = (kind.max_power - kind.idle_power) / kind.gpus if kind.gpus else 0.0
                    one = busy.get(replica.deployment)
                    draws[member.node] += len(member.gpus) * (share if one is None else one)
        whole = {name: Watts(round(draw)) for name, draw in draws.items()}
        return cls(facility.name, facility, owners, whole, notes, closed=closed)

    @cached_property
    def palette(self) -> Palette:
        """The colours of its replicas."""
        return Palette({owner.replica: owner.deployment for owner in self.owners.values()})

    @cached_property
    def loads(self) -> Mapping[str, Load]:
        """What the feeds carry."""
        supply = Supply(self.facility.sites, self.facility.feeds, self.facility.racks.values())
        drawn = self.by_rack
        for name, rack in self.facility.racks.items():
            supply.draw(rack, drawn[name])
        return supply.loads()

    @cached_property
    def by_rack(self) -> Mapping[str, Watts]:
        """What each rack draws, its switches included."""
        found = {name: int(rack.base_power) for name, rack in self.facility.racks.items()}
        for name, node in self.facility.nodes.items():
            found[node.rack] += self.draws[name]
        return {name: Watts(power) for name, power in found.items()}

    @cached_property
    def standing(self) -> Mapping[str, Sequence[Node]]:
        """The nodes of each rack in natural order."""
        found: dict[str, list[Node]] = {name: [] for name in self.facility.racks}
        for node in sorted(self.facility.nodes.values(), key=lambda node: natural(node.name)):
            found[node.rack].append(node)
        return found

    @cached_property
    def gpus_of(self) -> Counter[str]:
        """How many GPUs each deployment has."""
        nodes = self.facility.nodes
        return Counter(
            owner.deployment for (node, _), owner in self.owners.items() if _gpus(self.facility, nodes[node])
        )

    def cells(self, node: Node) -> Sequence[Gpu]:
        """The GPUs of a node; of one without the slots that are taken."""
        return _gpus(self.facility, node) or tuple(Gpu(index) for index in range(self._slots[node.name]))

    @cached_property
    def free(self) -> int | None:
        """GPUs that nobody has; None where there are none at all."""
        everywhere = sum(len(_gpus(self.facility, node)) for node in self.facility.nodes.values())
        return everywhere - self.gpus_of.total() if everywhere else None

    @cached_property
    def _slots(self) -> Counter[str]:
        return Counter(node for node, _ in self.owners)

    def told(self, node: Node, gpu: Gpu) -> str:
        """One GPU in words."""
        owner = self.owners.get((node.name, gpu.index))
        what = "GPU" if _gpus(self.facility, node) else "slot"
        said = [f"{owner.replica}, rank {owner.rank}" if owner else "free", f"{node.name} {what} {gpu.index}"]
        said += [f"NVLink {gpu.scale_up}"] if gpu.scale_up else []
        said += [f"rail {gpu.rail}"] if gpu.rail >= 0 else []
        said += [f"NUMA {gpu.numa}"] if gpu.numa >= 0 else []
        return " · ".join(said)


def _gpus(facility: Facility, node: Node) -> Sequence[Gpu]:
    """Those that only its type tells of too."""
    return node.gpus or tuple(Gpu(index) for index in range(facility.node_types[node.type].gpus))
