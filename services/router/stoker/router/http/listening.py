"""Ports of the router that are not gRPC's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stoker.common.addresses import host_and_port
from stoker.common.errors import StokerError
from stoker.common.tls import Tls

_HANDSHAKE_S = 10.0


async def listen(
    setting: str,
    address: str,
    connection: Callable[[], asyncio.BaseProtocol],
    *,
    example: str,
    host_optional: bool = False,
    secure: Tls | None = None,
    shared: bool = False,
) -> asyncio.Server:
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
        return await asyncio.get_running_loop().create_server(
            connection,
            host or "0.0.0.0",  # noqa: S104 - as every service
            port,
            backlog=1024,
            reuse_port=shared or None,
            ssl=secure.server_context() if secure is not None else None,
            ssl_handshake_timeout=_HANDSHAKE_S if secure is not None else None,
        )
    except OSError as error:
        raise StokerError(
            f"cannot listen on {address}: {error}; choose another address ({setting})", reason="ADDRESS_IN_USE"
        ) from error
