"""How good placements are, how soon, and how that grows.

    python bench/placement.py [-o json] [--draw docs/img] [--only pods hall growth first-fit] [--limit-s 30]

`pods`: 135 DGX nodes, several sets of needs. `hall`: 10,000 GPUs and 500 replicas. `growth`: the time for a first
placement, and for a proven one or until the limit. `first-fit`: 30 random facilities, against taking the first nodes
in order that have free GPUs. Wall time; the machine should have two cores to itself.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import monotonic

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.facilities import Shape, needs, random_facility, regular
from bench.svg import drawn
from stoker.planner.core.facility.values import Facility
from stoker.planner.core.ordering import natural
from stoker.planner.core.placement import Goal, Need, Placed, PlacementProblem, Score, greedy, place, scores
from stoker.planner.core.placement.cells import unfit
from stoker.planner.core.placement.greedy import Greedy
from stoker.planner.core.placement.ground import ground
from stoker.planner.core.placement.prune import prune, sound
from stoker.planner.core.placement.state import State
from stoker.planner.core.placement.values import Member
from tests.support.placement_checker import faults

SIZES = (16, 32, 64, 135, 270, 540, 1_250)
Rows = list[dict[str, object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", dest="output", choices=["json", "table"], default="table")
    parser.add_argument("--draw", type=Path)
    parser.add_argument("--only", nargs="*", choices=list(BENCHES), default=list(BENCHES))
    parser.add_argument("--limit-s", type=float, default=30.0)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    found = {name: BENCHES[name](options.limit_s, options.seeds) for name in options.only}
    if options.draw and "growth" in found:
        (options.draw / "growth-placement.svg").write_text(_drawing(found["growth"]))
    if options.output == "json":
        print(json.dumps(found, indent=2))
        return
    for name, rows in found.items():
        print(f"\n{name}")
        for row in rows:
            print("  " + "  ".join(f"{key} {_shown(value)}" for key, value in row.items()))


def _shown(value: object) -> str:
    return f"{value:,.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def timed(problem: PlacementProblem, limit_s: float) -> dict[str, object]:
    """One problem, at once and improved, checked."""
    begun = monotonic()
    quick = greedy(problem)
    first_s = monotonic() - begun
    begun = monotonic()
    better = place(problem, time_limit_s=limit_s, clock=monotonic)
    better_s = monotonic() - begun
    assert not faults(problem, quick.placed), faults(problem, quick.placed)
    assert not faults(problem, better.placed), faults(problem, better.placed)
    before = {score.goal: score.value for score in quick.scores}
    changed = {
        s.goal.value: f"{before[s.goal]:,.6g}->{s.value:,.6g}" for s in better.scores if before[s.goal] != s.value
    }
    return {
        "gpus": sum(len(node.gpus) for node in problem.facility.nodes.values()),
        "asked": sum(need.replicas * need.members * need.gpus for need in problem.needs),
        "replicas": sum(need.replicas for need in problem.needs),
        "unplaced": sum(gap.replicas for gap in better.unplaced),
        "first_s": round(first_s, 3),
        "better_s": round(better_s, 1),
        "gaps": _gaps(better.scores),
        "changed": json.dumps(changed),
    }


def _gaps(found: Sequence[Score]) -> str:
    """Goals that are not proven to be within 5 % of the best."""
    far = [f"{s.goal.value} {'?' if s.gap is None else format(s.gap, '.0%')}" for s in found if (s.gap or 1.0) > 0.05]
    far = [word for word, s in zip(far, [s for s in found if (s.gap or 1.0) > 0.05], strict=True) if s.gap != 0.0]
    return ", ".join(far) or "none"


def pods(limit_s: float, seeds: int) -> Rows:
    facility = regular(Shape(135))
    return [timed(PlacementProblem(facility, needs(facility, seed, 0.8)), limit_s) for seed in range(1, seeds + 1)]


def hall(limit_s: float, _seeds: int) -> Rows:
    facility = regular(Shape(1_250))
    wanted = needs(facility, 1, 0.92, count=500, gangs=0.75)
    return [timed(PlacementProblem(facility, wanted), limit_s)]


def growth(limit_s: float, _seeds: int) -> Rows:
    rows: Rows = []
    for nodes in SIZES:
        facility = regular(Shape(nodes))
        rows.append(timed(PlacementProblem(facility, needs(facility, 1, 0.8, gangs=0.4)), limit_s))
    return rows


def _drawing(rows: Rows) -> str:
    lines = {
        name: [(float(str(row["gpus"])), max(0.001, float(str(row[key])))) for row in rows]
        for name, key in (("a first placement", "first_s"), ("a better one, proven or cut off", "better_s"))
    }
    return drawn("Placing on a growing facility", "GPUs", "seconds", lines, {})


# --- first fit ---


def first_fit(facility: Facility, wanted: Sequence[Need]) -> tuple[Placed, ...]:
    """The first nodes in order with enough free GPUs, the lowest of these: what planners do that count GPUs only."""
    order = sorted(facility.nodes, key=natural)
    free = {name: [gpu.index for gpu in facility.nodes[name].gpus] for name in order}
    placed = []
    for need in sorted(wanted, key=lambda need: (-need.members * need.gpus, -need.gpus, need.deployment)):
        for number in range(need.replicas):
            chosen = [name for name in order if len(free[name]) >= need.gpus][: need.members]
            if len(chosen) == need.members:
                members = tuple(Member(name, tuple(free[name][: need.gpus])) for name in chosen)
                for name in chosen:
                    del free[name][: need.gpus]
                placed.append(Placed(f"{need.deployment}-{number}", need.deployment, members))
    return tuple(placed)


def careful_first_fit(problem: PlacementProblem) -> tuple[Placed, ...]:
    """First fit that keeps every limit: the first nodes in order on which one more member breaks none."""
    empty, state = State(ground(problem.facility), problem), State(ground(problem.facility), problem)
    search = Greedy(state)
    order = sorted(problem.facility.nodes, key=natural)
    for need in sorted(problem.needs, key=lambda need: (-need.members * need.gpus, -need.gpus, need.deployment)):
        suited = [node for node in order if unfit(state, need, node) is None]
        for number in range(need.replicas):
            members: list[Member] = []
            for node in suited:
                found = state.member(node, need) if len(members) < need.members else None
                if found is not None and search.open(node, need) and search.carries(node, need):
                    members.append(found[0])
            if len(members) == need.members:
                placed = Placed(f"{need.deployment}-{number}", need.deployment, tuple(members))
                state.take(placed)
                if not sound(empty, state):
                    state.release(placed.replica)
    prune(state)
    return tuple(state.placed.values())


def against_first_fit(limit_s: float, _seeds: int) -> Rows:
    """Sums over 30 facilities; a facility counts for both where both place every replica, kept limits or not."""
    sums: defaultdict[str, list[float]] = defaultdict(list)
    broken: defaultdict[str, int] = defaultdict(int)
    for seed in range(30):
        facility = random_facility(seed)
        problem = PlacementProblem(facility, needs(facility, seed, 0.6))
        quick = greedy(problem)
        found = {
            "first fit": first_fit(facility, problem.needs),
            "first fit within limits": careful_first_fit(problem),
            "at once": quick.placed,
            "improved": place(problem, time_limit_s=limit_s, clock=monotonic).placed,
        }
        for name, placed in found.items():
            broken[name] += bool(faults(problem, placed))
            for score in scores(problem, placed):
                sums[f"{name} {score.goal.value}"].append(score.value)
    return [
        {
            "planner": name,
            "facilities with a broken limit": broken[name],
            "without a place": sum(sums[f"{name} shortfall"]),
            "oversubscribed GB/s": sum(sums[f"{name} oversubscribed"]) / 1e9,
            "stranded kW": sum(sums[f"{name} stranded"]) / 1e3,
            "stranded kW median": median(sums[f"{name} stranded"]) / 1e3,
            "lost with the worst rack": sum(sums[f"{name} {Goal.SPREAD.value}"]),
            "straddling groups": sum(sums[f"{name} locality"]),
        }
        for name in ("first fit", "first fit within limits", "at once", "improved")
    ]


BENCHES: dict[str, Callable[[float, int], Rows]] = {
    "pods": pods,
    "hall": hall,
    "growth": growth,
    "first-fit": against_first_fit,
}

if __name__ == "__main__":
    main()
