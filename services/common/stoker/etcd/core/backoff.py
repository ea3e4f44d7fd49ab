"""How long to wait before trying again."""

from __future__ import annotations


def delay(attempt: int, u: float, *, base_s: float = 0.1, cap_s: float = 2.0) -> float:
    """Seconds to wait after failure number `attempt` (0 is the first): doubling, capped, half of it jitter.

    `u` is uniform in [0, 1). The result lies in [nominal / 2, nominal), so that clients that failed
    together do not return together, and none returns at once.
    """
    nominal = min(cap_s, base_s * 2.0 ** min(attempt, 32))
    return nominal * (0.5 + u / 2)
