"""The comparison of who may go: one small fleet whose tenants differ in liveliness, and the tables made of it."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations
from pathlib import Path

from bench.scale_down import WAYS, Moment, table
from bench.scale_down_world import Measured, Pair, World
from stoker.bench.replicas import Hardware
from stoker.bench.traces import tenants_trace

ROOT = Path(__file__).parents[2]


def decision() -> World:
    """Three of five tenants have gone; all that the others ask for fits into the caches."""
    jobs = tenants_trace(
        1, tenants=5, over=0.6, documents=6, document_blocks=60, over_at=400.0, rare_s=300.0, seconds=1_300.0
    )
    world = World(jobs, Hardware(kv_blocks=400))
    world.reach(700.0)
    return world


def after(way: str, pair: Pair) -> Measured:
    return decision().after(way, pair, 0)


def test_who_goes_held_nothing_that_is_asked_for_again() -> None:
    world = decision()
    chosen = world.chosen()
    others = [pair for pair in combinations(world.engines, 2) if not set(pair) & set(chosen)]
    gone, kept = after("go", chosen), after("keep", ())
    assert gone == after("go", chosen), "the same each time"
    assert gone == kept, "nothing is missed"
    assert min(after("go", pair).hit for pair in others[:3]) < 0.8 * gone.hit
    assert after("warmed", chosen).warmed == 0, "nothing of theirs is likely to be asked for"
    all_warmed = after("all warmed first", chosen)
    assert all_warmed.warmed > 0
    assert all_warmed.net < all_warmed.hit


def moment(hit: float, noise: float | None) -> Moment:
    ways = dict.fromkeys(WAYS, (1.0, 0.9, 0.5, 7))
    return Moment(hit, 0.5, 1.1, 0.4, 1.2, 1.3, 1.3, None if noise is None else 1.1, noise, 0.1, ways)


def test_one_replay_says_nothing_of_chance() -> None:
    lines = list(table({"0 s": moment(0.5, None), "1 s": moment(0.7, None)}, 1))
    assert lines[0] == "| decision | mean of pairs | chosen | knowing | best draw | best mean | spread |"
    assert lines[4] == "| mean | 0.6000 | 1.100 | 1.200 | 1.300 | 1.300 | 0.1000 |"
    assert "one replay of each" in lines[6]
    more = list(table({"0 s": moment(0.5, 0.01), "1 s": moment(0.7, 0.03)}, 2))
    assert more[4] == "| mean | 0.6000 | 1.100 | 1.200 | 1.300 | 1.300 | 1.100 | 0.0200 | 0.1000 |"
    assert "2 replays of each" in more[6]
    assert len({line.count("|") for line in more[:5]}) == 1


FORKS = """
from bench.scale_down import forked

class World:
    went = 0

    def after(self, way, pair, replay):
        self.went += 1
        return self.went, replay, pair[0]

forks = [("go", ("a",), number) for number in range(5)]
assert forked(World(), forks) == {fork: (1, fork[2], "a") for fork in forks}
forked(World(), [("go", (), 0)])
"""


def test_ways_on_begin_alike_and_none_fails_unseen() -> None:
    ran = subprocess.run([sys.executable, "-c", FORKS], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert "IndexError" in ran.stderr
    assert ran.stderr.rstrip().endswith("EOFError")
