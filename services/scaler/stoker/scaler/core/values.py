"""The values that go into a scaling decision and come out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from stoker.scaler.core.signals import Wanted


class Reason(StrEnum):
    """Why a deployment gets the count it gets. Stable: people and programs match on it."""

    FIXED = "FIXED"
    """The specification says so and no policy says otherwise."""
    CONCURRENCY = "CONCURRENCY"
    """Requests in flight over the target, in the stable window."""
    PANIC = "PANIC"
    """The same in the panic window, or what was wanted since the panic began."""
    SATURATION = "SATURATION"
    """Spare KV cache and queue."""
    SLO = "SLO"
    """The times of the SLO, by the queueing model."""
    FORECAST = "FORECAST"
    """The same for the demand expected when a replica started now is ready."""

    NEW = "NEW"
    """Nothing was decided before: the specification's count, within the bounds."""
    PAUSED = "PAUSED"
    """Held: the operator said so."""
    UNKNOWN = "UNKNOWN"
    """Held: what the policy needs is not known."""
    STALE = "STALE"
    """Held: what is known is older than the policy's `fresh_s`."""
    UNSEEN = "UNSEEN"
    """Not lowered: a whole window of demand has not been seen yet, after a restart or an outage."""
    SETTLING = "SETTLING"
    """Not lowered as far: more was wanted a short while ago."""
    MARGIN = "MARGIN"
    """Not lowered: the need is too close to the lower count."""
    COOLDOWN = "COOLDOWN"
    """Held: the last change is too recent."""
    STEP = "STEP"
    """Moved less than wanted: one decision may change only so much."""
    COMING = "COMING"
    """Not raised: what is starting will carry it."""
    LOST = "LOST"
    """Raised for replicas that failed, or should long have been ready."""
    VARIANT = "VARIANT"
    """Another deployment of the group grows or shrinks instead."""
    AT_LEAST = "AT_LEAST"
    """Raised to the lower bound."""
    AT_MOST = "AT_MOST"
    """Lowered to the upper bound."""
    SCHEDULE = "SCHEDULE"
    """A bound that holds at this hour."""
    DOMAIN = "DOMAIN"
    """Lowered less: each failure domain keeps its minimum."""
    VICTIM = "VICTIM"
    """Why one replica goes rather than another: no step of its own."""
    CAP_COST = "CAP_COST"
    """The group's money allows no more."""
    CAP_POWER = "CAP_POWER"
    """The group's power allows no more."""
    IDLE = "IDLE"
    """Lowered to none: nothing was asked for the policy's `idle_s`."""
    NOT_IDLE = "NOT_IDLE"
    """Not lowered to none: not long enough without any request, or not known to be."""
    WOKEN = "WOKEN"
    """Raised from none: a router holds a request."""


class Standing(IntEnum):
    """How far a replica is from serving. The higher, the more is lost by removing it."""

    FAILING = 0
    """Died or never became ready."""
    PENDING = 1
    """Assigned, no process yet; or nothing is known of it."""
    STARTING = 2
    """Its process loads the model."""
    UNHEALTHY = 3
    """Served before and may again."""
    READY = 4
    """Serves."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A deployment as asked for: `replicas` is the count of its specification."""

    name: str
    generation: int
    replicas: int


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica that counts: `leaving` once it was told to drain, `moving` while another is to take its place."""

    id: str
    deployment: str
    standing: Standing
    leaving: bool = False
    since: float | None = None
    """When it came to stand so (monotonic seconds); None: not known."""
    domain: str = ""
    """What fails together with it: its rack, say. Empty: not known."""
    moving: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """Work of one replica, as known at `seen_at` (monotonic seconds). None is unknown, which is not zero."""

    seen_at: float
    running: int | None = None
    waiting: int | None = None
    queued_prefill_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Because:
    """One step of a decision, with the numbers behind it. A number that is None is unknown."""

    reason: Reason
    numbers: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Need:
    """How many replicas of one deployment alone the whole demand of its group needs: a fraction, before limits.

    None is unknown: the count is held. `correction` is what the policy has learnt of its own model by now.
    """

    replicas: float | None
    reason: Reason
    numbers: Mapping[str, float | None] = field(default_factory=dict)
    correction: float = 1.0


@dataclass(frozen=True, slots=True)
class Cost:
    """What it costs that a replica goes, beside those that go before it: seconds of one replica's time."""

    lost_tokens: float
    """Tokens of KV cache expected to be asked for again that nobody else will hold."""
    lost_s: float
    """Prefill of these."""
    drain_s: float | None
    """Until its work is done; None: its load is not known."""
    backlog: bool = False
    """Requests wait in it, and nowhere many more."""


@dataclass(frozen=True, slots=True)
class Desired:
    """How many replicas a deployment shall have, which go first when there are more, and why.

    This is what is persisted: `reason` is that of the last change, and stands while nothing else changes.
    """

    deployment: str
    generation: int
    replicas: int
    victims: tuple[str, ...] = ()
    reason: str = Reason.FIXED


@dataclass(frozen=True, slots=True)
class Decision:
    """What one round decided for one deployment, changed or not, and each step that led there.

    `because` begins with the policy's need; each further step is a limit that moved or held the count. The last
    one that did gives the `reason`. `wanted` belongs into the next round's `History.wanted` (None: not known).
    `costs` are by victim those of the ready ones, where they were chosen in this round.
    """

    deployment: str
    before: int | None
    replicas: int
    victims: tuple[str, ...]
    because: tuple[Because, ...]
    wanted: Wanted | None = None
    costs: Mapping[str, Cost] = field(default_factory=dict)

    @property
    def reason(self) -> Reason:
        """Why the count is what it is."""
        return self.because[-1].reason


@dataclass(frozen=True, slots=True)
class Fleet:
    """All the scaler sees. `desired` is what was last written, by this leader or one before it."""

    deployments: Sequence[Deployment] = ()
    replicas: Sequence[Replica] = ()
    desired: Sequence[Desired] = ()
    loads: Mapping[str, Load] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decisions:
    """What a round decided for every deployment (`made`), what shall be persisted of it (`desired`), and the part
    of that which is news."""

    made: tuple[Decision, ...] = ()
    desired: tuple[Desired, ...] = ()
    changed: tuple[Desired, ...] = ()
    removed: tuple[str, ...] = ()

    @property
    def quiet(self) -> bool:
        """True where nothing has to be written."""
        return not self.changed and not self.removed
