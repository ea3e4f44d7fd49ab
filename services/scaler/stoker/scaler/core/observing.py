"""Samples out of what routers and node agents report.

All they count is counted from a beginning of their own, so that lost messages do no harm; a rate is the growth
between two readings over the time between them. What is not known is left unknown: a router that falls silent makes
arrivals unknown until it has surely ended, and a sum over replicas stands for all of them where nearly all are known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stoker.scaler.core.counting import Growth, Meter, Reading
from stoker.scaler.core.signals import Sample
from stoker.scaler.core.values import Replica, Standing

_ENDED_AFTER_S = 30.0
"""A router that says nothing for so long has ended …"""
_GONE_AFTER_S = 5.0
"""… or for so long after its registry said that its stream had ended: it may only have moved to another."""
_FRESH_S = 5.0
"""Age at which a gauge is no longer known. They come each second, or twice."""
_NEARLY_ALL = 0.8
"""Of the ready replicas so many must be known for the rest to be taken to be like them."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What one router has seen of one model: counters, and what waits there now."""

    model: str
    deployments: tuple[str, ...]
    counts: Mapping[str, float]
    queued: float = 0.0
    oldest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """What one replica's agent reports: counters, and what it holds now. None is unknown."""

    life: int
    counts: Mapping[str, float]
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    prefill_tokens_per_s: float | None = None


@dataclass(slots=True)
class _Model:
    meter: Meter
    asked: Asked


@dataclass(slots=True)
class _Router:
    began: int
    heard_at: float
    gone_at: float | None = None
    models: dict[str, _Model] = field(default_factory=dict)

    def ended(self, now: float) -> bool:
        gone = self.gone_at is not None and now - self.gone_at > _GONE_AFTER_S
        return gone or now - self.heard_at > _ENDED_AFTER_S


@dataclass(slots=True)
class _Engine:
    meter: Meter
    at: float
    load: Report


@dataclass(frozen=True, slots=True)
class Seen:
    """A sample and what the replicas of the deployment counted in its time, for those who learn from it."""

    sample: Sample
    grown: tuple[Growth, ...] = ()
    prefill_rates: tuple[float, ...] = ()


class Observer:
    """Holds the newest of every router and replica; `samples` draws them together."""

    def __init__(self) -> None:
        self._routers: dict[str, _Router] = {}
        self._engines: dict[str, _Engine] = {}

    def demand(self, router: str, began: int, asked: Iterable[Asked], at: float) -> None:
        """What a router counted by `at` (monotonic seconds), of the models that changed."""
        held = self._routers.get(router)
        if held is None or held.began != began:
            held = self._routers[router] = _Router(began, at)
        held.heard_at, held.gone_at = max(held.heard_at, at), None
        for each in asked:
            model = held.models.get(each.model)
            if model is None:
                model = held.models[each.model] = _Model(Meter(), each)
            model.asked = each
            model.meter.read(Reading(at, began, each.counts))

    def gone(self, router: str, now: float) -> None:
        """No registry hears it any more."""
        held = self._routers.get(router)
        if held is not None and held.gone_at is None:
            held.gone_at = now

    def load(self, replica: str, load: Report, at: float) -> None:
        """What a replica's agent reported at `at` (monotonic seconds)."""
        held = self._engines.get(replica)
        if held is None:
            held = self._engines[replica] = _Engine(Meter(), at, load)
        held.at, held.load = at, load
        held.meter.read(Reading(at, load.life, load.counts))

    def forget(self, replica: str) -> None:
        """It is gone."""
        self._engines.pop(replica, None)

    def together(self, deployments: Iterable[str]) -> list[list[str]]:
        """The deployments, in one part those that share routers' models: their samples are one question."""
        parts = {name: [name] for name in deployments}
        for router in self._routers.values():
            for model in router.models.values():
                known = [name for name in model.asked.deployments if name in parts]
                for name in known[1:]:
                    part, other = parts[known[0]], parts[name]
                    if part is not other:
                        part += other
                        parts.update(dict.fromkeys(other, part))
        return list({id(part): part for part in parts.values()}.values())

    def samples(self, deployments: Collection[str], replicas: Iterable[Replica], now: float) -> dict[str, Seen]:
        """One of each deployment, of all that share a model (`together`) or of none. Asking again begins a new
        interval."""
        mine: defaultdict[str, list[Replica]] = defaultdict(list)
        for replica in replicas:
            if not replica.leaving:
                mine[replica.deployment].append(replica)
        ready = {name: sum(r.standing is Standing.READY for r in of) for name, of in mine.items()}
        demand = self._demand(deployments, ready, now)
        return {name: self._seen(mine[name], demand.get(name), now) for name in deployments}

    def _seen(self, replicas: Sequence[Replica], demand: _Demand | None, now: float) -> Seen:
        ready = [replica.id for replica in replicas if replica.standing is Standing.READY]
        starting = sum(replica.standing in (Standing.PENDING, Standing.STARTING) for replica in replicas)
        engines = _Engines([held for each in ready if (held := self._engines.get(each))], len(ready), now)
        demand = demand or _Demand(known=False, fresh=False)
        itl_s = engines.mean("itl_sum_s", "itl_count")
        sample = Sample(
            at=now,
            ready=len(ready),
            starting=starting,
            running=engines.sum(lambda load: load.running),
            waiting=engines.sum(lambda load: load.waiting),
            queued=demand.queued if demand.fresh else None,
            queue_s=demand.oldest_s if demand.fresh else None,
            arrivals_per_s=demand.rate("arrivals"),
            prefill_tokens_per_s=demand.rate("prompt_tokens"),
            prompt_scv=demand.prompt_scv(),
            decode_tokens_per_s=engines.rate("generation_tokens"),
            kv_usage=engines.average(lambda load: load.kv_usage),
            hit_rate=engines.mean("found", "looked_up"),
            ttft_s=demand.mean("ttft_s", "ttfts"),
            itl_s=itl_s if itl_s is not None else demand.mean("itl_s", "itls"),
            within_slo=demand.mean("within_slo", "judged"),
        )
        return Seen(sample, tuple(engines.grown), engines.prefill_rates())

    def _demand(self, wanted: Collection[str], ready: Mapping[str, int], now: float) -> dict[str, _Demand]:
        """By deployment. What comes for a model that several serve is shared by their ready replicas."""
        for name in [name for name, router in self._routers.items() if router.ended(now)]:
            del self._routers[name]
        demand: defaultdict[str, _Demand] = defaultdict(_Demand)
        for router in self._routers.values():
            fresh = now - router.heard_at <= _FRESH_S and router.gone_at is None
            for model in router.models.values():
                if not any(name in wanted for name in model.asked.deployments):
                    continue
                model.meter.still(router.heard_at)
                growth = model.meter.grown()
                for deployment, share in _shares(model.asked.deployments, ready):
                    demand[deployment].add(model.asked, growth, share, fresh=fresh)
        return demand


def _shares(deployments: Sequence[str], ready: Mapping[str, int]) -> Iterator[tuple[str, float]]:
    total = sum(ready.get(name, 0) for name in deployments)
    for name in deployments:
        yield name, ready.get(name, 0) / total if total else 1.0 / len(deployments)


@dataclass(slots=True)
class _Demand:
    """Demand of one deployment, all routers and models together."""

    known: bool = True
    """Every router has told what it counted."""
    fresh: bool = True
    """Every router has told lately what waits in it."""
    queued: float = 0.0
    oldest_s: float = 0.0
    rates: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, asked: Asked, growth: Growth | None, share: float, *, fresh: bool) -> None:
        self.fresh = self.fresh and fresh
        self.queued += share * asked.queued
        self.oldest_s = max(self.oldest_s, asked.oldest_s)
        if growth is None:
            self.known = False
            return
        for name, count in growth.counts.items():
            self.rates[name] += share * count / growth.seconds

    def rate(self, name: str) -> float | None:
        return self.rates[name] if self.known else None

    def prompt_scv(self) -> float | None:
        """Of the prompts that came; of routers that do not count squares it is unknown."""
        mean, square = self.mean("prompt_tokens", "arrivals"), self.mean("prompt_tokens_squared", "arrivals")
        return max(0.0, square / (mean * mean) - 1.0) if mean and square else None

    def mean(self, total: str, count: str) -> float | None:
        """Of what was counted at all: the answers of other routers are much the same."""
        return self.rates[total] / self.rates[count] if self.rates[count] else None


class _Engines:
    """The ready replicas of one deployment of which something is known; `ready` is how many there are."""

    def __init__(self, engines: Sequence[_Engine], ready: int, now: float) -> None:
        self._ready = ready
        self._fresh = [engine.load for engine in engines if now - engine.at <= _FRESH_S]
        self.grown = [growth for engine in engines if (growth := engine.meter.grown()) is not None]

    def sum(self, value: Callable[[Report], float | None]) -> float | None:
        mean = self.average(value)
        return None if mean is None else mean * self._ready

    def average(self, value: Callable[[Report], float | None]) -> float | None:
        return self._mean([value(load) for load in self._fresh])

    def rate(self, name: str) -> float | None:
        mean = self._mean([growth.rate(name) for growth in self.grown])
        return None if mean is None else mean * self._ready

    def mean(self, total: str, count: str) -> float | None:
        """Of what all of them counted."""
        counts = sum(growth.counts.get(count, 0.0) for growth in self.grown)
        return sum(growth.counts.get(total, 0.0) for growth in self.grown) / counts if counts else None

    def prefill_rates(self) -> tuple[float, ...]:
        return tuple(load.prefill_tokens_per_s for load in self._fresh if load.prefill_tokens_per_s is not None)

    def _mean(self, values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        if not known or len(known) < _NEARLY_ALL * self._ready:
            return None
        return sum(known) / len(known)
