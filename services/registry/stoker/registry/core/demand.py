"""Demand that routers see: of each router and model the newest, for as long as its stream lasts.

Counters count from a router's beginning, so nothing has to arrive but the newest: whatever is slow or lost is made
good by the next report.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from stoker.api.registry.v1 import registry_pb2
from stoker.registry.core.dispatches import aged_ms

MAX_MODELS = 256
"""Models in one message."""
_MAX_MODELS_KEPT = 1_024
"""Of one router."""
_MAX_KEPT = 65_536
"""Models of all routers together."""


@dataclass
class Standing:
    """The newest of one router, by model; `at` is when it was counted, monotonic seconds."""

    router_id: str
    began_ns: int = 0
    sequence: int = 0
    at: float = 0.0
    gone: bool = False
    models: dict[str, registry_pb2.Demand] = field(default_factory=dict)

    def take(self, report: registry_pb2.RouterDemand, demand: Iterable[registry_pb2.Demand], at: float) -> None:
        """Take a newer report."""
        if report.began_ns != self.began_ns:
            self.models.clear()
        self.began_ns, self.sequence, self.at, self.gone = report.began_ns, report.sequence, at, report.gone
        self.models.update((each.model, each) for each in demand)

    def messages(self, now: float) -> Iterator[registry_pb2.RouterDemand]:
        """All of it, in pieces; one without models where there are none."""
        models = list(self.models.values())
        for start in range(0, max(1, len(models)), MAX_MODELS):
            yield registry_pb2.RouterDemand(
                router_id=self.router_id,
                began_ns=self.began_ns,
                sequence=self.sequence,
                demand=models[start : start + MAX_MODELS],
                gone=self.gone,
                age_ms=aged_ms(0, self.at, now),
            )


class DemandStore:
    """Demand of the routers that announce here."""

    def __init__(self, most: int = _MAX_KEPT, most_of_one: int = _MAX_MODELS_KEPT) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._kept = 0
        self._routers: dict[str, Standing] = {}

    def offer(self, report: registry_pb2.RouterDemand, now: float) -> registry_pb2.RouterDemand | None:
        """Keep a report; returns what of it is news, None for nothing: it is old, or there is no room.

        A router that began later than what is held counts anew.
        """
        held = self._routers.get(report.router_id)
        if held is not None and (report.began_ns, report.sequence) <= (held.began_ns, held.sequence):
            return None
        if held is None:
            held = self._routers[report.router_id] = Standing(report.router_id)
        before = len(held.models)
        known = held.models if report.began_ns == held.began_ns else {}
        room = min(self._most - self._kept + before - len(known), self._most_of_one - len(known))
        new = [each for each in report.demand if each.model not in known]
        refused = {each.model for each in new[max(0, room) :]}
        taken = [each for each in report.demand if each.model not in refused]
        held.take(report, taken, now - report.age_ms / 1000)
        self._kept += len(held.models) - before
        if refused:
            report = registry_pb2.RouterDemand(
                router_id=report.router_id,
                began_ns=report.began_ns,
                sequence=report.sequence,
                demand=taken,
                age_ms=report.age_ms,
            )
        return report

    def gone(self, router_id: str) -> registry_pb2.RouterDemand | None:
        """A router announces here no more; returns what to say of it, None where nothing was known of it."""
        held = self._routers.pop(router_id, None)
        if held is None:
            return None
        self._kept -= len(held.models)
        return registry_pb2.RouterDemand(
            router_id=router_id, began_ns=held.began_ns, sequence=held.sequence, gone=True
        )

    def all(self, now: float) -> Iterator[registry_pb2.RouterDemand]:
        """All that is held, in pieces."""
        for held in self._routers.values():
            yield from held.messages(now)


class DemandMerge:
    """Which of what several registries tell of a router's demand is news.

    A router speaks to one registry at a time. That its stream to an earlier one has ended says nothing of it.
    """

    def __init__(self, most: int = 4_096) -> None:
        self._most = most
        self._cursors: dict[str, tuple[str, int, int]] = {}

    def offer(self, source: str, report: registry_pb2.RouterDemand) -> bool:
        """Whether to take this report."""
        cursor = self._cursors.get(report.router_id)
        place = (report.began_ns, report.sequence)
        if report.gone:
            if cursor is None or cursor[0] != source:
                return False
            del self._cursors[report.router_id]
            return True
        # Pieces of one report share their sequence.
        if cursor is not None and place < cursor[1:]:
            return False
        self._cursors.pop(report.router_id, None)
        self._cursors[report.router_id] = (source, *place)
        if len(self._cursors) > self._most:
            del self._cursors[next(iter(self._cursors))]
        return True
