"""Calls to engines over HTTP."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping

from stoker.common import http1
from stoker.common.errors import Unavailable
from stoker.common.headers import POLICY
from stoker.openai import RANK_HEADER
from stoker.router.flights.tenants import PRIORITY_HEADER

# Headers of one connection, not of the message; and those that the client library writes itself.
_OWN_HEADERS = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade", "host", "content-length", "content-encoding", "expect",
})  # fmt: skip
OUR_HEADERS = (POLICY, PRIORITY_HEADER, "x-request-timeout")
"""Read by the router alone: they are nothing to an engine."""
_REPLACED = _OWN_HEADERS.union(OUR_HEADERS, ("x-request-id", RANK_HEADER))


class EngineFailed(Unavailable):
    """An engine could not be reached, or its connection broke.

    `refused`: nothing listens there. `moved`: it was found dead, and a retry is taken for the request.
    """

    reason = "ENGINE_FAILED"

    def __init__(self, message: str, *, refused: bool = False, moved: bool = False) -> None:
        super().__init__(message, retry_after_s=0.5)
        self.refused = refused
        self.moved = moved


class Engines:
    """The HTTP client for all engines. Connections are kept; bodies pass as they are."""

    def __init__(self, connect_s: float) -> None:
        self._client = http1.Client(connect_s)

    async def close(self) -> None:
        """Drop all connections."""
        await self._client.close()

    async def begin(
        self, method: str, url: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> http1.Exchange:
        """Send a request; the caller waits for the response's head. Raises EngineFailed."""
        try:
            return await self._client.send(method, url, (headers or {}).items(), body)
        except (http1.Broken, ValueError) as error:
            raise failed(error) from error

    async def call(
        self, method: str, url: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> http1.Exchange:
        """Send a request and return the response with its headers in; the caller reads and closes it.

        Raises EngineFailed. The caller bounds the time.
        """
        exchange = await self.begin(method, url, body, headers)
        try:
            return await exchange.head()
        except BaseException as error:
            exchange.close()
            if isinstance(error, http1.Broken):
                raise failed(error) from error
            raise


def failed(error: Exception) -> EngineFailed:
    """What went wrong with a connection, as the error to raise."""
    refused = getattr(error, "errno", None) == errno.ECONNREFUSED
    return EngineFailed(f"the engine's connection failed: {error or type(error).__name__}", refused=refused)


def request_headers(received: Mapping[str, str], request_id: str) -> dict[str, str]:
    """What of a client's headers goes on to the engine: all but those of the connection."""
    headers = {name: value for name, value in received.items() if name.lower() not in _REPLACED}
    headers["X-Request-Id"] = request_id
    return headers


def response_headers(received: Iterable[tuple[str, str]]) -> dict[str, str]:
    """What of an engine's headers goes back to the client."""
    return {
        name: value
        for name, value in received
        if name.lower() not in _OWN_HEADERS or name.lower() == "content-encoding"
    }
