"""The routing decision: a pure function of a request, the fleet as seen, the time and a seeded rng."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from random import Random

from stoker.common.errors import Unavailable
from stoker.router.core.fleet import Fleet
from stoker.router.core.values import Candidate, Decision, Reason, Replica, Request, RoutingConfig

STOKER = "stoker"
ROUND_ROBIN = "round_robin"
POLICIES = (STOKER, ROUND_ROBIN)

_RANKS = 8  # places on the ring worth telling apart: beyond them, load alone decides


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
    opened = [view for view in views if view.load + view.weight <= view.bound]
    best = min(opened, key=_preference) if opened else min(views, key=_excess)
    cached = round(best.cached)
    return Decision(
        replica=best.replica,
        reason=Reason.PANIC if panic else _reason(best, views, bool(opened)),
        cached_tokens=cached,
        prefill_tokens=request.prompt_tokens - cached,
        over_bound=not opened,
        candidates=_explained(views, fleet, now) if explain else (),
        shown_tokens=best.exact if best.trust == 1.0 else 0,
    )


def _explained(views: list[Candidate], fleet: Fleet, now: float) -> tuple[Candidate, ...]:
    """Return all candidates, best first, with the trust that weighing skips where nothing matched."""
    ranked = sorted(views, key=_preference)
    return tuple(view._replace(trust=fleet.index.trust(view.replica, now)) for view in ranked)


def candidates(request: Request, fleet: Fleet, now: float) -> tuple[Sequence[Replica], bool]:
    """Return the replicas that may serve a request, and whether that took panic mode.

    Raises Unavailable (reason NO_REPLICA) when there is none.
    """
    able: Sequence[Replica] = fleet.fit(request.adapter, request.role)
    if request.exclude:
        able = [replica for replica in able if replica.id not in request.exclude]
    if not able:
        raise Unavailable(_no_replica(request, fleet), reason="NO_REPLICA", retry_after_s=1.0)
    if fleet.health.quiet:
        return able, False
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


def weigh(request: Request, fleet: Fleet, replicas: Sequence[Replica], now: float, rng: Random) -> list[Candidate]:
    """Return every candidate with its cost, load, bound and matches, in the order of `replicas`."""
    config = fleet.config
    depths = fleet.index.depths(request.keys)
    trust = {replica: fleet.index.trust(replica, now) for replica in depths}
    # Speculation continues a digest that is fully trusted; beside a doubtful one it stands alone.
    sure = {replica: tiers[-1] for replica, tiers in depths.items() if trust[replica] == 1.0}
    believed = fleet.speculation.extend(request.keys, sure)
    rank = _ring_ranks(request, fleet, sure, rng)
    loads = fleet.load.loads((replica.id for replica in replicas), now)
    total = sum(loads)
    slack = (1.0 + config.epsilon) / sum(replica.capacity for replica in replicas)
    kv = config.kv_weight * (request.prompt_tokens + request.output_tokens)
    unknown = max(0, request.prompt_tokens - request.block_size * max(believed.values(), default=0))
    home = config.home_credit * unknown
    prompt, floor, rates = request.prompt_tokens, config.floor_tokens, fleet.rates
    views = []
    # Most replicas hold the same few blocks of a prompt.
    worth: dict[tuple[int, tuple[int, ...], int, float], float] = {}
    for replica, load in zip(replicas, loads, strict=True):
        name = replica.id
        exact = speculative = 0
        cached, sureness = 0.0, 1.0
        # Keys of another block size mean nothing here: no credit.
        if (name in believed or name in depths) and replica.block_size == request.block_size:
            tiers, blocks = depths.get(name, ()), believed.get(name, 0)
            sureness = trust.get(name, 0.0)
            exact = replica.block_size * (tiers[-1] if tiers else 0)
            speculative = max(exact, replica.block_size * blocks)
            known = (replica.block_size, tiers, blocks, sureness)
            if known not in worth:
                worth[known] = _cached_tokens(request, config, *known)
            cached = worth[known]
        prefill = prompt - cached
        weight = prefill + kv
        share = math.ceil(slack * (total + weight) * replica.capacity)
        place = rank.get(name, _RANKS)
        fresh = prefill if place else prefill - home
        cost = (load + config.miss_weight * fresh) / rates[name]
        bound = share if share > floor else floor
        views.append(Candidate(name, cost, load, weight, bound, exact, speculative, cached, sureness, place))
    return views


def _cached_tokens(
    request: Request, config: RoutingConfig, size: int, tiers: tuple[int, ...], believed: int, trust: float
) -> float:
    """Return the prompt tokens that a replica will probably not have to compute.

    Each tier adds what the faster ones lack, at its own credit; then comes what only speculation vouches for.
    The last token is always computed: the engine needs its logits.
    """
    held, known, before = 0.0, 0, 0
    for credit, depth in zip(config.tier_credit, tiers, strict=True) if tiers else ():
        held += credit * (depth - before)
        known = before = depth
    if trust == 1.0:
        held += config.speculative_credit * max(0, believed - known)
    else:
        held = max(trust * held, config.speculative_credit * believed)
    return min(size * held, max(0.0, request.prompt_tokens - 1.0))


def _ring_ranks(request: Request, fleet: Fleet, sure: dict[str, int], rng: Random) -> dict[str, int]:
    """Rank the first few replicas in the ring order of the first block that no digest shows.

    That block is where this prompt leaves what the fleet already shares: a system prompt common to all
    cannot send everything to one home, and routers that see the same digests agree on it.
    """
    if request.keys:
        key = request.keys[min(max(sure.values(), default=0), len(request.keys) - 1)]
    else:
        key = request.session or rng.getrandbits(64)
    return {replica: rank for rank, replica in enumerate(islice(fleet.ring.order(key), _RANKS))}


def _preference(view: Candidate) -> tuple[float, int]:
    return (round(view.cost, 3), view.ring_rank)


def _excess(view: Candidate) -> tuple[float, int]:
    return (view.load + view.weight - view.bound, view.ring_rank)


def _reason(best: Candidate, views: list[Candidate], opened: bool) -> Reason:
    if not opened:
        return Reason.LEAST_LOADED
    if any(view.cached > best.cached for view in views):
        return Reason.SPILL
    if best.cached:
        return Reason.EXACT if 2 * best.trust * best.exact >= best.cached else Reason.SPECULATIVE
    return Reason.RING if best.ring_rank == 0 else Reason.SPILL


def _round_robin(request: Request, fleet: Fleet, replicas: Sequence[Replica]) -> Decision:
    """The baseline: each candidate in turn, whatever it holds."""
    ids = sorted(replica.id for replica in replicas)
    chosen = ids[fleet.turn % len(ids)]
    fleet.turn += 1
    return Decision(chosen, Reason.ROUND_ROBIN, 0, request.prompt_tokens, over_bound=False)
