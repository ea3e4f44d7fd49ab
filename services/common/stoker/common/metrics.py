"""Prometheus metrics: one endpoint per process, names under `stoker_`, base units."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from prometheus_client import start_http_server

from stoker.common.addresses import host_and_port
from stoker.common.errors import StokerError


@contextlib.contextmanager
def exposed(listen: str) -> Iterator[int | None]:
    """Serves /metrics on `listen` (host:port) while the block runs and yields the port; not at all where empty."""
    if not listen:
        yield None
        return
    found = host_and_port(listen)
    if found is None:
        raise StokerError(
            f"metrics_listen is {listen!r}; set it to host:port, or to nothing to go without", reason="BAD_CONFIG"
        )
    host, port = found
    try:
        server, thread = start_http_server(port, addr=host or "0.0.0.0")  # noqa: S104
    except OSError as error:
        raise StokerError(
            f"cannot serve metrics on {listen!r}: {error}; set it to host:port, or to nothing to go without",
            reason="ADDRESS_IN_USE",
        ) from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join(timeout=2)
