"""A router of several processes on the same ports, by SO_REUSEPORT: `workers` above 1.

Each worker is a whole router, and the kernel spreads connections over them. This parent reserves the ports, starts
the workers, starts again what ends or stands still, and on SIGTERM has them drain. Parent and worker hold the ends of
a socket, which is the worker's standard input: there the worker says from time to time that it runs, and hears that
its parent ends, however that happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import random
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import structlog

from stoker.common import service
from stoker.common.addresses import host_and_port
from stoker.common.backoff import Backoff
from stoker.common.errors import StokerError
from stoker.router.config import ListenConfig, RouterConfig
from stoker.router.workers.siblings import Siblings

log = structlog.get_logger(__name__)

_NUMBER = "STOKER_ROUTER_WORKER"
_CONFIG = "config.json"
_BACKOFF = Backoff(0.2, 10.0)
_SETTLED_S = 30.0
"""Who lived so long starts again at once."""
_GRACE_S = 10.0
"""To end after the drain."""
_BEAT_S = 0.5
_LOOK_S = 1.0
_SILENT_LOOKS = 10
"""A worker not heard of for so many has frozen; its share of new connections waits meanwhile."""
_STARTING_LOOKS = 120
"""The same before its first word: it loads modules."""


async def supervise(config: RouterConfig, stop: asyncio.Event) -> None:
    """Run `config.workers` workers until `stop` is set, then drain them. Raises StokerError."""
    with _folder() as folder, _reserved(config.listen) as listening:
        (folder / _CONFIG).write_bytes(msgspec.json.encode(replace(config, listen=listening)))
        log.info("router.workers", count=config.workers, grpc=listening.grpc, http=listening.http)
        async with asyncio.TaskGroup() as group:
            for number in range(config.workers):
                group.create_task(_keep(number, folder, config.drain_s + _GRACE_S, stop), name=f"worker {number}")


async def _keep(number: int, folder: Path, stops_s: float, stop: asyncio.Event) -> None:
    """Keep one worker running."""
    rng = random.Random()  # noqa: S311 - jitter
    failures = lives = 0
    while not stop.is_set():
        began = time.monotonic()
        try:
            status = await _run(number, folder, stops_s, stop)
        except OSError as error:  # no memory or no process to be had now: the other workers go on
            log.error("router.worker_not_started", worker=number, error=error.strerror or str(error))
            status = 1
        if stop.is_set():
            return
        lives += 1
        # What a later life cannot run with may be only now so, and the other workers do run.
        if status == service.EXIT_STAY_DOWN and lives == 1:
            raise StokerError(f"worker {number} cannot run with this configuration; see above", reason="BAD_CONFIG")
        failures = 0 if time.monotonic() - began > _SETTLED_S else failures + 1
        delay_s = _BACKOFF.delay_s(failures, rng) if failures else 0.0
        log.error("router.worker_ended", worker=number, status=status, again_in_s=round(delay_s, 1))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await stop.wait()


async def _run(number: int, folder: Path, stops_s: float, stop: asyncio.Event) -> int:
    """One life of a worker; returns its exit status."""
    line, theirs = socket.socketpair()
    with line:
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "stoker.router",
                stdin=theirs.fileno(),
                start_new_session=True,  # Ctrl-C is for the parent, who passes it on
                env={**os.environ, _NUMBER: f"{number}:{folder}"},
            )
        return await _until_end(process, number, line, stops_s, stop)


async def _until_end(
    process: asyncio.subprocess.Process, number: int, line: socket.socket, stops_s: float, stop: asyncio.Event
) -> int:
    ending, stopping = asyncio.ensure_future(process.wait()), asyncio.ensure_future(stop.wait())
    freezing = asyncio.ensure_future(silent(line))
    try:
        await asyncio.wait({ending, stopping, freezing}, return_when=asyncio.FIRST_COMPLETED)
        if stopping.done() and not ending.done():
            line.shutdown(socket.SHUT_WR)  # no signal: systemd may have sent one already, and a second one forces
            await asyncio.wait({ending, freezing}, timeout=stops_s, return_when=asyncio.FIRST_COMPLETED)
        if freezing.done() and not ending.done():
            log.error("router.worker_frozen", worker=number, pid=process.pid, silent_s=_SILENT_LOOKS * _LOOK_S)
    finally:
        stopping.cancel()
        freezing.cancel()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await asyncio.shield(ending)
    return ending.result()


async def silent(
    line: socket.socket, look_s: float = _LOOK_S, looks: int = _SILENT_LOOKS, starting: int = _STARTING_LOOKS
) -> None:
    """Return when the other end of a worker's line has said nothing for too long.

    Counted in looks rather than in seconds: a parent that stood still itself, with its workers or without, has not
    looked meanwhile.
    """
    line.setblocking(False)
    missed, most = 0, starting
    while missed < most:
        await asyncio.sleep(look_s)
        missed += 1
        with contextlib.suppress(OSError):
            while line.recv(4096):
                missed, most = 0, looks


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Of the workers alone, for as long as they run.

    Old files of /tmp are swept away on most hosts, but not from a locked directory (tmpfiles.d(5)); without
    its configuration no worker could start again.
    """
    folder = Path(tempfile.mkdtemp(prefix="stoker-router-"))
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(held)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _reserved(listen: ListenConfig) -> Iterator[ListenConfig]:
    """Hold the ports for the workers, so that they are theirs between two lives too; port 0 becomes a free one."""
    with contextlib.ExitStack() as held:
        found = {}
        for name in ("grpc", "http", "ext_authz", "ext_proc", "pick"):
            address = getattr(listen, name)
            found[name] = _reserve(f"listen.{name}", address, held) if address else ""
        yield replace(listen, **found)


def _reserve(setting: str, address: str, held: contextlib.ExitStack) -> str:
    parsed = host_and_port(address)
    if parsed is None:
        raise StokerError(f"{setting} is {address!r}; write host:port", reason="BAD_CONFIG")
    host, port = parsed[0] or "0.0.0.0", parsed[1]  # noqa: S104 - as every service
    try:
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as trial:  # somebody else's port is not to be shared
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(place)
            trial.listen(1)
        holder = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(place)
    except OSError as error:
        raise StokerError(
            f"cannot listen on {address}: {error}; choose another address ({setting})", reason="ADDRESS_IN_USE"
        ) from error
    return f"{f'[{host}]' if ':' in host else host}:{holder.getsockname()[1]}"


# --- in a worker -------------------------------------------------------------------------------------------


def assigned() -> tuple[RouterConfig, Siblings] | None:
    """What this process shall be, where it is a worker."""
    given = os.environ.get(_NUMBER)
    if given is None:
        return None
    number, _, folder = given.partition(":")
    config = msgspec.json.decode((Path(folder) / _CONFIG).read_bytes(), type=RouterConfig)
    metrics = _shifted(config.metrics_listen, int(number))
    record = config.record
    if record.path:
        record = replace(record, path=f"{record.path}.worker-{number}")
    return replace(config, metrics_listen=metrics, record=record), Siblings(Path(folder), int(number), config.workers)


def _shifted(address: str, by: int) -> str:
    """The same host, as many ports further; port 0 stays."""
    parsed = host_and_port(address) if address else None
    if parsed is None or not parsed[1]:
        return address
    return f"{address.rpartition(':')[0]}:{parsed[1] + by}"


@contextlib.asynccontextmanager
async def belonging(stop: asyncio.Event) -> AsyncIterator[None]:
    """Tell the parent that this worker runs while the block does, and set `stop` when it ends or wants an end."""
    loop = asyncio.get_running_loop()
    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as line:
        line.setblocking(False)

        def readable() -> None:
            with contextlib.suppress(OSError):
                if line.recv(4096):
                    return
            loop.remove_reader(line)
            log.info("router.worker_stopping")
            stop.set()

        async def beat() -> None:
            while True:
                with contextlib.suppress(OSError):  # who does not listen has gone, or stands still
                    line.send(b".")
                await asyncio.sleep(_BEAT_S)

        loop.add_reader(line, readable)
        beating = asyncio.create_task(beat(), name="beat")
        try:
            yield
        finally:
            loop.remove_reader(line)
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
