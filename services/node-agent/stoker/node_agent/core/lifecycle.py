"""The life of one member of a replica: what to do next, given what is asked and what is seen.

    PENDING ─► STARTING ─► READY ◄─► UNHEALTHY
                  │          │           │
                  └──────────┴──► BACKOFF ┴─► STARTING …      any ─► DRAINING ─► STOPPED

`step` never waits: it is called on each change and now and then, and returns what to do at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from random import Random

from stoker.common.backoff import Backoff
from stoker.node_agent.core import gang
from stoker.node_agent.core.gang import Peer, State
from stoker.node_agent.core.task import Task
from stoker.node_agent.engine.protocol import Health

MAX_ERROR_BYTES = 4096
"""Longest `last_error` that is reported."""

_ACCESS_LINE = ' HTTP/1.1" '
"""Marks a line of an HTTP access log: our own probes would crowd out what went wrong."""
_RUNNING = {State.STARTING, State.READY, State.UNHEALTHY}


@dataclass(frozen=True)
class Policy:
    """Times in seconds; see the service's settings for what each means."""

    unhealthy_after_s: float = 10.0
    restart_after_s: float = 60.0
    drain_settle_s: float = 1.0
    terminate_timeout_s: float = 15.0
    healthy_after_s: float = 300.0
    backoff: Backoff = field(default_factory=lambda: Backoff(first_s=1.0, max_s=60.0))


@dataclass(frozen=True)
class Exit:
    """The engine process ended, or could not be started: then `error` says why."""

    code: int | None = None
    """Exit status, negative for a signal; None where it cannot be known (the engine was adopted)."""
    error: str = ""


@dataclass(frozen=True)
class Seen:
    """What the agent sees of one member now."""

    task: Task | None
    """What is assigned; None where nothing is any more."""
    alive: bool
    """Whether the engine process runs."""
    wall_ms: int
    """Wall clock, only to make epochs that rise across lost state."""
    exit: Exit | None = None
    """Set in one step only: the process ended since the step before."""
    health: Health | None = None
    """The latest answer of this life of the engine; None before the first."""
    peers: Mapping[int, Peer] = field(default_factory=dict)
    in_flight: int | None = None
    """Requests in the relay and in the engine; None where unknown."""
    in_flight_at: float = 0.0
    """When that was measured."""
    started_before: bool | None = None
    """This host has had the task's model ready before; None where nobody knows."""


@dataclass(frozen=True)
class Member:
    """Where one member stands. Times are monotonic seconds."""

    task: Task
    since: float
    state: State = State.PENDING
    attempt: int = 0
    epoch: int = 0
    failures: int = 0
    """Failed attempts in a row; a long healthy life forgets them."""
    launched_at: float = 0.0
    ready_at: float | None = None
    answered_at: float = 0.0
    """When the engine last proved that it serves."""
    retry_at: float = 0.0
    terminated_at: float | None = None
    killed: bool = False
    last_error: str = ""
    exit_code: int | None = None
    startup_s: float | None = None
    first_start: bool | None = None
    """Of the start that `startup_s` is of: this host had never had the model ready."""

    @property
    def serving(self) -> bool:
        """Whether new requests are welcome."""
        return self.state is State.READY and self.task.leads


class Act(Enum):
    """What the agent shall do."""

    LAUNCH = "launch"
    """Start the engine for `attempt` and `epoch` of the member as returned."""
    TERMINATE = "terminate"
    """SIGTERM."""
    KILL = "kill"
    """SIGKILL."""
    FORGET = "forget"
    """The member is over: drop its records."""


def step(member: Member, seen: Seen, policy: Policy, now: float, rng: Random) -> tuple[Member, list[Act]]:
    """The member after what is seen, and what to do now."""
    exit_ = seen.exit
    if exit_ is None and member.state in _RUNNING and not seen.alive:
        exit_ = Exit(error="the engine is not there")  # its end went by unseen
    if exit_ is not None:
        member = _exited(member, exit_, seen, policy, now, rng)
    task = seen.task
    if task is None or task.drain or task.revision != member.task.revision:
        return _leave(member, seen, policy, now)
    member = replace(member, task=task)
    match member.state:
        case State.PENDING | State.BACKOFF:
            return _rest(member, seen, policy, now)
        case State.STOPPED:
            return _to(member, State.PENDING, now), []
        case State.DRAINING:
            return _undrain(member, seen, policy, now)
        case _:
            return _run(member, seen, policy, now, rng)


def _to(member: Member, state: State, now: float) -> Member:
    return member if member.state is state else replace(member, state=state, since=now)


def _new_epoch(member: Member, seen: Seen) -> int:
    return max(member.epoch + 1, seen.wall_ms)


def _exited(member: Member, exit_: Exit, seen: Seen, policy: Policy, now: float, rng: Random) -> Member:
    what = exit_.error or f"the engine {_ending(exit_.code)}"
    unexpected = member.terminated_at is None
    member = replace(
        member,
        exit_code=exit_.code,
        epoch=_new_epoch(member, seen),  # whatever it had cached is gone
        terminated_at=None,
        killed=False,
    )
    if member.state in _RUNNING:
        return _failed(member, what, policy, now, rng)
    if member.state is State.DRAINING:
        if unexpected:
            member = replace(member, last_error=f"{what} while it drained")
        return _to(member, State.STOPPED, now)
    return member


def _ending(code: int | None) -> str:
    if code is None:
        return "ended; its exit status is unknown because an earlier agent had started it"
    return f"was ended by signal {-code}" if code < 0 else f"exited with status {code}"


def _failed(member: Member, what: str, policy: Policy, now: float, rng: Random) -> Member:
    was_stable = member.ready_at is not None and now - member.ready_at >= policy.healthy_after_s
    failures = 1 if was_stable else member.failures + 1
    after = f"{now - member.launched_at:.1f} s after its start"
    return replace(
        _to(member, State.BACKOFF, now),
        failures=failures,
        retry_at=now + policy.backoff.delay_s(failures - 1, rng),
        ready_at=None,
        last_error=f"attempt {member.attempt}: {what}, {after}",
    )


def _end(member: Member, seen: Seen, policy: Policy, now: float) -> tuple[Member, list[Act]]:
    """SIGTERM, and SIGKILL to one that does not heed it."""
    if not seen.alive:
        return member, []
    if member.terminated_at is None:
        return replace(member, terminated_at=now), [Act.TERMINATE]
    if not member.killed and now - member.terminated_at >= policy.terminate_timeout_s:
        return replace(member, killed=True), [Act.KILL]
    return member, []


def _rest(member: Member, seen: Seen, policy: Policy, now: float) -> tuple[Member, list[Act]]:
    """PENDING or BACKOFF: wait for the old process to go, for the pause to pass and for the gang."""
    if seen.alive:
        return _end(member, seen, policy, now)
    task = member.task
    if member.state is State.BACKOFF and task.leads and now < member.retry_at:
        return member, []
    attempt = gang.may_start(task.rank, task.size, member.attempt, seen.peers)
    if attempt is None:
        return member, []
    member = replace(
        _to(member, State.STARTING, now),
        attempt=attempt,
        epoch=_new_epoch(member, seen),
        launched_at=now,
        ready_at=None,
        terminated_at=None,
        killed=False,
    )
    return member, [Act.LAUNCH]


def _run(member: Member, seen: Seen, policy: Policy, now: float, rng: Random) -> tuple[Member, list[Act]]:
    task = member.task
    if task.leads and seen.health is Health.SERVING:
        member = replace(member, answered_at=now)
    why = gang.failure(task.rank, member.attempt, member.ready_at is not None, seen.peers)
    why = why or _unwell(member, seen, policy, now)
    if why is not None:
        return _end(_failed(member, why, policy, now, rng), seen, policy, now)
    serves = not task.leads or seen.health is Health.SERVING
    if member.state is State.STARTING:
        if serves and gang.complete(task.rank, task.size, member.attempt, seen.peers):
            member = replace(
                _to(member, State.READY, now),
                ready_at=now,
                answered_at=now,
                startup_s=now - member.launched_at,
                first_start=None if seen.started_before is None else not seen.started_before,
            )
        return member, []
    return _to(member, _condition(member, seen, policy, now), now), []


def _unwell(member: Member, seen: Seen, policy: Policy, now: float) -> str | None:
    """Why a running engine must be started again; None while it need not."""
    if member.state is State.STARTING:
        if now - member.launched_at >= member.task.startup_timeout_s:
            return f"not ready within startup_timeout_s ({member.task.startup_timeout_s:g})"
        return None
    if not member.task.leads:
        return None
    silent_s = now - member.answered_at
    if seen.health is Health.UNHEALTHY and silent_s >= policy.unhealthy_after_s:
        return "the server says that its engine is dead"
    if silent_s >= policy.restart_after_s:
        return f"no answer to health checks for {silent_s:.0f} s"
    return None


def _condition(member: Member, seen: Seen, policy: Policy, now: float) -> State:
    if not member.task.leads or seen.health is Health.SERVING:
        return State.READY
    if seen.health is Health.UNHEALTHY or now - member.answered_at >= policy.unhealthy_after_s:
        return State.UNHEALTHY
    return member.state


def _leave(member: Member, seen: Seen, policy: Policy, now: float) -> tuple[Member, list[Act]]:
    """Nothing is wanted of this member any more: finish, stop, and make room for what comes next."""
    if member.state is State.STOPPED or (member.state in {State.PENDING, State.BACKOFF} and not seen.alive):
        return _stopped(_to(member, State.STOPPED, now), seen, now)
    if member.state in {State.BACKOFF, State.STARTING}:  # nothing runs in it: no request is lost
        return _end(_to(member, State.DRAINING, now), seen, policy, now)
    if member.state is not State.DRAINING:
        return _to(member, State.DRAINING, now), []
    if not seen.alive:
        return _stopped(_to(member, State.STOPPED, now), seen, now)
    if member.terminated_at is not None or _drained(member, seen, policy, now):
        return _end(member, seen, policy, now)
    return member, []


def _stopped(member: Member, seen: Seen, now: float) -> tuple[Member, list[Act]]:
    if seen.task is None:
        return member, [Act.FORGET]
    if seen.task.revision != member.task.revision:
        return Member(task=seen.task, since=now, epoch=member.epoch), []
    return replace(member, task=seen.task), []


def _drained(member: Member, seen: Seen, policy: Policy, now: float) -> bool:
    lasted = now - member.since
    if lasted >= member.task.drain_timeout_s:
        return True
    if not member.task.leads:
        leader = seen.peers.get(0)
        return leader is not None and leader.state is State.STOPPED
    settled = member.since + policy.drain_settle_s
    return now >= settled and seen.in_flight == 0 and seen.in_flight_at >= settled


def _undrain(member: Member, seen: Seen, policy: Policy, now: float) -> tuple[Member, list[Act]]:
    """Wanted again: a drain that has not yet ended the engine is taken back."""
    if not seen.alive:
        return _to(member, State.STOPPED, now), []
    if member.terminated_at is not None:
        return _end(member, seen, policy, now)
    if member.ready_at is None:
        return _to(member, State.STARTING, now), []
    return replace(_to(member, State.READY, now), answered_at=now), []


def compose_error(summary: str, log_lines: list[str], limit: int = MAX_ERROR_BYTES) -> str:
    """`summary` and as many of the log's last lines as fit into `limit` bytes of UTF-8."""
    text = summary.encode()[:limit].decode(errors="ignore")
    if not summary or not log_lines:
        return text
    head = f"{text}; the log ends with:\n"
    room = limit - len(head.encode())
    tail: list[str] = []
    for line in reversed([line for line in log_lines if _ACCESS_LINE not in line]):
        room -= len(line.encode()) + 1
        if room < 0:
            break
        tail.append(line)
    return head + "\n".join(reversed(tail)) if tail else text
