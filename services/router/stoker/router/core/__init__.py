"""The router's decisions: pure, no I/O, no clock, no randomness of their own.

How a router uses it (all times are its own monotonic seconds):

    fleet = Fleet(RoutingConfig())                      # one per served model
    fleet.put(Replica(id=…, block_size=…, …)); fleet.remove(id)
    fleet.snapshot(id, Snapshot(epoch, sequence, {Tier.GPU: keys}, {Tier.GPU: xor}), now) -> Sync
    fleet.delta(id, Delta(epoch, sequence, stored, removed, digests), now) -> Sync
    fleet.index.vouch(id, now)                          # nothing changed; Sync.RESYNC: ask for a snapshot
    fleet.load.report(id, tokens, seen_at)              # queued prefill + kv_weight × active KV
    keys = blocks.block_keys(tokens, block_size, blocks.root_key(model, lora=…, cache_salt=…))
    request = Request(keys, prompt_tokens, block_size, …)
    decision = decide(request, fleet, now, rng, policy="stoker", explain=False)   # raises Unavailable
    if fleet.busy(decision.replica, now):               # it waits, and others before it
        ticket = queue.join(request, fleet, now)                                  # raises Exhausted
        while (grant := queue.grant(fleet, now, rng)): …  # whenever something ended or changed: dispatch each
    flight = fleet.dispatch(request, decision, now)
    told = Dispatched.of(request, decision)             # for the other routers, which note it by
    fleet.overhear(told, at, now)                       # at: when it was dispatched, by the own clock
    fleet.first_token(flight, now); fleet.release(flight, now)    # release on every path; both idempotent
    fleet.observe(replica, Outcome.OK | FAULT | CALLER, now)      # passive health
    budget = RetryBudget(); budget.request(); budget.take()

Retry: release the flight, `budget.take()`, then decide again with `Request.exclude` naming what was tried.
An engine restart: a Snapshot with a higher epoch. A replica that left: `remove`. `Decision.candidates` (with
explain=True) is all that Explain shows.
"""

from stoker.common.retries import RetryBudget
from stoker.router.core.admission import RETRY_S, AdmissionQueue, Grant
from stoker.router.core.alternatives import alternatives
from stoker.router.core.decide import POLICIES, ROUND_ROBIN, STOKER, decide
from stoker.router.core.demand import MOST_ENDS, Tally
from stoker.router.core.explanation import Explanation
from stoker.router.core.fairness import Fairness
from stoker.router.core.fleet import Fleet
from stoker.router.core.health import Health, HealthConfig, Outcome
from stoker.router.core.index import BlockIndex
from stoker.router.core.limits import TenantLimits, TenantMeter
from stoker.router.core.load import LoadLedger
from stoker.router.core.ring import Ring
from stoker.router.core.seam import Continuation, Said, Seam, Stops, obstacle, seam
from stoker.router.core.speculation import Speculation
from stoker.router.core.values import (
    Candidate,
    Decision,
    Delta,
    Dispatched,
    Reason,
    Replica,
    Request,
    Role,
    RoutingConfig,
    Snapshot,
    Sync,
    Tier,
)

__all__ = [
    "MOST_ENDS",
    "POLICIES",
    "RETRY_S",
    "ROUND_ROBIN",
    "STOKER",
    "AdmissionQueue",
    "BlockIndex",
    "Candidate",
    "Continuation",
    "Decision",
    "Delta",
    "Dispatched",
    "Explanation",
    "Fairness",
    "Fleet",
    "Grant",
    "Health",
    "HealthConfig",
    "LoadLedger",
    "Outcome",
    "Reason",
    "Replica",
    "Request",
    "RetryBudget",
    "Ring",
    "Role",
    "RoutingConfig",
    "Said",
    "Seam",
    "Snapshot",
    "Speculation",
    "Stops",
    "Sync",
    "Tally",
    "TenantLimits",
    "TenantMeter",
    "Tier",
    "alternatives",
    "decide",
    "obstacle",
    "seam",
]
