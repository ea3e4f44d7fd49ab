"""Decisions that were taken: what a caller is told of one, and the last ones, for Explain."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from stoker.router import core
from stoker.router.fleet.pools import Target
from stoker.router.prompts.plan import Plan

REPLICA_HEADER = "x-stoker-replica"
DECISION_HEADER = "x-stoker-decision"

# What is remembered: so many decisions, and as long as they hold no more than so many bytes.
_KEPT = 8192
_KEPT_BYTES = 64 * 1024 * 1024
# Of replicas that were no candidates so many are remembered with each: their reasons are looked up at every decision.
_MOST_EXCLUDED = 16
# By measurement, rounded up: of one decision, and of each candidate that it can still explain.
_DECISION_BYTES = 2560
_CANDIDATE_BYTES = 80
# What all decisions over the same replicas share, the ring above all, for each of these; the first is charged for it.
_SHARED_BYTES = 2560


class Decided(msgspec.Struct, frozen=True):
    """A decision that was taken. Times in seconds of the router's clock."""

    plan: Plan
    decision: core.Decision
    target: Target
    at: float
    since: float
    """When the request was ready to be decided; it may have waited, or been tried elsewhere, since."""
    tried: frozenset[str] = frozenset()
    """Replicas that failed it before."""

    @property
    def attempt(self) -> int:
        """Which try this is, from 1."""
        # The ranks of one engine fail together.
        return 1 + len({name.partition("@")[0] for name in self.tried}) if self.tried else 1


def told(decided: Decided) -> dict[str, str]:
    """What the caller is told of a decision, as HTTP headers or gRPC metadata."""
    return {REPLICA_HEADER: decided.target.id, DECISION_HEADER: described(decided)}


def described(decided: Decided) -> str:
    """A decision as one structured-field item (RFC 9651): the reason, then what is known as parameters."""
    decision, tokens = decided.decision, decided.plan.tokens
    hit = "" if tokens is None else f";hit={decision.cached_tokens};prompt={tokens}"
    cost = "" if decision.cost is None else f";cost_ms={1000 * decision.cost:.1f}"
    waited = round(1000 * (decided.at - decided.since))
    return (
        f"{decision.reason.value}{hit}{cost};candidates={decision.considered}"
        f";waited_ms={waited};attempt={decided.attempt}"
    )


class Remembered(NamedTuple):
    """A decision as Explain shows it later: no prompt, no block keys, and nothing of the fleet that would live on."""

    decision: core.Decision
    policy: str
    source: str
    """What the prompt was hashed from, and `why` if not from tokens."""
    why: str
    tokens: int | None
    blocks: int
    last_key: int
    """Stands for all its blocks: each key is made of the one before. 0 where there are none."""
    at: float
    waited_s: float
    attempt: int
    excluded: tuple[tuple[str, str], ...]
    """Replicas that were no candidates, each with a stable reason."""

    @classmethod
    def of(cls, decided: Decided, missing: Sequence[str] | None = None) -> Remembered:
        """What is worth remembering of a decision; of those `missing` among the candidates, why (default: of all)."""
        plan, keys = decided.plan, decided.plan.request.keys
        return cls(  # by position: each decision pays for it
            decided.decision,
            plan.policy,
            plan.source,
            plan.why,
            plan.tokens,
            len(keys),
            keys[-1] if keys else 0,
            decided.at,
            decided.at - decided.since,
            decided.attempt,
            _excluded(decided, missing_of(decided) if missing is None else missing),
        )


class Recent:
    """The last decision of each of the last requests, bounded in number and in bytes."""

    def __init__(self, kept: int = _KEPT, kept_bytes: int = _KEPT_BYTES) -> None:
        self._kept = kept
        self._kept_bytes = kept_bytes
        self._by_request: OrderedDict[str, tuple[Remembered, int]] = OrderedDict()
        self.bytes = 0
        """What is remembered holds about so much."""
        self._ids: object = None
        self._left_out: tuple[object, list[str]] = None, []

    def __len__(self) -> int:
        return len(self._by_request)

    def note(self, request_id: str, decided: Decided) -> None:
        """Remember a decision in place of an earlier one for the same request."""
        before = self._by_request.pop(request_id, None)
        if before is not None:
            self.bytes -= before[1]
        remembered = Remembered.of(decided, self._missing(decided))
        size = self._size(remembered)
        self._by_request[request_id] = remembered, size
        self.bytes += size
        while len(self._by_request) > self._kept or (self.bytes > self._kept_bytes and len(self._by_request) > 1):
            _, (_, oldest) = self._by_request.popitem(last=False)
            self.bytes -= oldest

    def of(self, request_id: str) -> Remembered | None:
        """The decision last taken for a request; None where it is not remembered."""
        found = self._by_request.get(request_id)
        return found[0] if found is not None else None

    def _missing(self, decided: Decided) -> list[str]:
        """A few of those that were no candidates: while the candidates are the same, so are the others."""
        considered = decided.decision.candidates
        if isinstance(considered, tuple):
            return []
        if considered.ids is not self._left_out[0]:
            self._left_out = considered.ids, missing_of(decided)[:_MOST_EXCLUDED]
        return self._left_out[1]

    def _size(self, remembered: Remembered) -> int:
        """Bytes, about."""
        considered = remembered.decision.candidates
        each = _CANDIDATE_BYTES
        if not isinstance(considered, tuple) and considered.ids is not self._ids:
            self._ids = considered.ids
            each += _SHARED_BYTES
        return _DECISION_BYTES + each * (len(considered) + len(remembered.excluded))


def missing_of(decided: Decided) -> list[str]:
    """The replicas of the pool that were not considered; none are known where nothing was weighed."""
    considered, targets = decided.decision.candidates, decided.plan.pool.targets
    if isinstance(considered, tuple) or len(considered) == len(targets):
        return []
    return sorted(targets.keys() - set(considered.ids))


def _excluded(decided: Decided, missing: Sequence[str]) -> tuple[tuple[str, str], ...]:
    if not missing:
        return ()
    targets = decided.plan.pool.targets
    return tuple((name, _why_not(decided, targets[name])) for name in missing if name in targets)


def _why_not(decided: Decided, target: Target) -> str:
    """A stable reason; see `Excluded` in router.proto."""
    plan, pool = decided.plan, decided.plan.pool
    if target.id in decided.tried:
        return "already_tried"
    if plan.pinned and target.id != plan.pinned:
        return "pinned_elsewhere"
    if target.draining:
        return "draining"
    if not target.reachable:
        return "unhealthy"
    if not target.ready:
        return "not_ready"
    if pool.fleet.health.ejected(target.id, decided.at):
        return "ejected"
    if plan.request.adapter not in ("", *target.record.engine.model_names[1:]):
        return "no_adapter"
    return "retiring" if target.retiring else "not_considered"
