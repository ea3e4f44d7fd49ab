"""What systemd is to a host, this is to a local stack: starts its processes in order, starts again what dies,
stops everything in order. Run by `stoker.local.stack`; not for production.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import os
import random
import signal
import sys
import time
from collections.abc import Coroutine, Iterator
from itertools import groupby
from pathlib import Path

import aiohttp
import structlog

from stoker.common import logs, rpc
from stoker.common.backoff import Backoff
from stoker.common.errors import StokerError
from stoker.local import process
from stoker.local.state import Home, Plan, Probe, Service, ServiceState, StackState

log = structlog.get_logger(__name__)

_BACKOFF = Backoff(first_s=0.2, max_s=5.0)
_STABLE_S = 30.0
"""A service that ran this long starts its back-off anew."""
_ENGINE_GRACE_S = 15.0

ENGINES_STOP_AFTER = 2
"""Engines outlive their agents; they are stopped once all services up to this `stops` rank have."""


class StartFailed(StokerError):
    """A service did not become ready; the message holds the last lines of its log."""

    reason = "START_FAILED"


class Supervisor:
    """Runs one plan until `stop` is set or the start fails."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._home = Home(Path(plan.home))
        self._children: dict[str, asyncio.subprocess.Process] = {}
        self._state = StackState(
            engine=plan.engine,
            endpoints=plan.endpoints,
            services=[ServiceState(s.name, log=str(self._home.log(s.name))) for s in plan.services],
            supervisor=process.identify(os.getpid()),
        )
        self._rng = random.Random()  # noqa: S311 - spreads restarts, hides nothing
        self.stop = asyncio.Event()
        self.force = asyncio.Event()

    async def run(self) -> int:
        """Start, keep running until told to stop, stop. Returns the exit status."""
        self._save()
        await self._end_engines()  # what a crashed supervisor left
        try:
            if await self._until_stopped(self._start()):
                self._state.phase = "running"
                self._home.write_state(self._state)
                log.info("stack.running")
                await self._until_stopped(self._keep())
        except StokerError as error:
            self._state.phase, self._state.failure = "failed", error.message
            log.error("stack.start_failed", error=error.message)
        else:
            self._state.phase = "stopping"
        self._save()
        await self._stop_all()
        if self._state.phase == "failed":
            self._save()
            return 1
        self._state.phase = "stopped"
        self._save()
        return 0

    async def _until_stopped(self, work: Coroutine[None, None, None]) -> bool:
        """Run `work` to its end (True), or cancel it once `stop` is set (False)."""
        task = asyncio.ensure_future(work)
        stopped = asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                return False
            task.result()
            return True
        finally:
            for pending in (task, stopped):
                pending.cancel()
            await asyncio.gather(task, stopped, return_exceptions=True)

    async def _start(self) -> None:
        for _, group in groupby(sorted(self._plan.services, key=lambda s: s.starts), key=lambda s: s.starts):
            try:
                async with asyncio.TaskGroup() as tasks:
                    for service in group:
                        tasks.create_task(self._start_first(service))
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None

    async def _start_first(self, service: Service) -> None:
        child = await self._spawn(service)
        await self._wait_ready(service, child)

    async def _keep(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for service in self._plan.services:
                tasks.create_task(self._keep_one(service))

    async def _keep_one(self, service: Service) -> None:
        attempt = 0
        while True:
            began = time.monotonic()
            status = await self._children[service.name].wait()
            attempt = 0 if time.monotonic() - began > _STABLE_S else attempt + 1
            delay_s = _BACKOFF.delay_s(attempt, self._rng)
            log.warning("service.died", name=service.name, status=status, restart_in_s=round(delay_s, 2))
            state = self._state_of(service)
            state.status, state.restarts = "restarting", state.restarts + 1
            self._save()
            await asyncio.sleep(delay_s)
            try:
                child = await self._spawn(service)
                await self._wait_ready(service, child)
            except StartFailed as error:
                log.error("service.restart_failed", name=service.name, error=error.message)
                with contextlib.suppress(ProcessLookupError):
                    self._children[service.name].kill()

    async def _spawn(self, service: Service) -> asyncio.subprocess.Process:
        state = self._state_of(service)
        state.status = "starting" if state.status == "waiting" else state.status
        path = self._home.log(service.name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as output:
                child = await asyncio.create_subprocess_exec(
                    *service.argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **service.env},
                    # Ctrl-C in the terminal is for us: we stop the others, in order.
                    start_new_session=True,
                )
        except OSError as error:
            raise StartFailed(f"cannot start {service.name} ({service.argv[0]}): {error.strerror}") from error
        self._children[service.name] = child
        state.process = process.identify(child.pid)
        self._save()
        return child

    async def _wait_ready(self, service: Service, child: asyncio.subprocess.Process) -> None:
        exited = asyncio.ensure_future(child.wait())
        ready = asyncio.ensure_future(wait_ready(service.probe, self._plan.start_timeout_s))
        try:
            await asyncio.wait({exited, ready}, return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                raise StartFailed(self._failure(service, f"ended with status {exited.result()} while starting"))
            if not ready.result():
                seconds = f"{self._plan.start_timeout_s:g} s"
                raise StartFailed(self._failure(service, f"was not ready after {seconds}"))
        finally:
            for waiting in (exited, ready):
                waiting.cancel()
            await asyncio.gather(exited, ready, return_exceptions=True)
        self._state_of(service).status = "ready"
        self._save()

    def _failure(self, service: Service, what: str) -> str:
        path = self._home.log(service.name)
        lines = "\n".join(f"  | {line}" for line in process.last_lines(path)) or "  | (nothing)"
        return f"{service.name} {what}. Last lines of {path}:\n{lines}"

    async def _stop_all(self) -> None:
        for rank, group in groupby(sorted(self._plan.services, key=lambda s: s.stops), key=lambda s: s.stops):
            if rank > ENGINES_STOP_AFTER:
                await self._end_engines()
            await asyncio.gather(*(self._stop_one(service) for service in group))
        await self._end_engines()

    async def _stop_one(self, service: Service) -> None:
        child, state = self._children.get(service.name), self._state_of(service)
        if child is not None and child.returncode is None:
            child.terminate()
            exited = asyncio.ensure_future(child.wait())
            forced = asyncio.ensure_future(self.force.wait())
            await asyncio.wait({exited, forced}, timeout=service.grace_s, return_when=asyncio.FIRST_COMPLETED)
            forced.cancel()
            if not exited.done():
                log.warning("service.killed", name=service.name)
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
            await exited
        state.status, state.process = "stopped", None
        self._save()

    async def _end_engines(self) -> None:
        mine = [child.pid for child in self._children.values() if child.returncode is None]
        left = process.writing_under(self._home.run, spare=mine)
        grace_s = 0.0 if self.force.is_set() else _ENGINE_GRACE_S
        for killed in await process.end(left, grace_s):
            log.warning("engine.killed", pid=killed.pid)

    def _state_of(self, service: Service) -> ServiceState:
        return next(s for s in self._state.services if s.name == service.name)

    def _save(self) -> None:
        try:
            self._home.write_state(self._state)
        except StokerError as error:
            if self._state.phase == "starting":  # whoever waits for it would not learn how it fares
                raise
            log.warning("state.not_written", error=error.message)


async def wait_ready(probe: Probe, timeout_s: float) -> bool:
    """True once the service answers that it is ready, False after `timeout_s` seconds."""
    if probe.kind == "grpc":
        return await rpc.wait_serving(probe.target, timeout_s)
    try:
        async with asyncio.timeout(timeout_s), aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(
                        f"http://{probe.target}/health", timeout=aiohttp.ClientTimeout(total=2)
                    ) as reply:
                        if reply.status == 200:
                            return True
                await asyncio.sleep(0.05)
    except TimeoutError:
        return False


@contextlib.contextmanager
def _only_one(home: Home) -> Iterator[None]:
    home.path.mkdir(parents=True, exist_ok=True)
    with home.lock_file.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StokerError(
                f"a stack already runs in {home.path}; see `stoker status`", reason="STACK_RUNS"
            ) from None
        yield


async def _run(plan: Plan, *, tied: bool) -> int:
    supervisor = Supervisor(plan)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        (supervisor.force if supervisor.stop.is_set() else supervisor.stop).set()

    def on_stdin() -> None:
        if not os.read(0, 1024):  # whoever started us is gone
            loop.remove_reader(0)
            supervisor.stop.set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop)
    if tied:
        loop.add_reader(0, on_stdin)
    return await supervisor.run()


def main() -> None:
    """Run the plan in a home directory; `--tied` ends with stdin."""
    parser = argparse.ArgumentParser(prog="python -m stoker.local.supervisor", description=__doc__)
    parser.add_argument("home", type=Path)
    parser.add_argument("--tied", action="store_true", help="stop when stdin ends")
    options = parser.parse_args()
    logs.setup("supervisor")
    home = Home(options.home.absolute())
    try:
        with _only_one(home):
            sys.exit(asyncio.run(_run(home.require_plan(), tied=options.tied)))
    except StokerError as error:
        log.error("supervisor.failed", reason=error.reason, error=error.message)
        sys.exit(1)


if __name__ == "__main__":
    main()
