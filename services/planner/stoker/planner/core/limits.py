"""A limit of a facility: what there is, what is used, and what one more would take."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What runs out."""

    POWER = "power"
    COOLING = "cooling"
    SPACE = "space"
    WEIGHT = "weight"
    PORTS = "ports"
    RACKS = "racks"


class Scope(StrEnum):
    """Where it runs out."""

    RACK = "rack"
    FEED = "feed"
    SITE = "site"


UNITS = {
    Kind.POWER: "W",
    Kind.COOLING: "W",
    Kind.SPACE: "U",
    Kind.WEIGHT: "kg",
    Kind.PORTS: "ports",
    Kind.RACKS: "racks",
}


@dataclass(frozen=True, slots=True)
class Limit:
    """`available`, `used` and `each` are in the unit of the kind (`UNITS`); `each` is what one more takes.

    `lost` names the source whose loss makes it this tight, "" where all feeds live. `room` counts how many more fit
    where that is not `left` divided by `each`: free units between nodes hold fewer.
    """

    kind: Kind
    scope: Scope
    at: str
    available: float
    used: float
    each: float
    lost: str = ""
    room: int | None = None

    @property
    def left(self) -> float:
        """What is not used; negative where too much is."""
        return self.available - self.used

    @property
    def allows(self) -> int:
        """How many more fit. A great many where one takes nothing."""
        if self.room is not None:
            return self.room
        if self.each <= 0:
            return _ENDLESS
        return max(0, int((self.left + _ROUNDING) // self.each))


_ENDLESS = 1 << 31
_ROUNDING = 1e-6


def tightest(limits: list[Limit]) -> Limit | None:
    """The one that allows the fewest; of several the narrower scope, then the order of kinds."""
    order = {scope: at for at, scope in enumerate(Scope)}, {kind: at for at, kind in enumerate(Kind)}
    return min(limits, key=lambda each: (each.allows, order[0][each.scope], order[1][each.kind]), default=None)
