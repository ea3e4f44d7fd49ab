"""From one placement to another: what stays, moves, starts and stops, and what warm cache that costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from stoker.planner.core.ordering import natural
from stoker.planner.core.placement import Member, Placed


class Kind(Enum):
    """What happens to a replica."""

    MOVE = "move"
    START = "start"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Change:
    """`here` is where it is, `there` where it is to be, None where it is not. `warm_tokens` are those in its KV cache
    that others must compute anew; None where unknown, and where it has none to lose."""

    kind: Kind
    replica: str
    deployment: str
    here: tuple[Member, ...] | None
    there: tuple[Member, ...] | None
    warm_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class Changes:
    """All of them by replica; `stay` counts those that are left alone, under whichever name."""

    changes: tuple[Change, ...]
    stay: int

    def of(self, kind: Kind) -> int:
        """How many of a kind."""
        return sum(change.kind is kind for change in self.changes)

    @property
    def warm_tokens(self) -> float | None:
        """What is lost in all; None where that of one is unknown."""
        lost = [change.warm_tokens for change in self.changes if change.here is not None]
        return None if any(each is None for each in lost) else float(sum(each or 0.0 for each in lost))


def changes(before: Sequence[Placed], after: Sequence[Placed], warm: Mapping[str, float] | None = None) -> Changes:
    """What leads from `before` to `after`; `warm` is what each replica holds in its cache, in tokens, as far as that
    is known.

    Two replicas of one deployment in one place are the same, whatever they are called; others go by their names.
    """
    warm = warm or {}
    spots: dict[tuple[str, tuple[Member, ...]], list[Placed]] = defaultdict(list)
    for old in before:
        spots[old.deployment, old.members].append(old)
    leaving, coming = {old.replica: old for old in before}, {new.replica: new for new in after}
    stay = 0
    for new in sorted(after, key=lambda each: natural(each.replica)):
        same = spots[new.deployment, new.members]
        if same:
            same_name = next((old for old in same if old.replica == new.replica), same[0])
            same.remove(same_name)
            del leaving[same_name.replica], coming[new.replica]
            stay += 1
    found = [
        Change(Kind.MOVE, name, old.deployment, old.members, coming[name].members, warm.get(name))
        for name, old in leaving.items()
        if name in coming and coming[name].deployment == old.deployment
    ]
    moving = {change.replica for change in found}
    found += [
        Change(Kind.STOP, name, old.deployment, old.members, None, warm.get(name))
        for name, old in leaving.items()
        if name not in moving
    ]
    found += [
        Change(Kind.START, name, new.deployment, None, new.members)
        for name, new in coming.items()
        if name not in moving
    ]
    return Changes(tuple(sorted(found, key=lambda change: natural(change.replica))), stay)
