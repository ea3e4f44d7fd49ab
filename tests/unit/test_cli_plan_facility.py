"""`stoker plan validate | schema | catalogue | import` as a script sees them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.cli.plan.facility import Form
from stoker.planner import facility_file, importers
from tests.support.command import run

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests/data/imports"
TWO_ROWS = str(ROOT / "examples/facilities/two-rows.yaml")


class Stoker:
    """Runs verbs in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Exit status, stdout and stderr."""
        status = run(self._monkeypatch, *arguments)
        out, err = self._capsys.readouterr()
        return status, out, err


@pytest.fixture
def stoker(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Stoker:
    return Stoker(monkeypatch, capsys)


def test_validate_says_what_is_in_a_file(stoker: Stoker) -> None:
    status, out, _ = stoker("plan", "validate", TWO_ROWS, "-o", "json")
    assert status == 0
    assert json.loads(out) == {
        "facility": "two-rows",
        "sites": 1,
        "regions": 1,
        "racks": 8,
        "nodes": 32,
        "gpus": 256,
        "scale_up_domains": 32,
        "feeds": 22,
        "switches": 12,
        "cables": 512,
        "supply_kw": 600.0,
        "nodes_max_kw": 326.4,
        "doubts": [],
    }


def test_validate_tells_every_mistake_and_ends_with_2(stoker: Stoker, tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("name: f\nsites: {s: {supply_kw: x, rocks: {}}}\n")
    status, _, err = stoker("plan", "validate", str(tmp_path / "f.yaml"))
    assert status == 2
    assert "f.yaml:2: sites.s.supply_kw: 'x' is no number" in err
    assert "f.yaml:2: sites.s.rocks: no such setting; did you mean racks?" in err
    assert "next:  correct" in err


def test_validate_puts_included_files_in(stoker: Stoker, tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("name: f\ninclude: [more.yaml]\nsites: {s: {racks: {r1: {}}}}\n")
    (tmp_path / "more.yaml").write_text("sites: {s: {racks: {'r[2-3]': {height_u: 48}}}}\n")
    status, out, _ = stoker("plan", "validate", str(tmp_path / "f.yaml"), "--whole")
    assert status == 0
    assert facility_file.parse(out, "whole") == facility_file.read(tmp_path / "f.yaml")


def test_the_schema_is_json(stoker: Stoker) -> None:
    status, out, _ = stoker("plan", "schema")
    assert status == 0
    assert json.loads(out)["$ref"].endswith("FacilityFile")


def test_the_catalogue_by_a_word(stoker: Stoker) -> None:
    status, out, _ = stoker("plan", "catalogue", "nvl72", "-o", "json")
    value = json.loads(out)
    assert status == 0
    assert [row["rack_type"] for row in value["rack_types"]] == ["gb200-nvl72"]
    assert value["gpu_types"] == []
    assert all(row["source"] and row["source_date"] for row in value["node_types"])
    tray, rack = value["node_types"][0], value["rack_types"][0]
    assert tray["source_of"]["weight_kg"]["source"].startswith("Estimate")
    assert rack["source_of"]["height_u"]["source"] != rack["source"]
    status, _, err = stoker("plan", "catalogue", "abacus")
    assert (status, "no type has 'abacus' in its name" in err) == (1, True)


def test_the_catalogue_in_tables(stoker: Stoker) -> None:
    status, out, _ = stoker("plan", "catalogue")
    assert status == 0
    assert {"h100-sxm", "dgx-b200", "gb200-nvl72", "mi300x-8"} <= set(out.split())


def test_an_import_is_a_part_that_a_file_includes(stoker: Stoker, tmp_path: Path) -> None:
    status, out, err = stoker(
        "plan", "import", str(DATA / "topology-tree.conf"), "--format", "slurm", "--gbit-per-s", "200"
    )
    assert status == 0
    assert "cables of 200 Gbit/s" in err
    (tmp_path / "fabric.yaml").write_text(out)
    (tmp_path / "f.yaml").write_text(
        "name: f\ninclude: [fabric.yaml]\nsites: {s: {racks: {'r[01-37]': "
        "{height_u: 48, nodes: {'gpu[001-036],login1': dgx-h100}}}}}\n"
    )
    assert len(facility_file.read(tmp_path / "f.yaml").links) == 40


def test_an_import_as_json_with_types_by_name(stoker: Stoker) -> None:
    csv = str(DATA / "netbox-devices.csv")
    status, out, _ = stoker(
        "plan", "import", csv, "--format", "netbox", "--node-type", "Disk 2U=l40s-8", "-o", "json"
    )
    assert status == 0
    nodes = json.loads(out)["sites"]["FRA-1"]["suites"]["Hall-A"]["racks"]["A01"]["nodes"]
    assert nodes["store-1"] == {"type": "l40s-8", "bottom_u": 20}


def test_what_cannot_be_imported_is_told(stoker: Stoker) -> None:
    status, _, err = stoker("plan", "import", str(DATA / "lldp.json"), "--format", "slurm")
    assert (status, "expected SwitchName=" in err) == (2, True)
    status, _, err = stoker("plan", "import", "none.json", "--format", "lldp")
    assert (status, "cannot read none.json" in err) == (2, True)


def test_every_format_is_offered() -> None:
    assert {form.value for form in Form} == set(importers.FORMATS)


@pytest.mark.parametrize("verb", [["validate", "--whole"], ["apply"], ["what-if", "--facility"]])
def test_a_mistake_is_told_with_its_line_before_a_file_is_sent(
    verb: list[str], stoker: Stoker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "none"))
    file = tmp_path / "hall.yaml"
    file.write_text("# The hall.\n\nname: hall\nsites: {here: {supply_watts: 3}}\n")
    status, _, err = stoker("plan", *verb, str(file))
    assert status == 2, err
    assert f"{file}:4: sites.here.supply_watts: no such setting" in err
