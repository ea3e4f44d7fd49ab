"""Starting, watching and stopping a local stack from outside its supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from stoker.common.errors import StokerError
from stoker.local import process
from stoker.local.process import ProcessId
from stoker.local.state import Home, Plan, StackState

Progress = Callable[[StackState], None]

_POLL_S = 0.1
_START_S = 15.0
"""Longest time in which a supervisor must have said that it runs."""
_NEEDED_MIB = 256
"""Room for etcd, which takes 128 MiB in advance, and for logs."""
_STOP_S = 60.0
"""Longest time a supervisor may take to stop; its own graces add up to less."""


class LocalStack:
    """One stack, named by its home directory."""

    def __init__(self, home: Home) -> None:
        self.home = home
        # Held, because a tied supervisor stops when this end of its stdin is closed.
        self._supervisor: subprocess.Popen[bytes] | None = None

    def state(self) -> StackState | None:
        """The running stack's state, None if none runs here."""
        state = self.home.read_state()
        return state if state is not None and state.running else None

    async def start(self, plan: Plan, progress: Progress, *, tied: bool = False) -> StackState:
        """Start all services and return once they are ready. On failure, all that was started is stopped.

        `tied` stacks end with this process, however it ends; others go on until `stop`.
        Raises StokerError with the reason and the last lines of the log at fault.
        """
        async with self._alone():
            self._refuse_second()
            await self.stop()  # what an earlier one left
            self.clear()
            self.home.write_plan(plan)
            with self.home.usable():
                self._check_space()
                self._supervisor = self._spawn(tied=tied)
            async with self._or_stopped():
                await self._until_seen(self._supervisor)
        async with self._or_stopped():
            return await self._until_running(self._supervisor, progress)

    def _refuse_second(self) -> None:
        if self.state() is not None:
            raise StokerError(
                f"a stack already runs in {self.home.path}; see `stoker status`, or stop it with `stoker down`",
                reason="STACK_RUNS",
            )

    @contextlib.asynccontextmanager
    async def _or_stopped(self) -> AsyncIterator[None]:
        try:
            yield
        except BaseException:
            await asyncio.shield(self.stop())
            raise

    async def sweep(self) -> None:
        """End what a killed supervisor left, which holds ports; a stack that runs is not touched."""
        async with self._alone():
            if self.state() is None:
                await self.stop()

    def lost(self) -> bool:
        """Whether processes of a stack run here whose supervisor was killed."""
        state = self._readable_state()
        return state is not None and not state.running and any(p.alive() for p in self._recorded(state))

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Keep others from starting a stack here for the length of the block.

        The lock is the directory above: the stack's own is removed and made anew.
        """
        with self.home.usable():
            self.home.path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.home.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        deadline = time.monotonic() + 2 * _START_S
        try:
            while not _locked(handle):
                if time.monotonic() > deadline:
                    raise StokerError(
                        f"another command is starting a stack in {self.home.path}; see `stoker status`",
                        reason="STACK_RUNS",
                    )
                await asyncio.sleep(_POLL_S)
            yield
        finally:
            os.close(handle)

    def _check_space(self) -> None:
        free_mib = shutil.disk_usage(self.home.path).free >> 20
        if free_mib < _NEEDED_MIB:
            raise StokerError(
                f"{free_mib} MiB are free at {self.home.path}, and a stack needs {_NEEDED_MIB}",
                reason="HOME_UNUSABLE",
            )

    async def _until_seen(self, supervisor: subprocess.Popen[bytes]) -> None:
        """Until the supervisor is in the state file, where others see it, or has ended."""
        deadline = time.monotonic() + _START_S
        while supervisor.poll() is None and time.monotonic() < deadline:
            state = self.home.read_state()
            if state is not None and state.supervisor is not None and state.supervisor.pid == supervisor.pid:
                return
            await asyncio.sleep(_POLL_S)

    def _spawn(self, *, tied: bool) -> subprocess.Popen[bytes]:
        self.home.run.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, "-m", "stoker.local.supervisor", str(self.home.path)]
        with self.home.log("supervisor").open("ab") as output:
            # With a pipe for stdin the supervisor notices when this process is gone, even by SIGKILL.
            return subprocess.Popen(
                [*argv, "--tied"] if tied else argv,
                stdin=subprocess.PIPE if tied else subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    async def _until_running(self, supervisor: subprocess.Popen[bytes], progress: Progress) -> StackState:
        while True:
            ended = supervisor.poll() is not None
            state = self.home.read_state()
            if state is not None and state.supervisor is not None and state.supervisor.pid == supervisor.pid:
                progress(state)
                if state.phase == "running":
                    return state
                if state.failure and ended:
                    raise StokerError(state.failure, reason="START_FAILED")
            if ended:
                lines = "\n".join(f"  | {line}" for line in process.last_lines(self.home.log("supervisor")))
                raise StokerError(
                    f"the stack's supervisor ended with status {supervisor.returncode}. "
                    f"Last lines of {self.home.log('supervisor')}:\n{lines}",
                    reason="START_FAILED",
                )
            await asyncio.sleep(_POLL_S)

    async def stop(self, progress: Progress | None = None) -> int:
        """Stop whatever of this stack runs, supervisor or not; returns how many processes were ended.

        Only processes that this stack started are touched: those in its state file, told by pid and start
        time, and those whose log lies in its directory.
        """
        state = self._readable_state()
        ended = 0
        if state is not None and state.running:
            assert state.supervisor is not None  # noqa: S101 - what `running` means
            ended = 1 + sum(s.process is not None for s in state.services)
            await self._stop_supervisor(state.supervisor, progress)
        if self._supervisor is not None and self._supervisor.poll() is None:  # it has not written a state yet
            self._supervisor.terminate()
        left = {p for p in self._recorded(state) if p.alive()} | set(process.writing_under(self.home.run))
        await process.end(left, grace_s=10.0)
        if self._supervisor is not None:
            if self._supervisor.stdin is not None:
                self._supervisor.stdin.close()
            self._supervisor.wait(timeout=5.0)
            self._supervisor = None
        return ended + len(left)

    async def _stop_supervisor(self, supervisor: ProcessId, progress: Progress | None) -> None:
        supervisor.signal(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_S
        while supervisor.alive() and time.monotonic() < deadline:
            state = self._readable_state()
            if progress is not None and state is not None:
                progress(state)
            await asyncio.sleep(_POLL_S)
        supervisor.signal(signal.SIGKILL)

    def _readable_state(self) -> StackState | None:
        with contextlib.suppress(StokerError):
            return self.home.read_state()
        return None

    @staticmethod
    def _recorded(state: StackState | None) -> set[ProcessId]:
        if state is None:
            return set()
        known = [state.supervisor, *(service.process for service in state.services)]
        return {p for p in known if p is not None}

    def clear(self) -> None:
        """Forget a stopped stack: its data, logs and state."""
        shutil.rmtree(self.home.run, ignore_errors=True)
        for file in (self.home.state_file, self.home.plan_file, self.home.lock_file):
            if file.exists():
                with self.home.usable():
                    file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty: something of the user's lies there
            self.home.path.rmdir()


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.asynccontextmanager
async def running(plan: Plan, progress: Progress) -> AsyncIterator[StackState]:
    """A stack for the length of a block: gone without trace afterwards, its logs kept if the block failed."""
    stack = LocalStack(Home(Path(plan.home)))
    try:
        yield await stack.start(plan, progress, tied=True)
    except Exception:
        await asyncio.shield(stack.stop())
        raise
    except BaseException:
        await asyncio.shield(_vanish(stack))
        raise
    await _vanish(stack)


async def _vanish(stack: LocalStack) -> None:
    await stack.stop()
    stack.clear()
    with contextlib.suppress(OSError):  # not ours alone: a lasting stack has it
        stack.home.path.parent.rmdir()
