"""Calls to routers: by gRPC where an address is host:port, by HTTP where it is http://host:port or https://host:port."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from stoker.api.inference.v1 import inference_pb2
from stoker.api.router.v1 import router_pb2
from stoker.client.connections import Unreachable, connected
from stoker.client.deadline import Deadline
from stoker.client.settings import ClientSettings
from stoker.common import connect, http1, otel, rpc
from stoker.common.channels import Channels
from stoker.common.errors import Code, DeadlineExceeded, InvalidRequest, StokerError, Unavailable

R = TypeVar("R", bound=Message)

_ORIGIN = re.compile(r"https?://[^/\s]+")
_KEEPALIVE_S = 60.0
"""Routers let an idle connection go after 75 s."""
_MOST_ANSWER_BYTES = rpc.MAX_MESSAGE_BYTES


@dataclass(frozen=True)
class Method(Generic[R]):
    """A unary RPC."""

    service: str
    name: str
    read: Callable[[bytes], R]

    @property
    def path(self) -> str:
        """As HTTP calls it, over either transport."""
        return f"/{self.service}/{self.name}"


PICK = Method("stoker.api.router.v1.RouterService", "Pick", router_pb2.PickResponse.FromString)
REPORT = Method("stoker.api.router.v1.RouterService", "ReportPicks", router_pb2.ReportPicksResponse.FromString)
MODELS = Method("stoker.api.inference.v1.InferenceService", "ListModels", inference_pb2.ListModelsResponse.FromString)


class Turns:
    """Routers that are as good as each other: one is asked until it does not answer, then the next."""

    def __init__(self, addresses: Sequence[str], rng: Random) -> None:
        self.addresses = tuple(addresses)
        self._current = rng.randrange(len(addresses)) if addresses else 0

    def __iter__(self) -> Iterator[str]:
        """Each once, from the one that answered last."""
        for _ in self.addresses:
            yield self.addresses[self._current]
            self._current = (self._current + 1) % len(self.addresses)


class Routers:
    """All routers of a client. Picks go by HTTP where any address says so; all else needs gRPC."""

    def __init__(self, addresses: Sequence[str], channels: Channels, settings: ClientSettings, rng: Random) -> None:
        """Raises InvalidRequest for what is no address."""
        if isinstance(addresses, str) or not addresses:
            raise InvalidRequest.field("routers", 'give a list of routers, each host:port, for example ["r1:7320"]')
        by_http = [address.rstrip("/") for address in addresses if "://" in address]
        if strange := [each for each in by_http if not _ORIGIN.fullmatch(each)]:
            raise InvalidRequest.field("routers", f"{strange[0]!r}: write host:port, http://host:port or https://…")
        self.by_grpc = Turns([address for address in addresses if "://" not in address], rng)
        self.pickers = Turns(by_http, rng) if by_http else self.by_grpc
        self._channels = channels
        self._connect_s = settings.connect_s
        self._metadata = dict(settings.metadata)
        tls = settings.tls
        self._http = http1.Client(
            settings.connect_s,
            keepalive_s=_KEEPALIVE_S,
            secure=ssl.create_default_context if tls is None else lambda: tls.client_context("http/1.1"),
        )

    async def close(self) -> None:
        """Drop the connections of HTTP."""
        await self._http.close()

    def need_grpc(self) -> None:
        """Raises StokerError where no router is named by its gRPC port."""
        if not self.by_grpc.addresses:
            raise StokerError(
                "models are listed and requests relayed by gRPC alone; name a router by that port too, as host:port",
                code=Code.UNIMPLEMENTED,
                reason="UNIMPLEMENTED",
            )

    def metadata(self) -> list[tuple[str, str]]:
        """What goes to a router with each request."""
        return list((self._metadata | otel.current()).items())

    async def ask(self, turns: Turns, method: Method[R], request: Message, deadline: Deadline) -> tuple[str, R]:
        """One answer of a router, and which. Another is asked where one does not answer. Raises StokerError."""
        failed: StokerError | None = None
        for router in turns:
            try:
                if "://" not in router:
                    within_s = min(self._connect_s, deadline.left())
                    await connected(self._channels.to(router), router, within_s)
                return router, await self.call(router, method, request, deadline.left(), self.metadata())
            except StokerError as error:
                failed = error
                if failed.code is not Code.UNAVAILABLE:
                    raise
        assert failed is not None  # noqa: S101 - there is a router
        raise failed

    async def call(
        self,
        router: str,
        method: Method[R],
        request: Message,
        seconds: float,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> R:
        """One call to one router. Raises StokerError; Unreachable where nothing was sent."""
        if "://" in router:
            return await self._call_by_http(router, method, request, seconds, metadata)
        unary: Any = self._channels.to(router).unary_unary(
            method.path, request_serializer=type(request).SerializeToString, response_deserializer=method.read
        )
        try:
            answer: R = await unary(request, timeout=seconds, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise rpc.error_from(error) from error
        return answer

    async def _call_by_http(
        self,
        router: str,
        method: Method[R],
        request: Message,
        seconds: float,
        metadata: Sequence[tuple[str, str]],
    ) -> R:
        headers = {
            "content-type": connect.PROTO,
            **connect.VERSION,
            connect.TIMEOUT_HEADER: str(max(1, int(1000 * seconds))),
            **dict(metadata),
        }
        try:
            async with asyncio.timeout(seconds):
                status, body = await self._exchanged(router + method.path, headers, request.SerializeToString())
        except TimeoutError:
            raise DeadlineExceeded(f"{router} did not answer within {seconds:g} s") from None
        if status != 200:
            raise connect.error_from(status, body)
        try:
            return method.read(body)
        except DecodeError as error:
            raise Unavailable(f"{router} sent what is no answer of {method.name}", reason="BAD_STREAM") from error

    async def _exchanged(self, url: str, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
        """Status and body of an answer. Asked once more where a kept connection had been closed meanwhile."""
        broken: http1.Broken | None = None
        for _ in range(2):
            try:
                exchange = await self._http.send("POST", url, headers.items(), body)
            except http1.Broken as error:
                raise Unreachable(str(error)) from error
            try:
                async with exchange:
                    await exchange.head()
                    return exchange.status, await exchange.read(_MOST_ANSWER_BYTES)
            except http1.Broken as error:
                broken = error
                if exchange.status:
                    break
        raise Unavailable(f"{url}: {broken}") from broken
