"""Errors across gRPC: reasons, fields and retry delays arrive; surprises cost one call and tell nothing."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stoker.api.planner.v1 import planner_pb2, planner_pb2_grpc
from stoker.api.registry.v1 import registry_pb2, registry_pb2_grpc
from stoker.common import rpc
from stoker.common.errors import Code, FieldViolation, InvalidRequest, StokerError, Unavailable

SERVICE = "stoker.api.planner.v1.PlannerService"
Handler = Callable[[Any], Awaitable[planner_pb2.GetPlannerStatusResponse]]


async def _call(handler: Handler) -> planner_pb2.GetPlannerStatusResponse:
    class Servicer(planner_pb2_grpc.PlannerServiceServicer):
        async def GetPlannerStatus(self, request: Any, context: Any) -> planner_pb2.GetPlannerStatusResponse:
            return await handler(context)

    server = rpc.RpcServer.bind("127.0.0.1:0", [SERVICE])
    planner_pb2_grpc.add_PlannerServiceServicer_to_server(Servicer(), server.server)  # type: ignore[abstract] # one is called
    await server.start()
    try:
        async with rpc.channel(f"127.0.0.1:{server.port}") as channel:
            stub = planner_pb2_grpc.PlannerServiceStub(channel)
            return await stub.GetPlannerStatus(planner_pb2.GetPlannerStatusRequest(), timeout=5)
    finally:
        await server.stop(0)


async def _error(raised: Exception) -> StokerError:
    async def handler(_: Any) -> planner_pb2.GetPlannerStatusResponse:
        raise raised

    with pytest.raises(grpc.RpcError) as caught:
        await _call(handler)
    return rpc.error_from(caught.value)


@pytest.mark.parametrize("code", list(Code))
async def test_every_code_arrives_as_itself(code: Code) -> None:
    error = await _error(StokerError("m", code=code, reason="R"))
    assert (error.code, error.reason, error.message) == (code, "R", "m")


async def test_fields_and_retry_delay_arrive() -> None:
    error = await _error(InvalidRequest.field("sampling.n", "must be at least 1"))
    assert error.fields == (FieldViolation("sampling.n", "must be at least 1"),)
    error = await _error(Unavailable("later", retry_after_s=1.5, metadata={"leader": "x"}))
    assert error.retry_after_s == pytest.approx(1.5)
    assert error.metadata == {"leader": "x"}


@pytest.mark.parametrize("letter", ["a", "\n", "\u00e9", "\U0001f525"])
@pytest.mark.parametrize("length", [300, 3_000, 20_000, 2_000_000])
async def test_a_long_error_arrives_as_far_as_headers_take_it(letter: str, length: int) -> None:
    """Beyond some kilobytes of trailers a client drops the whole status, and knows neither code nor reason."""
    error = await _error(InvalidRequest.field("facility", f"said: {letter * length} end"))
    assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "INVALID_REQUEST")
    assert error.message.startswith(f"facility: said: {letter * 100}")
    assert error.fields[0].field == "facility"
    cut = length > 300 or letter == "\U0001f525"
    assert error.message.endswith("characters more" if cut else " end")
    many = InvalidRequest("m", fields=(FieldViolation(letter * 100, letter * length),) * 50)
    assert (await _error(many)).fields[0].field.startswith(letter)


async def test_surprises_tell_nothing_of_the_inside() -> None:
    error = await _error(ValueError("prompt text that must not leak"))
    assert error.code is Code.INTERNAL
    assert "leak" not in error.message
    assert "incident=" in error.message


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_message_that_cannot_be_decoded_is_the_callers_mistake(streaming: bool) -> None:
    class Servicer(registry_pb2_grpc.RegistryServiceServicer):
        async def GetFleet(self, request: Any, context: Any) -> registry_pb2.GetFleetResponse:
            return registry_pb2.GetFleetResponse()

        async def Report(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            async for _ in requests:
                yield registry_pb2.ReportResponse()

    server = rpc.RpcServer.bind("127.0.0.1:0", [])
    registry_pb2_grpc.add_RegistryServiceServicer_to_server(Servicer(), server.server)  # type: ignore[abstract]
    await server.start()
    async with rpc.channel(f"127.0.0.1:{server.port}") as channel:
        service = "/stoker.api.registry.v1.RegistryService"
        if streaming:
            stream: Any = channel.stream_stream(f"{service}/Report")
            call = stream(timeout=5)
            await call.write(b"")
            assert await call.read() == b"", "what came before was taken"
            await call.write(b"\xff\xff")
            answer = call.read()
        else:
            unary: Any = channel.unary_unary(f"{service}/GetFleet")
            answer = unary(b"\xff\xff", timeout=5)
        with pytest.raises(grpc.RpcError) as caught:
            await answer
        error = rpc.error_from(caught.value)
        assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "INVALID_REQUEST")
        assert "cannot be decoded" in error.message
    await server.stop(0)


async def test_a_server_that_is_slow_to_shake_hands_is_waited_for() -> None:
    """A starved machine may take a second over a handshake: that is no reason to fail a call."""
    server = rpc.RpcServer.bind("127.0.0.1:0", [SERVICE])
    await server.start()
    await server.set_serving(True)
    pipes: set[asyncio.Task[None]] = set()

    async def pipe(source: asyncio.StreamReader, sink: asyncio.StreamWriter, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        while piece := await source.read(65536):
            sink.write(piece)
        sink.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", server.port)
        pipes.add(asyncio.create_task(pipe(inner_reader, writer, 0.6)))
        pipes.add(asyncio.create_task(pipe(reader, inner_writer, 0.6)))

    proxy = await asyncio.start_server(accept, "127.0.0.1", 0)
    target = f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
    async with rpc.channel(target) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING
    proxy.close()
    await server.stop(0)
    await asyncio.gather(*pipes, return_exceptions=True)


async def test_taken_port_is_an_error_that_names_it() -> None:
    first = rpc.RpcServer.bind("127.0.0.1:0", [])
    with pytest.raises(StokerError, match=str(first.port)) as caught:
        rpc.RpcServer.bind(f"127.0.0.1:{first.port}", [])
    assert caught.value.reason == "ADDRESS_IN_USE"
    await first.stop(0)


async def test_serving_is_told_by_health() -> None:
    server = rpc.RpcServer.bind("127.0.0.1:0", [SERVICE])
    await server.start()
    target = f"127.0.0.1:{server.port}"
    assert not await rpc.wait_serving(target, 0.3)
    await server.set_serving(True)
    assert await rpc.wait_serving(target, 5)
    await server.stop(0)
