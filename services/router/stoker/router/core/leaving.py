"""Replicas that retire: off the ring, and for the while that they serve only for what they alone hold."""

from __future__ import annotations

from functools import reduce
from operator import or_

from stoker.router.core.fleet import Fleet
from stoker.router.core.values import Request


def closed(request: Request, fleet: Fleet) -> frozenset[str]:
    """Return the retiring replicas that a request shall not go to: what they compute anew is lost when they drain.

    One is open to a prompt of which its digest shows half or more, and more than that of any replica that stays.
    """
    *_, held = [], *fleet.index.runs(request.keys).values()
    stay = reduce(or_, fleet.panel(request.adapter, request.role, request.exclude | fleet.retiring).bits, 0)
    elsewhere = max((depth for depth, alive in held if alive & stay), default=0)
    found = set()
    for name in fleet.retiring:
        bit = 1 << fleet.seats.number(name)
        depth = max((depth for depth, alive in held if alive & bit), default=0)
        alike = fleet.replicas[name].block_size == request.block_size
        if not alike or depth <= elsewhere or 2 * depth * request.block_size < request.prompt_tokens:
            found.add(name)
    return frozenset(found)
