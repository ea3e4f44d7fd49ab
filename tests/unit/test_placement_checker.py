"""The checker of placements: it finds each kind of fault that a plan could have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.facilities import Shape, regular
from stoker.planner.core.placement import Need, Placed, PlacementProblem, greedy
from stoker.planner.core.placement.values import Member
from stoker.planner.core.units import BytesPerSecond, watts
from tests.support.placement_checker import faults

FACILITY = regular(Shape(16, per_rack=4, pod=2, power_share=0.5))
WHOLE = tuple(range(8))
FAR = (("n0", "n8"), ("n4", "n12"))


def on(*places: tuple[str, tuple[int, ...]]) -> tuple[Placed, ...]:
    return tuple(Placed(f"d-{n}", "d", (Member(node, gpus),)) for n, (node, gpus) in enumerate(places))


@pytest.mark.parametrize(
    ("placed", "words"),
    [
        (on(("n0", WHOLE), ("n0", (7,))), "belongs to"),
        (on(("n0", WHOLE), ("n1", WHOLE)), "end with rack r0"),
        (on(("n0", WHOLE), ("n1", WHOLE), ("n2", WHOLE)), "feed A-r0 carries"),
        (on(("n0", (0, 1, 2))), "has 3 GPUs"),
        (on(("n99", WHOLE)), "lost or closed"),
        (on(("n15", WHOLE)), "lost or closed"),
        ((Placed("d-0", "d", (Member("n0", WHOLE), Member("n1", WHOLE))),), "has 2 members"),
    ],
)
def test_it_finds(placed: tuple[Placed, ...], words: str) -> None:
    problem = PlacementProblem(FACILITY, (Need("d", 3, 8, tensor_parallel=8),), lost=frozenset({"n15"}))
    assert any(words in fault for fault in faults(problem, placed)), faults(problem, placed)


def test_it_finds_groups_that_straddle_though_they_need_not() -> None:
    problem = PlacementProblem(FACILITY, (Need("d", 1, 2, tensor_parallel=2),))
    assert not faults(problem, on(("n0", (2, 3))))
    assert any("straddles pcie_root" in fault for fault in faults(problem, on(("n0", (1, 2)))))


def test_it_finds_groups_over_two_nvlink_domains() -> None:
    problem = PlacementProblem(FACILITY, (Need("d", 1, 8, 2, tensor_parallel=16),))
    placed = (Placed("d-0", "d", (Member("n0", WHOLE), Member("n4", WHOLE))),)
    assert any("spans" in fault for fault in faults(problem, placed))


def test_it_finds_traffic_that_no_uplink_carries() -> None:
    need = Need("d", 2, 8, 2, tensor_parallel=8, peer_rate=BytesPerSecond(300 * 10**9))
    placed = tuple(Placed(f"d-{n}", "d", (Member(a, WHOLE), Member(b, WHOLE))) for n, (a, b) in enumerate(FAR))
    narrow = regular(Shape(16, per_rack=4, pod=2, oversubscription=16.0))
    found = faults(PlacementProblem(narrow, (need,)), placed)
    assert any("leave" in fault for fault in found), found
    assert not faults(PlacementProblem(FACILITY, (need,)), placed)


def test_what_stands_is_not_held_against_a_plan() -> None:
    standing = on(("n0", WHOLE), ("n1", WHOLE), ("n2", WHOLE))
    problem = PlacementProblem(FACILITY, (Need("d", 3, 8, tensor_parallel=8),), standing)
    assert not faults(problem, standing)
    assert greedy(problem).placed == standing
    weaker = replace(FACILITY, feeds={k: replace(f, capacity=watts(1)) for k, f in FACILITY.feeds.items()})
    assert not faults(replace(problem, facility=weaker), standing)
    assert faults(replace(problem, facility=weaker, standing=()), standing)


def test_it_finds_members_that_no_cable_connects() -> None:
    loose = replace(FACILITY, links=tuple(link for link in FACILITY.links if link.lower != "n8"))
    problem = PlacementProblem(loose, (Need("d", 1, 8, 2, tensor_parallel=8),))
    placed = (Placed("d-0", "d", (Member("n0", WHOLE), Member("n8", WHOLE))),)
    assert any("no cable connects" in fault for fault in faults(problem, placed)), faults(problem, placed)


def test_it_finds_replicas_out_of_reach() -> None:
    problem = PlacementProblem(FACILITY, (Need("d", 1, 8, near="mars", reach_s=0.01),))
    assert any("too far from mars" in fault for fault in faults(problem, on(("n0", WHOLE))))
