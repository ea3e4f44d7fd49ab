"""Real processes: told apart by start time, taken over by pidfd, ended with all they started."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stoker.common.errors import Exhausted
from stoker.node_agent import process as processes
from stoker.node_agent.ports import Ports
from stoker.node_agent.process import LIFE_VARIABLE, EngineProcess, find_by_token, is_alive, start_time
from tests.support.waiting import eventually

WAITS = [sys.executable, "-c", "import signal; print('up', flush=True); signal.alarm(60); signal.pause()"]


class Ending:
    def __init__(self) -> None:
        self.code: int | None = None
        self.happened = asyncio.Event()

    def __call__(self, code: int | None) -> None:
        self.code = code
        self.happened.set()

    async def wait(self) -> int | None:
        await asyncio.wait_for(self.happened.wait(), 5)
        return self.code


@pytest.mark.parametrize(
    ("program", "code"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 11)", -11)]
)
async def test_exit_status_and_output(tmp_path: Path, program: str, code: int) -> None:
    ending = Ending()
    argv = [sys.executable, "-c", f"print('hello', flush=True); {program}"]
    process = EngineProcess.launch(argv, os.environ, tmp_path / "log", ending)
    assert await ending.wait() == code
    assert not process.alive
    assert (tmp_path / "log").read_text().startswith("hello")
    assert start_time(process.pid) is None, "it was not reaped"


async def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no-such"):
        EngineProcess.launch(["/no-such"], {}, tmp_path / "log", Ending())


async def test_terminate_and_kill(tmp_path: Path) -> None:
    ending = Ending()
    EngineProcess.launch(WAITS, os.environ, tmp_path / "log", ending).terminate()
    assert await ending.wait() == -signal.SIGTERM
    ending = Ending()
    EngineProcess.launch(WAITS, os.environ, tmp_path / "log", ending).kill()
    assert await ending.wait() == -signal.SIGKILL


async def test_a_session_of_its_own_that_ends_with_it(tmp_path: Path) -> None:
    ending = Ending()
    program = (
        "import signal, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.alarm(60); signal.pause()'])\n"
        "print(child.pid, flush=True)\n"
        "signal.pause()\n"
    )
    engine = EngineProcess.launch([sys.executable, "-c", program], os.environ, tmp_path / "log", ending)
    assert os.getsid(engine.pid) == engine.pid != os.getsid(0)
    worker = int(await _text(tmp_path / "log"))
    started = start_time(worker)
    assert started is not None
    os.kill(engine.pid, signal.SIGKILL)
    await ending.wait()
    await eventually(lambda: not is_alive(worker, started), "the worker ends with its engine", 5)


async def test_adoption_of_a_process_that_is_no_child(tmp_path: Path) -> None:
    starter = (
        f"import subprocess, sys; p = subprocess.Popen({WAITS!r}, start_new_session=True, stdout=-3); print(p.pid)"
    )
    run = await asyncio.create_subprocess_exec(sys.executable, "-c", starter, stdout=subprocess.PIPE)
    pid = int((await run.communicate())[0])
    started = start_time(pid)
    assert started is not None
    assert EngineProcess.adopt(pid, started + 1, Ending()) is None, "another process with that pid"
    ending = Ending()
    process = EngineProcess.adopt(pid, started, ending)
    assert process is not None
    killed = time.monotonic()
    process.kill()
    assert await ending.wait() is None
    assert time.monotonic() - killed < 1.0
    assert EngineProcess.adopt(pid, started, Ending()) is None


async def test_a_released_process_lives_on_and_tells_nothing(tmp_path: Path) -> None:
    ending = Ending()
    process = EngineProcess.launch(WAITS, os.environ, tmp_path / "log", ending)
    process.release()
    assert is_alive(process.pid, process.started)
    os.kill(process.pid, signal.SIGKILL)
    await asyncio.to_thread(os.waitpid, process.pid, 0)
    assert not ending.happened.is_set()


async def test_an_engine_whose_pid_was_not_written_down_is_found(tmp_path: Path) -> None:
    ending = Ending()
    process = EngineProcess.launch(WAITS, {**os.environ, LIFE_VARIABLE: "token-1"}, tmp_path / "log", ending)
    await _text(tmp_path / "log")
    assert find_by_token("token-1") == (process.pid, process.started)
    assert find_by_token("token-2") is None
    process.kill()
    await ending.wait()
    assert find_by_token("token-1") is None


def test_ports_are_free_consecutive_and_handed_out_once() -> None:
    ports = Ports(random.Random(3))
    first = ports.take(4)
    assert ports.take() not in range(first, first + 4)
    crowded = Ports(random.Random(3))
    crowded.keep(20_000, 9_500)
    with pytest.raises(Exhausted, match="consecutive"):
        crowded.take()
    crowded.give_back(20_000, 9_500)
    assert crowded.take()


async def _text(path: Path) -> str:
    return str(await eventually(lambda: path.read_text().strip(), f"something in {path}"))


def test_this_process_is_alive() -> None:
    assert processes.is_alive(os.getpid(), start_time(os.getpid()) or -1)
