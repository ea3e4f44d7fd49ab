"""Envoy's gRPC access log, as far as the router reads it (ADR 33)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from stoker.api.envoy.v1 import access_log_pb2 as pb
from stoker.router.envoy.flights import Ending, Flights
from stoker.router.workers.siblings import Siblings

log = structlog.get_logger(__name__)

SERVICE = "envoy.service.accesslog.v3.AccessLogService"
FLIGHT_HEADER = "x-stoker-flight"
_FAULTS = (
    "upstream_remote_reset",
    "upstream_connection_failure",
    "upstream_connection_termination",
    "upstream_protocol_error",
)


ABOUT = "envoy"
"""What workers call entries that they pass on."""


def add_to(server: grpc.aio.Server, flights: Flights, siblings: Siblings) -> None:
    """Serve Envoy's access log service for these flights. Entries of another worker's go there."""

    async def stream(messages: AsyncIterator[pb.AccessLogs], context: object) -> bytes:
        async for message in messages:
            for entry in message.http_logs.log_entry:
                take_or_pass_on(entry, flights, siblings)
        return b""

    siblings.hears(ABOUT, lambda said: take(pb.HttpEntry.FromString(said), flights))
    handler: Any = grpc.stream_unary_rpc_method_handler(stream, request_deserializer=decoded)
    generic: Any = grpc.method_handlers_generic_handler(SERVICE, {"StreamAccessLogs": handler})
    server.add_generic_rpc_handlers((generic,))


def take_or_pass_on(entry: pb.HttpEntry, flights: Flights, siblings: Siblings) -> None:
    """One entry: this worker's, or another's."""
    take(entry, flights)
    if siblings.count > 1:
        name = entry.request.request_headers.get(FLIGHT_HEADER, "")
        siblings.pass_on(name, ABOUT, entry.SerializeToString())


def decoded(message: bytes) -> pb.AccessLogs:
    """A batch; an empty one where the bytes are none."""
    try:
        return pb.AccessLogs.FromString(message)
    except DecodeError:
        log.warning("envoy.access_log_unreadable", size=len(message))
        return pb.AccessLogs()


def take(entry: pb.HttpEntry, flights: Flights) -> None:
    """One entry: a flight goes on, or has ended. Entries of other requests count for nothing."""
    name = entry.request.request_headers.get(FLIGHT_HEADER, "")
    if not name:
        return
    common = entry.common_properties
    if common.access_log_type in (pb.ACCESS_LOG_TYPE_DOWNSTREAM_START, pb.ACCESS_LOG_TYPE_DOWNSTREAM_PERIODIC):
        # An engine's first byte is no sign of output: headers of a stream come before its prefill.
        flights.goes_on(name, answered=entry.response.response_body_bytes > 0)
    elif common.access_log_type == pb.ACCESS_LOG_TYPE_UPSTREAM_END:
        flights.failed_try(name, _ending(entry))
    else:
        flights.ended(name, _ending(entry))


def _ending(entry: pb.HttpEntry) -> Ending:
    common, flags = entry.common_properties, entry.common_properties.response_flags
    first = common.time_to_first_downstream_tx_byte
    return Ending(
        status=entry.response.response_code.value,
        fault=any(getattr(flags, name) for name in _FAULTS),
        refused=flags.upstream_connection_failure and "refused" in common.upstream_transport_failure_reason.lower(),
        gone=flags.downstream_connection_termination,
        # An engine that sent something and a reader that takes nothing look alike.
        late=flags.upstream_request_timeout
        or (flags.stream_idle_timeout and common.HasField("time_to_first_upstream_rx_byte")),
        first_byte_s=first.ToNanoseconds() / 1e9 if common.HasField("time_to_first_downstream_tx_byte") else None,
        tries=common.upstream_request_attempt_count,
    )
