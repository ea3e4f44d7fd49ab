"""What a local stack writes down: its plan, and how each of its processes fares. JSON, replaced whole."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from stoker.common.errors import StokerError
from stoker.local.process import ProcessId

T = TypeVar("T")

Phase = Literal["starting", "running", "stopping", "stopped", "failed"]
Status = Literal["waiting", "starting", "ready", "restarting", "stopped", "failed"]

FORMAT = 1


@dataclass(frozen=True)
class Endpoints:
    """Where a stack is reached, host:port each; `http` are base URLs."""

    etcd: str
    registry: tuple[str, ...]
    router: tuple[str, ...]
    http: tuple[str, ...]
    agents: tuple[str, ...]
    scaler: str
    planner: str
    envoy: tuple[str, ...] = ()
    """Base URLs of the Envoys that carry the tokens, one before each router; none where routers do."""


@dataclass(frozen=True)
class Probe:
    """How to see that a service is ready."""

    kind: Literal["http", "grpc"]
    """http: GET /health answers 200."""
    target: str
    """host:port"""


@dataclass(frozen=True)
class Service:
    """One process of the stack."""

    name: str
    argv: tuple[str, ...]
    probe: Probe
    starts: int
    """Services start in rising order of this; equal ones together."""
    stops: int
    """Services stop in rising order of this; equal ones together."""
    env: dict[str, str] = field(default_factory=dict)
    grace_s: float = 10.0
    """Seconds from SIGTERM to SIGKILL."""


@dataclass(frozen=True)
class Plan:
    """A whole stack, before any of it runs."""

    home: str
    engine: str
    services: tuple[Service, ...]
    endpoints: Endpoints
    start_timeout_s: float = 60.0
    """Seconds that one service may take to become ready."""
    format: int = FORMAT


@dataclass
class ServiceState:
    """One process, as it stands."""

    name: str
    status: Status = "waiting"
    process: ProcessId | None = None
    restarts: int = 0
    log: str = ""


@dataclass
class StackState:
    """A whole stack, as it stands."""

    engine: str
    endpoints: Endpoints
    services: list[ServiceState]
    phase: Phase = "starting"
    supervisor: ProcessId | None = None
    failure: str = ""
    """What went wrong, with the last lines of the log; empty if nothing did."""
    format: int = FORMAT

    @property
    def running(self) -> bool:
        """Whether the stack's supervisor lives."""
        return self.supervisor is not None and self.supervisor.alive()


@dataclass(frozen=True)
class Home:
    """The directory of one stack."""

    path: Path

    @classmethod
    def default(cls) -> Home:
        """$STOKER_HOME, or .stoker in the working directory."""
        return cls(Path(os.environ.get("STOKER_HOME") or ".stoker").absolute())

    @property
    def plan_file(self) -> Path:
        """What was started."""
        return self.path / "plan.json"

    @property
    def state_file(self) -> Path:
        """How it fares."""
        return self.path / "state.json"

    @property
    def lock_file(self) -> Path:
        """Held by the supervisor while it lives."""
        return self.path / "lock"

    @property
    def run(self) -> Path:
        """Data and logs of the processes. Whatever writes its log in here is the stack's, and ends with it."""
        return self.path / "run"

    @contextlib.contextmanager
    def usable(self) -> Iterator[None]:
        """Turn what the file system refuses within the block into what to do about it. Raises StokerError."""
        try:
            yield
        except OSError as error:
            raise StokerError(
                f"cannot keep a stack in {self.path}: {error.strerror} ({error.filename or self.path})",
                reason="HOME_UNUSABLE",
            ) from error

    def log(self, service: str) -> Path:
        """The log of one service."""
        return self.run / f"{service}.log"

    def read_state(self) -> StackState | None:
        """The state, None if there is none. Raises StokerError if it is unreadable."""
        with self.usable():
            return _read(self.state_file, StackState)

    def write_state(self, state: StackState) -> None:
        """Replace the state. Raises StokerError where it cannot be written."""
        with self.usable():
            _write(self.state_file, state)

    def read_plan(self) -> Plan | None:
        """The plan, None if there is none. Raises StokerError if it is unreadable."""
        with self.usable():
            return _read(self.plan_file, Plan)

    def require_plan(self) -> Plan:
        """The plan. Raises StokerError if there is none or it is unreadable."""
        plan = self.read_plan()
        if plan is None:
            raise StokerError(f"{self.plan_file} is missing; start a stack with `stoker up`", reason="BAD_STATE")
        return plan

    def write_plan(self, plan: Plan) -> None:
        """Replace the plan. Raises StokerError where it cannot be written."""
        with self.usable():
            _write(self.plan_file, plan)


def _read(path: Path, cls: type[T]) -> T | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(content, type=cls)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StokerError(
            f"{path} is not readable ({error}); run `stoker down`, which ends what is left and clears it",
            reason="BAD_STATE",
        ) from error


def _write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = msgspec.json.format(msgspec.json.encode(value), indent=2)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()
        raise
