"""Calls to engines over HTTP."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Mapping

import aiohttp
from aiohttp.connector import AddrInfoType
from yarl import URL

from stoker.common.errors import Unavailable

# Headers of one connection, not of the message; and those that the client library writes itself.
_OWN_HEADERS = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade", "host", "content-length", "content-encoding", "expect",
})  # fmt: skip
_OUR_HEADERS = frozenset({"x-stoker-policy", "x-request-timeout"})
_BUFFER_BYTES = 256 * 1024
# A host that vanished without a FIN is noticed within 13 s, as over gRPC: whether it owes an answer or an ack.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 13_000),
)


class EngineFailed(Unavailable):
    """An engine could not be reached, or its connection broke. `refused`: nothing listens there."""

    reason = "ENGINE_FAILED"

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message, retry_after_s=0.5)
        self.refused = refused


class Engines:
    """The HTTP client for all engines. Connections are kept; bodies pass as they are."""

    def __init__(self, connect_s: float) -> None:
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s)
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Open the client on this event loop."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=60, keepalive_timeout=4.0, socket_factory=_socket),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=_BUFFER_BYTES,
            timeout=self._timeout,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def close(self) -> None:
        """Drop all connections."""
        if self._session is not None:
            await self._session.close()

    async def call(
        self, method: str, url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> aiohttp.ClientResponse:
        """Send a request and return the response with its headers in; the caller reads and closes it.

        Raises EngineFailed. The caller bounds the time.
        """
        assert self._session is not None, "start() first"  # noqa: S101
        try:
            return await self._session.request(
                method, URL(url, encoded=True), data=body, headers=headers, allow_redirects=False
            )
        except (aiohttp.ClientError, ConnectionError) as error:
            raise failed(error) from error
        except TimeoutError as error:  # only the connection's own: the caller's cancels
            if asyncio.current_task() is not None and asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise
            raise EngineFailed(f"the engine took too long to connect to: {url}") from error


def failed(error: Exception) -> EngineFailed:
    """What went wrong with a connection, as the error to raise."""
    refused = getattr(error, "errno", None) == errno.ECONNREFUSED or isinstance(error, ConnectionRefusedError)
    return EngineFailed(f"the engine's connection failed: {error or type(error).__name__}", refused=refused)


def _socket(address: AddrInfoType) -> socket.socket:
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    for level, option, value in _KEEPALIVE:
        made.setsockopt(level, option, value)
    return made


def request_headers(received: Mapping[str, str], request_id: str) -> dict[str, str]:
    """What of a client's headers goes on to the engine: all but those of the connection."""
    headers = {
        name: value
        for name, value in received.items()
        if (lower := name.lower()) not in _OWN_HEADERS and lower not in _OUR_HEADERS and lower != "x-request-id"
    }
    headers["X-Request-Id"] = request_id
    return headers


def response_headers(received: Mapping[str, str]) -> dict[str, str]:
    """What of an engine's headers goes back to the client."""
    return {
        name: value
        for name, value in received.items()
        if name.lower() not in _OWN_HEADERS or name.lower() == "content-encoding"
    }
