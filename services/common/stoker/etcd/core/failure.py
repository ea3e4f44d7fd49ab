"""What a failed call means: whose fault, and whether the write may have happened."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Kind(Enum):
    """Causes that callers treat differently."""

    UNREACHABLE = auto()
    NO_LEADER = auto()
    TIMEOUT = auto()
    BUSY = auto()
    COMPACTED = auto()
    LEASE_GONE = auto()
    LEASE_EXISTS = auto()
    NO_SPACE = auto()
    TOO_LARGE = auto()
    DENIED = auto()
    REJECTED = auto()


# Another endpoint, or the same one later, may do better.
_PASSING = frozenset({Kind.UNREACHABLE, Kind.NO_LEADER, Kind.TIMEOUT, Kind.BUSY})

# etcd's texts, which are the only thing that tells these apart: the status code is the same.
_BY_TEXT = (
    ("requested lease not found", Kind.LEASE_GONE),
    ("lease already exists", Kind.LEASE_EXISTS),
    ("has been compacted", Kind.COMPACTED),
    ("database space exceeded", Kind.NO_SPACE),
    ("too many requests", Kind.BUSY),
    ("no leader", Kind.NO_LEADER),
    ("Received message larger than max", Kind.TOO_LARGE),
    ("request is too large", Kind.TOO_LARGE),
)

_BY_STATUS = {
    "UNAVAILABLE": Kind.UNREACHABLE,
    "DEADLINE_EXCEEDED": Kind.TIMEOUT,
    # A server that is stopping cancels what it is serving.
    "CANCELLED": Kind.UNREACHABLE,
    "RESOURCE_EXHAUSTED": Kind.BUSY,
    "UNAUTHENTICATED": Kind.DENIED,
    "PERMISSION_DENIED": Kind.DENIED,
    "INTERNAL": Kind.UNREACHABLE,
    "UNKNOWN": Kind.UNREACHABLE,
}


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed call, judged."""

    kind: Kind
    maybe_applied: bool
    text: str

    @property
    def passing(self) -> bool:
        """Whether trying again can help."""
        return self.kind in _PASSING


def judge(status: str, text: str) -> Failure:
    """Judge a gRPC status name and its details text.

    A write is known not to have happened when the request never left this process, or when etcd turned it
    away before proposing it. Everything else that passes is ambiguous: the entry may be in the log.
    """
    kind = next((k for words, k in _BY_TEXT if words in text), _BY_STATUS.get(status, Kind.REJECTED))
    never_sent = status == "UNAVAILABLE" and text.startswith("failed to connect")
    turned_away = kind not in {Kind.UNREACHABLE, Kind.TIMEOUT} and not answer_refused(text)
    return Failure(kind, maybe_applied=not (never_sent or turned_away), text=text or status)


def answer_refused(text: str) -> bool:
    """Whether it was the answer that was too large for us, of a request that etcd took."""
    return "Received message larger than max" in text
