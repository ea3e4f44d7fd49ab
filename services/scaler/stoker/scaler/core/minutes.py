"""Demand minute by minute, kept for days."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from stoker.scaler.core.past import NOTHING, Past
from stoker.scaler.core.signals import Minute, Sample

MINUTE_S = 60.0
_KNOWN_S = 30.0
"""Of each minute so much must be known."""


@dataclass(slots=True)
class _Mean:
    """A mean over time; `seconds` of it are known."""

    total: float = 0.0
    seconds: float = 0.0

    def add(self, value: float | None, seconds: float) -> None:
        if value is not None:
            self.total += value * seconds
            self.seconds += seconds

    def value(self) -> float | None:
        return self.total / self.seconds if self.seconds >= _KNOWN_S else None


@dataclass
class Minutes:
    """Whole minutes that are known, oldest first; the one in the making is left out.

    A minute in which demand was not known for long enough is missing. One without any prompt has the hit rate of the
    one before.
    """

    kept: Past = NOTHING
    _number: int = -1
    _arrivals: _Mean = field(default_factory=_Mean)
    _prompt: _Mean = field(default_factory=_Mean)
    _decode: _Mean = field(default_factory=_Mean)
    _looked_up: float = 0.0
    _found: float = 0.0

    def add(self, sample: Sample, seconds: float, wall: float, memory_s: float) -> None:
        """A sample over the last `seconds` up to the wall-clock second `wall`; minutes older than `memory_s` go."""
        number = int((wall - seconds / 2) // MINUTE_S)
        if number != self._number:
            self._close(wall, memory_s)
            self._number = number
        decode = sample.decode_tokens_per_s
        self._arrivals.add(sample.arrivals_per_s, seconds)
        self._prompt.add(sample.prefill_tokens_per_s, seconds)
        self._decode.add(0.0 if decode is None and not sample.ready else decode, seconds)
        if sample.hit_rate is not None and sample.prefill_tokens_per_s is not None:
            self._looked_up += sample.prefill_tokens_per_s * seconds
            self._found += sample.hit_rate * sample.prefill_tokens_per_s * seconds

    def restore(self, minutes: Iterable[Minute]) -> None:
        """Minutes that someone else has kept: those that are not known here."""
        own = {round(minute.at / MINUTE_S): minute for minute in self.kept}
        others = {round(minute.at / MINUTE_S): minute for minute in minutes}
        self.kept = Past.of(minute for _, minute in sorted({**others, **own}.items()))

    def _close(self, wall: float, memory_s: float) -> None:
        arrivals, prompt, decode = self._arrivals.value(), self._prompt.value(), self._decode.value()
        at = self._number * MINUTE_S
        # A clock that was set back: what lies in the future by it was put down by the wrong clock.
        kept = self.kept.between(wall - memory_s - MINUTE_S, min(at, wall))
        if arrivals is not None and prompt is not None and decode is not None:
            before = kept[-1].hit_rate if kept else 0.0
            hit_rate = self._found / self._looked_up if self._looked_up else before
            kept = kept.followed_by(Minute(at, arrivals, prompt, decode, hit_rate))
        self.kept = kept
        self._arrivals, self._prompt, self._decode = _Mean(), _Mean(), _Mean()
        self._looked_up = self._found = 0.0
