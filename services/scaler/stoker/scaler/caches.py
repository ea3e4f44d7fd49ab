"""What routers and agents tell of KV blocks, kept by deployment: what a cache is worth when its replica is to go."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np

from stoker.api.registry.v1 import registry_pb2
from stoker.common.blocks import SAMPLE
from stoker.registry.client import FleetView
from stoker.scaler.core import warming
from stoker.scaler.core.warming import Warming
from stoker.scaler.core.warmth import Warmth, WarmthConfig, Worth

_BLOCKS = 524_288
"""Followed by all deployments together: about 128 MiB."""
_FEWEST = 1_024
_BLOCK_TOKENS = 16


class Caches:
    """One `Warmth` a deployment. Only sampled keys are kept, and of these a bounded number."""

    def __init__(self, view: FleetView) -> None:
        self._view = view
        self._warmths: dict[str, Warmth] = {}

    def dispatched(self, dispatches: Iterable[registry_pb2.Dispatch], now: float) -> None:
        """Requests went to replicas."""
        for dispatch in dispatches:
            warmth = self._of(dispatch.replica_id)
            if warmth is not None:
                warmth.used(_sampled(dispatch.touched), now - dispatch.age_ms / 1000)

    def told(self, update: registry_pb2.DigestUpdate, now: float) -> None:
        """A replica holds other blocks than before, in one of its tiers and ranks."""
        warmth = self._of(update.replica_id)
        if warmth is None:
            return
        replica, cache = update.replica_id, f"{update.tier}/{update.dp_rank}"
        if update.snapshot:
            warmth.holds(replica, _sampled(update.added), now, cache)
        else:
            warmth.removed(replica, _sampled(update.removed), now, cache)
            warmth.stored(replica, _sampled(update.added), now, cache)

    def forget(self, replica: str) -> None:
        """A replica is gone."""
        for name in [name for name in self._warmths if name not in self._view.deployments]:
            del self._warmths[name]
        for warmth in self._warmths.values():
            warmth.forget(replica)

    def worths(self, going: Mapping[str, Collection[str]], now: float) -> dict[str, Worth]:
        """By deployment what its caches are worth when so many of its replicas go."""
        worths = {}
        for name, victims in going.items():
            warmth = self._warmths.get(name)
            if warmth is not None:
                warmth.block_tokens = self._block_tokens(warmth.replicas)
                worths[name] = warmth.worth(now, staying=_staying(warmth, victims))
        return worths

    def warmings(
        self,
        deployment: str,
        going: Collection[str],
        heirs: Collection[str],
        budget_tokens: float,
        now: float,
        *,
        replaced: bool = False,
    ) -> tuple[Warming, ...]:
        """The prefixes of replicas that go which `heirs` are to compute, best first. Those that are `replaced` leave
        as much room for blocks as before."""
        warmth = self._warmths.get(deployment)
        if warmth is None or budget_tokens <= 0:
            return ()
        blocks = warmth.held_by(going, now, staying=1.0 if replaced else _staying(warmth, going))
        return warming.plan(blocks, heirs, self._block_tokens(warmth.replicas) * SAMPLE, budget_tokens)

    def _of(self, replica: str) -> Warmth | None:
        record = self._view.replicas.get(replica)
        if record is None:
            return None
        warmth = self._warmths.get(record.deployment)
        if warmth is None:
            warmth = self._warmths[record.deployment] = Warmth(_BLOCK_TOKENS, WarmthConfig())
            share = max(_FEWEST, _BLOCKS // len(self._warmths))
            for each in self._warmths.values():
                each.limit = min(each.config.limit, share)
        return warmth

    def _block_tokens(self, replicas: Iterable[str]) -> int:
        """The replicas of one deployment are alike."""
        records = (self._view.replicas.get(replica) for replica in replicas)
        return next((r.engine.block_size for r in records if r is not None and r.engine.block_size), _BLOCK_TOKENS)


def _staying(warmth: Warmth, going: Collection[str]) -> float:
    """The share of the caches that is left."""
    there = warmth.replicas
    return 1.0 - len(set(going) & set(there)) / max(1, len(there))


def _sampled(packed: bytes) -> list[int]:
    keys = np.frombuffer(packed[: len(packed) - len(packed) % 8], dtype="<u8")
    sampled: list[int] = keys[keys % SAMPLE == 0].tolist()
    return sampled
