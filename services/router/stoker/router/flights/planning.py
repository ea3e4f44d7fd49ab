"""From what was asked to a plan that its caller has paid for: the same on every way in that relays."""

from __future__ import annotations

from collections.abc import Mapping

from stoker.common.headers import POLICY
from stoker.common.otel import Span
from stoker.router import tracing
from stoker.router.flights.routing import Router
from stoker.router.prompts.plan import Plan
from stoker.router.prompts.prompt import Asked


async def planned(
    router: Router,
    asked: Asked,
    given: Mapping[str, str],
    span: Span,
    request_id: str,
    *,
    until: float | None = None,
    pinned: str = "",
    told_late: bool = False,
    body: bytes = b"",
) -> Plan:
    """Plan a request of these headers (or metadata), once its model has a replica; `until` by the loop's clock.

    `pinned`, `told_late` and `body` as in `Router.plan`. Raises what these and `Holding.wait` raise, and
    InvalidRequest for a priority that is none.
    """
    caller = router.tenants.caller(given, asked.priority)
    tracing.asked(span, request_id, asked)
    if router.holding.needed(asked.model):
        with tracing.waiting(span):
            await router.holding.wait(asked.model, caller, until)
    with span.child("plan"):
        policy = given.get(POLICY, "")
        plan = await router.plan(asked, caller, policy=policy, pinned=pinned, told_late=told_late, body=body)
    tracing.planned(span, plan)
    return plan
