"""What a placement starts from and what it says; docs/placement.md defines each limit and goal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from stoker.planner.core.facility.values import Facility
from stoker.planner.core.units import NO_RATE, BytesPerSecond, Watts

Clock = Callable[[], float]
"""Monotonic seconds."""
Look = Callable[[], None]
"""Called now and then by what may take long; what it raises ends that."""

Stopping = Callable[[Callable[[], None]], None]
"""Takes what ends a search that is about to begin, to be called from another thread; it replaces the one before."""


def unwatched() -> None:
    """The `Look` of who waits however long it takes."""


class Domain(Enum):
    """What may fail as one. SOURCE is the source of a rack's power, for racks that do not survive its loss; SWITCH
    is what hangs on one switch of the lowest tier alone."""

    NODE = "node"
    RACK = "rack"
    SOURCE = "source"
    SWITCH = "switch"
    ROW = "row"
    SUITE = "suite"
    SITE = "site"
    REGION = "region"
    PROVIDER = "provider"


class Goal(Enum):
    """What is made small, each only as far as it costs nothing of those before it."""

    SHORTFALL = "shortfall"
    """Replicas without a place, each times its deployment's weight."""
    LOCALITY = "locality"
    """Tensor-parallel groups that lie over more PCIe roots (1 each) or NUMA nodes (2) than on a free node."""
    OVERSUBSCRIBED = "oversubscribed"
    """Bytes per second over uplinks that are narrower than what hangs below them."""
    ADJACENCY = "adjacency"
    """Bytes per second of KV between prefill and decode that leave an NVLink domain of several nodes or a switch
    domain, summed over the tiers."""
    RAILS = "rails"
    """GPUs of gangs that are on another rail than their like in the gang's first member."""
    REGIONS = "regions"
    """Replicas that are in another region than `Need.regions` asks."""
    SPREAD = "spread"
    """Replicas lost with the worst rack, summed over the deployments."""
    STRANDED = "stranded"
    """Watts that free GPUs could draw, but no member of the largest size that is asked for."""
    COST = "cost"
    """Currency per hour for the GPUs in use, by the price of their nodes."""
    MOVES = "moves"
    """Standing replicas that change their place though they could stay."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The decode deployment to which a prefill deployment sends KV: `rate` bytes per second in all, once every
    replica of both has a place."""

    deployment: str
    rate: BytesPerSecond


@dataclass(frozen=True, slots=True)
class Need:
    """What one deployment asks for: `replicas` in all, the standing ones among them.

    A replica is `members` nodes with `gpus` GPUs each; 0 GPUs mean a slot of a host that has none. `tensor_parallel`
    GPUs in order of rank, over members if larger than `gpus`, make a group inside one NVLink domain; 1: no groups.
    `gpu_types` and `node_selector` narrow the nodes, empty ones nothing; so does `engine` where the problem knows
    engines.

    `busy_power` is what one busy GPU adds to its node; None: what the node type says. `peer_rate` is what each member
    sends to the next, the last to the first. `pair` is who gets KV from this deployment.

    At least `1 - largest_share` of two or more replicas live on when any one domain of a kind in `spread_over` fails.
    Where that leaves some of them without a place, `largest_share_if_short` counts instead; None: nothing does.
    `regions` are the shares wanted in each region, empty where it does not matter. No replica goes farther than
    `reach_s` (one way) from region `near`. A replica without a place counts `weight`.
    """

    deployment: str
    replicas: int
    gpus: int = 1
    members: int = 1
    tensor_parallel: int = 1
    gpu_types: frozenset[str] = frozenset()
    node_selector: Mapping[str, str] = field(default_factory=dict)
    engine: str = ""
    busy_power: Watts | None = None
    peer_rate: BytesPerSecond = NO_RATE
    pair: Pair | None = None
    spread_over: frozenset[Domain] = frozenset({Domain.RACK, Domain.SOURCE})
    largest_share: float = 0.5
    largest_share_if_short: float | None = None
    regions: Mapping[str, float] = field(default_factory=dict)
    near: str = ""
    reach_s: float | None = None
    weight: int = 1


@dataclass(frozen=True, slots=True)
class Member:
    """One node of a replica; `gpus` are indices as the driver counts, in order of rank."""

    node: str
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Placed:
    """A replica and its members, in order of rank."""

    replica: str
    deployment: str
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class PlacementProblem:
    """All that a placement depends on.

    `standing` replicas keep their place, but for those named in `movable` and those with a member on a node that is
    in `lost` or not in the facility: these get a new place under their name. Replicas of deployments that nobody
    needs hold their GPUs. `closed` nodes (draining, excluded, only just back) get nothing new.

    `slots` are the places for replicas without GPUs on hosts without GPUs. `engines` are those that each node offers;
    None where nobody knows, which forbids nothing. `reserved` are names that new replicas must not get.
    """

    facility: Facility
    needs: tuple[Need, ...] = ()
    standing: tuple[Placed, ...] = ()
    movable: frozenset[str] = frozenset()
    closed: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()
    slots: Mapping[str, int] = field(default_factory=dict)
    engines: Mapping[str, frozenset[str]] | None = None
    reserved: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Conflict:
    """A limit that alone, or with the others told beside it, keeps a replica out. `limit` is a stable word (gpus,
    power, cooling, spread, scale_up, bandwidth, selector, engine, closed, reach …), `words` has the numbers."""

    limit: str
    words: str


@dataclass(frozen=True, slots=True)
class Unplaced:
    """Replicas without a place, why, and what would help."""

    deployment: str
    replicas: int
    conflicts: tuple[Conflict, ...]
    remedy: str

    @property
    def words(self) -> str:
        """One sentence of all of it."""
        return "; ".join([conflict.words for conflict in self.conflicts] + [self.remedy])


@dataclass(frozen=True, slots=True)
class Score:
    """How well a goal was reached. `bound`: no placement that is as good in the goals before it is below; None where
    nothing was proven."""

    goal: Goal
    value: float
    bound: float | None = None

    @property
    def proven(self) -> bool:
        """True where nothing better exists."""
        return self.bound is not None and self.value <= self.bound + 1e-9

    @property
    def gap(self) -> float | None:
        """Share of `value` that might be saved, 0 to 1; None where nothing was proven."""
        if self.bound is None:
            return None
        return max(0.0, self.value - self.bound) / self.value if self.value > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Placement:
    """`placed` are all replicas that have a place, standing ones included, by name. `moved` names those that stood
    elsewhere, `fresh` those that did not stand at all. `scores` are in the order of the goals."""

    placed: tuple[Placed, ...]
    unplaced: tuple[Unplaced, ...] = ()
    moved: frozenset[str] = frozenset()
    fresh: frozenset[str] = frozenset()
    scores: tuple[Score, ...] = ()

    @property
    def feasible(self) -> bool:
        """Whether every replica that is needed has a place."""
        return not self.unplaced

    @property
    def proven(self) -> bool:
        """Whether no goal can be reached better."""
        return all(score.proven for score in self.scores)
