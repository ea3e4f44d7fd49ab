"""The routing decision: a pure function of a request, the fleet as seen, the time and a seeded rng."""

from __future__ import annotations

import math
from random import Random

from stoker.common.errors import Unavailable
from stoker.router.core.fleet import Fleet
from stoker.router.core.values import Candidate, Decision, Reason, Replica, Request, Role

STOKER = "stoker"
ROUND_ROBIN = "round_robin"
POLICIES = (STOKER, ROUND_ROBIN)

_FALLBACKS = 3


def decide(
    request: Request, fleet: Fleet, now: float, rng: Random, *, policy: str = STOKER, explain: bool = False
) -> Decision:
    """Choose a replica for a request.

    Raises Unavailable (reason NO_REPLICA) when no replica of the pool can take it.
    """
    replicas, panic = candidates(request, fleet, now)
    if policy == ROUND_ROBIN:
        return _round_robin(request, fleet, replicas)
    views = weigh(request, fleet, replicas, now, rng)
    opened = [view for view in views if view.open]
    ranked = sorted(opened or views, key=_preference if opened else _excess)
    best = ranked[0]
    rest = ranked[1 : 1 + _FALLBACKS]
    if len(rest) < _FALLBACKS and opened:
        closed = sorted((view for view in views if not view.open), key=_excess)
        rest += closed[: _FALLBACKS - len(rest)]
    cached = round(_cached(best, fleet.config.speculative_credit))
    return Decision(
        replica=best.replica,
        reason=Reason.PANIC if panic else _reason(best, views, bool(opened)),
        cached_tokens=cached,
        prefill_tokens=request.prompt_tokens - cached,
        over_bound=not opened,
        fallbacks=tuple(view.replica for view in rest),
        candidates=tuple(ranked + [v for v in views if v not in ranked]) if explain else (),
    )


def candidates(request: Request, fleet: Fleet, now: float) -> tuple[list[Replica], bool]:
    """Return the replicas that may serve a request, and whether that took panic mode.

    Raises Unavailable (reason NO_REPLICA) when there is none.
    """
    able = [
        replica
        for replica in fleet.replicas.values()
        if replica.ready
        and not replica.draining
        and replica.id not in request.exclude
        and (not request.adapter or request.adapter in replica.adapters)
        and (replica.role is Role.BOTH or request.role in (Role.BOTH, replica.role))
    ]
    if not able:
        raise Unavailable(_no_replica(request, fleet), reason="NO_REPLICA", retry_after_s=1.0)
    admitted = [replica for replica in able if not fleet.health.ejected(replica.id, now)]
    if not admitted or len(admitted) < fleet.config.panic_share * len(able):
        return able, True
    return admitted, False


def _no_replica(request: Request, fleet: Fleet) -> str:
    total = len(fleet.replicas)
    ready = sum(replica.ready for replica in fleet.replicas.values())
    wanted = f" with adapter {request.adapter!r}" if request.adapter else ""
    return (
        f"no replica{wanted} can take this request: {total} announced, {ready} ready, "
        f"{len(request.exclude)} already tried; wait for one to become ready, or scale the deployment up"
    )


def weigh(request: Request, fleet: Fleet, replicas: list[Replica], now: float, rng: Random) -> list[Candidate]:
    """Return every candidate with its cost, load, bound and matches, in the order of `replicas`."""
    config = fleet.config
    exact = fleet.index.depths(request.keys)
    blocks = {replica: depths[-1] for replica, depths in exact.items()}
    speculative = fleet.speculation.extend(request.keys, blocks)
    rank = _ring_ranks(request, fleet, blocks, rng)
    loads = {replica.id: fleet.load.load(replica.id) for replica in replicas}
    total = sum(loads.values())
    capacity = sum(replica.capacity for replica in replicas)
    kv = config.kv_weight * (request.prompt_tokens + request.output_tokens)
    views = []
    for replica in replicas:
        size = replica.block_size if replica.block_size == request.block_size else 0
        known = size * blocks.get(replica.id, 0)
        believed = size * speculative.get(replica.id, 0)
        trust = fleet.index.trust(replica.id, now)
        cached = min(_credit(known, believed, trust, config.speculative_credit), max(0, request.prompt_tokens - 1))
        prefill = request.prompt_tokens - cached
        weight = prefill + kv
        share = replica.capacity / capacity
        bound = max(config.floor_tokens, math.ceil((1.0 + config.epsilon) * (total + weight) * share))
        cost = (loads[replica.id] + prefill) / replica.prefill_rate
        views.append(
            Candidate(
                replica.id,
                cost,
                loads[replica.id],
                weight,
                bound,
                known,
                max(known, believed),
                trust,
                rank[replica.id],
            )
        )
    return views


def _credit(exact: int, speculative: int, trust: float, speculative_credit: float) -> float:
    return max(exact * trust, exact * trust + (speculative - exact) * speculative_credit)


def _cached(view: Candidate, speculative_credit: float) -> float:
    return _credit(view.exact, view.speculative, view.trust, speculative_credit)


def _ring_ranks(request: Request, fleet: Fleet, blocks: dict[str, int], rng: Random) -> dict[str, int]:
    """Rank all replicas by the ring order of the first block that none of them holds.

    That block is where this prompt leaves what the fleet already shares: a system prompt common to all
    cannot send everything to one home, and routers that see the same digests agree on it.
    """
    if not request.keys:
        key = rng.getrandbits(64)
    else:
        key = request.keys[min(max(blocks.values(), default=0), len(request.keys) - 1)]
    return {replica: rank for rank, replica in enumerate(fleet.ring.order(key))}


def _preference(view: Candidate) -> tuple[float, int]:
    return (round(view.cost, 3), view.ring_rank)


def _excess(view: Candidate) -> tuple[float, int]:
    return (view.load + view.weight - view.bound, view.ring_rank)


def _reason(best: Candidate, views: list[Candidate], opened: bool) -> Reason:
    if not opened:
        return Reason.LEAST_LOADED
    if any(view.speculative > best.speculative for view in views):
        return Reason.SPILL
    if best.exact and best.exact * 2 >= best.speculative:
        return Reason.EXACT
    if best.speculative:
        return Reason.SPECULATIVE
    return Reason.RING if best.ring_rank == 0 else Reason.SPILL


def _round_robin(request: Request, fleet: Fleet, replicas: list[Replica]) -> Decision:
    """The baseline: each candidate in turn, whatever it holds."""
    ids = sorted(replica.id for replica in replicas)
    start = fleet.turn % len(ids)
    fleet.turn += 1
    order = ids[start:] + ids[:start]
    return Decision(order[0], Reason.ROUND_ROBIN, 0, request.prompt_tokens, False, tuple(order[1 : 1 + _FALLBACKS]))
