"""The values that go into a routing decision and come out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from stoker.router.core.explanation import Explanation


class Tier(IntEnum):
    """Where a replica holds a KV block. Lower is faster."""

    GPU = 0
    CPU = 1
    STORAGE = 2


class Role(Enum):
    """The part of a request a replica takes. BOTH serves any."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class Reason(Enum):
    """Why the chosen replica was chosen, strongest evidence first."""

    EXACT = "exact"  # its reported KV blocks cover most of the prompt's known prefix
    SPECULATIVE = "speculative"  # this router sent the prefix there a moment ago
    RING = "ring"  # nobody holds the prefix: its home on the ring
    SPILL = "spill"  # a better match, or the home, is full or costs more
    LEAST_LOADED = "least_loaded"  # all are over the bound: the one that is least over
    ROUND_ROBIN = "round_robin"  # the baseline policy
    PANIC = "panic"  # too few are healthy to trust the verdict: all are tried


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica of a model, as the registry announces it.

    `capacity` is its relative weight (1.0 for the reference machine). `prefill_rate` is measured in
    uncached prompt tokens per second, None before it was; `block_size` in tokens; `kv_blocks` is the GPU
    cache's size in blocks, 0 when unknown. An empty `adapters` means base model only. `ready_at` is when it became
    ready, in the router's monotonic seconds; None where that is long ago. One that is `retiring` is about to drain:
    it has no place on the ring, and takes prompts only that it alone holds.
    """

    id: str
    block_size: int = 16
    capacity: float = 1.0
    prefill_rate: float | None = None
    kv_blocks: int = 0
    role: Role = Role.BOTH
    ready: bool = True
    draining: bool = False
    adapters: frozenset[str] = frozenset()
    ready_at: float | None = None
    retiring: bool = False


class Request(msgspec.Struct, frozen=True):
    """What the router knows of a request: block keys (u64) of its full blocks, and sizes in tokens.

    `exclude` names replicas that already failed this request. `session` (u64, 0 for none) stands for the caller's
    session: a prompt without keys has its home on the ring. `streamed` is whether the router will see the first
    token; where not, it estimates when the prefill ends. `priority` goes first where it is lower (as in vLLM);
    `weight` is its tenant's share of what there is.
    """

    keys: Sequence[int]
    prompt_tokens: int
    block_size: int = 16
    output_tokens: int = 0
    adapter: str = ""
    role: Role = Role.BOTH
    exclude: frozenset[str] = frozenset()
    session: int = 0
    streamed: bool = True
    priority: int = 0
    tenant: str = ""
    weight: float = 1.0


class Candidate(NamedTuple):
    """One replica as the decision saw it.

    `cost` is in seconds of prefill, what would be computed anew weighted by `miss_weight`. `load`, `weight`
    and `bound` are in tokens: it is open while load + weight ≤ bound. `exact` and `speculative` are the
    matched prompt tokens by evidence (the second includes the first), `cached` what both are worth after
    tier and confidence; `trust` is the confidence in its digest from 0 to 1. `ring_rank` is its place in the
    ring order of the prompt's prefix, up to 8.
    """

    replica: str
    cost: float
    load: float
    weight: float
    bound: float
    exact: int
    speculative: int
    cached: float
    trust: float
    ring_rank: int

    @property
    def open(self) -> bool:
        """Whether the bound admits this request here."""
        return self.load + self.weight <= self.bound


class Decision(NamedTuple):
    """Where a request goes, and why. If that fails before the first token: decide again, excluding it.

    `cached_tokens` is the predicted hit; `prefill_tokens` what is left to compute. `over_bound` is set
    when no replica was open and the least loaded took it. `shown_tokens` is the part of the prompt that the
    replica's digest shows, 0 for a digest in doubt. `candidates` lists every replica considered when
    the decision was asked to explain itself, and is empty otherwise; `considered` is their number in any case.
    `cost` is that of the chosen one, None where nothing was weighed.
    """

    replica: str
    reason: Reason
    cached_tokens: int
    prefill_tokens: int
    over_bound: bool
    candidates: Explanation | tuple[Candidate, ...] = ()
    shown_tokens: int = 0
    cost: float | None = None
    considered: int = 0


class Dispatched(msgspec.Struct, frozen=True):
    """A request on its way to a replica, as its router tells the others.

    `keys` (u64) are those of its blocks that the replica's digest does not show, in order; `prefill_tokens` what
    it has to compute; `kv_tokens` prompt and expected output. Every router weighs them by its own configuration.
    """

    replica: str
    keys: Sequence[int]
    prefill_tokens: int
    kv_tokens: int

    @classmethod
    def of(cls, request: Request, decision: Decision) -> Dispatched:
        """What the other routers need to know of a request that goes where a decision says."""
        return cls(
            replica=decision.replica,
            keys=request.keys[decision.shown_tokens // request.block_size :],
            prefill_tokens=decision.prefill_tokens,
            kv_tokens=request.prompt_tokens + request.output_tokens,
        )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole sets of a replica's blocks in some tiers; without any, an empty GPU tier.

    Each tier counts its own sequence. `digests` are XORs of the keys per tier, checked when given.
    """

    epoch: int
    sequence: int
    keys: Mapping[Tier, Sequence[int]]
    digests: Mapping[Tier, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Delta:
    """What changed since `sequence − 1` of the same epoch and tiers. `digests` are those after the change."""

    epoch: int
    sequence: int
    stored: Mapping[Tier, Sequence[int]]
    removed: Mapping[Tier, Sequence[int]]
    digests: Mapping[Tier, int] = field(default_factory=dict)


class Sync(Enum):
    """What became of a snapshot or delta."""

    APPLIED = "applied"
    STALE = "stale"  # older than what is held: ignored
    RESYNC = "resync"  # gap, new epoch or wrong digest: ask for a snapshot


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """How a pool of replicas is routed. Defaults come from the front that `bench/mooncake.py` prints."""

    epsilon: float = 1.0
    """The slack of the bound: a replica may hold (1 + epsilon) times its fair share of the load."""
    floor_tokens: float = 40_960.0
    """A replica is open below this load whatever its share: affinity holds when the fleet is quiet."""
    kv_weight: float = 0.03
    """Load of one token of active KV, in queued prefill tokens."""
    step_s: float = 0.04
    """Load of a request until its first token, beside its prefill, in seconds: the steps that it takes part in."""
    miss_weight: float = 4.0
    """What an uncached token costs against a queued one: it also evicts a block that someone else wants."""
    home_credit: float = 0.15
    """The share of what nobody holds that its home on the ring is credited with, so that routers agree."""
    ring_credit: float = 0.15
    """The share of a prefix with which its home on the ring is credited while no digest tells what is there."""
    hold_s: float = 0.1
    """A replica with more prefill before it than this, in seconds, is sent no more: who wants it waits in the router.

    Enough to keep an engine busy while its next request is on the way; what waits here can still go elsewhere.
    """
    aging: float = 0.3
    """Of those that wait, who has least to compute goes first, less this part of the time it has waited."""
    fair_tokens: float = 16_384.0
    """Tokens by which a waiting tenant may fall behind another before its requests alone are considered."""
    vnodes: int = 128
    """Points on the ring for capacity 1.0."""
    speculative_credit: float = 0.95
    """The share of a speculative match that counts as cached."""
    tier_credit: tuple[float, float, float] = (1.0, 0.7, 0.3)
    """The share of a match in each tier (GPU, CPU, STORAGE) that counts as cached."""
    digest_fresh_s: float = 15.0
    digest_stale_s: float = 60.0
    """Trust in a digest falls from 1 at the first age to 0 at the second."""
    speculation_ttl_s: float = 10.0
    """How long, at least, a dispatch vouches for its blocks before the digest does; at most twice that."""
    speculation_limit: int = 262_144
    """Keys that speculation holds per generation, of which there are two."""
    ramp_start: float = 0.25
    """The part of its share of the bound, and of the floor, that a replica may hold when it has just become ready."""
    ramp_s: float = 30.0
    """How long until that part is the whole, in seconds; 0 for at once."""
    panic_share: float = 0.5
    """With fewer than this share of the ready replicas admitted by health, all are tried."""
