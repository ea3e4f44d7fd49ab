"""Errors of the etcd layer, each with a stable reason."""

from __future__ import annotations

from stoker.common.errors import Code, StokerError
from stoker.etcd.core.failure import Failure, Kind


class EtcdError(StokerError):
    """Anything etcd, or the way to it, refused."""

    code = Code.INTERNAL
    reason = "ETCD_ERROR"


class EtcdUnavailable(EtcdError):
    """No endpoint answered in time. Nothing was written, or the call was safe to repeat."""

    code = Code.UNAVAILABLE
    reason = "ETCD_UNAVAILABLE"


class EtcdNoLeader(EtcdUnavailable):
    """The members reached have no leader: an election is on, or the quorum is lost."""

    reason = "ETCD_NO_LEADER"


class Ambiguous(EtcdError):
    """The write was sent and its answer lost: it may have happened, or not, or not yet.

    Read, then write again with a comparison to what was read: the late copy of a write that compares fails.
    """

    code = Code.ABORTED
    reason = "ETCD_AMBIGUOUS"


class Compacted(EtcdError):
    """The revision asked for is no longer kept."""

    code = Code.FAILED_PRECONDITION
    reason = "ETCD_COMPACTED"


class LeaseLost(EtcdError):
    """The lease expired or was revoked, and its keys went with it."""

    code = Code.FAILED_PRECONDITION
    reason = "ETCD_LEASE_LOST"


class EtcdFull(EtcdError):
    """etcd reached its space quota and takes no writes until an operator compacts, defragments and disarms."""

    code = Code.RESOURCE_EXHAUSTED
    reason = "ETCD_NO_SPACE"


class EtcdDenied(EtcdError):
    """etcd refused the credentials, or they lack the permission."""

    code = Code.PERMISSION_DENIED
    reason = "ETCD_DENIED"


class EtcdRejected(EtcdError):
    """etcd found the request itself wrong: too many operations, a future revision."""

    code = Code.INVALID_ARGUMENT
    reason = "ETCD_REJECTED"


class EtcdTooLarge(EtcdRejected):
    """The request passes etcd's limit (1.5 MiB by default), or its answer ours."""

    reason = "ETCD_TOO_LARGE"


_BY_KIND: dict[Kind, type[EtcdError]] = {
    Kind.UNREACHABLE: EtcdUnavailable,
    Kind.TIMEOUT: EtcdUnavailable,
    Kind.BUSY: EtcdUnavailable,
    Kind.NO_LEADER: EtcdNoLeader,
    Kind.COMPACTED: Compacted,
    Kind.LEASE_GONE: LeaseLost,
    Kind.NO_SPACE: EtcdFull,
    Kind.DENIED: EtcdDenied,
    Kind.TOO_LARGE: EtcdTooLarge,
}


def to_error(what: str, failure: Failure, endpoint: str) -> EtcdError:
    """The error for a judged failure of `what` at `endpoint`."""
    kind = _BY_KIND.get(failure.kind, EtcdRejected)
    retry = 1.0 if issubclass(kind, EtcdUnavailable) else None
    return kind(f"etcd {what} at {endpoint}: {failure.text}", retry_after_s=retry)
