"""Limits of tenants in requests and tokens: token buckets that say when to come again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from stoker.common.errors import Exhausted

_SOON_S = 1e-6  # sums of small steps do not come out even: who waited as told may be early by their last digits
_KEPT = 16_384  # tenants are named by callers: what is remembered of them is bounded


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What one tenant may ask for; 0 for as much as it likes.

    Tokens are those of the prompt and those that may be generated.
    """

    requests_per_s: Annotated[float, Meta(description="requests a second, on average; 0: no limit", ge=0)] = 0.0
    tokens_per_s: Annotated[float, Meta(description="tokens a second, on average; 0: no limit", ge=0)] = 0.0
    burst_s: Annotated[float, Meta(description="seconds' worth of them that may come at once", gt=0)] = 60.0
    weight: Annotated[float, Meta(description="share against other tenants, when requests wait", gt=0)] = 1.0


@dataclass(slots=True)
class _Bucket:
    level: float
    at: float

    def missing(self, rate: float, burst_s: float, amount: float, now: float) -> float:
        """Fill up to `now`; return what is missing for `amount`. What is larger than the bucket needs a full one."""
        full = rate * burst_s
        self.level = min(full, self.level + rate * (now - self.at))
        self.at = now
        return min(amount, full) - self.level


class TenantMeter:
    """What each tenant has used, at one router."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[str, tuple[_Bucket, _Bucket]] = OrderedDict()

    def take(self, tenant: str, limits: TenantLimits, tokens: float, now: float) -> None:
        """Count a request. Raises Exhausted (TENANT_LIMIT), with the time until it would be admitted."""
        if not limits.requests_per_s and not limits.tokens_per_s:
            return
        rates, amounts = (limits.requests_per_s, limits.tokens_per_s), (1.0, tokens)
        buckets = self._buckets.get(tenant)
        if buckets is None:
            buckets = self._buckets[tenant] = (
                _Bucket(rates[0] * limits.burst_s, now),
                _Bucket(rates[1] * limits.burst_s, now),
            )
            if len(self._buckets) > _KEPT:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(tenant)
        waits = {
            what: bucket.missing(rate, limits.burst_s, amount, now) / rate
            for what, rate, amount, bucket in zip(("requests", "tokens"), rates, amounts, buckets, strict=True)
            if rate
        }
        # Whoever waits for one of them must not be sent away for the other then.
        what, wait = max(waits.items(), key=lambda item: item[1])
        if wait > _SOON_S:
            rate = getattr(limits, f"{what}_per_s")
            raise Exhausted(
                f"tenant {tenant or 'without a name'} has used its {rate:g} {what}/s "
                f"({rate * limits.burst_s:g} at once); try again after the delay",
                reason="TENANT_LIMIT",
                retry_after_s=wait,
            )
        for rate, amount, bucket in zip(rates, amounts, buckets, strict=True):
            if rate:
                bucket.level -= amount
