"""Real processes: told apart beyond doubt, found by their logs, ended."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.local import process
from stoker.local.process import ProcessId
from tests.support.waiting import eventually

STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.alarm(60);"
    "print('up', flush=True); signal.pause()"
)


@pytest.fixture
def child(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (tmp_path / "child.log").open("wb") as log:
        started = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=log, stderr=log)
    yield started
    started.kill()
    started.wait()


async def until_it_writes(log: Path) -> None:
    await eventually(lambda: process.last_lines(log), f"something in {log}")


def test_a_pid_alone_names_nothing(child: subprocess.Popen[bytes]) -> None:
    known = process.identify(child.pid)
    assert known is not None
    assert known.alive()
    recycled = ProcessId(known.pid, known.started - 1)
    assert not recycled.alive()
    assert not recycled.signal(signal.SIGKILL)
    assert known.alive()


def test_a_zombie_does_not_live(child: subprocess.Popen[bytes]) -> None:
    known = process.identify(child.pid)
    assert known is not None
    child.kill()
    child.wait()
    assert not known.alive()
    assert process.identify(2**22 + 1) is None


def test_processes_are_found_by_where_they_write(child: subprocess.Popen[bytes], tmp_path: Path) -> None:
    assert [p.pid for p in process.writing_under(tmp_path)] == [child.pid]
    assert process.writing_under(tmp_path, spare=[child.pid]) == []
    assert process.writing_under(tmp_path / "other") == []
    sibling = tmp_path.with_name(tmp_path.name + "-2")
    assert process.writing_under(sibling) == []


async def test_who_ignores_sigterm_is_killed(child: subprocess.Popen[bytes], tmp_path: Path) -> None:
    await until_it_writes(tmp_path / "child.log")
    known = process.identify(child.pid)
    assert known is not None
    assert await process.end([known], grace_s=0.2) == [known]
    assert not known.alive()


def test_last_lines_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("\n".join(f"line {n}" for n in range(10_000)))
    assert process.last_lines(log, 2) == ["line 9998", "line 9999"]
    assert len(process.last_lines(log, 10_000, max_bytes=100)) < 15
    assert process.last_lines(tmp_path / "none.log") == []
