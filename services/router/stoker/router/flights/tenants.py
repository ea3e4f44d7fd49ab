"""Who asks: the tenant and the priority of a request, and what that tenant may ask for."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stoker.common.errors import InvalidRequest
from stoker.router import core
from stoker.router.config import TenantsConfig

PRIORITY_HEADER = "x-stoker-priority"
_NAME = re.compile(r"[\x21-\x7e]{1,128}")
_PRIORITIES = range(-100, 101)


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is, and how soon it shall go: lower is sooner."""

    tenant: str = ""
    priority: int = 0


NOBODY = Caller()


class Tenants:
    """Tells tenants apart, and holds each to its limits."""

    def __init__(self, config: TenantsConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._header = config.header.lower()
        self._clock = clock
        self._meter = core.TenantMeter()

    def caller(self, headers: Mapping[str, str], priority: int = 0) -> Caller:
        """Read HTTP headers or gRPC metadata (names in lower case, or a mapping that ignores case).

        `priority` is the request's own; a header goes before it. Raises InvalidRequest.
        """
        tenant = headers.get(self._header, "") if self._header else ""
        if tenant and not _NAME.fullmatch(tenant):
            raise InvalidRequest.field(self._header, "must be 1 to 128 printable characters without spaces")
        if not tenant and self._config.by_api_key:
            key = headers.get("authorization", "")
            # The key itself must be in no log and no label.
            tenant = f"key-{hashlib.sha256(key.encode()).hexdigest()[:12]}" if key else ""
        text = headers.get(PRIORITY_HEADER)
        if text is not None:
            try:
                priority = int(text)
            except ValueError:
                priority = _PRIORITIES.stop
            if priority not in _PRIORITIES:
                raise InvalidRequest.field(PRIORITY_HEADER, "must be a whole number from -100 (first) to 100 (last)")
        if not tenant and not priority:
            return NOBODY
        return Caller(tenant, min(max(priority, _PRIORITIES.start), _PRIORITIES.stop - 1))

    def weight(self, tenant: str) -> float:
        """A tenant's share against others."""
        return self._limits(tenant).weight

    def take(self, tenant: str, tokens: float) -> None:
        """Count a request. Raises Exhausted (TENANT_LIMIT)."""
        self._meter.take(tenant, self._limits(tenant), tokens, self._clock())

    def _limits(self, tenant: str) -> core.TenantLimits:
        return self._config.named.get(tenant, self._config.limits)
