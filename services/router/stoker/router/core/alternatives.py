"""Where a request may go when the replica chosen for it fails before the first token."""

from __future__ import annotations

from stoker.router.core.fleet import Fleet
from stoker.router.core.values import Decision, Request


def alternatives(request: Request, decision: Decision, fleet: Fleet, now: float, count: int) -> list[str]:
    """Return up to `count` other replicas, best first: by cost where the decision was explained, else by load."""
    if count <= 0:
        return []
    out = request.exclude | {decision.replica} | (frozenset() if fleet.health.quiet else fleet.health.out(now))
    most = count + len(out)
    considered = decision.candidates
    if not isinstance(considered, tuple):
        names = considered.cheapest(most)
    else:
        panel = fleet.panel(request.adapter, request.role, fleet.retiring)
        order = fleet.load.loads(now)[panel.seats].argsort(kind="stable")[:most]
        names = [panel.ids[row] for row in order.tolist()]
    return [name for name in names if name not in out][:count]
