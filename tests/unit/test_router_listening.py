"""The router's own ports: bursts of connections, descriptors that run out, names with several addresses."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Callable

import pytest
import uvloop
from structlog.testing import capture_logs

from stoker.common.errors import StokerError
from stoker.router.http.listening import Listener, listen

BURST = 48


class Counted(asyncio.Protocol):
    """Says when a connection is there."""

    def __init__(self, there: Callable[[], None]) -> None:
        self._there = there

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._there()
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        assert isinstance(data, bytes)
        self._transport.abort()  # type: ignore[attr-defined]


async def listening(there: Callable[[], None], address: str = "127.0.0.1:0") -> Listener:
    return await listen("listen.http", address, lambda: Counted(there), example="127.0.0.1:7380")


def connecting(port: int, count: int) -> list[socket.socket]:
    """So many connections that the kernel has made already, and nobody has accepted."""
    made = []
    for _ in range(count):
        each = socket.create_connection(("127.0.0.1", port), timeout=5)
        each.setblocking(False)
        made.append(each)
    return made


async def rounds_until(met: Callable[[], bool], most: int) -> int:
    """How often the loop goes round until then."""
    for count in range(most):
        if met():
            return count
        await asyncio.sleep(0)
    return most


def test_a_burst_of_connections_is_taken_in_at_once() -> None:
    """One each time round, beside clients that keep the loop busy, makes the last of a burst wait for its square."""

    async def main() -> int:
        there: list[None] = []
        port = await listening(lambda: there.append(None))
        clients = connecting(port.port, BURST)
        count = await rounds_until(lambda: len(there) == BURST, 10 * BURST)
        port.close()
        for each in clients:
            each.close()
        return count

    assert uvloop.run(main()) < BURST / 4


async def test_connections_wait_while_descriptors_have_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.router.http.listening._NO_ROOM_S", 0.05)
    arrived = asyncio.Event()
    port = await listening(arrived.set)
    (client,) = connecting(port.port, 1)
    free = os.dup(client.fileno())
    os.close(free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with capture_logs() as logs:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            await rounds_until(lambda: bool(logs), 1_000)
            woken = await rounds_until(arrived.is_set, 100)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert [line["event"] for line in logs] == ["router.accept_failed"], "said once, not each time round"
        assert woken == 100
    async with asyncio.timeout(10):
        await arrived.wait()
    port.close()
    client.close()


async def test_who_closes_takes_in_no_more() -> None:
    there: list[None] = []
    port = await listening(lambda: there.append(None))
    number = port.port
    port.close()
    port.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", number), timeout=5)
    assert not there


async def test_a_taken_address_is_named() -> None:
    port = await listening(lambda: None)
    with pytest.raises(StokerError, match=f"cannot listen on localhost:{port.port}.*listen.http") as caught:
        await listening(lambda: None, f"localhost:{port.port}")
    assert caught.value.reason == "ADDRESS_IN_USE"
    port.close()
