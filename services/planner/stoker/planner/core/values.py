"""The values that go into a plan and come out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from stoker.planner.core.placement.ground import Ground
from stoker.planner.core.placement.values import Domain, Member
from stoker.planner.core.units import NO_RATE, BytesPerSecond, Watts


class Wanted(Enum):
    """What an assignment asks of its agents."""

    RUN = "run"
    RETIRE = "retire"
    """Serve on, and have what only it holds computed elsewhere: then it drains."""
    DRAIN = "drain"


class Condition(Enum):
    """What the planner needs to know of a replica's state."""

    READY = "ready"
    """Serves."""
    NOT_READY = "not_ready"
    """Some member is starting, failing, or draining."""
    GONE = "gone"
    """No member is left, or all have stopped."""


@dataclass(frozen=True, slots=True)
class Node:
    """A host. It offers `gpus` (indices as the driver counts), or where it has none, `cpu_slots` replicas.

    `host` is the address that several nodes may share (a local stack's do); "": one that no other has.
    """

    id: str
    gpus: frozenset[int] = frozenset()
    cpu_slots: int = 0
    engines: frozenset[str] = frozenset()
    labels: Mapping[str, str] = field(default_factory=dict)
    draining: bool = False
    host: str = ""


@dataclass(frozen=True, slots=True)
class Wishes:
    """Where replicas may and should be, as `Need` of a placement has it. `tensor_parallel` 0: all of a member's GPUs.
    `pair_rate` is what one replica sends to those of `pair`. `spread_over` None: what suits the facility;
    `largest_share` None: one half; where that leaves some without a place, rounded up to a whole replica."""

    tensor_parallel: int = 0
    busy_power: Watts | None = None
    peer_rate: BytesPerSecond = NO_RATE
    pair: str = ""
    pair_rate: BytesPerSecond = NO_RATE
    spread_over: frozenset[Domain] | None = None
    largest_share: float | None = None
    regions: Mapping[str, float] = field(default_factory=dict)
    near: str = ""
    reach_s: float | None = None
    gpu_types: frozenset[str] = frozenset()
    weight: int = 1


_NO_WISHES = Wishes()


@dataclass(frozen=True, slots=True)
class Deployment:
    """What to run. `spec` names one content of the specification, its replica count and its `wishes` left out.

    `gang_size` nodes per replica, each with `gpus_per_node` GPUs; none means a slot on a host without GPUs.
    """

    name: str
    spec: str
    engine: str
    gpus_per_node: int = 0
    gang_size: int = 1
    node_selector: Mapping[str, str] = field(default_factory=dict)
    wishes: Wishes = _NO_WISHES


@dataclass(frozen=True, slots=True)
class Warming:
    """A prompt prefix, by the key of its last block, that another replica shall compute: so many tokens there."""

    leaf: int
    successor: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """A replica and the nodes that run it by rank, the leader first.

    `warmings` are for one that is told to retire, best first; not known of one that stands.
    """

    replica: str
    deployment: str
    spec: str
    members: tuple[Member, ...]
    wanted: Wanted = Wanted.RUN
    rendezvous_port: int = 0
    warmings: tuple[Warming, ...] = ()


@dataclass(frozen=True, slots=True)
class Desired:
    """How many replicas a deployment shall have, which go first when there are more, and what is computed on others
    before one of them goes."""

    replicas: int
    victims: tuple[str, ...] = ()
    warmings: Mapping[str, tuple[Warming, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Limits:
    """What an operator set: rendezvous ports, when absent nodes count as lost (seconds, see `loss`), and how long to
    look for better places than the first ones found (seconds; 0: not at all) where a round places at least
    `search_least` replicas with GPUs."""

    rendezvous_ports: range = range(29_500, 29_700)
    grace_s: float = 20.0
    mass_share: float = 0.34
    mass_grace_s: float = 300.0
    settle_s: float = 15.0
    search_s: float = 0.0
    search_least: int = 4


@dataclass(frozen=True, slots=True)
class Problem:
    """All the planner sees.

    `conditions` is by replica id; one that is missing has no member left. `settling` are nodes back from
    the lost: they may still be stopping what they ran, so nothing new goes there. `lost` are nodes given up;
    assigned nodes that are neither there nor in `nodes` are late and may return.
    `replacing` are ids that an earlier plan freed for a replacement. `retired` are replicas that were told to retire
    and have done so, or have taken too long.

    `ground` is the facility with what agents report of it; None: what `nodes` alone tell. `applied` says that an
    operator described it: only then is a spread asked for by default, and nodes that the description lacks,
    `unlisted`, get nothing new. `moves` are replicas that an operator moves, with where to.
    """

    nodes: Sequence[Node] = ()
    deployments: Sequence[Deployment] = ()
    desired: Mapping[str, Desired] = field(default_factory=dict)
    assignments: Sequence[Assignment] = ()
    conditions: Mapping[str, Condition] = field(default_factory=dict)
    settling: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()
    replacing: frozenset[str] = frozenset()
    retired: frozenset[str] = frozenset()
    ground: Ground | None = None
    applied: bool = False
    unlisted: frozenset[str] = frozenset()
    moves: Mapping[str, tuple[Member, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unplaced:
    """Replicas that have no place, or have to leave one and cannot: why, in words that name what would help."""

    deployment: str
    replicas: int
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What to write, in one transaction: no id is in both. `why` has a few words on each put and delete. `moves` says
    of each replica that is to move why it cannot; nothing where it does."""

    puts: tuple[Assignment, ...] = ()
    deletes: tuple[str, ...] = ()
    unplaced: tuple[Unplaced, ...] = ()
    replacing: frozenset[str] = frozenset()
    moves: Mapping[str, str] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)

    @property
    def quiet(self) -> bool:
        """True where nothing has to be written."""
        return not self.puts and not self.deletes
