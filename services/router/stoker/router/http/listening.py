"""Ports of the router that are not gRPC's."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Sequence

import structlog

from stoker.common.addresses import host_and_port
from stoker.common.errors import StokerError
from stoker.common.tls import Tls

log = structlog.get_logger()

_HANDSHAKE_S = 10.0
_BACKLOG = 1024
_AT_ONCE = 64
_NO_ROOM_S = 0.5


class Listener:
    """Takes in connections, as many at once as have come.

    uvloop's own server takes one each time round its loop. Beside 64 busy clients a time round is as long as 64
    requests, so that a burst of connections waits for its square.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        connection: Callable[[], asyncio.BaseProtocol],
        secure: ssl.SSLContext | None,
    ) -> None:
        """Listen at these bound sockets, which are the listener's from here on."""
        self._sockets = tuple(sockets)
        self._connection = connection
        self._secure = secure
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._pauses: dict[socket.socket, asyncio.TimerHandle] = {}
        for each in self._sockets:
            each.listen(_BACKLOG)
            self._loop.add_reader(each, self._accept, each)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._sockets[0].getsockname()[1])

    def close(self) -> None:
        """Take in no more. Connections that are there stay."""
        for pause in self._pauses.values():
            pause.cancel()
        for task in self._opening:
            task.cancel()
        for each in self._sockets:
            self._loop.remove_reader(each)
            each.close()
        self._sockets = ()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                taken, _peer = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor or no memory left: those that wait would wake this again at once
                log.warning("router.accept_failed", port=listening.getsockname()[1], error=str(error))
                self._pause(listening)
                return
            task = self._loop.create_task(self._open(taken))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, taken: socket.socket) -> None:
        try:
            taken.setblocking(False)
            taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(
                self._connection,
                taken,
                ssl=self._secure,
                ssl_handshake_timeout=_HANDSHAKE_S if self._secure is not None else None,
            )
        except (OSError, TimeoutError) as error:  # gone again, or no TLS
            taken.close()
            log.debug("router.connection_failed", error=str(error))
        except asyncio.CancelledError:
            taken.close()
            raise

    def _pause(self, listening: socket.socket) -> None:
        self._loop.remove_reader(listening)
        self._pauses[listening] = self._loop.call_later(_NO_ROOM_S, self._resume, listening)

    def _resume(self, listening: socket.socket) -> None:
        del self._pauses[listening]
        self._loop.add_reader(listening, self._accept, listening)


async def listen(
    setting: str,
    address: str,
    connection: Callable[[], asyncio.BaseProtocol],
    *,
    example: str,
    host_optional: bool = False,
    secure: Tls | None = None,
    shared: bool = False,
) -> Listener:
    """Serve `connection` on `address`, host:port; plain text without `secure`.

    `setting` is what the user calls the address, `example` one that would do. Without a host, where that is
    `host_optional`, it is all interfaces. `shared`: with other processes of this
    router. Raises StokerError when the address is taken or none.
    """
    found = host_and_port(address)
    if found is None or not (found[0] or host_optional):
        raise StokerError(f"{setting} is {address!r}; write host:port, for example {example}", reason="BAD_CONFIG")
    host, port = found
    try:
        sockets = await _bound(host or "0.0.0.0", port, shared=shared)  # noqa: S104 - as every service
        return Listener(sockets, connection, secure.server_context() if secure is not None else None)
    except OSError as error:
        raise StokerError(
            f"cannot listen on {address}: {error}; choose another address ({setting})", reason="ADDRESS_IN_USE"
        ) from error


async def _bound(host: str, port: int, *, shared: bool) -> list[socket.socket]:
    """A socket for each address of the host. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, where in dict.fromkeys(found):
            made = socket.socket(family, kind, protocol)
            sockets.append(made)
            made.setblocking(False)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            made.bind(where)
    except OSError:
        for each in sockets:
            each.close()
        raise
    return sockets
