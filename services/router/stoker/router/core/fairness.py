"""Which tenants are due: virtual token counters.

Each tenant's counter grows by the tokens that are computed for it: uncached prompt tokens once, output tokens twice,
divided by its weight (VTC: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). Those within
`slack` of the lowest are due, and among them the caches choose: serving strictly in order of the counters would throw
away what order can gain (DLPM: Cao et al., "Locality-aware Fair Scheduling in LLM Serving", 2025). So no tenant
that waits falls behind another by more than the slack and one request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable

_OUTPUT_WEIGHT = 2.0
_KEPT = 4_096  # tenants are named by callers: what is remembered of them is bounded


class Fairness:
    """Counters of the tenants of one pool, in tokens."""

    def __init__(self, slack: float) -> None:
        self._slack = slack
        self._last = 0.0  # counter of the tenant that was the last to have nobody waiting
        self._served: OrderedDict[str, float] = OrderedDict()

    def served(self, tenant: str) -> float:
        """A tenant's counter."""
        return self._served.get(tenant, 0.0)

    def arrive(self, tenant: str, waiting: Iterable[str]) -> None:
        """A tenant that had nobody waiting has now: what it left unused while away is no credit."""
        lowest = min((self.served(other) for other in waiting), default=self._last)
        self._set(tenant, max(self.served(tenant), lowest))

    def depart(self, tenant: str) -> None:
        """A tenant has nobody waiting any more."""
        self._last = self.served(tenant)

    def charge(self, tenant: str, prefill_tokens: float, output_tokens: float, weight: float = 1.0) -> None:
        """A tenant's request is sent."""
        self._set(tenant, self.served(tenant) + (prefill_tokens + _OUTPUT_WEIGHT * output_tokens) / weight)

    def due(self, waiting: Collection[str]) -> tuple[list[str], list[str]]:
        """Those of the tenants that wait who are due, and the others, each lowest first."""
        ranked = sorted(waiting, key=self.served)
        limit = self.served(ranked[0]) + self._slack if ranked else 0.0
        split = next((place for place, tenant in enumerate(ranked) if self.served(tenant) > limit), len(ranked))
        return ranked[:split], ranked[split:]

    def _set(self, tenant: str, tokens: float) -> None:
        self._served[tenant] = tokens
        self._served.move_to_end(tenant)
        while len(self._served) > _KEPT:
            self._served.popitem(last=False)
