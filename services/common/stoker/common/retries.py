"""Whether a failed request may be tried again elsewhere."""

from __future__ import annotations


class RetryBudget:
    """Retries as a share of requests: each request earns `ratio` of a retry, up to `burst` saved.

    The share keeps an outage from doubling its own load; the burst lets a quiet router retry at all.
    """

    def __init__(self, ratio: float = 0.2, burst: float = 10.0) -> None:
        self._ratio = ratio
        self._burst = burst
        self._saved = burst

    @property
    def left(self) -> bool:
        """Whether a retry could be taken now."""
        return self._saved >= 1.0

    def spend(self) -> None:
        """Count a retry that somebody else has taken, which may put the budget into debt of as much as it saves."""
        self._saved = max(self._saved - 1.0, -self._burst)

    def request(self) -> None:
        """Count a first attempt."""
        self._saved = min(self._burst, self._saved + self._ratio)

    def take(self) -> bool:
        """Spend one retry if the budget allows."""
        if not self.left:
            return False
        self._saved -= 1.0
        return True
