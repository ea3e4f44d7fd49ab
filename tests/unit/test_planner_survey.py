"""What the planner takes for its ground: the facility as written, with what agents report."""

from __future__ import annotations

import pytest

from stoker.api.common.v1 import common_pb2
from stoker.api.registry.v1 import records_pb2
from stoker.planner import facility_file
from stoker.planner.core.values import Node, Problem
from stoker.planner.survey import Surveyor
from stoker.registry.core import documents
from tests.support.facilities import hall


def record(text: str, revision: int) -> records_pb2.Facility:
    return records_pb2.Facility(name="current", document_zlib=documents.packed(text), revision=revision)


def reported(*names: str, gpus: int = 4) -> dict[str, common_pb2.Node]:
    made = [common_pb2.Gpu(index=index, numa_node=-1) for index in range(gpus)]
    return {name: common_pb2.Node(node_id=name, incarnation=1, gpus=made) for name in names}


def test_without_a_facility_agents_reports_are_the_ground() -> None:
    survey = Surveyor().look(None, reported("n1", "n2"))
    assert (survey.listed, survey.revision, survey.problem) == (None, 0, "")
    assert set(survey.ground.facility.nodes) == {"n1", "n2"}
    problem = survey.on(Problem(nodes=[Node("n1"), Node("n2")]))
    assert (problem.applied, problem.unlisted) == (False, frozenset())


def test_a_facility_is_read_once_and_nodes_that_it_lacks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    surveyor, text = Surveyor(), hall({"r1": "n1"})
    first = surveyor.look(record(text, 7), reported("n1", "n9"))
    assert (first.revision, first.listed) == (7, frozenset({"n1"}))
    problem = first.on(Problem(nodes=[Node("n1"), Node("n9")]))
    assert (problem.applied, problem.unlisted) == (True, frozenset({"n9"}))
    monkeypatch.setattr(facility_file, "parse", lambda *_: pytest.fail("read again"))
    assert surveyor.look(record(text, 7), reported("n1", "n9")) is first, "nothing changed"
    fewer = surveyor.look(record(text, 7), reported("n1", gpus=3))
    assert len(fewer.ground.facility.nodes["n1"].gpus) == 3, "a GPU is gone"


def test_what_cannot_be_read_leaves_the_last_one_that_could() -> None:
    surveyor = Surveyor()
    surveyor.look(record(hall({"r1": "n1"}), 7), reported("n1"))
    kept = surveyor.look(record("name: x\nsites: 3\n", 9), reported("n1"))
    assert (kept.revision, kept.listed) == (7, frozenset({"n1"}))
    assert "revision 9" in kept.problem
    assert "revision 7 is planned for" in kept.problem
    mended = surveyor.look(record(hall({"r1": "n[1-2]"}), 11), reported("n1"))
    assert (mended.revision, mended.listed, mended.problem) == (11, frozenset({"n1", "n2"}), "")
    gone = surveyor.look(None, reported("n1"))
    assert (gone.revision, gone.listed, gone.problem) == (0, None, "")


def test_a_planner_that_could_never_read_it_places_nothing_new() -> None:
    survey = Surveyor().look(record("name: x\nsites: 3\n", 9), reported("n1"))
    assert survey.listed == frozenset()
    assert "nothing new is placed" in survey.problem
    assert survey.on(Problem(nodes=[Node("n1")])).unlisted == {"n1"}


def test_a_defect_in_reading_costs_the_facility_and_not_the_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    surveyor = Surveyor()
    surveyor.look(record(hall({"r1": "n1"}), 7), reported("n1"))

    def defect(*_: object) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr(facility_file, "parse", defect)
    kept = surveyor.look(record(hall({"r1": "n2"}), 9), reported("n1"))
    assert kept.revision == 7
    assert "too deep" in kept.problem


def test_damaged_records_are_refused_like_unreadable_ones() -> None:
    damaged = records_pb2.Facility(name="current", document_zlib=b"no zlib", revision=3)
    assert "zlib" in Surveyor().look(damaged, reported("n1")).problem
