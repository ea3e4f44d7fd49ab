"""The comparison as a user runs it: a table of JSON, and nothing left behind, also after Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.local import process
from tests.support.waiting import eventually_blocking

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]


def start(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STOKER_")}
    argv = [sys.executable, "-m", "bench.peers", "--peer", "none", "--cache", str(tmp_path / "cache"), *arguments]
    return subprocess.Popen(
        argv,
        cwd=ROOT,
        env={**kept, "STOKER_HOME": str(tmp_path / "home")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_stoker_alone_is_measured_on_a_stack_of_its_own(tmp_path: Path) -> None:
    small = ("--workload", "shared", "--requests", "8", "--rounds", "1", "--sim-speed", "50")
    running = start(tmp_path, "--measure", "quality", *small, "-o", "json")
    output, errors = running.communicate(timeout=120)
    assert running.returncode == 0, errors
    shared = json.loads(output)["quality"]["shared"]
    assert [row["name"] for row in shared] == ["stoker", "stoker round_robin"]
    assert [(row["requests"], row["errors"]) for row in shared] == [(8, 0), (8, 0)]
    assert process.writing_under(tmp_path) == []


def under_way(running: subprocess.Popen[str], home: Path) -> bool:
    assert running.poll() is None, running.communicate()
    return len(process.writing_under(home)) >= 2


def test_ctrl_c_leaves_nothing_running(tmp_path: Path) -> None:
    running = start(tmp_path, "--measure", "speed", "--rounds", "100", "--prompt-bytes", "2000")
    try:
        eventually_blocking(lambda: under_way(running, tmp_path), "router and engines start", 60)
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=30) == 130
    finally:
        running.kill()
        running.communicate()
    assert process.writing_under(tmp_path) == []
