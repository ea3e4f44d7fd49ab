"""Does what was served show up in the digests?

Everything that can silently turn prefix routing into plain load balancing (another tokenizer, another block
size, another root key, lost events) has one symptom: keys of a prompt that a replica has just computed never
appear in its digest. So a sample of served prompts is looked for, and the alarm rises when most are missing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import structlog

from stoker.router import metrics
from stoker.router.fleet.pools import Pool, Target
from stoker.router.prompts.plan import TOKENS, Plan

log = structlog.get_logger(__name__)

_PATIENCE_S = 5.0
_SAMPLE_EVERY_S = 0.1
_MAX_WAITING = 256
_WINDOW = 32
_ENOUGH = 16


@dataclass(frozen=True, slots=True)
class _Sample:
    pool: Pool
    target: Target
    epoch: int
    key: int
    until: float


@dataclass(slots=True)
class _Verdicts:
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    alarmed: bool = False


class Confirmations:
    """Samples served prompts and counts which of them the digests confirm."""

    def __init__(self) -> None:
        self._waiting: deque[_Sample] = deque()
        self._verdicts: dict[str, _Verdicts] = {}
        self._next_at = float("-inf")

    def alarmed(self, model: str) -> bool:
        """Whether prefix routing of a model has decayed."""
        verdicts = self._verdicts.get(model)
        return verdicts is not None and verdicts.alarmed

    def served(self, plan: Plan, target: Target, now: float) -> None:
        """Note a prompt that a replica has just computed; most calls only look at the clock."""
        if now < self._next_at or plan.source != TOKENS or not plan.request.keys or target.refused:
            return
        if len(self._waiting) >= _MAX_WAITING:
            return
        self._next_at = now + _SAMPLE_EVERY_S
        self._waiting.append(_Sample(plan.pool, target, target.record.epoch, plan.request.keys[0], now + _PATIENCE_S))

    def check(self, now: float) -> None:
        """Look for the waiting samples. Call it about twice a second."""
        for _ in range(len(self._waiting)):
            sample = self._waiting.popleft()
            if sample.target.record.epoch != sample.epoch or sample.target.pool is not sample.pool:
                continue
            if sample.target.id in sample.pool.fleet.index.depths([sample.key]):
                self._judge(sample.pool.model, True)
            elif now >= sample.until:
                self._judge(sample.pool.model, False)
            else:
                self._waiting.append(sample)

    def _judge(self, model: str, seen: bool) -> None:
        metrics.DIGEST_SEEN.labels(model, "seen" if seen else "missing").inc()
        verdicts = self._verdicts.setdefault(model, _Verdicts())
        verdicts.recent.append(seen)
        missing = verdicts.recent.count(False)
        alarmed = len(verdicts.recent) >= _ENOUGH and missing * 2 > len(verdicts.recent)
        metrics.ALARM.labels(model).set(alarmed)
        if alarmed and not verdicts.alarmed:
            log.error("parity.prefix_routing_decayed", model=model, missing=missing, of=len(verdicts.recent))
        verdicts.alarmed = alarmed
