"""Processes as Linux shows them: who they are beyond doubt, what they write to, how to end them.

A pid alone names nothing, it is used again. A pid with its start time does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.05


@dataclass(frozen=True)
class ProcessId:
    """One life of one process."""

    pid: int
    started: int
    """Clock ticks from boot to its start, as in /proc/PID/stat."""

    def alive(self) -> bool:
        """Whether it still runs. A zombie does not: it only waits to be counted."""
        stat = _stat(self.pid)
        return stat is not None and stat.started == self.started and stat.state not in "ZX"

    def signal(self, signum: signal.Signals) -> bool:
        """Send a signal; False if the process is gone."""
        if not self.alive():
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, signum)
            return True
        return False


@dataclass(frozen=True)
class _Stat:
    state: str
    started: int


def identify(pid: int) -> ProcessId | None:
    """The process that has this pid now, None if there is none."""
    stat = _stat(pid)
    return ProcessId(pid, stat.started) if stat is not None else None


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the name in brackets and may itself hold spaces and brackets.
    fields = text.rpartition(")")[2].split()
    return _Stat(state=fields[0], started=int(fields[19]))


def writing_under(directory: Path, *, spare: Iterable[int] = ()) -> list[ProcessId]:
    """This user's processes whose stdout or stderr is a file below `directory`, without the pids in `spare`.

    That is how engines are found again: they outlive their agents on purpose, and whatever an engine
    starts inherits its log.
    """
    root = f"{directory.resolve()}/"
    spared = {os.getpid(), *spare}
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in spared:
            continue
        if any(_target(entry / "fd" / fd).startswith(root) for fd in ("1", "2")):
            process = identify(int(entry.name))
            if process is not None and process.alive():
                found.append(process)
    return found


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


async def end(processes: Iterable[ProcessId], grace_s: float) -> list[ProcessId]:
    """SIGTERM to all, SIGKILL to those still there after `grace_s` seconds; returns the killed ones."""
    waiting = [p for p in processes if p.signal(signal.SIGTERM)]
    waiting = await _gone(waiting, grace_s)
    killed = [p for p in waiting if p.signal(signal.SIGKILL)]
    await _gone(killed, 5.0)
    return killed


async def _gone(processes: list[ProcessId], within_s: float) -> list[ProcessId]:
    deadline = time.monotonic() + within_s
    while processes and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)
        processes = [p for p in processes if p.alive()]
    return processes


def last_lines(log: Path, count: int = 15, *, max_bytes: int = 16_384) -> list[str]:
    """The last lines of a log, at most `max_bytes` of it; none if it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - max_bytes))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return text.splitlines()[-count:]
