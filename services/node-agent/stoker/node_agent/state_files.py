"""What must survive the agent: which engines it started, what they had cached, what they said.

STATE_DIR/agent.lock              held while an agent runs: two on one directory would fight over engines
STATE_DIR/members/KEY.json        one record per member, replaced atomically
STATE_DIR/digests/KEY.msgpack     copies of its block digests
STATE_DIR/logs/KEY.log, KEY.log.1 its engine's output
STATE_DIR/models.json             models that were ready here, the last one last: their weights may be at hand
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import msgspec
import structlog

from stoker.common.errors import StokerError
from stoker.node_agent.core.digest import Image
from stoker.node_agent.core.gang import State
from stoker.node_agent.core.lifecycle import Member
from stoker.node_agent.core.task import Task

log = structlog.get_logger(__name__)


class StateDirInUse(StokerError):
    """Another agent runs on this directory."""

    reason = "STATE_DIR_IN_USE"


@dataclass(frozen=True)
class Address:
    """Where an engine listens and where its events go."""

    host: str
    """What its HTTP server binds."""
    http: int
    kv_events: int
    kv_replay: int


@dataclass(frozen=True)
class Record:
    """All that a later agent needs to go on with a member."""

    task: Task
    state: State
    attempt: int
    epoch: int
    failures: int
    last_error: str
    exit_code: int | None
    startup_s: float | None
    token: str = ""
    """Names the life of the engine in its environment; empty where none was started."""
    address: Address | None = None
    pid: int = 0
    """0 with a token means that the agent ended between starting the engine and writing this down."""
    started: int = 0
    argv_sha256: str = ""
    first_start: bool | None = None

    def member(self, now: float) -> Member:
        """The member as it stood, with its clocks begun anew."""
        ready = self.state in {State.READY, State.UNHEALTHY, State.DRAINING} and self.startup_s is not None
        return Member(
            task=self.task,
            since=now,
            state=self.state,
            attempt=self.attempt,
            epoch=self.epoch,
            failures=self.failures,
            launched_at=now,
            ready_at=now if ready else None,
            answered_at=now,
            retry_at=now,
            last_error=self.last_error,
            exit_code=self.exit_code,
            startup_s=self.startup_s,
            first_start=self.first_start,
        )


def record_of(member: Member, before: Record | None = None) -> Record:
    """The record of a member; what concerns its process is taken from the record before."""
    fresh = Record(
        task=member.task,
        state=member.state,
        attempt=member.attempt,
        epoch=member.epoch,
        failures=member.failures,
        last_error=member.last_error,
        exit_code=member.exit_code,
        startup_s=member.startup_s,
        first_start=member.first_start,
    )
    if before is None:
        return fresh
    return replace(
        fresh,
        token=before.token,
        address=before.address,
        pid=before.pid,
        started=before.started,
        argv_sha256=before.argv_sha256,
    )


_ABSURD = 1 << 62
_MOST_MODELS = 1_000


class StateDir:
    """One agent's directory."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock: IO[str] | None = None
        self._models: dict[str, None] = {}
        self._noting = threading.Lock()

    def open(self) -> None:
        """Create what is missing and take the lock. Raises StateDirInUse when another agent holds it."""
        try:
            for name in ("members", "digests", "logs"):
                (self._root / name).mkdir(parents=True, exist_ok=True)
            lock = (self._root / "agent.lock").open("w")
        except OSError as error:
            raise StokerError(
                f"state_dir {self._root} cannot be used: {error.strerror}; set state_dir to a directory "
                "this user may write",
                reason="BAD_CONFIG",
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise StateDirInUse(
                f"another agent runs on state_dir {self._root}; give each agent a directory of its own"
            ) from error
        self._lock = lock
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            models = msgspec.json.decode((self._root / "models.json").read_bytes(), type=list[str])
            self._models = dict.fromkeys(models)

    def close(self) -> None:
        """Give up the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def next_incarnation(self, wall_ns: int) -> int:
        """A number above that of every agent before on this directory; with a clock that runs well, `wall_ns`.

        Raises OSError when it cannot be written down.
        """
        path = self._root / "incarnation"
        try:
            last = int(path.read_text())
        except (OSError, ValueError):
            last = 0
        # A host whose clock was set back must not take itself for the older of two.
        number = max(wall_ns, last + 1 if 0 <= last < _ABSURD else 0)
        _replace(path, str(number).encode())
        return number

    def was_ready(self, model: str) -> bool:
        """Whether a model was ready on this host before, as far as is remembered."""
        return model in self._models

    def note_ready(self, model: str) -> None:
        """Remember that a model is ready. Raises OSError when it cannot be written down."""
        with self._noting:
            if next(reversed(self._models), None) == model:
                return
            self._models.pop(model, None)
            self._models[model] = None
            while len(self._models) > _MOST_MODELS:
                del self._models[next(iter(self._models))]
            _replace(self._root / "models.json", msgspec.json.encode(list(self._models)))

    def records(self) -> Iterator[Record]:
        """All records; one that cannot be read is set aside and told of, never fatal."""
        for path in sorted((self._root / "members").glob("*.json")):
            try:
                yield msgspec.json.decode(path.read_bytes(), type=Record)
            except (OSError, msgspec.MsgspecError) as error:
                log.error("state.record_unreadable", path=str(path), error=str(error))
                with contextlib.suppress(OSError):
                    path.rename(path.with_suffix(".unreadable"))

    def write(self, record: Record) -> None:
        """Replace a member's record; it is on disk when this returns."""
        _replace(self._root / "members" / f"{record.task.key}.json", msgspec.json.encode(record))

    def remove(self, key: str) -> None:
        """Drop a member's record and digests; its log stays for people to read."""
        (self._root / "members" / f"{key}.json").unlink(missing_ok=True)
        self.drop_digests(key)

    def log_path(self, key: str) -> Path:
        """Where the output of a member's engine goes."""
        return self._root / "logs" / f"{key}.log"

    def write_digests(self, key: str, copies: Sequence[DigestCopy]) -> None:
        """Replace the copies of a member's block digests, one for each data-parallel rank."""
        _replace(self._root / "digests" / f"{key}.msgpack", msgspec.msgpack.encode(copies))

    def read_digests(self, key: str) -> list[DigestCopy]:
        """The copies of a member's block digests; none where they cannot be read."""
        try:
            content = (self._root / "digests" / f"{key}.msgpack").read_bytes()
            return msgspec.msgpack.decode(content, type=list[DigestCopy])
        except (OSError, msgspec.MsgspecError):
            return []

    def drop_digests(self, key: str) -> None:
        """Forget the copies of a member's block digests."""
        (self._root / "digests" / f"{key}.msgpack").unlink(missing_ok=True)


@dataclass(frozen=True)
class DigestCopy:
    """A block digest and how far in its engine's events it reaches."""

    image: Image
    next_seq: int


def _replace(path: Path, content: bytes) -> None:
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def bound_log(path: Path, max_bytes: int) -> bool:
    """Rotate a log that outgrew `max_bytes`: copied to `.1`, then emptied. The engine appends on, unaware."""
    try:
        if path.stat().st_size <= max_bytes:
            return False
        shutil.copyfile(path, path.with_name(f"{path.name}.1"))
        os.truncate(path, 0)
    except OSError as error:
        log.warning("state.log_not_rotated", path=str(path), error=str(error))
        return False
    return True


class Tail:
    """Reads a log from its end on, across rotations. Lines are cut at 4 KiB."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._rest = b""

    def last(self, count: int, max_bytes: int = 4 << 20) -> list[str]:
        """The last `count` lines, from the last `max_bytes` at most; none if the log cannot be read."""
        try:
            size = self._path.stat().st_size
        except OSError:
            return []
        self._at = max(0, size - max_bytes)
        lines = self._read(size - self._at)
        if self._rest:
            lines.append(_line(self._rest))
            self._rest = b""
        return lines[-count:]

    def more(self, max_bytes: int = 1 << 20) -> list[str]:
        """Whole lines written since, from `max_bytes` at most."""
        return self._read(max_bytes)

    def _read(self, max_bytes: int) -> list[str]:
        try:
            with self._path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._at:  # it was rotated
                    self._at, self._rest = 0, b""
                file.seek(self._at)
                data = file.read(max_bytes)
        except OSError:
            return []
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-_MAX_LINE:]
        return [_line(line) for line in lines]


_MAX_LINE = 4096


def _line(line: bytes) -> str:
    return line[:_MAX_LINE].decode("utf-8", "replace").rstrip("\r")


def last_lines(path: Path, count: int, max_bytes: int = 65_536) -> list[str]:
    """The last lines of a log; none if it cannot be read."""
    return Tail(path).last(count, max_bytes)
