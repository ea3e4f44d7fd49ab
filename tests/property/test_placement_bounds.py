"""What is said to be proven, against every placement that there is, on facilities small enough to try them all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from bench.facilities import TRAY, Shape, regular
from stoker.planner.core.facility.values import Facility
from stoker.planner.core.placement import Goal, Need, Pair, Placed, PlacementProblem, place, scores
from stoker.planner.core.placement.values import Member
from stoker.planner.core.units import BytesPerSecond
from tests.support.placement_checker import faults

GB = 10**9
SMALL = replace(TRAY, name="small", gpu="h100-sxm", fabric_ports=1)


def every(facility: Facility, needs: tuple[Need, ...]) -> Iterator[tuple[Placed, ...]]:
    """All ways to give each replica aligned GPUs of one node, or no place."""
    replicas = [(need, number) for need in needs for number in range(need.replicas)]
    choices = [
        [None, *(Member(node, tuple(range(at, at + need.gpus))) for node in facility.nodes for at in _starts(need))]
        for need, _ in replicas
    ]
    for chosen in product(*choices):
        taken = [(member.node, gpu) for member in chosen if member for gpu in member.gpus]
        if len(taken) == len(set(taken)):
            yield tuple(
                Placed(f"{need.deployment}-{number}", need.deployment, (member,))
                for (need, number), member in zip(replicas, chosen, strict=True)
                if member
            )


def _starts(need: Need) -> range:
    return range(0, 5 - need.gpus, need.gpus)


@settings(max_examples=8)
@given(
    st.sampled_from([(4, 4, 2), (2, 2, 4), (1, 2, 4), (4, 2, 2)]),
    st.sampled_from([0.6, 0.8, 1.0]),
    st.sampled_from([0.5, 1.0]),
    st.booleans(),
)
def test_nothing_is_better_than_what_is_proven(
    sizes: tuple[int, int, int], power: float, share: float, paired: bool
) -> None:
    shape = Shape(3, per_rack=1, pod=1, power_share=power, node_type=SMALL, oversubscription=2.0)
    facility = regular(shape)
    pair = Pair("d1", BytesPerSecond(5 * GB)) if paired else None
    needs = tuple(
        Need(
            f"d{n}",
            2 if n == 2 else 1,
            gpus,
            tensor_parallel=gpus,
            largest_share=share,
            pair=pair if n == 0 else None,
        )
        for n, gpus in enumerate(sizes)
    )
    problem = PlacementProblem(facility, needs)
    found = place(problem, time_limit_s=20.0)
    assert not faults(problem, found.placed)
    mine = [score.value for score in found.scores]
    proven = [score.proven or score.goal is Goal.STRANDED for score in found.scores]
    for other in every(facility, needs):
        theirs = [score.value for score in scores(problem, other)]
        for place_of, (own, value) in enumerate(zip(mine, theirs, strict=True)):
            if value > own + 1e-6 or not proven[place_of]:
                break
            if value < own - 1e-6:
                assert faults(problem, other), (found.scores[place_of], other)
                break
