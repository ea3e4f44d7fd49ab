"""Addresses as settings and options give them: host:port."""

from __future__ import annotations


def host_and_port(address: str) -> tuple[str, int] | None:
    """Host, without the brackets of IPv6, and port, 0 to 65535; None for what is no host:port.

    The host may be empty: what that stands for is for the caller to say.
    """
    host, _, port = address.rpartition(":")
    # The operating system would take a port that is too large, cut to 16 bits.
    if not (port.isascii() and port.isdigit()) or len(port) > 5 or int(port) > 65_535:
        return None
    return host.strip("[]"), int(port)
