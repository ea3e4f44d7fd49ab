"""Waiting in a pool of servers: Erlang's delay formula, and its extension to times that are not exponential.

Sources: A. K. Erlang 1917 (delay formula; here by the recursion of the loss formula, which neither overflows nor
loses digits); A. O. Allen, "Probability, Statistics, and Queueing Theory", 2nd ed. 1990, §5.3 (Allen-Cunneen: the
mean wait of M/M/c times (ca² + cs²)/2); W. Whitt, "Approximations for the GI/G/m queue", Production and Operations
Management 2(2), 1993 (the wait of those who wait is nearly exponential).
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

_POINTS = 24


def erlang_c(servers: int, offered: float) -> float:
    """The probability that a request must wait, with Poisson arrivals and exponential service times.

    `offered` is the load in erlangs: arrivals a second times mean service seconds. 1 where it is not below
    `servers`: the queue grows without end. Takes a time linear in `servers`; exact to float precision at 10,000.
    """
    if offered <= 0.0:
        return 0.0
    if offered >= servers:
        return 1.0
    blocked = 1.0
    for busy in range(1, servers + 1):
        served = offered * blocked
        blocked = served / (busy + served)
    return servers * blocked / (servers - offered * (1.0 - blocked))


def ending_rate(
    servers: int, arrivals_per_s: float, service_s: float, arrival_scv: float, service_scv: float
) -> float:
    """One over the mean wait of those who wait, per second; 0 where the queue grows without end."""
    spare = servers - arrivals_per_s * service_s
    if spare <= 0.0:
        return 0.0
    variability = max(1e-3, (arrival_scv + service_scv) / 2.0)
    return spare / (service_s * variability) if service_s > 0.0 else math.inf


def spread(mean: float, scv: float) -> list[float]:
    """Equally likely values of a lognormal quantity with this mean and squared coefficient of variation."""
    if scv <= 0.0 or mean <= 0.0:
        return [mean]
    variance = math.log1p(scv)
    sigma = math.sqrt(variance)
    values = [math.exp(sigma * z - variance / 2.0) for z in _normal_points()]
    # Few points miss some of the tail: scaled, so that the mean is right.
    return [mean * value * len(values) / sum(values) for value in values]


@lru_cache(maxsize=1)
def _normal_points() -> tuple[float, ...]:
    normal = NormalDist()
    return tuple(normal.inv_cdf((place + 0.5) / _POINTS) for place in range(_POINTS))
