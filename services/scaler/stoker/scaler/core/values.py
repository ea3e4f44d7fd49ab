"""The values that go into a scaling decision and come out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum


class Reason(StrEnum):
    """Why a deployment gets the count it gets. Stable: people and programs match on it."""

    FIXED = "FIXED"
    """The specification says so and no policy says otherwise."""


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
    """A replica that counts: `leaving` once it was told to drain."""

    id: str
    deployment: str
    standing: Standing
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """Work of one replica, as known at `seen_at` (monotonic seconds). None is unknown, which is not zero."""

    seen_at: float
    running: int | None = None
    waiting: int | None = None
    queued_prefill_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Desired:
    """How many replicas a deployment shall have, which go first when there are more, and why."""

    deployment: str
    generation: int
    replicas: int
    victims: tuple[str, ...] = ()
    reason: str = Reason.FIXED


@dataclass(frozen=True, slots=True)
class Fleet:
    """All the scaler sees. `desired` is what was last written, by this leader or one before it."""

    deployments: Sequence[Deployment] = ()
    replicas: Sequence[Replica] = ()
    desired: Sequence[Desired] = ()
    loads: Mapping[str, Load] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decisions:
    """What a round decided for every deployment, and the part of it that has to be written."""

    desired: tuple[Desired, ...] = ()
    changed: tuple[Desired, ...] = ()
    removed: tuple[str, ...] = ()

    @property
    def quiet(self) -> bool:
        """True where nothing has to be written."""
        return not self.changed and not self.removed
