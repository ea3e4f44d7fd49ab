"""The one root of every error Stoker raises, with stable reasons.

A reason is part of the API: it travels in `google.rpc.ErrorInfo.reason`, in OpenAI error bodies and in
CLI output, is listed in `docs/errors.md`, and is never reused for another meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Code(Enum):
    """What kind of failure this is: the gRPC status name, with the HTTP status an OpenAI client sees."""

    INVALID_ARGUMENT = 400
    UNAUTHENTICATED = 401
    PERMISSION_DENIED = 403
    NOT_FOUND = 404
    ALREADY_EXISTS = 409
    ABORTED = 410
    FAILED_PRECONDITION = 412
    RESOURCE_EXHAUSTED = 429
    CANCELLED = 499
    INTERNAL = 500
    UNIMPLEMENTED = 501
    UNAVAILABLE = 503
    DEADLINE_EXCEEDED = 504


@dataclass(frozen=True)
class FieldViolation:
    """One bad field of a request: its dotted path, and what to do about it."""

    field: str
    description: str


class StokerError(Exception):
    """An error that says what is wrong, where, and what to do.

    `reason` is SCREAMING_SNAKE_CASE and stable. `retry_after_s` is set only when trying again can help,
    and is then truthful. `fields` names the request fields at fault.
    """

    code: Code = Code.INTERNAL
    reason: str = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        code: Code | None = None,
        retry_after_s: float | None = None,
        fields: tuple[FieldViolation, ...] = (),
        metadata: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.reason
        self.code = code or self.code
        self.retry_after_s = retry_after_s
        self.fields = fields
        self.metadata = metadata or {}


class InvalidRequest(StokerError):
    """The caller sent something that can never work; `fields` says what."""

    code = Code.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"

    @classmethod
    def field(cls, field: str, description: str) -> InvalidRequest:
        """An invalid request with one field at fault."""
        return cls(f"{field}: {description}", fields=(FieldViolation(field, description),))


class NotFound(StokerError):
    """The named thing does not exist."""

    code = Code.NOT_FOUND
    reason = "NOT_FOUND"


class Unavailable(StokerError):
    """Nothing can serve this now, but may soon."""

    code = Code.UNAVAILABLE
    reason = "UNAVAILABLE"


class Conflict(StokerError):
    """The state moved on since the caller looked: a stale fence, generation or incarnation."""

    code = Code.FAILED_PRECONDITION
    reason = "CONFLICT"


class Exhausted(StokerError):
    """A bound was reached: queue, quota, message size."""

    code = Code.RESOURCE_EXHAUSTED
    reason = "RESOURCE_EXHAUSTED"


class DeadlineExceeded(StokerError):
    """The caller's deadline passed."""

    code = Code.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"
