"""What a client may be told beside its routers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stoker.common.errors import InvalidRequest
from stoker.common.tls import Tls


@dataclass(frozen=True)
class ClientSettings:
    """Times are in seconds. Without `tls` everything goes in plain text."""

    timeout_s: float = 600.0
    """Of a request that says nothing else: everything included, from the pick to the last token."""
    connect_s: float = 2.0
    """To connect to a router or a node."""
    direct: bool = True
    """Stream from the nodes; otherwise all goes through the routers."""
    relay_s: float = 30.0
    """How long all goes through the routers once no node of a pick could be reached."""
    alternatives: int = 2
    """Replicas to ask for beside the first, for retries before the first token."""
    tls: Tls | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Sent to the routers with each request, for example `x-stoker-tenant` or `authorization`."""

    def __post_init__(self) -> None:
        for name in ("timeout_s", "connect_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InvalidRequest.field(name, "must be a number of seconds above 0")
