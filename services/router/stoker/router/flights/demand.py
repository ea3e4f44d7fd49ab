"""The demand that this router sees, by model: counted on every way in, told to whoever scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from stoker.api.registry.v1 import registry_pb2
from stoker.router.core.demand import Tally, Times
from stoker.router.decisions.decided import Decided
from stoker.router.fleet.view import View
from stoker.router.prompts.plan import TOKENS, Plan

_MOST_MODELS = 1_024
"""Models are named by operators, but adapters come and go, and what was counted stays counted."""
_MOST_DEPLOYMENTS = 64


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that waits in this router. `since` is when it came, by the router's clock."""

    model: str
    since: float
    held: bool = False
    """No replica is ready."""


class Demand:
    """Counts. What waits at the moment is asked of `waiting` when it is told."""

    def __init__(self, view: View, waiting: Callable[[], Iterable[Waiting]], clock: Callable[[], float]) -> None:
        self._view = view
        self._waiting = waiting
        self._clock = clock
        self._tallies: dict[str, Tally] = {}
        self._told: dict[str, tuple[int, ...]] = {}
        self._beyond = Tally()

    def of(self, model: str) -> Tally:
        """What was counted for a model, by the name that requests ask for."""
        return self._tallies.get(model) or self._new(model)

    def _new(self, model: str) -> Tally:
        if len(self._tallies) >= _MOST_MODELS:
            return self._beyond
        tally = self._tallies[model] = Tally()
        self._set_times(model, tally)
        return tally

    def _set_times(self, model: str, tally: Tally) -> None:
        slos = [self._view.deployed.slo(name) for name in self._view.deployed.serving(model)]
        tally.most_ttft_s = min((slo.ttft_s for slo in slos), default=math.inf)
        tally.most_itl_s = min((slo.itl_s for slo in slos), default=math.inf)

    def arrived(self, plan: Plan) -> None:
        """A request was planned."""
        request = plan.request
        tally = self._tallies.get(request.adapter or plan.pool.model) or self.of(request.adapter or plan.pool.model)
        tally.arrivals += 1
        tokens = request.prompt_tokens
        tally.prompt_tokens += tokens
        tally.prompt_tokens_squared += tokens * tokens

    def refused(self, plan: Plan) -> None:
        """It is turned away, before a first try."""
        self.of(plan.request.adapter or plan.pool.model).refused += 1

    def departed(self, decided: Decided) -> Tally:
        """A try of one goes to a replica; its end is told to what this returns."""
        plan = decided.plan
        model = plan.request.adapter or plan.pool.model
        tally = self._tallies.get(model) or self.of(model)
        tally.tries += 1
        if plan.source == TOKENS:
            tally.predicted_cached_tokens += decided.decision.cached_tokens
        return tally

    def fold(self) -> None:
        """Count the tries that have ended. Call it every while."""
        for tally in self._tallies.values():
            tally.fold()
        self._beyond.fold()

    def report(self, whole: bool) -> Iterator[registry_pb2.Demand]:
        """What changed since the last call, or all; models that nobody has asked for are told too, as zero."""
        waiting: dict[str, list[Waiting]] = {}
        for each in self._waiting():
            waiting.setdefault(each.model, []).append(each)
        for model in (*self._view.names(), *self._view.deployed.models(), *waiting):
            self.of(model)
        self.fold()
        now = self._clock()
        for model, tally in self._tallies.items():
            self._set_times(model, tally)
            marks = (*tally.marks(), len(waiting.get(model, ())))
            if whole or marks[-1] or marks != self._told.get(model):
                self._told[model] = marks
                yield self._message(model, tally, waiting.get(model, ()), now)

    def _message(self, model: str, tally: Tally, waiting: Iterable[Waiting], now: float) -> registry_pb2.Demand:
        waiting = tuple(waiting)
        return registry_pb2.Demand(
            model=model,
            deployments=self._view.deployed.serving(model)[:_MOST_DEPLOYMENTS],
            arrivals=tally.arrivals,
            prompt_tokens=tally.prompt_tokens,
            prompt_tokens_squared=tally.prompt_tokens_squared,
            predicted_cached_tokens=tally.predicted_cached_tokens,
            compared_tokens=tally.compared_tokens,
            cached_tokens=tally.cached_tokens,
            output_tokens=tally.output_tokens,
            finished=tally.finished,
            failed=tally.failed,
            refused=tally.refused,
            cancelled=tally.cancelled,
            judged=tally.judged,
            within_slo=tally.within_slo,
            ttft=_histogram(tally.ttft),
            itl=_histogram(tally.itl),
            queued=len(waiting),
            oldest_queued_s=max((now - each.since for each in waiting), default=0.0),
            in_flight=tally.in_flight,
            held=sum(each.held for each in waiting),
        )


def _histogram(times: Times) -> registry_pb2.LogHistogram:
    return registry_pb2.LogHistogram(counts=times.told(), sum_s=times.sum_s)
