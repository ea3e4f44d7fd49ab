"""Homes that cannot hold a stack: told in one line that says what to do, and nothing is started."""

from __future__ import annotations

import asyncio
import io
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from stoker.cli import main
from stoker.common import logs
from stoker.common.errors import StokerError
from stoker.local.stack import LocalStack
from stoker.local.state import Endpoints, Home, Plan

Usage = namedtuple("Usage", "total used free")


def plan(home: Path) -> Plan:
    return Plan(str(home), "sim", (), Endpoints("", (), (), (), (), "", ""))


@pytest.mark.parametrize("verb", [["up"], ["status"], ["bench", "routing", "--requests", "1"]])
def test_a_home_that_is_a_file_is_named(
    verb: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "file"
    home.touch()
    monkeypatch.setenv("STOKER_HOME", str(home))
    monkeypatch.setattr(logs, "setup", lambda *_: None)
    assert main._run(verb) == 1
    told = capsys.readouterr().err
    assert f"cannot keep a stack in {home}" in told
    assert "Not a directory" in told or "File exists" in told
    assert "set STOKER_HOME" in told


def test_a_home_that_cannot_be_made_is_named() -> None:
    stack = LocalStack(Home(Path("/proc/nothing")))
    with pytest.raises(StokerError, match="cannot keep a stack in /proc/nothing: No such file") as raised:
        asyncio.run(stack.start(plan(stack.home.path), lambda _: None))
    assert raised.value.reason == "HOME_UNUSABLE"


def test_a_full_disk_is_told_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 1 << 40, 5 << 20))
    stack = LocalStack(Home(tmp_path / "home"))
    with pytest.raises(StokerError, match=r"5 MiB are free at .*/home, and a stack needs 256") as raised:
        asyncio.run(stack.start(plan(stack.home.path), lambda _: None))
    assert raised.value.reason == "HOME_UNUSABLE"
    assert not stack.home.run.exists()


def test_a_log_that_cannot_be_written_is_no_error_of_the_work() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    print("lost", file=logs.Steady(Full()), flush=True)
    closed = io.StringIO()
    closed.close()
    print("lost", file=logs.Steady(closed), flush=True)
    kept = io.StringIO()
    print("kept", file=logs.Steady(kept), flush=True)
    assert kept.getvalue() == "kept\n"
