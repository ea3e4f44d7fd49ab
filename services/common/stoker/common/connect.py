"""Unary calls of the Connect protocol (https://connectrpc.com/docs/protocol): what both of its ends share.

A call is `POST /package.Service/Method` with a message as body. An error is JSON, with the details that gRPC gives.
"""

from __future__ import annotations

import base64
import binascii

import msgspec
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError

from stoker.common import rpc
from stoker.common.errors import Code, InvalidRequest, StokerError

PROTO = "application/proto"
JSON = "application/json"
TIMEOUT_HEADER = "connect-timeout-ms"
VERSION = {"connect-protocol-version": "1"}

_LONGEST_DIGITS = 10
_TYPE_URL = "type.googleapis.com/"
_NAMES = {code: code.name.lower() for code in Code} | {Code.CANCELLED: "canceled"}
_CODES = {name: code for code, name in _NAMES.items()} | {"out_of_range": Code.INVALID_ARGUMENT}
_STATUSES = {code: code.value for code in Code} | {Code.FAILED_PRECONDITION: 400, Code.ABORTED: 409}
_CODE_OF_STATUS = {
    401: Code.UNAUTHENTICATED,
    403: Code.PERMISSION_DENIED,
    404: Code.UNIMPLEMENTED,
    429: Code.UNAVAILABLE,
    502: Code.UNAVAILABLE,
    503: Code.UNAVAILABLE,
    504: Code.UNAVAILABLE,
}
"""What a status means that came with no error of the protocol's: something between has answered."""


class _Detail(msgspec.Struct, frozen=True):
    type: str
    value: str


class _Error(msgspec.Struct, frozen=True):
    code: str
    message: str = ""
    details: list[_Detail] = []


def status_of(error: StokerError) -> int:
    """The HTTP status that goes with an error."""
    return _STATUSES[error.code]


def encoded(error: StokerError) -> bytes:
    """An error as a response's body."""
    details = [
        _Detail(detail.TypeName(), base64.b64encode(detail.value).decode().rstrip("="))
        for detail in rpc.status_of(error).details
    ]
    return msgspec.json.encode(_Error(_NAMES[error.code], error.message, details))


def error_from(status: int, body: bytes) -> StokerError:
    """What a server said with a status that is not 200, as the error it raised."""
    try:
        said = msgspec.json.decode(body, type=_Error)
        code = _CODES.get(said.code, Code.INTERNAL)
        return rpc.error_with(code, said.message or said.code, [_unpacked(each) for each in said.details])
    except (msgspec.DecodeError, binascii.Error, ValueError, DecodeError):
        code = _CODE_OF_STATUS.get(status, Code.INTERNAL)
        return StokerError(f"HTTP status {status} without an error that can be read", code=code, reason=code.name)


def _unpacked(detail: _Detail) -> any_pb2.Any:
    value = base64.b64decode(detail.value + "=" * (-len(detail.value) % 4))
    return any_pb2.Any(type_url=_TYPE_URL + detail.type, value=value)


def seconds_allowed(header: str | None) -> float | None:
    """How long the caller waits; None where it does not say. Raises InvalidRequest."""
    if header is None:
        return None
    if not (header.isascii() and header.isdigit() and len(header) <= _LONGEST_DIGITS):
        raise InvalidRequest.field(TIMEOUT_HEADER, f"must be milliseconds, of {_LONGEST_DIGITS} digits at most")
    return int(header) / 1000
