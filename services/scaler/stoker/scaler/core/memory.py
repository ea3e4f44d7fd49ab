"""What is remembered of one deployment."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from stoker.scaler.core.capacity import Measured
from stoker.scaler.core.minutes import Minutes
from stoker.scaler.core.policies.windows import at_rest
from stoker.scaler.core.policy import Policy, lookback_s, memory_s
from stoker.scaler.core.signals import History, Sample, Startup, Wanted

MOST_SAMPLES = 8_192
_NO_GAP = 0.9
"""Samples of idleness lie this share of the policy's `fresh_s` apart: a day of it is 6,400 of them."""
_SHORT_MEMORY_S = 2 * 3_600.0
"""Minutes that are kept whatever the policy: people ask why, and a policy may change."""
_SLOT_S = 0.5
"""Rounds follow changes, many in a second at times: of the counts wanted in so short a time the highest is kept."""


@dataclass
class Memory:
    """Signals, bounded: samples for the longest window of the policy, minutes for its seasons."""

    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=MOST_SAMPLES))
    wanted: deque[Wanted] = field(default_factory=lambda: deque(maxlen=MOST_SAMPLES))
    minutes: Minutes = field(default_factory=Minutes)
    measured: Measured = field(default_factory=Measured)
    changed_at: float | None = None
    """When the count last changed (monotonic seconds); None: not known to have."""
    count: int | None = None
    """The count that was last seen written."""

    def add(self, sample: Sample, policy: Policy, wall: float) -> None:
        """The newest sample, made at the wall-clock second `wall`."""
        if self.samples:
            seconds = min(sample.at - self.samples[-1].at, policy.fresh_s)
            self.minutes.add(sample, seconds, wall, max(_SHORT_MEMORY_S, memory_s(policy)))
        if self._goes_on_idle(sample, policy):
            self.samples.pop()
        self.samples.append(sample)
        oldest = sample.at - lookback_s(policy)
        for past in (self.samples, self.wanted):
            while past and past[0].at < oldest:
                past.popleft()

    def _goes_on_idle(self, sample: Sample, policy: Policy) -> bool:
        """Whether the last sample tells nothing that this one and the one before it do not: days of idleness are
        waited for where a policy says so."""
        if len(self.samples) < 2:
            return False
        before, last = self.samples[-2], self.samples[-1]
        return sample.at - before.at <= _NO_GAP * policy.fresh_s and all(
            at_rest(each) for each in (before, last, sample)
        )

    def want(self, wanted: Wanted) -> None:
        """What the policy asked for in the round just decided."""
        if self.wanted and wanted.at - self.wanted[-1].at < _SLOT_S:
            last = self.wanted.pop()
            wanted = Wanted(last.at, max(last.replicas, wanted.replicas), wanted.correction)
        self.wanted.append(wanted)

    def counted(self, count: int, at: float) -> None:
        """A desired count was seen written, or is there from before: then `at` tells when it was written."""
        if count != self.count:
            self.count = count
            self.changed_at = at if self.changed_at is None else max(self.changed_at, at)

    def restore(self, wanted: Iterable[Wanted], changed_at: float | None) -> None:
        """What an earlier scaler kept, of before this one began."""
        first = self.wanted[0].at if self.wanted else float("inf")
        older = [each for each in wanted if each.at < first]
        self.wanted = deque([*older, *self.wanted], maxlen=MOST_SAMPLES)
        known = [at for at in (self.changed_at, changed_at) if at is not None]
        self.changed_at = max(known, default=None)

    def history(self, startup: Startup, wall: float) -> History:
        """All of it, as a decision takes it; `wall` is the wall-clock second of the round."""
        return History(
            tuple(self.samples),
            self.minutes.kept,
            tuple(self.wanted),
            self.measured.capacity,
            startup,
            self.changed_at,
            wall,
        )
