"""What the demo says of its figures."""

from __future__ import annotations

import pytest

from stoker.bench.stats import RunFigures
from stoker.cli.demo import reading, table
from stoker.cli.output import Format, Output


def run_of(policy: str, requests_per_s: float, errors: int = 0) -> RunFigures:
    kinds = {"grpc_unavailable": errors} if errors else {}
    return RunFigures(policy, 0.5, 100.0, 200.0, 300.0, requests_per_s, 150, errors, kinds)


def test_two_whole_runs_are_compared() -> None:
    told = reading("shared", [run_of("stoker", 3.0), run_of("round_robin", 2.0)])
    assert "1.50 × its requests/s" in told


def test_runs_with_failures_are_not_compared() -> None:
    told = reading("shared", [run_of("stoker", 3.0), run_of("round_robin", 0.5, errors=147)])
    assert told == "shared prefixes: 147 requests failed, so these runs are not compared"


def test_in_a_pipe_every_row_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    runs = [run_of("stoker", 3.0), run_of("round_robin", 0.5, errors=147)]
    Output(Format.TEXT).result(None, table({"chat": runs}))
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split()[-1] == "errors"
    assert first.startswith("multi-turn chat  stoker")
    assert second.endswith("147 grpc_unavailable")
