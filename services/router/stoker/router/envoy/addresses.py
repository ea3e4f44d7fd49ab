"""Engines as Envoy is told of them: ip:port. It resolves no names that a header gives."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

from stoker.common.errors import Unavailable

_KEPT_S = 30.0
_MOST = 16_384


class Addresses:
    """Remembers what URLs resolve to, for half a minute where a name was looked up."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: dict[str, tuple[str, float]] = {}

    def known(self, url: str) -> str | None:
        """The address of an engine's base URL where nothing need be looked up. Raises Unavailable as `of`."""
        known = self._known.get(url)
        if known is not None and known[1] > self._clock():
            return known[0]
        host, port = _place(url)
        try:
            return self._keep(url, _joined(str(ipaddress.ip_address(host)), port), float("inf"))
        except ValueError:
            return None

    async def of(self, url: str) -> str:
        """The address of an engine's base URL. Raises Unavailable where there is none."""
        known = self.known(url)
        if known is not None:
            return known
        host, port = _place(url)
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise Unavailable(
                f"the engine's host {host} has no address: {error.strerror}", retry_after_s=1.0
            ) from error
        return self._keep(url, _joined(str(found[0][4][0]), port), self._clock() + _KEPT_S)

    def _keep(self, url: str, address: str, until: float) -> str:
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[url] = (address, until)
        return address


def _place(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.path not in ("", "/") or not parts.hostname:
        raise Unavailable(f"engine {url} cannot be reached through Envoy: only http://host:port can")
    return parts.hostname, parts.port or 80


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
