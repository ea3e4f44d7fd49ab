"""What stands, held against the facility, and what Prometheus is told of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY

from stoker.planner import facility_file, metrics, rounds
from stoker.planner.core import placement
from stoker.planner.core.placement import Member
from stoker.planner.core.placement.ground import ground
from stoker.planner.core.values import Assignment, Deployment, Desired, Limits, Node, Problem, Wanted
from stoker.planner.rounds import judged
from tests.support.facilities import hall

VLLM = frozenset({"vllm"})
CHAT = Deployment("chat", "a", "vllm", gpus_per_node=1)


def problem(racks: dict[str, str], *placed: tuple[str, int], kw: float = 100.0) -> Problem:
    facility = facility_file.parse(hall(racks, rack_kw=kw), "facility")
    names = sorted({*facility.nodes, *(node for node, _ in placed)})
    return Problem(
        nodes=[Node(name, frozenset(range(4)), engines=VLLM) for name in names],
        deployments=[CHAT],
        desired={"chat": Desired(len(placed))},
        assignments=[
            Assignment(f"chat-{number}", "chat", "a", (Member(node, (gpu,)),))
            for number, (node, gpu) in enumerate(placed)
        ],
        ground=ground(facility),
        applied=True,
        unlisted=frozenset(names) - facility.nodes.keys(),
    )


def level(which: str, case: str) -> float | None:
    return REGISTRY.get_sample_value("stoker_planner_feed_share", {"level": which, "case": case})


def test_feeds_are_told_by_level_with_all_of_them_and_after_a_loss() -> None:
    given = problem({"r1": "n1", "r2": "n2"}, ("n1", 0), ("n1", 1), ("n2", 0), kw=4)
    found = judged(given)
    assert not found.violations
    assert given.ground is not None
    metrics.note_loads(given.ground.facility, found.loads)
    assert level("0", "after_loss") == 3 / 4, "r1 draws 3 kW, all of it from one feed when the other is lost"
    assert level("1", "after_loss") == 5 / 800, "derated to four fifths"
    assert level("2", "after_loss") is None


def test_what_exceeds_a_feed_is_named_with_its_replicas_and_counted() -> None:
    given = problem({"r1": "n1", "r2": "n2"}, ("n1", 0), ("n1", 1), ("n1", 2), ("n2", 0), ("n9", 0), kw=3)
    found = judged(given)
    told = {(violation.limit, violation.subject): violation for violation in found.violations}
    over = told["power", "feed r1-a after the loss of source b"]
    assert over.replicas == ("chat-0", "chat-1", "chat-2")
    assert "4 kW at the most of 3 kW" in over.words
    assert told["node", "n9"].replicas == ("chat-4",)
    assert told["spread", "chat"].replicas == ("chat-0", "chat-1", "chat-2"), "of four that stand in the facility"
    metrics.note_violations(found.violations)
    assert REGISTRY.get_sample_value("stoker_planner_violations", {"limit": "power"}) == 2
    metrics.note_violations(())
    assert REGISTRY.get_sample_value("stoker_planner_violations", {"limit": "power"}) == 0


def test_what_leaves_draws_on_and_counts_for_no_spread() -> None:
    given = problem({"r1": "n1", "r2": "n2"}, ("n1", 0), ("n1", 1), ("n1", 2), ("n2", 0), kw=3)
    leaving = [Assignment(a.replica, "chat", "a", a.members, Wanted.DRAIN) for a in given.assignments]
    found = judged(replace(given, assignments=leaving))
    assert {violation.limit for violation in found.violations} == {"power"}


def test_a_gpu_that_its_host_lost_is_named() -> None:
    given = problem({"r1": "n1", "r2": "n2"}, ("n1", 0), ("n1", 7))
    (violation,) = judged(given).violations
    assert (violation.limit, violation.subject, violation.replicas) == ("gpus", "n1", ("chat-1",))


def test_a_search_that_ends_in_a_defect_costs_the_better_places_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(*_: object, **__: object) -> None:
        raise MemoryError

    given = replace(problem({"r1": "n1", "r2": "n2"}), desired={"chat": Desired(4)})
    told: list[str] = []
    monkeypatch.setattr(rounds, "log", SimpleNamespace(exception=told.append))
    monkeypatch.setattr(placement, "place", defect)
    drawn = rounds._planned(given, Limits(search_s=2.0, search_least=1))
    assert (len(drawn.puts), told) == (4, ["planner.search_failed"])
    monkeypatch.setattr(placement, "greedy", defect)
    with pytest.raises(MemoryError):
        rounds._planned(given, Limits(search_s=2.0, search_least=1))
