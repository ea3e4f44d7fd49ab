"""Pick and ReportPicks as unary calls of the Connect protocol: the messages of gRPC at the price of plain HTTP."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message

from stoker.api.router.v1 import router_pb2
from stoker.common import connect
from stoker.common.errors import Code, DeadlineExceeded, InvalidRequest, StokerError
from stoker.router.http.port import Answer, Ask
from stoker.router.http.reading import internal_error
from stoker.router.picking.calls import PickCalls

PREFIX = "/stoker.api.router.v1.RouterService/"
_PROTO = {"content-type": connect.PROTO}
_JSON = {"content-type": connect.JSON}
_INLINE_JSON = 4096
# Reading JSON into messages is slow. In a thread it still keeps the loop from time to time: so it is bounded.
_MOST_JSON = 1024 * 1024

Called = Message | Coroutine[Any, Any, Message]


class _Refused(StokerError):
    """What the protocol says by an HTTP status of its own."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message, code=Code.UNIMPLEMENTED, reason="UNIMPLEMENTED")
        self.status = status
        self.headers = headers or {}


@dataclass(frozen=True, slots=True)
class _Method:
    request: Callable[[], Message]
    read: Callable[[bytes], Message]
    call: Callable[[Any, Mapping[str, str]], Called]


class ConnectCalls:
    """Answers calls below `PREFIX`."""

    def __init__(self, calls: PickCalls) -> None:
        self._undo = calls.undo
        self._methods = {
            "Pick": _Method(router_pb2.PickRequest, router_pb2.PickRequest.FromString, calls.pick),
            "ReportPicks": _Method(
                router_pb2.ReportPicksRequest,
                router_pb2.ReportPicksRequest.FromString,
                lambda request, metadata: calls.report(request),
            ),
        }

    def answer(self, ask: Ask) -> Answer | Coroutine[Any, Any, Answer]:
        """One call: the answer, where nothing has to be waited for. Never raises, nor does what is to be awaited,
        but for being cancelled.
        """
        try:
            method = self._method(ask)
            kind = _kind(ask)
            within_s = connect.seconds_allowed(ask.headers.get(connect.TIMEOUT_HEADER))
            if kind == connect.PROTO:
                said = method.call(_decoded(method.read, ask.body), ask.headers)
            elif len(ask.body) <= _INLINE_JSON:
                said = method.call(_of_json(method, ask.body), ask.headers)
            else:
                said = _read_and_call(method, ask)
            return self._said(kind, said) if isinstance(said, Message) else self._later(ask, kind, said, within_s)
        except Exception as error:  # noqa: BLE001 - one bad call must not cost the process
            return _failed(ask, error)

    def _method(self, ask: Ask) -> _Method:
        """What is asked for. Raises _Refused."""
        method = self._methods.get(ask.target.removeprefix(PREFIX))
        if method is None:
            raise _Refused(404, f"{ask.target[:200]} is not served here; these are: {', '.join(self._methods)}")
        if ask.method != "POST":
            raise _Refused(405, f"{ask.target} takes POST, not {ask.method}", {"allow": "POST"})
        return method

    async def _later(
        self, ask: Ask, kind: str, coming: Coroutine[Any, Any, Message], within_s: float | None
    ) -> Answer:
        """What has to wait."""
        try:
            async with asyncio.timeout(within_s) as until:
                return self._said(kind, await coming)
        except TimeoutError as error:
            if not until.expired():
                return _failed(ask, error)
            return _failed(ask, DeadlineExceeded(f"no replica had room within the {within_s:g} s that were allowed"))
        except Exception as error:  # noqa: BLE001 - as above
            return _failed(ask, error)

    def _said(self, kind: str, said: Message) -> Answer:
        undo = None
        if isinstance(said, router_pb2.PickResponse):
            undo = functools.partial(self._undo, said)
        if kind == connect.PROTO:
            return Answer(200, _PROTO, said.SerializeToString(), undo=undo)
        return Answer(200, _JSON, json_format.MessageToJson(said, indent=None).encode(), undo=undo)


def _kind(ask: Ask) -> str:
    """The form of a call's messages. Raises _Refused and InvalidRequest for what is not served."""
    given = ask.headers.get("content-type", "")
    kind = given if given == connect.PROTO else given.partition(";")[0].strip().lower()
    if kind not in (connect.PROTO, connect.JSON):
        kinds = f"{connect.PROTO}, {connect.JSON}"
        raise _Refused(415, f"content-type {given[:100]!r} is not taken; these are: {kinds}", {"accept-post": kinds})
    packing = ask.headers.get("content-encoding", "identity")
    if packing != "identity":
        raise _Refused(501, f"content-encoding {packing[:100]!r} is not taken; send the message as it is (identity)")
    version = ask.headers.get("connect-protocol-version", "1")
    if version != "1":
        raise InvalidRequest.field("connect-protocol-version", f"must be 1, not {version[:100]!r}")
    return kind


def refusal(error: StokerError) -> Answer:
    """An error, in the form of the protocol."""
    own = error if isinstance(error, _Refused) else None
    status, headers = (own.status, {**_JSON, **own.headers}) if own else (connect.status_of(error), _JSON)
    return Answer(status, headers, connect.encoded(error))


def _failed(ask: Ask, error: Exception) -> Answer:
    if not isinstance(error, StokerError):
        error = internal_error("pick.internal_error", ask.target, error)
    return refusal(error)


async def _read_and_call(method: _Method, ask: Ask) -> Message:
    said = method.call(await asyncio.to_thread(_of_json, method, ask.body), ask.headers)
    return said if isinstance(said, Message) else await said


def _decoded(read: Callable[[bytes], Message], body: bytes) -> Message:
    try:
        return read(body)
    except DecodeError as error:
        raise InvalidRequest(
            "the message cannot be decoded: it is not what this method takes; use stubs made from Stoker's protos"
        ) from error


def _of_json(method: _Method, body: bytes) -> Message:
    if len(body) > _MOST_JSON:
        more = f"{len(body)} bytes of JSON are more than {_MOST_JSON}, the most that is read; send {connect.PROTO}"
        raise InvalidRequest(more, reason="BODY_TOO_LARGE")
    try:
        return json_format.Parse(body, method.request(), ignore_unknown_fields=True)
    except (json_format.ParseError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"the message cannot be read as JSON: {error}") from error
