"""Errors in the form of the OpenAI API."""

from __future__ import annotations

import math

import msgspec

from stoker.common.errors import Code, StokerError

_TYPES = {
    Code.INVALID_ARGUMENT: "invalid_request_error",
    Code.NOT_FOUND: "invalid_request_error",
    Code.FAILED_PRECONDITION: "invalid_request_error",
    Code.RESOURCE_EXHAUSTED: "rate_limit_error",
    Code.UNAUTHENTICATED: "authentication_error",
    Code.PERMISSION_DENIED: "permission_error",
    Code.DEADLINE_EXCEEDED: "timeout_error",
}


class TooLarge(StokerError):
    """A body beyond the bound."""

    code = Code.INVALID_ARGUMENT
    reason = "BODY_TOO_LARGE"

    def __init__(self, limit: int) -> None:
        """`limit` in bytes."""
        super().__init__(
            f"the body is larger than {limit} bytes, the most this router takes (limits.max_body_bytes); send less"
        )


class MethodNotAllowed(StokerError):
    """The path exists, but takes the method `allowed` alone."""

    code = Code.INVALID_ARGUMENT
    reason = "METHOD_NOT_ALLOWED"

    def __init__(self, path: str, allowed: str, given: str) -> None:
        super().__init__(f"{path} takes {allowed}, not {given}")
        self.allowed = allowed


def body(error: StokerError) -> bytes:
    """`{"error": {message, type, param, code}}`; `code` is the stable reason in lower case."""
    return msgspec.json.encode(
        {
            "error": {
                "message": error.message,
                "type": _TYPES.get(error.code, "server_error"),
                "param": error.fields[0].field if error.fields else None,
                "code": error.reason.lower(),
            }
        }
    )


def event(error: StokerError) -> bytes:
    """The same as one server-sent event."""
    return b"data: " + body(error) + b"\n\n"


def status(error: StokerError) -> int:
    """The HTTP status of an error."""
    match error:
        case TooLarge():
            return 413
        case MethodNotAllowed():
            return 405
        case _:
            return error.code.value


def headers(error: StokerError) -> dict[str, str]:
    """What goes with the body."""
    values = {"Content-Type": "application/json"}
    if error.retry_after_s is not None:
        values["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, MethodNotAllowed):
        values["Allow"] = error.allowed
    return values
