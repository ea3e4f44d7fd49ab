"""How the members of a replica that spans nodes act as one. Nobody speaks but through reported states.

The leader (rank 0) numbers the attempts. It begins attempt k + 1 only when every member is known and none of
them runs; members launch what the leader has begun. Whoever fails at attempt k says so, the leader then ends
attempt k for all. A member that is not heard of has not failed: its agent may be restarting while its engine
serves on, and if its host is gone, the leader's own engine notices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """Where a member stands; values are the names used in the API."""

    PENDING = "PENDING"
    STARTING = "STARTING"
    READY = "READY"
    DRAINING = "DRAINING"
    STOPPED = "STOPPED"
    BACKOFF = "BACKOFF"
    UNHEALTHY = "UNHEALTHY"


_AT_REST = {State.PENDING, State.BACKOFF}
_BEGUN = {State.STARTING, State.READY, State.UNHEALTHY}


@dataclass(frozen=True)
class Peer:
    """What another member of the gang last reported, for the same assignment."""

    rank: int
    state: State
    attempt: int
    running: bool = False
    """Whether its engine process is there, in whatever state: an ended attempt may take a while to die."""


Peers = Mapping[int, Peer]
"""By rank, without oneself; one that is not heard of is absent."""


def may_start(rank: int, size: int, attempt: int, peers: Peers) -> int | None:
    """The attempt to begin now, or None to wait. `attempt` is the last one this member began, 0 for none."""
    if rank:
        leader = peers.get(0)
        begun = leader is not None and leader.state in _BEGUN and leader.attempt > attempt
        return leader.attempt if leader is not None and begun else None
    if waits_for(size, peers):
        return None
    return max([attempt, *(peer.attempt for peer in peers.values())]) + 1


def waits_for(size: int, peers: Peers) -> list[int]:
    """Ranks that keep the leader from beginning an attempt: not heard of, or not yet at rest."""
    return [r for r in range(1, size) if r not in peers or peers[r].running or peers[r].state not in _AT_REST]


def complete(rank: int, size: int, attempt: int, peers: Peers) -> bool:
    """Whether the others let this member be ready: all run this attempt, and for members the leader is ready."""
    if rank:
        leader = peers.get(0)
        return leader is not None and leader.attempt == attempt and leader.state is State.READY
    return all(
        r in peers and peers[r].attempt == attempt and peers[r].state in {State.STARTING, State.READY}
        for r in range(1, size)
    )


def failure(rank: int, attempt: int, was_ready: bool, peers: Peers) -> str | None:
    """Why this member's running attempt is over because of another member; None while it is not."""
    if rank:
        leader = peers.get(0)
        if leader is None:
            return None
        if leader.attempt > attempt:
            return f"the leader has begun attempt {leader.attempt}"
        if leader.attempt == attempt and leader.state in {State.BACKOFF, State.STOPPED, State.PENDING}:
            return f"the leader has ended attempt {attempt}"
        if leader.state is State.PENDING:  # it lost its memory, and waits for all to be at rest
            return "the leader begins anew"
        return None
    for peer in peers.values():
        if peer.attempt == attempt and peer.state in {State.BACKOFF, State.STOPPED}:
            return f"rank {peer.rank} failed at attempt {attempt}"
        if peer.attempt > attempt or (was_ready and peer.attempt != attempt):
            return f"rank {peer.rank} is at attempt {peer.attempt}, not {attempt}"
    return None
