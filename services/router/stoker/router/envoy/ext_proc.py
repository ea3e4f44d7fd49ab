"""The endpoint-picker protocol of the Gateway API Inference Extension (v1.0): decisions over Envoy's `ext_proc`.

A gateway opens a stream for each request and tells of it piece by piece. The body has to come whole (BUFFERED) or
to be sent back (FULL_DUPLEX_STREAMED). The stream lasts as long as the request: its end ends the flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
import structlog
from google.protobuf import struct_pb2
from google.protobuf.message import DecodeError

from stoker.api.envoy.v1 import ext_proc_pb2 as pb
from stoker.common.errors import DeadlineExceeded, StokerError
from stoker.common.otel import CONTEXT_HEADERS
from stoker.openai import RANK_HEADER
from stoker.router.decisions.decided import DECISION_HEADER
from stoker.router.envoy.access_log import FLIGHT_HEADER
from stoker.router.envoy.check import STAND_INS, Checks, endpoint_header, replica_header
from stoker.router.envoy.flights import Ending, Flights
from stoker.router.http.errors import TooLarge
from stoker.router.http.intake import BODY_S, HELD_BODIES, bodies_full
from stoker.router.http.port import Answer, Ask, refusal

log = structlog.get_logger(__name__)

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
LIVENESS, READINESS = "liveness", "readiness"

_LB, _HINT = "envoy.lb", "envoy.lb.subset_hint"
_PICKED, _SERVED, _SUBSET = (f"x-gateway-destination-endpoint{end}" for end in ("", "-served", "-subset"))
_REAL = {said: status for status, said in STAND_INS.items()}
# What Envoy takes as one message of a body that has to be sent back.
_PIECE_BYTES = 62_000
_UNHAPPY = "this gateway's request body mode cannot be used here: choose BUFFERED or FULL_DUPLEX_STREAMED"


class Bodies:
    """The bytes of bodies that all streams hold."""

    def __init__(self, max_body_bytes: int) -> None:
        self.largest = max_body_bytes
        self._most = HELD_BODIES * max_body_bytes
        self.held = 0

    def take(self, size: int, so_far: int) -> None:
        """Hold more of a body of which `so_far` is held. Raises TooLarge, Exhausted."""
        if so_far + size > self.largest:
            raise TooLarge(self.largest)
        if self.held + size > self._most:
            raise bodies_full(self._most)
        self.held += size


class ExternalProcessor:
    """Serves the protocol."""

    def __init__(self, checks: Checks, flights: Flights, bodies: Bodies, request_s: float) -> None:
        """`flights` are those of this protocol alone, and never silent; `request_s` bounds a stream, seconds."""
        self._checks = checks
        self._flights = flights
        self._bodies = bodies
        self._request_s = request_s

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve it there. Before the server starts."""
        handler: Any = grpc.stream_stream_rpc_method_handler(
            self._process, request_deserializer=_decoded, response_serializer=pb.Say.SerializeToString
        )
        generic: Any = grpc.method_handlers_generic_handler(SERVICE, {"Process": handler})
        server.add_generic_rpc_handlers((generic,))

    async def _process(self, _: object, context: Any) -> None:
        stream = Stream(self._checks, self._flights, self._bodies, context)
        try:
            async with asyncio.timeout(self._request_s):
                await stream.run()
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the request took longer than limits.request_s")
        finally:
            stream.close()


class Stream:
    """One request of a gateway."""

    def __init__(self, checks: Checks, flights: Flights, bodies: Bodies, context: Any) -> None:
        self._checks = checks
        self._flights = flights
        self._bodies = bodies
        self._context = context
        self._headers: dict[str, str] = {}
        self._only: frozenset[str] | None = None
        self._pieces: list[bytes] = []
        self._size = 0
        self._duplex = self._answer_duplex = False
        self._answer: Answer | None = None
        self._status = 0
        self._whole = False  # the answer is

    async def run(self) -> None:
        """Until the gateway ends it."""
        try:
            piece = await self._arrived()
        except StokerError as error:
            await self._refuse(refusal(error))
            return
        if not piece or not await self._decide(piece):
            return
        while (told := await self._next()) is not None:
            await self._follow(told)

    def close(self) -> None:
        """Count the request no more, wherever it stands."""
        self._let_go()
        if self._answer is None or self._answer.status != 200:
            return
        name = self._answer.headers[FLIGHT_HEADER]
        if self._status:
            self._flights.ended(name, Ending(self._status, gone=not self._whole))
        else:
            self._flights.drop(name)  # no engine answered, or its client left: the gateway does not say

    async def _next(self) -> pb.Told | None:
        told = await self._context.read()
        return None if told is grpc.aio.EOF else told

    # --- what is asked -------------------------------------------------------------------------------------

    async def _arrived(self) -> str:
        """Take the request in; returns which piece was the last, empty where it never came. Raises StokerError."""
        try:
            async with asyncio.timeout(BODY_S):
                while (told := await self._next()) is not None:
                    if await self._take_in(told):
                        return told.WhichOneof("piece") or ""
        except TimeoutError:
            raise DeadlineExceeded(f"the body did not arrive within {BODY_S:g} s") from None
        return ""

    async def _take_in(self, told: pb.Told) -> bool:
        """Take a piece of the request in; True for its last."""
        self._note(told)
        piece = told.WhichOneof("piece")
        if piece == "request_headers":
            self._headers = _headers(told.request_headers)
            modes = told.protocol_config
            self._duplex = modes.request_body_mode == pb.BODY_MODE_FULL_DUPLEX_STREAMED
            self._answer_duplex = modes.response_body_mode == pb.BODY_MODE_FULL_DUPLEX_STREAMED
            if not self._duplex and not told.request_headers.end_of_stream:
                await self._context.write(pb.Say(request_headers=pb.Change()))
            return told.request_headers.end_of_stream
        if piece == "request_body":
            self._hold(told.request_body.body)
            if not told.request_body.end_of_stream and not self._duplex:
                await self._context.abort(grpc.StatusCode.UNIMPLEMENTED, _UNHAPPY)
            return told.request_body.end_of_stream
        if piece != "request_trailers":
            await self._context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a request begins with its headers")
        return True

    def _note(self, told: pb.Told) -> None:
        hint = told.metadata_context.filter_metadata.get(_HINT) if told.HasField("metadata_context") else None
        if hint is not None and _SUBSET in hint.fields:
            value = hint.fields[_SUBSET]
            named = [each.string_value for each in value.list_value.values] or value.string_value.split(",")
            self._only = frozenset(each.strip() for each in named)

    def _hold(self, piece: bytes) -> None:
        self._bodies.take(len(piece), self._size)
        self._size += len(piece)
        self._pieces.append(piece)

    def _let_go(self) -> None:
        self._pieces.clear()
        self._bodies.held -= self._size
        self._size = 0

    async def _decide(self, piece: str) -> bool:
        """Answer a whole request, whose last piece this is; False where it is refused."""
        body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        headers = self._headers
        ask = Ask(headers.get(":method", ""), headers.get(":path", ""), headers, body, only=self._only)
        answer = self._checks.decide(ask)
        self._answer = answer if isinstance(answer, Answer) else await answer
        if self._answer.status != 200:
            await self._refuse(self._answer)
            return False
        change = _picked(self._answer)
        where = _metadata(self._answer)
        if not self._duplex:
            said = pb.Change(response=change)
            whole = pb.Say(request_body=said) if piece == "request_body" else pb.Say(request_headers=said)
            whole.dynamic_metadata.CopyFrom(where)
            await self._context.write(whole)
        else:
            await self._context.write(pb.Say(request_headers=pb.Change(response=change), dynamic_metadata=where))
            await self._send_back(piece, body)
        self._let_go()
        return True

    async def _send_back(self, last: str, body: bytes) -> None:
        if last == "request_headers":
            return
        trailers = last == "request_trailers"
        for said in _sent_back(body, end=not trailers):
            await self._context.write(pb.Say(request_body=said))
        if trailers:
            await self._context.write(pb.Say(request_trailers=pb.Trailers()))

    async def _refuse(self, answer: Answer) -> None:
        status = _REAL.get(answer.status, answer.status)
        headers = _set(answer.headers)
        await self._context.write(
            pb.Say(
                immediate_response=pb.Refusal(
                    status=pb.Status(code=status), headers=headers, body=answer.body, details="stoker_refused"
                )
            )
        )

    # --- what is answered ----------------------------------------------------------------------------------

    async def _follow(self, told: pb.Told) -> None:
        assert self._answer is not None  # noqa: S101
        piece = told.WhichOneof("piece")
        if piece == "response_headers":
            await self._answered(self._answer, told)
        elif piece == "response_body":
            body = told.response_body
            self._whole = self._whole or body.end_of_stream
            if self._answer_duplex:
                for said in _sent_back(body.body, end=body.end_of_stream):
                    await self._context.write(pb.Say(response_body=said))
            else:
                await self._context.write(pb.Say(response_body=pb.Change()))
        elif piece == "response_trailers":
            self._whole = True
            await self._context.write(pb.Say(response_trailers=pb.Trailers()))
        elif piece == "request_trailers":
            await self._context.write(pb.Say(request_trailers=pb.Trailers()))

    async def _answered(self, answer: Answer, told: pb.Told) -> None:
        headers = _headers(told.response_headers)
        status = headers.get(":status", "")
        self._status = int(status) if status.isascii() and status.isdigit() else 0
        self._whole = told.response_headers.end_of_stream
        name, place = answer.headers[FLIGHT_HEADER], self._served(answer, told)
        for _ in range(1, place):
            self._flights.failed_try(name, Ending(503))
        self._flights.goes_on(name, answered=True)
        says = {
            "x-stoker-replica": answer.headers[replica_header(place)],
            **{header: answer.headers[header] for header in (DECISION_HEADER, "x-request-id")},
        }
        change = pb.CommonChange(header_mutation=_set(says))
        await self._context.write(pb.Say(response_headers=pb.Change(response=change)))

    def _served(self, answer: Answer, told: pb.Told) -> int:
        """Which of the named engines answered, the first is 1."""
        metadata = told.metadata_context.filter_metadata
        served = (
            metadata[_LB].fields[_SERVED].string_value if _LB in metadata and _SERVED in metadata[_LB].fields else ""
        )
        endpoints = _endpoints(answer)
        return endpoints.index(served) + 1 if served in endpoints else 1


def _decoded(message: bytes) -> pb.Told:
    """A message; one without a piece where the bytes are none."""
    try:
        return pb.Told.FromString(message)
    except DecodeError:
        log.warning("envoy.ext_proc_unreadable", size=len(message))
        return pb.Told()


def _headers(told: pb.Headers) -> dict[str, str]:
    """By name; of several alike the first counts."""
    found: dict[str, str] = {}
    for header in told.headers.headers:
        value = header.raw_value.decode("latin-1") if header.raw_value else header.value
        found.setdefault(header.key.lower(), value)
    return found


def _endpoints(answer: Answer) -> list[str]:
    numbers: Iterable[int] = range(1, len(answer.headers))
    return [answer.headers[name] for name in map(endpoint_header, numbers) if name in answer.headers]


def _picked(answer: Answer) -> pb.CommonChange:
    headers = {_PICKED: ",".join(_endpoints(answer)), "x-request-id": answer.headers["x-request-id"]}
    for name in (RANK_HEADER, *CONTEXT_HEADERS):
        if name in answer.headers:
            headers[name] = answer.headers[name]
    change = _set(headers)
    if RANK_HEADER not in headers:
        change.remove_headers.append(RANK_HEADER)  # a client's own: the decision is the router's
    return pb.CommonChange(header_mutation=change, clear_route_cache=True)


def _metadata(answer: Answer) -> struct_pb2.Struct:
    where = struct_pb2.Struct()
    where.update({_LB: {_PICKED: ",".join(_endpoints(answer))}})
    return where


def _set(headers: dict[str, str] | Any) -> pb.HeaderChange:
    options = [
        pb.HeaderOption(
            header=pb.Header(key=name, raw_value=value.encode("latin-1", "replace")),
            append_action=pb.HEADER_ACTION_OVERWRITE,
        )
        for name, value in headers.items()
    ]
    return pb.HeaderChange(set_headers=options)


def _sent_back(body: bytes, *, end: bool) -> list[pb.Change]:
    """A body in pieces that the gateway takes; `end` after the last."""
    starts = range(0, max(1, len(body)), _PIECE_BYTES)
    return [
        pb.Change(
            response=pb.CommonChange(
                body_mutation=pb.BodyChange(
                    streamed_response=pb.Body(
                        body=body[start : start + _PIECE_BYTES], end_of_stream=end and start == starts[-1]
                    )
                )
            )
        )
        for start in starts
    ]
