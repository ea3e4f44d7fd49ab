"""How long replicas take to start."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stoker.scaler.core.signals import Startup
from stoker.scaler.core.values import Standing

_KEPT = 64


@dataclass(frozen=True, slots=True)
class Start:
    """One start: seconds from the decision to a ready replica. `first`: the node had never had this model ready, so
    that weights may have had to be fetched; None is unknown."""

    seconds: float
    first: bool | None = None


@dataclass(slots=True)
class _Watched:
    since: float
    """When it came to stand as it does."""
    standing: Standing
    began: float | None
    """When it was first seen, where that was before it was ready; None once it failed or was ready."""
    life: int = 0


class Starts:
    """Starts of all deployments, and since when each replica stands as it does, by the clock of who watches.

    The newest 64 starts of each deployment tell its percentiles: those with weights to fetch and those without as
    they came. One that has none yet takes those of other deployments of its model.
    """

    def __init__(self) -> None:
        self._watched: dict[str, _Watched] = {}
        self._starts: dict[str, deque[Start]] = {}
        self._models: dict[str, str] = {}

    def stands(
        self,
        replica: str,
        deployment: str,
        standing: Standing,
        life: int,
        told: Start | None,
        now: float,
    ) -> None:
        """How a replica stands at `now`; `told` is what its agent says of the last start of its engine's `life`,
        from its launch on."""
        watched = self._watched.get(replica)
        if watched is None:
            began = now if standing in (Standing.PENDING, Standing.STARTING) else None
            watched = self._watched[replica] = _Watched(now, standing, began)
        elif watched.standing is not standing:
            watched.since, watched.standing = now, standing
        if standing is Standing.FAILING:
            watched.began = None
        if standing is Standing.READY and life != watched.life:
            watched.life = life
            seen_s = 0.0 if watched.began is None else now - watched.began
            watched.began = None
            told_s = told.seconds if told is not None else 0.0
            if seconds := max(seen_s, told_s):
                self._of(deployment).append(Start(seconds, told.first if told is not None else None))

    def forget(self, replica: str) -> None:
        """It is gone."""
        self._watched.pop(replica, None)

    def since(self, replica: str) -> float | None:
        """When it came to stand as it does (monotonic seconds)."""
        watched = self._watched.get(replica)
        return None if watched is None else watched.since

    def serves(self, deployment: str, model: str) -> None:
        """Which model a deployment serves."""
        self._models[deployment] = model

    def keep(self, deployments: Iterable[str]) -> None:
        """Forget all others."""
        kept = set(deployments)
        for gone in self._models.keys() - kept:
            self._models.pop(gone)
            self._starts.pop(gone, None)

    def restore(self, deployment: str, starts: Iterable[Start]) -> None:
        """Starts that were measured before those known here."""
        own = list(self._of(deployment))
        self._starts[deployment] = deque([*starts, *own], maxlen=_KEPT)

    def kept(self, deployment: str) -> Sequence[Start]:
        """A deployment's own starts, oldest first."""
        return tuple(self._starts.get(deployment, ()))

    def startup(self, deployment: str) -> Startup:
        """Percentiles of a deployment's starts."""
        seconds = [start.seconds for start in self._starts.get(deployment, ())]
        if not seconds:
            model = self._models.get(deployment)
            alike = [name for name, other in self._models.items() if other == model]
            seconds = [start.seconds for name in alike for start in self._starts.get(name, ())]
        if not seconds:
            return Startup()
        seconds.sort()
        return Startup(_at(seconds, 0.5), _at(seconds, 0.95))

    def _of(self, deployment: str) -> deque[Start]:
        return self._starts.setdefault(deployment, deque(maxlen=_KEPT))


def _at(ordered: Sequence[float], share: float) -> float:
    """The smallest value that `share` of them are at most."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
