"""A request's way: pick, then the node; another node before the first token; the router where none is reached."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from random import Random
from typing import Any

import grpc

from stoker.api.inference.v1 import inference_pb2, inference_pb2_grpc
from stoker.api.router.v1 import router_pb2
from stoker.client.connections import Nodes, Unreachable, connected
from stoker.client.deadline import Deadline
from stoker.client.prompts import pick_of
from stoker.client.reports import Reports
from stoker.client.results import Served
from stoker.client.routers import PICK, Routers
from stoker.client.settings import ClientSettings
from stoker.common import otel, rpc
from stoker.common.channels import Channels
from stoker.common.errors import Code, StokerError
from stoker.common.retries import RetryBudget
from stoker.common.tickets import HEADER
from stoker.openai import RANK_HEADER

Response = inference_pb2.GenerateResponse | Served

_ELSEWHERE = {"RELAY_FULL", "REPLICA_NOT_FOUND"}
"""Reasons for which another replica may do better, beside all that is UNAVAILABLE."""
_NOT_THE_REPLICA = {"RELAY_FULL", "REPLICA_NOT_FOUND", "REPLICA_NOT_READY", "REPLICA_DRAINING", "DRAINING"}


class Ways:
    """All that a client's requests share."""

    def __init__(self, routers: Sequence[str], settings: ClientSettings, rng: Random) -> None:
        self._settings = settings
        self._channels = Channels(settings.tls)
        self.routers = Routers(routers, self._channels, settings, rng)
        self._nodes = Nodes(self._channels, self.routers.by_grpc.addresses)
        self._reports = Reports(self.routers)
        self._budget = RetryBudget()
        self._relay_until = float("-inf")

    async def close(self) -> None:
        """Tell what is left to tell, and disconnect."""
        await self._reports.close()
        await self.routers.close()
        await self._channels.close()

    async def run(self, request: inference_pb2.GenerateRequest, deadline: Deadline) -> AsyncGenerator[Response]:
        """Who serves, then the deltas, then Finished. Raises StokerError."""
        self._budget.request()
        if self._settings.direct and asyncio.get_running_loop().time() >= self._relay_until:
            picked = await self._picked(request, deadline)
            if picked is not None:
                flown = _Flown(self._reports, *picked)
                async with contextlib.aclosing(self._direct(request, flown, deadline)) as responses:
                    async for response in responses:
                        yield response
                if flown.served:
                    return
        async with contextlib.aclosing(self._relayed(request, deadline)) as responses:
            async for response in responses:
                yield response

    # --- the routers ---------------------------------------------------------------------------------------

    async def _picked(
        self, request: inference_pb2.GenerateRequest, deadline: Deadline
    ) -> tuple[str, router_pb2.PickResponse] | None:
        """A pick, and whose; None where routers do not know what that is."""
        asked = pick_of(request, self._settings.alternatives)
        try:
            return await self.routers.ask(self.routers.pickers, PICK, asked, deadline)
        except StokerError as error:
            if error.code is Code.UNIMPLEMENTED and self.routers.by_grpc.addresses:
                return None
            raise

    async def _relayed(self, request: inference_pb2.GenerateRequest, deadline: Deadline) -> AsyncGenerator[Response]:
        """By a router, which retries on its own. Another is asked where one could not be reached at all."""
        self.routers.need_grpc()
        failed: StokerError | None = None
        for router in self.routers.by_grpc:
            channel = self._channels.to(router)
            try:
                await connected(channel, router, min(self._settings.connect_s, deadline.left()))
            except Unreachable as error:
                failed = error
                continue
            call = _generate(channel, request, deadline.left(), self.routers.metadata())
            async with contextlib.aclosing(_responses(call)) as responses:
                async for response in responses:
                    if response.HasField("started"):
                        yield _served(response.started, response.started.reason, relayed=True)
                    else:
                        yield response
            return
        assert failed is not None  # noqa: S101 - there is a router
        raise failed

    # --- the nodes -----------------------------------------------------------------------------------------

    async def _direct(
        self, request: inference_pb2.GenerateRequest, flown: _Flown, deadline: Deadline
    ) -> AsyncGenerator[Response]:
        """From the first place that serves. Ends without a word where none could be reached."""
        failed: StokerError | None = None
        unreached = 0
        with flown:
            for number in range(len(flown.pick.places)):
                if failed is not None:
                    if not self._budget.take():
                        raise failed
                    flown.move(number, fault=_is_fault(failed))
                try:
                    async with contextlib.aclosing(self._at(request, flown, number, deadline)) as responses:
                        async for response in responses:
                            yield response
                except StokerError as error:
                    if flown.flowing or not _may_do_better(error):
                        flown.fault = flown.fault or _is_fault(error)
                        raise
                    failed = error
                    unreached += isinstance(error, Unreachable) or error.reason.startswith("TICKET_")
                else:
                    flown.served = True
                    return
            if failed is not None and (unreached < len(flown.pick.places) or not self.routers.by_grpc.addresses):
                flown.fault = _is_fault(failed)
                raise failed
        self._relay_until = asyncio.get_running_loop().time() + self._settings.relay_s

    async def _at(
        self, request: inference_pb2.GenerateRequest, flown: _Flown, number: int, deadline: Deadline
    ) -> AsyncGenerator[Response]:
        """From one place. What it says first is held back until output follows: until then another can take over."""
        pick, place = flown.pick, flown.pick.places[number]
        if not place.agent_endpoint:
            raise Unreachable(f"the agent of {place.replica_id} has told no address")
        with self._nodes.to(place.agent_endpoint) as channel:
            await connected(channel, place.agent_endpoint, min(self._settings.connect_s, deadline.left()))
            sent = inference_pb2.GenerateRequest()
            sent.CopyFrom(request)
            sent.replica_id, sent.request_id = place.replica_id, pick.request_id
            shown = list(otel.current().items())
            if pick.ticket:
                shown.append((HEADER, pick.ticket))
            if place.HasField("rank"):
                shown.append((RANK_HEADER, str(place.rank)))
            call = _generate(channel, sent, deadline.left(), shown)
            async with contextlib.aclosing(_responses(call)) as responses:
                async for response in responses:
                    if response.HasField("started"):
                        continue
                    if not flown.flowing:
                        flown.first()
                        cached = pick.predicted_cached_tokens if pick.HasField("predicted_cached_tokens") else None
                        reason, cached = (pick.reason, cached) if not number else ("alternative", None)
                        yield Served(pick.request_id, place.replica_id, reason, cached, relayed=False)
                    yield response


class _Flown:
    """A pick under way. Leaving the block tells its router the end, however it came."""

    def __init__(self, reports: Reports, router: str, pick: router_pb2.PickResponse) -> None:
        self.pick = pick
        self.flowing = self.served = self.fault = False
        self._reports = reports
        reports.begin(router, pick.pick_id)

    def first(self) -> None:
        """Output is here."""
        self.flowing = True
        self._reports.tell(self.pick.pick_id, router_pb2.PICK_EVENT_FIRST_TOKEN)

    def move(self, place: int, *, fault: bool) -> None:
        """On to the next place."""
        self._reports.tell(self.pick.pick_id, router_pb2.PICK_EVENT_MOVED, place, fault=fault)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        event = router_pb2.PICK_EVENT_FAILED if self.fault else router_pb2.PICK_EVENT_DROPPED
        self._reports.tell(self.pick.pick_id, router_pb2.PICK_EVENT_SERVED if self.served else event)


def _may_do_better(error: StokerError) -> bool:
    if error.reason.startswith("TICKET_"):
        return error.reason != "TICKET_EXCEEDED"
    return error.code is Code.UNAVAILABLE or error.reason in _ELSEWHERE


def _is_fault(error: StokerError) -> bool:
    """Whether a replica is to blame: not for what the way to it, the ticket or the request did."""
    if isinstance(error, Unreachable) or error.reason.startswith("TICKET_") or error.reason in _NOT_THE_REPLICA:
        return False
    return error.code in (Code.UNAVAILABLE, Code.INTERNAL)


def _generate(
    channel: grpc.aio.Channel, request: inference_pb2.GenerateRequest, seconds: float, metadata: list[tuple[str, str]]
) -> Any:
    stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
    return stub.Generate(request, timeout=seconds, metadata=metadata)


async def _responses(call: Any) -> AsyncGenerator[inference_pb2.GenerateResponse]:
    """What a call gives; it is cancelled however this ends. Raises StokerError."""
    try:
        async for response in call:
            yield response
    except grpc.aio.AioRpcError as error:
        raise rpc.error_from(error) from error
    finally:
        call.cancel()


def _served(started: inference_pb2.Started, reason: str, *, relayed: bool) -> Served:
    cached = started.predicted_cached_tokens if started.HasField("predicted_cached_tokens") else None
    return Served(started.request_id, started.replica_id, reason, cached, relayed)
