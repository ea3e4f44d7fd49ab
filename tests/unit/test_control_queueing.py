"""Waiting in a pool of servers."""

from __future__ import annotations

import heapq
import math
from random import Random

import pytest

from stoker.control.core.queueing import ending_rate, erlang_c, spread


def waits_longer(wait_s: float, servers: int, arrivals_per_s: float, service_scv: float = 1.0) -> float:
    """The probability of a longer wait, with Poisson arrivals and services of a second each on average."""
    rate = ending_rate(servers, arrivals_per_s, 1.0, 1.0, service_scv)
    return erlang_c(servers, arrivals_per_s) * math.exp(-wait_s * rate)


@pytest.mark.parametrize(("servers", "offered", "delayed"), [(2, 1, 0.33333), (10, 8, 0.40918), (100, 90, 0.21694)])
def test_published_values_of_erlangs_delay_formula(servers: int, offered: float, delayed: float) -> None:
    assert erlang_c(servers, offered) == pytest.approx(delayed, abs=5e-6)


def test_one_server_is_busy_as_often_as_its_load_says() -> None:
    assert erlang_c(1, 0.3) == pytest.approx(0.3)


def test_the_ends() -> None:
    assert erlang_c(5, 0.0) == 0.0
    assert erlang_c(5, 5.0) == 1.0
    assert erlang_c(0, 1.0) == 1.0
    assert ending_rate(2, 3.0, 1.0, 1.0, 1.0) == 0.0
    assert ending_rate(2, 3.0, 0.0, 1.0, 1.0) == math.inf


@pytest.mark.parametrize("servers", [1_000, 10_000])
def test_thousands_of_servers_neither_overflow_nor_lose_the_order(servers: int) -> None:
    loads = [servers * share for share in (0.5, 0.9, 0.97, 0.99, 0.999)]
    delayed = [erlang_c(servers, load) for load in loads]
    assert all(math.isfinite(one) and 0.0 <= one <= 1.0 for one in delayed)
    assert delayed == sorted(delayed)
    # Halfin and Whitt 1981: with load c - b * sqrt(c), delayed tends to 1 / (1 + b * Phi(b) / phi(b)).
    b = 1.0
    limit = 1.0 / (1.0 + b * 0.841345 / 0.241971)
    assert erlang_c(servers, servers - b * math.sqrt(servers)) == pytest.approx(limit, abs=0.02)


def test_the_tail_of_one_exponential_server_is_exact() -> None:
    # M/M/1: P(W > t) = rho * exp(-(mu - lambda) * t)
    assert waits_longer(2.0, 1, 0.5) == pytest.approx(0.5 * math.exp(-0.5 * 2.0))


@pytest.mark.parametrize(("servers", "load", "scv"), [(1, 0.7, 0.0), (4, 0.8, 1.0), (4, 0.8, 3.0), (16, 0.9, 2.0)])
def test_tails_are_near_those_of_a_simulated_queue(servers: int, load: float, scv: float) -> None:
    service = spread(1.0, scv)
    varied = sum((value - 1.0) ** 2 for value in service) / len(service)
    rng = Random(7)
    arrivals = servers * load
    free = [0.0] * servers
    at, waits = 0.0, []
    for _ in range(60_000):
        at += rng.expovariate(arrivals)
        begins = max(at, heapq.heappop(free))
        waits.append(begins - at)
        heapq.heappush(free, begins + rng.choice(service))
    for wait_s in (0.5, 2.0):
        seen = sum(wait > wait_s for wait in waits) / len(waits)
        assert waits_longer(wait_s, servers, arrivals, varied) == pytest.approx(seen, abs=0.08)


def test_a_spread_has_the_mean_and_about_the_variation_asked_for() -> None:
    values = spread(3.0, 0.5)
    mean = sum(values) / len(values)
    assert mean == pytest.approx(3.0)
    assert sum((value - mean) ** 2 for value in values) / len(values) / mean**2 == pytest.approx(0.5, rel=0.2)
    assert spread(3.0, 0.0) == [3.0]
