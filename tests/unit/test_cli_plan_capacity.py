"""`stoker plan capacity` as a script sees it, on the examples that are shipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.command import answer, run

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "facilities"


@pytest.mark.parametrize(
    ("example", "told"),
    [
        ("rack-15kw", {"nodes_per_rack": 3, "u_used": 12, "binding": "power", "gpus": 24}),
        ("dgx-rack", {"nodes_per_rack": 1, "u_used": 8, "binding": "power", "gpus": 8}),
        ("nvl72-2mw", {"racks": 16, "rack_kw_total": 1920, "gpus": 1152, "binding": "power"}),
        ("nvl72-2mw-reserved", {"racks": 15, "rack_kw_total": 1800, "gpus": 1080, "binding": "power"}),
        ("two-rows", {"racks": 8, "nodes": 32, "nodes_added": 0, "gpus": 256, "binding_at": "row1-r1"}),
    ],
)
def test_the_examples(
    example: str, told: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    value = answer(monkeypatch, capsys, "plan", "capacity", str(EXAMPLES / f"{example}.yaml"))
    assert {key: value[key] for key in told} == told


def test_the_keys_stay(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    value = answer(monkeypatch, capsys, "plan", "capacity", str(EXAMPLES / "dgx-rack.yaml"))
    row = {
        *("fill", "racks", "rack_kw_total", "nodes", "nodes_added", "gpus", "gpu_memory_gb", "nodes_per_rack"),
        *("gpus_per_rack", "u_used", "binding", "binding_scope", "binding_at", "why", "cost_per_hour"),
        *("energy_per_hour", "tokens_per_s", "tokens_per_joule"),
    }
    assert row | {"facility", "limits", "what_if"} == value.keys()
    assert all(each.keys() == row for each in value["what_if"])
    limit = {"limit", "scope", "at", "unit", "available", "used", "left", "after_loss_of", "room_for"}
    assert all(each.keys() == limit for each in value["limits"])
    assert "needs 20.4 kW of power and has 15 kW" in value["why"]


def test_all_types_are_told_side_by_side(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    value = answer(monkeypatch, capsys, "plan", "capacity", str(EXAMPLES / "nvl72-2mw.yaml"))
    rows = {row["fill"]: row for row in value["what_if"]}
    assert {"dgx-h100", "hgx-h200", "dgx-b200", "gb200-nvl72", "mi300x-8"} <= rows.keys()
    assert rows["gb200-nvl72"]["gpus"] == value["gpus"]
    assert rows["dgx-h100"]["gpus"] == 8 * (2_000_000 // 10_200)


def test_filled_with_something_else(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    value = answer(monkeypatch, capsys, "plan", "capacity", str(EXAMPLES / "rack-15kw.yaml"), "--fill", "dgx-h100")
    assert (value["fill"], value["nodes_per_rack"]) == ("dgx-h100", 1)


def test_tokens_are_told_for_a_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(EXAMPLES.parent / "models" / "llama-3.1-8b.json")
    value = answer(monkeypatch, capsys, "plan", "capacity", str(EXAMPLES / "dgx-rack.yaml"), "--model", model)
    rows = {row["fill"]: row for row in value["what_if"]}
    told = rows["dgx-h100"]
    assert told["tokens_per_joule"] == pytest.approx(told["tokens_per_s"] / 10_200, rel=0.01)
    assert rows["dgx-b200"]["tokens_per_joule"] > told["tokens_per_joule"] > 0
    assert value["tokens_per_s"] == told["tokens_per_s"]


def test_people_read_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "plan", "capacity", str(EXAMPLES / "rack-15kw.yaml")) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "rack-15kw: 1 rack with 3 nodes and 24 GPUs; 15 kW at the most" in shown
    assert "power after the loss of r1-b rack r1 15 kW 15 kW 0 kW 0 more" in shown


@pytest.mark.parametrize(
    ("text", "options", "told"),
    [
        ("name: x\nsites: {s: {racks: {r: {fill: dgx-h1000}}}}\n", (), ":2:"),
        (
            "name: x\nsites: {s: {racks: {r: {height_u: 42}}}}\n",
            ("--fill", "hx"),
            "'hx' is no type here; known: dgx-",
        ),
        ("name: x\nsites: {s: {envelopes: {r: {height_u: 42, fill: dgx-h100}}}}\n", (), "nothing ends it"),
    ],
)
def test_mistakes_are_told(
    text: str,
    options: tuple[str, ...],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "facility.yaml"
    file.write_text(text)
    assert run(monkeypatch, "plan", "capacity", str(file), *options) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert told in captured.err


def test_types_that_come_to_the_same_share_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(monkeypatch, "plan", "capacity", str(EXAMPLES / "dgx-rack.yaml")) == 0
    table = capsys.readouterr().out.split("filled with ")[-1]
    (line,) = (line for line in table.splitlines() if "dgx-h100" in line)
    assert line.startswith("dgx-h100, hgx-h100 ")
    assert "cost/h" not in table, "no price is known of any"


def test_what_ends_an_envelope_of_whole_racks_has_room_for_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    value = answer(monkeypatch, capsys, "plan", "capacity", str(EXAMPLES / "nvl72-2mw.yaml"))
    (site,) = (limit for limit in value["limits"] if limit["scope"] == "site")
    assert (site["limit"], site["left"], site["room_for"]) == ("power", 80, 0), "80 kW are no rack of 120 kW"
