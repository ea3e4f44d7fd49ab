"""What demo and bench say of their figures."""

from __future__ import annotations

import io
import sys

import pytest

from stoker.bench.stats import RunFigures
from stoker.cli.bench import as_json
from stoker.cli.demo import reading, table
from stoker.cli.output import Format, Output, Verbatim


def run_of(policy: str, requests_per_s: float, errors: int = 0) -> RunFigures:
    kinds = {"grpc_unavailable": errors} if errors else {}
    return RunFigures(policy, 0.5, 100.0, 200.0, 300.0, requests_per_s, 150, errors, kinds)


def test_every_round_of_a_bench_is_told_beside_the_medians() -> None:
    runs = {"stoker": [run_of("stoker", 1.0), run_of("stoker", 4.0, errors=1), run_of("stoker", 2.0)]}
    (told,) = as_json(runs, {"seed": 7})
    assert (told["policy"], told["requests_per_s"], told["errors"], told["seed"]) == ("stoker", 2.0, 1, 7)
    assert [f["requests_per_s"] for f in told["rounds"]] == [1.0, 4.0, 2.0]


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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_there_to_copy_has_no_breaks_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    command = """curl -d '{"prompt": ["a [b]c", "/x"], "stream": true}' http://127.0.0.1:7380/v1/completions"""
    Output(Format.TEXT).result(None, Verbatim(command))
    assert terminal.getvalue() == command + "\n"
