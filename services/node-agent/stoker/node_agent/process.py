"""Engine processes: children in sessions of their own, which an agent can let go of and take over again.

A pid alone names nothing, it is used again; a pid with its start time does. Engines outlive their agent on
purpose, so the next one is not their parent: it holds a pidfd, which tells of the end of any process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

LIFE_VARIABLE = "STOKER_ENGINE_LIFE"
"""Environment variable that carries a life's token: it finds an engine whose pid was never written down."""


class EngineProcess:
    """One life of one engine process. `on_exit` is called once, on the event loop, with the exit status.

    The status is negative for a signal, and None where this agent is not the parent.
    """

    def __init__(self, pid: int, started: int, pidfd: int, on_exit: Callable[[int | None], None]) -> None:
        self.pid = pid
        self.started = started
        self._pidfd: int | None = pidfd
        self._on_exit = on_exit
        asyncio.get_running_loop().add_reader(pidfd, self._ended)

    @classmethod
    def launch(
        cls, argv: Sequence[str], env: Mapping[str, str], log_path: Path, on_exit: Callable[[int | None], None]
    ) -> EngineProcess:
        """Start a child in a session of its own with its output in `log_path`. Raises OSError when it cannot."""
        with log_path.open("ab") as output:
            # Not waited for by this object: the pidfd tells of its end and `_ended` reaps it.
            pid = subprocess.Popen(
                argv,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            pid.returncode = 0  # keeps subprocess from reaping it elsewhere
        started = start_time(pid.pid)
        return cls(pid.pid, started or 0, os.pidfd_open(pid.pid), on_exit)

    @classmethod
    def adopt(cls, pid: int, started: int, on_exit: Callable[[int | None], None]) -> EngineProcess | None:
        """Take over a process that an earlier agent started; None if that process is no more."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return None
        # After opening: a pid that was used again in between shows another start time.
        if not is_alive(pid, started):
            os.close(pidfd)
            return None
        return cls(pid, started, pidfd, on_exit)

    @property
    def alive(self) -> bool:
        """Whether its end has not been noticed yet."""
        return self._pidfd is not None

    def terminate(self) -> None:
        """SIGTERM to the engine, which ends its own children."""
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the engine and to all of its session."""
        if self._pidfd is not None:
            _kill_session(self.pid)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def release(self) -> None:
        """Let go of it: it lives on, and its end is not told any more."""
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def _ended(self) -> None:
        if self._pidfd is None:
            return
        # Its workers hold accelerator memory: none may outlive it. A zombie still guards the session's number.
        _kill_session(self.pid)
        code = _reap(self._pidfd)
        self.release()
        self._on_exit(code)


def _reap(pidfd: int) -> int | None:
    try:
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return None
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process; None if there is none, or only its remains."""
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


def is_alive(pid: int, started: int) -> bool:
    """Whether the process with this pid is the one that started then."""
    return start_time(pid) == started


def find_by_token(token: str) -> tuple[int, int] | None:
    """Pid and start time of the session leader that carries this life's token; None if there is none."""
    wanted = f"{LIFE_VARIABLE}={token}".encode()
    for pid in _pids():
        try:
            if os.getsid(pid) != pid or wanted not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                continue
        except OSError:
            continue
        started = start_time(pid)
        if started is not None:
            return pid, started
    return None


def _kill_session(session: int) -> None:
    for pid in _pids():
        fields = _stat(pid)
        if not fields or int(fields[3]) != session or pid == session:
            continue
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(pid)
            try:
                if os.getsid(pid) == session:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            finally:
                os.close(pidfd)


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # The second field is the name in brackets and may itself hold spaces and brackets.
    return text.rpartition(")")[2].split()
