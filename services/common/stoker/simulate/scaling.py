"""The real scaler's rounds over a simulated fleet: signals as its service would make them, decisions carried out."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from stoker.bench.desk import Desk
from stoker.bench.replicas import Clock
from stoker.scaler.core.decide import decide
from stoker.scaler.core.past import NOTHING
from stoker.scaler.core.policy import Policy, lookback_s, memory_s
from stoker.scaler.core.signals import Capacity, History, Minute, Sample, Wanted
from stoker.scaler.core.values import Because, Cost, Decision, Decisions, Deployment, Desired, Fleet, Standing
from stoker.scaler.core.warming import Warming
from stoker.simulate.clairvoyant import Plan
from stoker.simulate.fleet import DEPLOYMENT, SimulatedFleet
from stoker.simulate.ledger import Interval, Ledger
from stoker.simulate.settings import Settings, Victims

_MONDAY_S = 1_704_067_200.0  # the wall clock at the beginning: a Monday, midnight UTC
_MINUTE_S = 60.0
AFTER_S = 600.0
"""The time after replicas that served were told to go, in which hits are counted apart."""


@dataclass(frozen=True, slots=True)
class Change:
    """One decision that changed the count, with what led to it."""

    at: float
    before: int
    after: int
    because: tuple[Because, ...]
    costs: Mapping[str, Cost] = field(default_factory=dict)
    """Of the replicas that went although they served, by the scaler's choice: what that costs."""

    @property
    def reason(self) -> str:
        """The last that had a say."""
        return self.because[-1].reason


@dataclass(slots=True)
class _Totals:
    """Sums at the sample before."""

    at: float = 0.0
    generated: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    held: float = 0.0
    sent_on: float = 0.0


@dataclass(slots=True)
class _Sums:
    """A minute in the making."""

    began: float = 0.0
    arrivals: int = 0
    prompt_tokens: float = 0.0
    generated: int = 0
    looked_up: int = 0
    cached: int = 0


@dataclass
class Scaling:
    """Measures, decides, acts, round after round."""

    policy: Policy
    settings: Settings
    fleet: SimulatedFleet
    ledger: Ledger
    desk: Desk
    clock: Clock
    plan: Plan | None = None
    """Counts that stand beforehand, in place of a decision's."""
    changes: list[Change] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._deployment = Deployment(DEPLOYMENT, 1, self.settings.initial)
        # What stands at the beginning was decided long before it.
        self._desired: tuple[Desired, ...] = (Desired(DEPLOYMENT, 1, self.settings.initial),)
        self._samples: deque[Sample] = deque()
        self._minutes = NOTHING
        self._wanted: deque[Wanted] = deque()
        self._totals = _Totals()
        self._minute = _Sums()
        self._changed_at: float | None = None
        self._rng = Random(f"{self.settings.seed} victims")  # noqa: S311 (repeatable on purpose)
        self._shrunk_at = float("-inf")
        self.prompt_tokens_after = self.cached_tokens_after = 0

    def round(self) -> None:
        """Measure and decide now, then come again."""
        now = self.clock.now
        self._observe(now)
        if self.plan is not None:
            count = min(max(self.settings.least, self.plan.at(now)), self.settings.most)
            self._deployment = replace(self._deployment, replicas=count)
        decisions = self._decided(now)
        decision = decisions.made[0]
        if decision.wanted is not None:
            self._wanted.append(decision.wanted)
        before = self._desired[0].replicas
        self._desired = decisions.desired
        if decision.replicas != before:
            self.changes.append(Change(now, before, decision.replicas, decision.because, decision.costs))
            self._changed_at = now
        self._remove(decision, now)
        staying = sum(not replica.leaving for replica in self.fleet.replicas)
        self.fleet.add(max(0, decision.replicas - staying))
        self.clock.after(self.settings.round_s, self.round)

    def _decided(self, now: float) -> Decisions:
        """As the scaler's service does it: what caches are worth is asked where ready replicas are to go."""
        decided = partial(
            decide,
            Fleet((self._deployment,), self.fleet.replicas, self._desired, self.fleet.loads),
            now,
            policies={DEPLOYMENT: self.policy},
            histories={DEPLOYMENT: self._history(now)},
        )
        decisions = decided()
        going = decisions.made[0]
        if not going.costs or self.settings.victims is not Victims.WARM:
            return decisions
        return decided(worths={DEPLOYMENT: self.fleet.caches.worth(going.victims)})

    def _remove(self, decision: Decision, now: float) -> None:
        victims, warmings = decision.victims, tuple[Warming, ...]()
        serving = [r.id for r in self.fleet.replicas if r.standing is Standing.READY and not r.leaving]
        going = [name for name in victims if name in serving]
        if going:
            self._shrunk_at = now
        match self.settings.victims:
            case Victims.WARM if going:
                heirs = [name for name in serving if name not in going]
                rate = self._capacity().prefill_tokens_per_s or 0.0
                budget = self.settings.warm_s * rate * len(heirs)
                warmings = self.fleet.caches.warmings(going, heirs, budget)
            case Victims.NEWEST:
                victims = (*(name for name in victims if name not in going), *serving[len(serving) - len(going) :])
            case Victims.RANDOM:
                victims = (*(name for name in victims if name not in going), *self._rng.sample(serving, len(going)))
        self.fleet.remove(victims, warmings)

    def _history(self, now: float) -> History:
        kept = lookback_s(self.policy)
        for past in (self._samples, self._wanted):
            while past and past[0].at < now - kept:
                past.popleft()
        return History(
            samples=tuple(self._samples),
            minutes=self._minutes,
            wanted=tuple(self._wanted),
            capacity=self._capacity(),
            startup=self.settings.starting.known,
            changed_at=self._changed_at,
            now_wall=_MONDAY_S + now,
        )

    def _capacity(self) -> Capacity:
        """As it was measured so far."""
        hardware, measured, answered = self.settings.hardware, self.fleet.measured, self.ledger.answered
        context = self.ledger.context_tokens / answered if answered else 0.0
        return Capacity(
            prefill_tokens_per_s=measured.prefilled_tokens / measured.prefill_s if measured.prefill_s else None,
            step_s=hardware.decode_s if answered else None,
            sequence_s=hardware.sequence_s + context * hardware.context_s if answered else None,
            kv_tokens=float(hardware.kv_blocks * hardware.block_size),
            max_seqs=hardware.max_seqs or None,
        )

    def _observe(self, now: float) -> None:
        interval, before, measured = self.ledger.take(), self._totals, self.fleet.measured
        totals = self._totals = _Totals(
            now,
            self.fleet.generated,
            measured.prompt_tokens,
            measured.cached_tokens,
            self.ledger.held.until(now),
            self.ledger.sent_on.until(now),
        )
        seconds = now - before.at
        if seconds <= 0.0:
            return
        waiting = sum(engine.waiting for engine in self.fleet.engines.values())
        serving = list(self.fleet.serving)
        looked_up = totals.prompt_tokens - before.prompt_tokens
        if now - self._shrunk_at <= AFTER_S:
            self.prompt_tokens_after += looked_up
            self.cached_tokens_after += totals.cached_tokens - before.cached_tokens
        count = self.fleet.count
        self._samples.append(
            Sample(
                at=now,
                ready=count.ready,
                starting=count.starting,
                running=max(0.0, (totals.sent_on - before.sent_on) / seconds - waiting),
                waiting=waiting,
                queued=(totals.held - before.held) / seconds,
                queue_s=self.desk.longest_wait_s(),
                arrivals_per_s=interval.arrived / seconds,
                prefill_tokens_per_s=interval.prompt_tokens / seconds,
                prompt_scv=_scv(interval),
                decode_tokens_per_s=(totals.generated - before.generated) / seconds,
                kv_usage=sum(e.cache.pinned for e in serving) / len(serving) / self.settings.hardware.kv_blocks
                if serving
                else None,
                hit_rate=(totals.cached_tokens - before.cached_tokens) / looked_up if looked_up else None,
                ttft_s=interval.ttft_s / interval.ttfts if interval.ttfts else None,
                itl_s=interval.decoding_s / interval.tokens if interval.tokens else None,
                within_slo=interval.within / interval.answered if interval.answered else None,
            )
        )
        self._add_to_minute(now, interval, before, totals)

    def _add_to_minute(self, now: float, interval: Interval, before: _Totals, totals: _Totals) -> None:
        sums = self._minute
        sums.arrivals += interval.arrived
        sums.prompt_tokens += interval.prompt_tokens
        sums.generated += totals.generated - before.generated
        sums.looked_up += totals.prompt_tokens - before.prompt_tokens
        sums.cached += totals.cached_tokens - before.cached_tokens
        seconds = now - sums.began
        if seconds < _MINUTE_S - 1e-6:
            return
        minute = Minute(
            at=_MONDAY_S + sums.began,
            arrivals_per_s=sums.arrivals / seconds,
            prefill_tokens_per_s=sums.prompt_tokens / seconds,
            decode_tokens_per_s=sums.generated / seconds,
            hit_rate=sums.cached / sums.looked_up if sums.looked_up else 0.0,
        )
        oldest = _MONDAY_S + now - memory_s(self.policy) - _MINUTE_S
        self._minutes = self._minutes.between(oldest, minute.at).followed_by(minute)
        self._minute = _Sums(began=now)


def _scv(interval: Interval) -> float | None:
    """Variance over squared mean of the prompts' lengths; unknown of fewer than two."""
    count = interval.arrived
    if count < 2:
        return None
    mean = interval.prompt_tokens / count
    variance = max(0.0, interval.prompt_squares - count * mean * mean) / (count - 1)
    return variance / (mean * mean)
