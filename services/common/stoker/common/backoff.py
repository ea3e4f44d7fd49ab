"""Jittered exponential back-off, as a value."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """Delays that double from `first_s` to at most `max_s`, each drawn from its upper half.

    "Equal jitter": spread enough that a fleet does not return in step, never so short that it hammers.
    """

    first_s: float = 0.1
    max_s: float = 5.0

    def delay_s(self, attempt: int, rng: random.Random) -> float:
        """Seconds to wait before try number `attempt` (0 is the first repetition)."""
        ceiling = min(self.max_s, self.first_s * float(2 ** min(attempt, 32)))
        return ceiling * (0.5 + 0.5 * rng.random())
