"""`stoker simulate`: figures on stdout, a drawing, and errors that say what to do."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from stoker.cli.main import _run
from stoker.cli.simulate import Load
from stoker.simulate.loads import GENERATORS

SVG = "{http://www.w3.org/2000/svg}"


def trace(folder: Path, requests: int = 120) -> Path:
    rows = [
        f"2023-11-16 18:{number // 60:02}:{number % 60:02}.5,{900 + 7 * number},{5 + number % 9}"
        for number in range(requests)
    ]
    file = folder / "azure.csv"
    file.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""]))
    return file


def test_every_load_can_be_named() -> None:
    assert {load.value for load in Load} == GENERATORS.keys()


def test_json_and_a_drawing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "o.svg"
    arguments = ["simulate", "--trace", str(trace(tmp_path)), "--format", "azure", "--policy", "fixed:2"]
    arguments += ["--policy", "concurrency:target=4", "--replicas-max", "5", "--startup-s", "10", "--plot", str(plot)]
    assert _run([*arguments, "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["simulated"]["trace"] == "azure.csv"
    assert found["simulated"]["hardware"]["block_size"] == 512
    assert found["simulated"]["victims"] == "warm"
    assert [row["policy"] for row in found["rows"]] == ["fixed:2", "concurrency:target=4"]
    fixed = found["rows"][0]
    assert (fixed["requests"], fixed["refused"], fixed["attainment"], fixed["changes"]) == (120, 0, 1.0, [])
    assert fixed["replica_hours"] == pytest.approx(2 * 119 / 3_600, abs=1e-3)
    root = ElementTree.fromstring(plot.read_text())  # noqa: S314 - our own
    said = {text.text for text in root.iter(f"{SVG}text")}
    assert {"fixed:2", "concurrency:target=4", "serving", "starting", "draining"} <= said
    assert len(root.findall(f"{SVG}polygon")) == 1 + 2 * 3, "demand, and three layers a policy"


def test_the_same_again_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "--trace", str(trace(tmp_path)), "--format", "azure", "--load", "2.5", "--seed", "9"]
    arguments += ["--victims", "random"]
    shown = []
    for _ in range(2):
        assert _run([*arguments, "--policy", "concurrency:target=1", "-o", "json"]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]


def test_a_table_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["simulate", "--trace", str(trace(tmp_path)), "--format", "azure", "--policy", "fixed:1"]) == 0
    out = capsys.readouterr().out
    assert "120 requests in 2 minutes; TTFT 2,000 ms and ITL 200 ms; start-up 90 s" in out
    assert "replica-hours" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--trace: name a trace with its --format, or a load with --generate"),
        (["--trace", "FILE"], "--format: say what"),
        (["--trace", "FILE", "--format", "mooncake"], ":1: it is no Mooncake request"),
        (["--trace", "FILE", "--format", "azure", "--model", "m"], "--model: a trace of azure names no models"),
        (["--trace", "FILE", "--format", "stoker"], "FILE: "),
        (["--generate", "step", "--startup-s", "1e308"], "'--startup-s'"),
        (["--trace", "/nowhere", "--format", "azure"], "cannot read /nowhere"),
        (["--generate", "step", "--replicas-max", "2", "--replicas-min", "3"], "--replicas-max: 2 is below"),
        (["--trace", "FILE", "--format", "azure", "--policy", "magic"], "--policy: 'magic' is no policy"),
        (
            ["--trace", "FILE", "--format", "azure", "--policy", "fixed:1", "--plot", "/nowhere/x.svg"],
            "--plot: cannot",
        ),
    ],
)
def test_errors_say_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    file = str(trace(tmp_path, 3))
    assert _run(["simulate", *(file if each == "FILE" else each for each in arguments)]) == 2
    assert said in capsys.readouterr().err


def test_a_plot_that_cannot_be_written_is_refused_before_the_simulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.simulate.run.simulate", lambda *_, **__: pytest.fail("it was simulated"))
    assert _run(["simulate", "--generate", "step", "--plot", str(tmp_path)]) == 2
    assert f"--plot: cannot write {tmp_path}; name a file" in capsys.readouterr().err
